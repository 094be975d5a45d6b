/* Opens the device of a rank, and replays what calls put on its stream. */
#include "bench/bench_cuda.h"
#include "collectives/communicator.h"
#include "cuda/device.h"

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
  cudaGraphDestroy(graph);
  if (error != cudaSuccess)
    return bench_cuda_failed(error, "cudaGraphInstantiate");
  struct bench_entry *again = bench_rounds_entry(rounds, "  in a graph", replay, device);
  again->graph = ready;
  again->release = release_graph;
  return BENCH_OK;
}
