/* The device of a rank, and the rounds in which entries take turns on it. */
#define _DEFAULT_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "bench/bench_cuda.h"
#include "compression/numerics.h"
#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#endif

int bench_cuda_failed(cudaError_t error, const char *what) {
  bench_complain("%s: CUDA: %s", what, cudaGetErrorString(error));
  return BENCH_FAILED;
}

/* --- The device */

/* FNV-1a, of which a double holds 53 bits. */
static double hash_of_machine(void) {
  char name[256] = "";
  uint64_t hash = 0xcbf29ce484222325u;
  gethostname(name, sizeof name - 1);
  for (const char *c = name; *c; c++)
    hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
  return (double)(hash >> 11);
}

bool bench_seat_find(struct bench_team *team, struct bench_seat *seat) {
  double *machines = ob_allocate((size_t)team->size, sizeof *machines);
  *seat = (struct bench_seat){0, 0};
  if (bench_team_agree(team, machines != NULL)) {
    machines[team->rank] = hash_of_machine(); /* zeros else */
    team->kind->combine(team, machines, (size_t)team->size, true);
    for (int rank = 0; rank < team->size; rank++) {
      bool here = machines[rank] == machines[team->rank];
      seat->rank += here && rank < team->rank;
      seat->ranks += here;
    }
  }
  ob_release(machines);
  return seat->ranks > 0;
}

static int open_number(int number, struct bench_device *device) {
  device->number = number;
  BENCH_TRY_CUDA(cudaSetDevice(number));
  BENCH_TRY_CUDA(cudaGetDeviceProperties(&device->properties, number));
  BENCH_TRY_CUDA(cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking));
  BENCH_TRY_CUDA(cudaEventCreate(&device->start));
  BENCH_TRY_CUDA(cudaEventCreate(&device->stop));
  return BENCH_OK;
}

int bench_device_open(int rank, struct bench_device *device) {
  int count = 0;
  *device = (struct bench_device){.number = -1};
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0)
    return open_number(rank % count, device);
  if (rank == 0)
    bench_complain("-d cuda: %s",
                   error == cudaSuccess ? "there is no device" : cudaGetErrorString(error));
  return BENCH_FAILED;
}

void bench_device_close(struct bench_device *device) {
  if (device->stream)
    cudaStreamDestroy(device->stream);
  if (device->start)
    cudaEventDestroy(device->start);
  if (device->stop)
    cudaEventDestroy(device->stop);
}

void bench_device_print(const struct bench_device *device, const char *benchmark) {
  printf("# onebit-bench %s -d cuda, version %s%s\n", benchmark, onebit_version(),
         BENCH_EMULATED ? ": an EMULATED device, whose times mean nothing" : "");
  printf("# %s, compute capability %d.%d, %.1f GiB\n", device->properties.name,
         device->properties.major, device->properties.minor,
         (double)device->properties.totalGlobalMem / (double)((size_t)1 << 30));
}

void *bench_device_memory(size_t count, size_t size) {
  void *memory = NULL;
  if (cudaMalloc(&memory, count ? count * size : 1) == cudaSuccess)
    return memory;
  cudaGetLastError(); /* the caller tells of it */
  return NULL;
}

int bench_device_fill(void *to, size_t count, onebit_dtype_t dtype, uint64_t seed) {
  float *values = ob_allocate(count, sizeof *values);
  if (!values) {
    bench_complain("no memory for %zu numbers", count);
    return BENCH_FAILED;
  }
  bench_fill(values, count, seed);
  /* In place: what has become shorter lies before what is still to be read. */
  for (size_t i = 0; dtype != ONEBIT_FLOAT32 && i < count; i++)
    ob_store(values, i, dtype, values[i]);
  cudaError_t error = cudaMemcpy(to, values, count * ob_dtype_size(dtype), cudaMemcpyHostToDevice);
  ob_release(values);
  return error == cudaSuccess ? BENCH_OK : bench_cuda_failed(error, "cudaMemcpy");
}

/* --- What a call puts on a stream */

#ifdef ONEBIT_EMULATED_CUDA

