/* Opens the device of a rank, and counts what calls put on its stream. */
#include "bench/bench_cuda.h"
#include "collectives/communicator.h"
#include "cuda/device.h"
#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#endif

int bench_cuda_failed(cudaError_t error, const char *what) {
  bench_complain("%s: CUDA: %s", what, cudaGetErrorString(error));
  return BENCH_FAILED;
}

/* --- The device */

static int open_device(struct bench_device *device, int place) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    if (place == 0)
      bench_complain("-d cuda: %s",
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

/* Opens a device. Ranks with communicators of their own are processes of this machine. */
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

void bench_device_note(struct bench_job *job) {
  const struct cudaDeviceProp *properties = &job->device->properties;
  bench_note(job->table, "onebit-bench %s -d cuda, version %s%s", job->benchmark->name,
             onebit_version(),
             BENCH_EMULATED ? ": an EMULATED device, whose times mean nothing" : "");
  bench_note(job->table, "%s, compute capability %d.%d, %.1f GiB", properties->name,
             properties->major, properties->minor,
             (double)properties->totalGlobalMem / (double)((size_t)1 << 30));
}

static int cuda_device_start(struct bench_device *device, double *seconds) {
  (void)seconds;
  BENCH_TRY_CUDA(cudaEventRecord(device->started, device->stream));
  return BENCH_OK;
}

static int stop(struct bench_device *device, double *seconds) {
  float milliseconds;
  BENCH_TRY_CUDA(cudaEventRecord(device->ended, device->stream));
  BENCH_TRY_CUDA(cudaEventSynchronize(device->ended));
  BENCH_TRY_CUDA(cudaEventElapsedTime(&milliseconds, device->started, device->ended));
  *seconds = 1e-3 * (double)milliseconds;
  return BENCH_OK;
}

const struct bench_space bench_space_cuda = {&ob_memory_cuda, cuda_device_start, stop};

/* --- What a call puts on a stream */

#ifdef ONEBIT_EMULATED_CUDA

static void synchronise_ranks(struct bench_team *team) {
  if (team)
    team->kind->barrier(team);
}

/* Counts the operations of all ranks that are threads of this process, by the emulated device's
 * counters. */
int bench_entry_count(struct bench_rounds *rounds, struct bench_entry *entry) {
  struct bench_team *team = rounds->team;
  size_t ranks = team ? (size_t)team->size : 1;
  synchronise_ranks(team);
  if (!team || team->rank == 0)
    emulation_reset_counts();
  synchronise_ranks(team);
  BENCH_TRY(entry->run(entry));
  synchronise_ranks(team);
  size_t waits = (size_t)emulation_counts().synchronisations;
  synchronise_ranks(team);
  BENCH_TRY_CUDA(cudaStreamSynchronize(rounds->device->stream));
  synchronise_ranks(team);
  struct emulation_counters ran = emulation_counts();
  synchronise_ranks(team);
  entry->counts = (struct bench_counts){.known = true,
                                        .kernels = (size_t)ran.kernels / ranks,
                                        .copies = (size_t)(ran.copies + ran.memsets) / ranks,
                                        .synchronisations = waits / ranks};
  return BENCH_OK;
}

static int count_graph(cudaGraph_t graph, struct bench_rounds *rounds, struct bench_entry *entry) {
  (void)graph;
  return bench_entry_count(rounds, entry);
}

#else

int bench_entry_count(struct bench_rounds *rounds, struct bench_entry *entry) {
  (void)rounds, (void)entry;
  return BENCH_OK;
}

/* Counts a graph's nodes. A call in which the host waits could not have been captured. */
static int count_graph(cudaGraph_t graph, struct bench_rounds *rounds, struct bench_entry *entry) {
  size_t count = 0;
  (void)rounds;
  BENCH_TRY_CUDA(cudaGraphGetNodes(graph, NULL, &count));
  cudaGraphNode_t *nodes = ob_allocate(count, sizeof(cudaGraphNode_t));
  cudaError_t error = nodes ? cudaGraphGetNodes(graph, nodes, &count) : cudaErrorMemoryAllocation;
  entry->counts = (struct bench_counts){.known = true};
  for (size_t k = 0; error == cudaSuccess && k < count; k++) {
    enum cudaGraphNodeType type;
    error = cudaGraphNodeGetType(nodes[k], &type);
    entry->counts.kernels += type == cudaGraphNodeTypeKernel;
    entry->counts.copies += type == cudaGraphNodeTypeMemcpy || type == cudaGraphNodeTypeMemset;
  }
  ob_release(nodes);
  return error == cudaSuccess ? BENCH_OK : bench_cuda_failed(error, "cudaGraphGetNodes");
}

#endif

static int replay(const struct bench_entry *entry) {
  const struct bench_device *device = entry->context;
  BENCH_TRY_CUDA(cudaGraphLaunch(entry->graph, device->stream));
  return BENCH_OK;
}

static void release_graph(struct bench_entry *entry) { cudaGraphExecDestroy(entry->graph); }

/* Captures, but not in the global mode: other ranks may be threads of this process, and
 * allocate. */
static int capture(struct bench_device *device, const struct bench_entry *of, cudaGraph_t *graph) {
  BENCH_TRY_CUDA(cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal));
  int status = of->run(of);
  cudaError_t ended = cudaStreamEndCapture(device->stream, graph);
  if (status == BENCH_OK && ended != cudaSuccess)
    return bench_cuda_failed(ended, "cudaStreamEndCapture");
  return status;
}

int bench_entry_capture(struct bench_rounds *rounds, size_t of) {
  struct bench_device *device = rounds->device;
  struct bench_entry *entry = &rounds->entries[of];
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  BENCH_TRY(entry->run(entry)); /* what is made in a first call */
  BENCH_TRY_CUDA(cudaStreamSynchronize(device->stream));
  BENCH_TRY(capture(device, entry, &graph));
  cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  int status = error == cudaSuccess ? count_graph(graph, rounds, entry)
                                    : bench_cuda_failed(error, "cudaGraphInstantiate");
  cudaGraphDestroy(graph);
  if (error == cudaSuccess) {
    struct bench_entry *again = bench_rounds_entry(rounds, "  in a graph", replay, device);
    again->graph = ready;
    again->release = release_graph;
    again->counts = entry->counts;
    again->counts.synchronisations = 0;
  }
  return status;
}
