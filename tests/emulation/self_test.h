/*
 * Common functions and macros of the emulated device's own tests.
 */
#ifndef EMULATION_SELF_TEST_H
#define EMULATION_SELF_TEST_H

#include "cuda_runtime.h"

void expect(bool holds, const char *what, const char *file, int line);
#define EXPECT(condition) expect(condition, #condition, __FILE__, __LINE__)

/* True if a child process that calls the function aborts with a message that contains these
 * words. */
bool aborts_with(void (*function)(), const char *words);

/* Launches one grid on the stream. */
template <typename... Expected, typename... Actual>
cudaError_t launch(cudaStream_t stream, unsigned grid, unsigned block, void (*kernel)(Expected...),
                   Actual... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline __global__ void set(int *memory, int value) { *memory = value; }
inline __global__ void copy(int *to, const int *from) { *to = *from; }

inline cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream;
  EXPECT(cudaStreamCreateWithFlags(&stream, flags) == cudaSuccess);
  return stream;
}

/* Allocates pinned memory, which both the host and kernels see. */
template <typename T> T *pinned(size_t count) {
  T *memory = nullptr;
  EXPECT(cudaMallocHost(&memory, count * sizeof(T)) == cudaSuccess);
  for (size_t i = 0; i < count; i++)
    memory[i] = T{};
  return memory;
}

void test_streams();
void test_eager();
void test_memory();
void test_capture();
void test_nccl();
void test_communicators();

#endif
