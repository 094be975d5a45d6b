/* With -d cuda, opens the device of a rank and times collectives on it: the blocking call, the call
 * on a stream, and, if ranks communicate over NCCL, also NCCL's own collective. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_collective.h"
#include "bench/bench_passes.h"
#include "collectives/communicator.h"
#include "compression/numerics.h"
#include "cuda/device.h"
#include "onebit/cuda.h"
#ifdef ONEBIT_HAVE_NCCL
#include "base/nccl_releases.h"
#include "onebit/nccl.h"
#endif

int bench_cuda_failed(cudaError_t error, const char *what) {
  bench_print_error("%s: CUDA: %s", what, cudaGetErrorString(error));
  return BENCH_FAILED;
}

static int open_device(struct bench_device *device, int place) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    if (place == 0)
      bench_print_error("-d cuda: %s",
                        error == cudaSuccess ? "there is no device" : cudaGetErrorString(error));
    return BENCH_FAILED;
  }
  device->number = place % count;
  BENCH_TRY_CUDA(cudaSetDevice(device->number));
  BENCH_TRY_CUDA(cudaGetDeviceProperties(&device->properties, device->number));
  BENCH_TRY_CUDA(cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking));
  BENCH_TRY_CUDA(cudaEventCreate(&device->started));
  BENCH_TRY_CUDA(cudaEventCreate(&device->ended));
  return BENCH_OK;
}

/* Opens the device of this rank. If the team's communicator has only one rank, all ranks are
 * processes of this machine. */
int bench_device_open(struct bench_team *team, struct bench_device *device) {
  *device = (struct bench_device){.number = -1, .ranks = 1};
  if (!team)
    return open_device(device, 0);
  bool own = team->comm->size != team->size;
  device->ranks = own ? team->size : team->comm->hosts.here;
  int status = open_device(device, own ? team->rank : team->comm->hosts.local_rank);
  return bench_team_agree(team, status == BENCH_OK) ? BENCH_OK : BENCH_FAILED;
}

void bench_device_close(struct bench_device *device) {
  if (device->stream)
    cudaStreamDestroy(device->stream);
  if (device->started)
    cudaEventDestroy(device->started);
  if (device->ended)
    cudaEventDestroy(device->ended);
}

void bench_device_print_notes(struct bench_job *job) {
  const struct cudaDeviceProp *properties = &job->device->properties;
  bench_print_note(job->table, "onebit-bench %s -d cuda, version %s%s", job->benchmark->name,
                   onebit_version(),
                   BENCH_EMULATED ? ": an EMULATED device, whose times mean nothing" : "");
  bench_print_note(job->table, "%s, compute capability %d.%d, %.1f GiB", properties->name,
                   properties->major, properties->minor,
                   (double)properties->totalGlobalMem / (double)((size_t)1 << 30));
}

static int cuda_device_start(struct bench_device *device, double *seconds) {
  (void)seconds;
  BENCH_TRY_CUDA(cudaEventRecord(device->started, device->stream));
  return BENCH_OK;
}

static int cuda_device_stop(struct bench_device *device, double *seconds) {
  float milliseconds;
  BENCH_TRY_CUDA(cudaEventRecord(device->ended, device->stream));
  BENCH_TRY_CUDA(cudaEventSynchronize(device->ended));
  BENCH_TRY_CUDA(cudaEventElapsedTime(&milliseconds, device->started, device->ended));
  *seconds = 1e-3 * (double)milliseconds;
  return BENCH_OK;
}

const struct bench_space bench_space_cuda = {&ob_memory_cuda, cuda_device_start, cuda_device_stop};

static onebit_status_t (*const stream_calls[])(const void *, void *, onebit_plan_t,
                                               cudaStream_t) = {
    [ONEBIT_ALLREDUCE] = onebit_allreduce_stream,
    [ONEBIT_ALLGATHER] = onebit_allgather_stream,
    [ONEBIT_REDUCE_SCATTER] = onebit_reduce_scatter_stream,
};

#ifdef ONEBIT_HAVE_NCCL
/* --- NCCL */

static int nccl_failed(ncclResult_t result, const char *what) {
  bench_print_error("%s: NCCL: %s", what, ncclGetErrorString(result));
  return BENCH_FAILED;
}

/* Makes each rank a separate host for NCCL, for a machine with more ranks than GPUs. NCCL rejects
 * two ranks of one host on one GPU, but lets a process set the name of its host. If there is no
 * other machine, ranks then communicate over NCCL's sockets, as hosts on an Ethernet do.
 * Environment variables that the user has set do not change. */
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

/* Sends rank 0's id to all ranks, as a sum over the ranks to which the other ranks add zeros. */
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
    return nccl_failed(result, "ncclCommInitRank");
  return bench_check_status(onebit_comm_create_nccl(like->nccl, comm), "onebit_comm_create_nccl");
}

