/* Ranks that talk over NCCL, and NCCL's own collectives to compare with. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_collective.h"
#include "bench/bench_cuda.h"
#include "onebit/nccl.h"

static int failed(ncclResult_t result, const char *what) {
  bench_complain("%s: NCCL: %s", what, ncclGetErrorString(result));
  return BENCH_FAILED;
}

/* NCCL refuses two ranks of one host on one GPU, and lets a process say which host it is on. So
 * where ranks outnumber a machine's GPUs, each is a host of its own; and where there is no other
 * machine they talk over its own sockets, as between hosts on an Ethernet. What the user has set
 * stays. */
static void be_a_host(const struct bench_exchange *exchange) {
  char host[32];
  snprintf(host, sizeof host, "rank%d", exchange->team->rank);
  setenv("NCCL_HOSTID", host, 0);
  if (exchange->seat.ranks < exchange->team->size)
    return;
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("NCCL_IB_DISABLE", "1", 0);
  setenv("NCCL_NET", "Socket", 0);
}

/* Rank 0's, which is all that is not zero. */
static void share_id(struct bench_team *team, ncclUniqueId *id) {
  double bytes[sizeof *id];
  for (size_t k = 0; k < sizeof *id; k++)
    bytes[k] = team->rank == 0 ? (double)(unsigned char)id->internal[k] : 0;
  team->kind->combine(team, bytes, sizeof *id, true);
  for (size_t k = 0; k < sizeof *id; k++)
    id->internal[k] = (char)(unsigned char)bytes[k];
}

static int join(struct bench_exchange *exchange, ncclUniqueId id, onebit_comm_t *comm) {
  BENCH_TRY_CUDA(cudaSetDevice(exchange->device->number));
  ncclResult_t result =
      ncclCommInitRank(&exchange->nccl, exchange->team->size, id, exchange->team->rank);
  if (result != ncclSuccess)
    return failed(result, "ncclCommInitRank");
  return bench_status(onebit_comm_create_nccl(exchange->nccl, comm), "onebit_comm_create_nccl");
}

int bench_nccl_create(struct bench_exchange *exchange, onebit_comm_t *comm) {
  struct bench_team *team = exchange->team;
  ncclUniqueId id = {{0}};
  int devices = 0;
  BENCH_TRY_CUDA(cudaGetDeviceCount(&devices));
  if (exchange->seat.ranks > devices && !BENCH_EMULATED)
    be_a_host(exchange);
  ncclResult_t result = team->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
  if (!bench_team_agree(team, result == ncclSuccess))
    return result == ncclSuccess ? BENCH_FAILED : failed(result, "ncclGetUniqueId");
  share_id(team, &id);
  int status = join(exchange, id, comm);
  return bench_team_agree(team, status == BENCH_OK) ? BENCH_OK : BENCH_FAILED;
}

void bench_nccl_destroy(struct ncclComm *nccl, onebit_comm_t comm) {
  onebit_comm_destroy(comm);
  if (nccl)
    ncclCommDestroy(nccl);
}

/* --- NCCL's own */

static ncclResult_t call(const struct bench_exchange *exchange, const void *send,
                         ncclDataType_t type, cudaStream_t stream) {
  size_t count = exchange->count;
  void *receive = exchange->dense_receive;
  switch (exchange->collective->operation) {
  case ONEBIT_ALLREDUCE:
    return ncclAllReduce(send, receive, count, type, ncclSum, exchange->nccl, stream);
  case ONEBIT_ALLGATHER:
    return ncclAllGather(send, receive, count, type, exchange->nccl, stream);
  case ONEBIT_REDUCE_SCATTER:
    return ncclReduceScatter(send, receive, count, type, ncclSum, exchange->nccl, stream);
  }
  return ncclInvalidArgument;
}

static int run_float(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_exchange *exchange = put->context;
  ncclResult_t result = call(exchange, exchange->dense_send, ncclFloat32, stream);
  return result == ncclSuccess ? BENCH_OK : failed(result, put->name);
}

static int run_half(const struct bench_put *put, cudaStream_t stream) {
  const struct bench_exchange *exchange = put->context;
  ncclResult_t result = call(exchange, exchange->half_send, ncclBfloat16, stream);
  return result == ncclSuccess ? BENCH_OK : failed(result, put->name);
}

struct bench_put *bench_nccl_add(struct bench_turns *turns, struct bench_exchange *exchange) {
  static const char *const names[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"};
  const char *name = names[exchange->collective->operation];
  struct bench_put *dense = bench_turns_add(turns, "%s float32", name);
  dense->run = run_float;
  dense->context = exchange;
  struct bench_put *half = bench_turns_add(turns, "%s bfloat16", name);
  half->run = run_half;
  half->context = exchange;
  return dense;
}