/* The emulated device counts what runs, of all ranks that are threads of this process. */
int bench_put_count(struct bench_turns *turns, struct bench_put *put) {
  struct bench_device *device = turns->device;
  struct bench_team *team = turns->team;
  size_t ranks = team ? (size_t)team->size : 1;
  if (team)
    team->kind->barrier(team);
  if (!team || team->rank == 0)
    emulation_reset_counts();
  if (team)
    team->kind->barrier(team);
  BENCH_TRY(put->run(put, device->stream));
  if (team)
    team->kind->barrier(team);
  size_t waits = (size_t)emulation_counts().synchronisations;
  if (team)
    team->kind->barrier(team);
  BENCH_TRY_CUDA(cudaStreamSynchronize(device->stream));
  if (team)
    team->kind->barrier(team);
  struct emulation_counters ran = emulation_counts();
  put->counts = (struct bench_counts){.known = true,
                                      .kernels = (size_t)ran.kernels / ranks,
                                      .copies = (size_t)(ran.copies + ran.memsets) / ranks,
                                      .synchronisations = waits / ranks};
  return BENCH_OK;
}

static int count_graph(cudaGraph_t graph, struct bench_turns *turns, struct bench_put *put) {
  (void)graph;
  return bench_put_count(turns, put);
}

#else

int bench_put_count(struct bench_turns *turns, struct bench_put *put) {
  (void)turns, (void)put;
  return BENCH_OK;
}

/* A call in which the host waits could not have been captured. */
static int count_graph(cudaGraph_t graph, struct bench_turns *turns, struct bench_put *put) {
  size_t count = 0;
  (void)turns;
  BENCH_TRY_CUDA(cudaGraphGetNodes(graph, NULL, &count));
  cudaGraphNode_t *nodes = ob_allocate(count, sizeof(cudaGraphNode_t));
  cudaError_t error = nodes ? cudaGraphGetNodes(graph, nodes, &count) : cudaErrorMemoryAllocation;
  put->counts = (struct bench_counts){.known = true};
  for (size_t k = 0; error == cudaSuccess && k < count; k++) {
    enum cudaGraphNodeType type;
    error = cudaGraphNodeGetType(nodes[k], &type);
    put->counts.kernels += type == cudaGraphNodeTypeKernel;
    put->counts.copies += type == cudaGraphNodeTypeMemcpy || type == cudaGraphNodeTypeMemset;
  }
  ob_release(nodes);
  return error == cudaSuccess ? BENCH_OK : bench_cuda_failed(error, "cudaGraphGetNodes");
}

#endif

static int replay(const struct bench_put *put, cudaStream_t stream) {
  BENCH_TRY_CUDA(cudaGraphLaunch(put->graph, stream));
  return BENCH_OK;
}

/* Not the global mode: other ranks may be threads of this process, and allocate. */
static int capture(struct bench_device *device, const struct bench_put *of, cudaGraph_t *graph) {
  BENCH_TRY_CUDA(cudaStreamBeginCapture(device->stream, cudaStreamCaptureModeThreadLocal));
  int status = of->run(of, device->stream);
  cudaError_t ended = cudaStreamEndCapture(device->stream, graph);
  if (status == BENCH_OK && ended != cudaSuccess)
    return bench_cuda_failed(ended, "cudaStreamEndCapture");
  return status;
}

int bench_put_capture(struct bench_turns *turns, struct bench_put *of, struct bench_put *put) {
  cudaGraph_t graph;
  BENCH_TRY(of->run(of, turns->device->stream)); /* what is made in a first call */
  BENCH_TRY_CUDA(cudaStreamSynchronize(turns->device->stream));
  BENCH_TRY(capture(turns->device, of, &graph));
  cudaError_t error = cudaGraphInstantiate(&put->graph, graph, 0);
  int status = error == cudaSuccess ? count_graph(graph, turns, of)
                                    : bench_cuda_failed(error, "cudaGraphInstantiate");
  cudaGraphDestroy(graph);
  put->run = replay;
  put->counts = of->counts;
  put->counts.synchronisations = 0;
  return status;
}

/* --- Rounds */

#define ROUNDS   21
#define WARMUPS  3
#define LAUNCHES (BENCH_EMULATED ? 1 : 20)