/* Creates an NCCL communicator for a case, and the library's communicator over it. Collective.
 * Returns an exit status. */
static int bench_nccl_create(struct bench_case *like, onebit_comm_t *comm) {
  struct bench_team *team = like->team;
  ncclUniqueId id = {{0}};
  int devices = 0;
  BENCH_TRY_CUDA(cudaGetDeviceCount(&devices));
  if (like->device->ranks > devices && !BENCH_EMULATED)
    name_own_host(like);
  ncclResult_t result = team->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
  if (!bench_team_agree(team, result == ncclSuccess))
    return result == ncclSuccess ? BENCH_FAILED : nccl_failed(result, "ncclGetUniqueId");
  send_id(team, &id);
  int status = bench_nccl_create_comm(like, id, comm);
  return bench_team_agree(team, status == BENCH_OK) ? BENCH_OK : BENCH_FAILED;
}

static void bench_nccl_destroy(struct ncclComm *nccl, onebit_comm_t comm) {
  onebit_comm_destroy(comm);
  if (nccl)
    ncclCommDestroy(nccl);
}

/* Runs NCCL's collective in float32, or in bfloat16 if way->half is set. */
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
  return result == ncclSuccess ? BENCH_OK : nccl_failed(result, entry->name);
}

/* Adds NCCL's own collective, in float32 and in bfloat16. */
static void bench_nccl_add(struct bench_case *test) {
  static const char *const names[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter"};
  char name[48];
  for (int half = 0; half < 2; half++) {
    snprintf(name, sizeof name, "%s %s", names[test->collective->operation],
             half ? "bfloat16" : "float32");
    bench_case_add(test, name, bench_nccl_run)->half = half;
  }
}

#endif

/* --- Ways to run the collective */

static int run_call(const struct bench_entry *entry) {
  const struct bench_case *test = ((const struct bench_way *)entry->context)->test;
  return bench_check_status(test->collective->call(test->send, test->receive, test->plan),
                            entry->name);
}

static int run_stream(const struct bench_entry *entry) {
  const struct bench_case *test = ((const struct bench_way *)entry->context)->test;
  return bench_check_status(stream_calls[test->collective->operation](
                                test->send, test->receive, test->plan, test->device->stream),
                            entry->name);
}

/* Adds a plan's blocking call and its call on a stream, and NCCL's own collective. */
static int cuda_add_ways(struct bench_case *test) {
  onebit_plan_options_t options =
      bench_case_options(test, test->options->variant, ONEBIT_DEVICE_CUDA);
  struct bench_way *way = bench_case_add(test, "call", run_call);
  test->rounds.entries[0].waits = true;
  BENCH_TRY(bench_check_status(onebit_plan_create(test->comm, test->count, &options, &way->plan),
                               "onebit_plan_create"));
  test->plan = way->plan;
  bench_case_add(test, "on a stream", run_stream)->plan = test->plan;
  test->plan_count = test->rounds.count;
#ifdef ONEBIT_HAVE_NCCL
  if (test->nccl && !test->options->no_dense)
    bench_nccl_add(test);
#endif
  return BENCH_OK;
}

static int cuda_synchronize_plan(struct bench_case *test) {
  return bench_check_status(onebit_plan_synchronize(test->plan), "the calls on the stream");
}

/* --- -c: as many threads of this process as there are ranks repeat the calls on the host, on the
 * same numbers (bench_fill_values). The results must be equal to the bit. */

struct twin {
  const struct bench_case *test;
  struct bench_options options; /* the same, with the device plan's schedule */
  void *result;                 /* the host's result for the rank that checks */
};

static size_t result_bytes(const struct bench_case *test) {
  return test->receive_count * ob_dtype_size(test->options->dtype);
}

static int run_twin(struct bench_team *team, const void *context) {
  const struct twin *twin = context;
  const struct bench_collective *collective = twin->test->collective;
  struct bench_case host;
  onebit_status_t status = ONEBIT_OK;
  BENCH_TRY(bench_case_create(team, &twin->options, collective, twin->test->bytes, &host));
  for (size_t k = 0; k < twin->test->plan_count && status == ONEBIT_OK; k++)
    status = collective->call(host.send, host.receive, host.plan);
  if (team->rank == twin->test->team->rank)
    memcpy(twin->result, host.receive, result_bytes(&host));
  bench_case_destroy(&host);
  return bench_check_status(status, "-c: on the host");
}

/* Resets the residual, and repeats the calls on the device. Before each call, fills the result with
 * other values. */
static int run_device(const struct bench_case *test, void *result) {
  cudaStream_t stream = test->device->stream;
  BENCH_TRY(
      bench_check_status(onebit_plan_reset_residual(test->plan), "onebit_plan_reset_residual"));
  for (size_t k = 0; k < test->plan_count; k++) {
    BENCH_TRY_CUDA(cudaMemsetAsync(test->receive, 0xff, result_bytes(test), stream));
    BENCH_TRY_CUDA(cudaStreamSynchronize(stream));
    BENCH_TRY(test->rounds.entries[k].run(&test->rounds.entries[k]));
    BENCH_TRY_CUDA(cudaStreamSynchronize(stream));
  }
  BENCH_TRY(bench_check_status(onebit_plan_synchronize(test->plan), "-c: on the stream"));
  BENCH_TRY_CUDA(cudaMemcpy(result, test->receive, result_bytes(test), cudaMemcpyDeviceToHost));
  return BENCH_OK;
}

static int cuda_judge(struct bench_case *test, bool *right) {
  onebit_plan_info_t info = bench_plan_info(test->plan);
  struct twin twin = {.test = test, .options = *test->options};
  if (!test->options->check)
    return BENCH_OK;
  if (info.schedule == ONEBIT_SCHEDULE_HIERARCHICAL && info.hosts > 1) {
    if (test->team->rank == 0)
      bench_print_error("-c: threads form one host, but the hierarchical schedule has %d here",
                        info.hosts);
    return BENCH_USAGE;
  }
  if (test->collective->operation == ONEBIT_ALLREDUCE)
    twin.options.variant.schedule = info.schedule;
  void *result = ob_allocate(1, result_bytes(test));
  twin.result = ob_allocate(1, result_bytes(test));
  int status = BENCH_FAILED;
  if (bench_team_agree(test->team, result && twin.result))
    status = run_device(test, result);
  if (status == BENCH_OK)
    status = bench_team_run_threads(test->team->size, run_twin, &twin);
  *right = status == BENCH_OK && memcmp(result, twin.result, result_bytes(test)) == 0;
  *right = bench_team_agree(test->team, *right);
  for (size_t k = 0; k < test->plan_count; k++)
    test->ways[k].right = *right;
  ob_release(result);
  ob_release(twin.result);
  return status;
}

/* --- Notes */

static void cuda_note(struct bench_job *job, const struct bench_case *test) {
  onebit_plan_info_t info = bench_plan_info(test->plan);
  bench_device_print_notes(job);
  bench_print_note(job->table, "%d ranks over %s, schedule %s, wire %s, %s", test->team->size,
                   info.transport, bench_schedules[info.schedule], bench_wires[info.wire],
                   bench_dtypes[test->options->dtype]);
  bench_print_note(job->table, "Size: bytes of a rank's %s as float32. Times: of the slowest rank",
                   test->collective->gathers ? "part" : "send buffer");
}

static const struct bench_calls cuda_calls = {cuda_add_ways, bench_measure_ways,
                                              cuda_synchronize_plan, cuda_judge, cuda_note};

/* --- The ranks */

/* Returns NULL, or the reason why NCCL cannot connect these ranks. If ranks are threads of one
 * process, NCCL needs a GPU for each rank. The emulated NCCL connects only ranks of one process,
 * which share the device. */
static const char *find_nccl_refusal(const struct bench_options *options,
                                     const struct bench_team *team) {
  int count = 0;
  bool threads = options->ranks > 0;
  if (!options->nccl || team->size == 1)
    return NULL;
  if (BENCH_EMULATED)
    return threads || options->nccl_ranks
               ? NULL
               : "the emulated device's NCCL supports only ranks of one process: use --nccl-ranks";
  if (threads && (cudaGetDeviceCount(&count) != cudaSuccess || team->size > count))
    return "each rank that is a thread needs its own device; --nccl-ranks starts processes instead";
  return NULL;
}

/* Runs the benchmark of a collective with -d cuda: over NCCL, over the team's communicator, or on a
 * single rank. */
int bench_cuda_collective(struct bench_job *job) {
  struct bench_case like = bench_case_without_size(job);
  const char *refused = find_nccl_refusal(job->options, job->team);
  onebit_comm_t own = NULL;
  int status = BENCH_OK;
  like.calls = &cuda_calls;
  like.space = like.rounds.space = &bench_space_cuda;
  like.device = like.rounds.device = job->device;
  if (refused && job->team->rank == 0)
    bench_print_error("--transport nccl: %s", refused);
  if (refused)
    return BENCH_USAGE;
#ifdef ONEBIT_HAVE_NCCL
  if (job->options->nccl)
    status = bench_nccl_create(&like, &own);
#endif
  if (!job->options->nccl && job->team->size == 1)
    status = bench_check_status(onebit_comm_create_self(&own), "onebit_comm_create_self");
  like.comm = own ? own : like.comm;
  if (status == BENCH_OK)
    status = bench_measure_sizes(job, bench_measure_collective_size, &like);
#ifdef ONEBIT_HAVE_NCCL
  if (job->options->nccl) {
    bench_nccl_destroy(like.nccl, own);
    return status;
  }
#endif
  onebit_comm_destroy(own);
  return status;
}
