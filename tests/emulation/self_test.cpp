/*
 * Tests the emulated device itself: the properties that other tests rely on. Prints failures, and
 * `N passed, N failed`.
 */
#include <atomic>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "cuda_runtime.h"
#include "emulation.h"
#include "inside.h"
#include "nccl.h"
#include "self_test.h"

/* ---- Threads of a CTA: barriers, warp collectives, orders, and misuse, which must abort ---- */

namespace {

/* Collectives do not wait for lanes that have returned. Values read from such lanes are NaN. */
__global__ void return_early(unsigned *ballots, float *values) {
  unsigned lane = threadIdx.x;
  if (lane >= 20)
    return;
  ballots[lane] = __ballot_sync(~0u, 1);
  values[lane] = __shfl_down_sync(~0u, 1.0f, 16);
}

void test_exited_lanes() {
  unsigned *ballots = pinned<unsigned>(32);
  float *values = pinned<float>(32);
  EXPECT(launch(nullptr, 1, 32, return_early, ballots, values) == cudaSuccess);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(ballots[0] == 0xfffffu && ballots[19] == 0xfffffu && ballots[20] == 0);
  EXPECT(values[3] == 1 && values[4] != values[4]);
  EXPECT(cudaFreeHost(ballots) == cudaSuccess && cudaFreeHost(values) == cudaSuccess);
}

/* Reads a value that its neighbour may not have written yet. */
__global__ void race(unsigned *stale) {
  __shared__ unsigned values[64];
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = 1;
  if (!values[63 - threadIdx.x])
    atomicAdd(stale, 1);
}

__global__ void note_order(unsigned *out, unsigned *next) {
  out[atomicAdd(next, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

void note_orders(const char *order, unsigned *out) {
  unsigned *next = pinned<unsigned>(1);
  setenv("EMULATED_ORDER", order, 1);
  EXPECT(launch(nullptr, 2, 64, note_order, out, next) == cudaSuccess);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(cudaFreeHost(next) == cudaSuccess);
  unsetenv("EMULATED_ORDER");
}

__global__ void some_threads_at_barrier() {
  if (threadIdx.x < 40)
    __syncthreads();
}
__global__ void two_collectives() {
  if (threadIdx.x < 4)
    __syncwarp();
  else
    __ballot_sync(~0u, 1);
}
__global__ void two_masks() { __syncwarp(threadIdx.x < 4 ? 0xfu : ~0u); }
__global__ void foreign_mask() { __syncwarp(0xfu); }
__global__ void sync_without_lane() {
  if (threadIdx.x < 4)
    __syncwarp(0x1fu);
  else
    __syncthreads();
}
__global__ void load_misaligned(float *memory) { __ldcs((const float4 *)(void *)(memory + 1)); }
__global__ void write_beyond(float *memory) { memory[16] = 1; }

template <void (*kernel)()> void run() {
  launch(nullptr, 1, 64, kernel);
  cudaDeviceSynchronize();
}

template <void (*kernel)(float *)> void run_on_memory() {
  float *memory;
  cudaMalloc(&memory, 64);
  launch(nullptr, 1, 1, kernel, memory);
  cudaDeviceSynchronize();
}

} // namespace

static void test_order() {
  unsigned *forward = pinned<unsigned>(128), *backward = pinned<unsigned>(128),
           *shuffled = pinned<unsigned>(128), *again = pinned<unsigned>(128),
           *stale = pinned<unsigned>(1);
  note_orders("forward", forward);
  note_orders("backward", backward);
  note_orders("shuffle", shuffled);
  note_orders("shuffle", again);
  bool right = true, differs = false;
  for (unsigned i = 0; i < 128; i++) {
    right &= forward[i] == i && backward[i] == 127 - i && shuffled[i] == again[i];
    differs |= shuffled[i] != i;
  }
  EXPECT(right && differs);
  EXPECT(launch(nullptr, 1, 64, race, stale) == cudaSuccess);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess && *stale > 0);
  for (unsigned *memory : {forward, backward, shuffled, again, stale})
    EXPECT(cudaFreeHost(memory) == cudaSuccess);
}

static void test_misuse() {
  EXPECT(aborts_with(run<some_threads_at_barrier>, "reached by only part of the CTA"));
  EXPECT(aborts_with(run<two_collectives>, "divergent warp"));
  EXPECT(aborts_with(run<two_masks>, "divergent warp"));
  EXPECT(aborts_with(run<foreign_mask>, "is not in its own mask"));
  EXPECT(aborts_with(run<sync_without_lane>, "deadlock"));
  EXPECT(aborts_with(run_on_memory<load_misaligned>, "misaligned"));
  EXPECT(aborts_with(run_on_memory<write_beyond>,
                     EMULATION_ASAN ? "heap-buffer-overflow" : "out of bounds"));
}

/*
 * ---- Drivers ----
 *
 * Behaviour that the documents of CUDA and NCCL allow but most drivers seldom show: late copies,
 * calls that wait, kernels that spin.
 */

namespace {

int *allocate_on_device(int value) {
  void *memory;
  EXPECT(cudaMalloc(&memory, 2 * sizeof(int)) == cudaSuccess);
  EXPECT(cudaMemset(memory, value, 2 * sizeof(int)) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess);
  return static_cast<int *>(memory);
}

/* Returns the value of `memory` that a stream reads if it is not ordered with the default
 * stream. */
int seen_by(cudaStream_t stream, const int *memory, int *seen) {
  EXPECT(launch(stream, 1, 1, copy, seen, memory) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
  return *seen;
}

/* The call returns when the bytes are staged. They reach the device when the default stream comes
 * to the copy. */
void copy_arrives_late() {
  cudaStream_t stream = new_stream();
  int *memory = allocate_on_device(0), *seen = pinned<int>(1), value = 7;
  EXPECT(cudaMemcpy(memory, &value, sizeof value, cudaMemcpyHostToDevice) == cudaSuccess);
  value = 8;
  EXPECT(seen_by(stream, memory, seen) == 0);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaSuccess && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaMemset(memory, 0, sizeof value) == cudaSuccess && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaMemcpy(memory + 1, memory, sizeof value, cudaMemcpyDeviceToDevice) == cudaSuccess);
  EXPECT(seen_by(stream, memory + 1, seen) == 0 && seen_by(stream, memory, seen) == 7);
  *seen = 9; /* pinned memory is not staged: the host waits */
  EXPECT(cudaMemcpy(memory, seen, sizeof value, cudaMemcpyHostToDevice) == cudaSuccess);
  EXPECT(seen_by(stream, memory, seen) == 9);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
  EXPECT(cudaFree(memory) == cudaSuccess && cudaFreeHost(seen) == cudaSuccess);
}

/* The copy waits for the earlier work of its stream, and is still made late. */
void copy_on_stream_arrives_late() {
  cudaStream_t stream = new_stream(), other = new_stream();
  int *memory = allocate_on_device(0), *seen = pinned<int>(1), value = 7;
  EXPECT(launch(stream, 1, 1, set, memory, 5) == cudaSuccess);
  EXPECT(cudaMemcpyAsync(memory, &value, sizeof value, cudaMemcpyHostToDevice, stream) ==
         cudaSuccess);
  EXPECT(seen_by(other, memory, seen) == 5 && seen_by(stream, memory, seen) == 7);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
  EXPECT(cudaFree(memory) == cudaSuccess && cudaFreeHost(seen) == cudaSuccess);
}

/* The work of a destroyed stream still runs. */
void destroyed_stream_works() {
  cudaStream_t stream = new_stream();
  int *seen = pinned<int>(1);
  EXPECT(launch(stream, 1, 1, set, seen, 1) == cudaSuccess);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess && *seen == 0);
  EXPECT(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess && *seen == 1);
  EXPECT(cudaFreeHost(seen) == cudaSuccess);
}

/* A communicator whose link is broken, with one of its kernels spinning on the stream. */
struct spinning {
  int *memory = pinned<int>(1), *other = pinned<int>(1), *device = allocate_on_device(0);
  cudaStream_t stream = new_stream();
  ncclComm_t comm = nullptr;

  spinning() {
    ncclUniqueId id;
    ncclResult_t error = ncclSuccess;
    setenv("EMULATED_TIMEOUT", "1", 1);
    EXPECT(ncclGetUniqueId(&id) == ncclSuccess);
    EXPECT(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess);
    emulation_nccl_break(comm);
    EXPECT(ncclRecv(memory, 1, ncclInt32, 0, comm, stream) == ncclSuccess);
    EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
    EXPECT(ncclCommGetAsyncError(comm, &error) == ncclSuccess && error == ncclRemoteError);
    EXPECT(cudaStreamQuery(stream) == cudaErrorNotReady);
    cudaGetLastError();
  }
};

void abort_ends_kernel() {
  spinning scene;
  EXPECT(ncclCommAbort(scene.comm) == ncclSuccess);
  EXPECT(cudaStreamSynchronize(scene.stream) == cudaSuccess);
  EXPECT(cudaStreamDestroy(scene.stream) == cudaSuccess);
  EXPECT(cudaFree(scene.device) == cudaSuccess && cudaFreeHost(scene.memory) == cudaSuccess);
  EXPECT(cudaFreeHost(scene.other) == cudaSuccess);
  unsetenv("EMULATED_TIMEOUT");
}

void copy_to_host() {
  spinning scene;
  int value;
  cudaMemcpyAsync(&value, scene.device, sizeof value, cudaMemcpyDeviceToHost, scene.stream);
}
void copy_from_host() {
  spinning scene;
  int value = 1;
  cudaMemcpyAsync(scene.device, &value, sizeof value, cudaMemcpyHostToDevice, scene.stream);
}
void free_memory() { cudaFree(spinning().device); }
void free_pinned() { cudaFreeHost(spinning().other); }
void destroy_it() { ncclCommDestroy(spinning().comm); }

/* The graph with the communicator's call outlives the communicator. */
void abort_before_graph() {
  int *memory = pinned<int>(1);
  ncclComm_t comm = nullptr;
  cudaStream_t stream = new_stream();
  cudaGraph_t graph;
  setenv("EMULATED_TIMEOUT", "1", 1);
  EXPECT(ncclCommInitAll(&comm, 1, nullptr) == ncclSuccess);
  EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess);
  EXPECT(ncclRecv(memory, 1, ncclInt32, 0, comm, stream) == ncclSuccess);
  EXPECT(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  ncclCommAbort(comm);
}

void ask_what_is_gone() {
  spinning scene;
  ncclResult_t error;
  ncclCommAbort(scene.comm);
  ncclCommGetAsyncError(scene.comm, &error);
}
void abort_twice() {
  spinning scene;
  ncclCommAbort(scene.comm);
  ncclCommAbort(scene.comm);
}

} // namespace

static void test_driver() {
  copy_arrives_late();
  copy_on_stream_arrives_late();
  destroyed_stream_works();
  abort_ends_kernel();
  EXPECT(aborts_with(copy_to_host, "a copy to the host ends after its work"));
  EXPECT(aborts_with(copy_from_host, "a copy from pageable memory begins after its work"));
  EXPECT(aborts_with(free_memory, "the device, whose work cudaFree waits for"));
  EXPECT(aborts_with(free_pinned, "the device, whose work cudaFreeHost waits for"));
  EXPECT(aborts_with(destroy_it, "ncclCommDestroy"));
  EXPECT(aborts_with(abort_before_graph, "graphs that have calls on a communicator"));
  EXPECT(aborts_with(ask_what_is_gone, "use after free"));
  EXPECT(aborts_with(abort_twice, "use after free"));
}

/* ---- All tests ---- */

std::atomic<int> passed, failed;

void expect(bool holds, const char *what, const char *file, int line) {
  (holds ? passed : failed)++;
  if (!holds)
    fprintf(stderr, "%s:%d: %s\n", file, line, what);
}

/* Runs the function in a child process and returns its message if it aborts. */
std::string message_of_abort(void (*function)()) {
  int ends[2];
  EXPECT(!pipe(ends));
  fflush(nullptr);
  pid_t child = fork();
  if (!child) {
    dup2(ends[1], 2);
    close(ends[0]);
    function();
    _exit(0);
  }
  close(ends[1]);
  std::string words;
  char part[512];
  for (ssize_t size; (size = read(ends[0], part, sizeof part)) > 0;)
    words.append(part, static_cast<size_t>(size));
  close(ends[0]);
  int status;
  waitpid(child, &status, 0);
  return status ? words : "no abort";
}

bool aborts_with(void (*function)(), const char *words) {
  std::string all = message_of_abort(function);
  if (all.find(words) != std::string::npos)
    return true;
  fprintf(stderr, "instead of '%s': %s\n", words, all.c_str());
  return false;
}

int main() {
  unsetenv("EMULATED_STREAMS");
  for (const char *order : {"forward", "backward", "shuffle"}) {
    setenv("EMULATED_ORDER", order, 1);
    test_exited_lanes();
  }
  unsetenv("EMULATED_ORDER");
  test_order();
  test_misuse();
  test_streams();
  test_eager();
  test_memory();
  test_capture();
  test_nccl();
  test_communicators();
  test_driver();
  printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed != 0;
}