/* Ranks begin each launch together. */
void bench_turns_begin(struct bench_turns *turns, const struct bench_options *options,
                       struct bench_device *device, struct bench_team *team) {
  bool asked = options->iterations != BENCH_BY_SIZE, warmed = options->warmups != BENCH_BY_SIZE;
  *turns = (struct bench_turns){.device = device,
                                .team = team,
                                .rounds = asked ? options->iterations : ROUNDS,
                                .warmups = warmed ? options->warmups : WARMUPS,
                                .repeats = team ? 1 : LAUNCHES};
}

struct bench_put *bench_turns_add(struct bench_turns *turns, const char *format, ...) {
  struct bench_put *put = &turns->puts[turns->count++];
  va_list arguments;
  va_start(arguments, format);
  *put = (struct bench_put){.counts = {.known = false}};
  vsnprintf(put->name, sizeof put->name, format, arguments);
  va_end(arguments);
  return put;
}

static int launch(const struct bench_turns *turns, const struct bench_put *put) {
  for (size_t k = 0; k < turns->repeats; k++)
    BENCH_TRY(put->run(put, turns->device->stream));
  return BENCH_OK;
}

static int time_by_events(const struct bench_turns *turns, const struct bench_put *put,
                          double *time) {
  struct bench_device *device = turns->device;
  float milliseconds;
  BENCH_TRY_CUDA(cudaEventRecord(device->start, device->stream));
  BENCH_TRY(launch(turns, put));
  BENCH_TRY_CUDA(cudaEventRecord(device->stop, device->stream));
  BENCH_TRY_CUDA(cudaEventSynchronize(device->stop));
  BENCH_TRY_CUDA(cudaEventElapsedTime(&milliseconds, device->start, device->stop));
  *time = 1e-3 * (double)milliseconds;
  return BENCH_OK;
}

static int time_by_clock(const struct bench_turns *turns, const struct bench_put *put,
                         double *time) {
  double start = bench_now();
  BENCH_TRY(launch(turns, put));
  *time = bench_now() - start;
  return BENCH_OK;
}

static int time_put(const struct bench_turns *turns, const struct bench_put *put, double *time) {
  if (turns->team)
    turns->team->kind->barrier(turns->team);
  BENCH_TRY((put->waits ? time_by_clock : time_by_events)(turns, put, time));
  *time /= (double)turns->repeats;
  return BENCH_OK;
}

/* Each round begins with another entry: what an entry finds in the caches must not always be what
 * one and the same other has left. */
static int take_times(struct bench_turns *turns) {
  for (size_t r = 0; r < turns->warmups + turns->rounds; r++)
    for (size_t k = 0; k < turns->count; k++) {
      struct bench_put *put = &turns->puts[(r + k) % turns->count];
      BENCH_TRY(time_put(turns, put, &put->times[r < turns->warmups ? 0 : r - turns->warmups]));
    }
  return BENCH_OK;
}

int bench_turns_run(struct bench_turns *turns) {
  turns->memory = ob_allocate((turns->count + 1) * turns->rounds, sizeof(double));
  if (!turns->memory) {
    bench_complain("no memory for the times of %zu rounds", turns->rounds);
    return BENCH_FAILED;
  }
  turns->scratch = turns->memory + turns->count * turns->rounds;
  for (size_t k = 0; k < turns->count; k++)
    turns->puts[k].times = turns->memory + k * turns->rounds;
  BENCH_TRY(take_times(turns));
  for (size_t k = 0; k < turns->count; k++) {
    struct bench_put *put = &turns->puts[k];
    if (turns->team)
      turns->team->kind->combine(turns->team, put->times, turns->rounds, false);
    memcpy(turns->scratch, put->times, turns->rounds * sizeof *put->times);
    put->time = bench_statistics(turns->scratch, turns->rounds);
  }
  return BENCH_OK;
}

void bench_turns_destroy(struct bench_turns *turns) {
  for (size_t k = 0; k < turns->count; k++)
    if (turns->puts[k].graph)
      cudaGraphExecDestroy(turns->puts[k].graph);
  ob_release(turns->memory);
}
