/*
 * Threads of a CTA: barriers, warp collectives, orders, and misuse, which must abort.
 */
#include <stdio.h>
#include <stdlib.h>

#include <chrono>

#include "emulation.h"
#include "sanitizers.h"
#include "self_test.h"

namespace {

/* Collectives do not wait for lanes that have returned; values read from those are NaN. */
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

void note(const char *order, unsigned *out) {
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
__global__ void absent_lane() {
  if (threadIdx.x < 4)
    __syncwarp(0x1fu);
  else
    __syncthreads();
}
__global__ void misaligned(float *memory) { __ldg((const float4 *)(void *)(memory + 1)); }
__global__ void beyond(float *memory) { memory[16] = 1; }

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

__global__ void many_collectives(unsigned *out) {
  unsigned value = threadIdx.x;
  for (int i = 0; i < 50; i++)
    value += __shfl_xor_sync(~0u, value, 1);
  out[threadIdx.x] = value;
}

} // namespace

void test_threads() { test_exited_lanes(); }

void test_order() {
  unsigned *forward = pinned<unsigned>(128), *backward = pinned<unsigned>(128),
           *shuffled = pinned<unsigned>(128), *again = pinned<unsigned>(128),
           *stale = pinned<unsigned>(1);
  note("forward", forward);
  note("backward", backward);
  note("shuffle", shuffled);
  note("shuffle", again);
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

void test_misuse() {
  EXPECT(aborts_with(run<some_threads_at_barrier>, "reached by only part of the CTA"));
  EXPECT(aborts_with(run<two_collectives>, "divergent warp"));
  EXPECT(aborts_with(run<two_masks>, "divergent warp"));
  EXPECT(aborts_with(run<foreign_mask>, "is not in its own mask"));
  EXPECT(aborts_with(run<absent_lane>, "deadlock"));
  EXPECT(aborts_with(run_on_memory<misaligned>, "misaligned"));
  EXPECT(aborts_with(run_on_memory<beyond>,
                     EMULATION_ASAN ? "heap-buffer-overflow" : "out of bounds"));
}

void test_speed() {
  unsigned *out = pinned<unsigned>(128);
  auto best = std::chrono::microseconds::max();
  for (int i = 0; i < 20; i++) {
    auto start = std::chrono::steady_clock::now();
    launch(nullptr, 1, 128, many_collectives, out);
    cudaDeviceSynchronize();
    best = std::min(best, std::chrono::duration_cast<std::chrono::microseconds>(
                              std::chrono::steady_clock::now() - start));
  }
  printf("128 threads and 50 collectives: %ld us\n", (long)best.count());
  EXPECT(cudaFreeHost(out) == cudaSuccess);
}
