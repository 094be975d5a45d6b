/* Ranks that talk over NCCL, and NCCL's own collectives to compare with. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/nccl_releases.h"
#include "bench/bench_cuda.h"
#include "onebit/nccl.h"

static int failed(ncclResult_t result, const char *what) {
  bench_complain("%s: NCCL: %s", what, ncclGetErrorString(result));
  return BENCH_FAILED;
}

/* Makes each rank a host of its own where ranks outnumber a machine's GPUs: NCCL refuses two ranks
 * of one host on one GPU, and lets a process say which host it is on. Where there is no other
 * machine they talk over its own sockets, as between hosts on an Ethernet. Variables that the user
 * has set stay. */
static void name_own_host(const struct bench_case *like) {
  char host[32];
  snprintf(host, sizeof host, "rank%d", like->team->rank);
  setenv("NCCL_HOSTID", host, 0);
  if (like->device->ranks < like->team->size)
    return;
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("NCCL_IB_DISABLE", "1", 0);
  setenv("NCCL_NET", "Socket", 0);
}

/* Sends rank 0's id to all, by a sum: the others have zeros. */
static void send_id(struct bench_team *team, ncclUniqueId *id) {
  double bytes[sizeof *id];
  for (size_t k = 0; k < sizeof *id; k++)
    bytes[k] = team->rank == 0 ? (double)(unsigned char)id->internal[k] : 0;
  team->kind->combine(team, bytes, sizeof *id, true);
  for (size_t k = 0; k < sizeof *id; k++)
    id->internal[k] = (char)(unsigned char)bytes[k];
}

static int bench_nccl_create_comm(struct bench_case *like, ncclUniqueId id, onebit_comm_t *comm) {
  BENCH_TRY_CUDA(cudaSetDevice(like->device->number));
  ncclResult_t result = ncclCommInitRank(&like->nccl, like->team->size, id, like->team->rank);
  if (result != ncclSuccess)
    return failed(result, "ncclCommInitRank");
  return bench_status(onebit_comm_create_nccl(like->nccl, comm), "onebit_comm_create_nccl");
}

int bench_nccl_create(struct bench_case *like, onebit_comm_t *comm) {
  struct bench_team *team = like->team;
  ncclUniqueId id = {{0}};
  int devices = 0;
  BENCH_TRY_CUDA(cudaGetDeviceCount(&devices));
  if (like->device->ranks > devices && !BENCH_EMULATED)
    name_own_host(like);
  ncclResult_t result = team->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
  if (!bench_team_agree(team, result == ncclSuccess))
    return result == ncclSuccess ? BENCH_FAILED : failed(result, "ncclGetUniqueId");
  send_id(team, &id);
  int status = bench_nccl_create_comm(like, id, comm);
  return bench_team_agree(team, status == BENCH_OK) ? BENCH_OK : BENCH_FAILED;
}

void bench_nccl_destroy(struct ncclComm *nccl, onebit_comm_t comm) {
  onebit_comm_destroy(comm);
  if (nccl)
    ncclCommDestroy(nccl);
}

/* --- NCCL's own */

/* Runs NCCL's collective in float32, or where the way says so in bfloat16. */
static int bench_nccl_run(const struct bench_entry *entry) {
  const struct bench_way *way = entry->context;
  const struct bench_case *test = way->test;
  ncclDataType_t type = way->half ? ncclBfloat16 : ncclFloat32;
  const void *send = way->half ? test->half_send : test->dense_send;
  void *receive = test->dense_receive;
  cudaStream_t stream = test->device->stream;
  ncclResult_t result = ncclInvalidArgument;
  switch (test->collective->operation) {
  case ONEBIT_ALLREDUCE:
    result = ncclAllReduce(send, receive, test->count, type, ncclSum, test->nccl, stream);
    break;
  case ONEBIT_ALLGATHER:
    result = ncclAllGather(send, receive, test->count, type, test->nccl, stream);
    break;
  case ONEBIT_REDUCE_SCATTER:
    result = ncclReduceScatter(send, receive, test->count, type, ncclSum, test->nccl, stream);
    break;
  }
  return result == ncclSuccess ? BENCH_OK : failed(result, entry->name);
}

void bench_nccl_add(struct bench_case *test) {
  static const char *const names[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"};
  char name[48];
  for (int half = 0; half < 2; half++) {
    snprintf(name, sizeof name, "%s %s", names[test->collective->operation],
             half ? "bfloat16" : "float32");
    bench_case_add(test, name, bench_nccl_run)->half = half;
  }
}
