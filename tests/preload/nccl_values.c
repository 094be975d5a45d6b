/* Values on the device, and checks that end the process. */
#include <stdio.h>
#include <unistd.h>

#include "tests/preload/nccl_program.h"

_Thread_local int rank;
_Thread_local ncclComm_t comm;
_Thread_local cudaStream_t stream;
_Thread_local float *host;
int size;

void fail(const char *what, int step, int i, double is, double wanted) {
  fprintf(stderr, "rank %d: %s: step %d, element %d is %.9g and not %.9g\n", rank, what, step, i,
          is, wanted);
  _exit(3);
}

void check_cuda(cudaError_t error, const char *call) {
  if (error == cudaSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, cudaGetErrorString(error));
  _exit(4);
}

void check_nccl(ncclResult_t result, const char *call) {
  if (result == ncclSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, ncclGetErrorString(result));
  _exit(5);
}

void *device_memory(size_t bytes) {
  void *memory;
  CUDA(cudaMalloc(&memory, bytes));
  CUDA(cudaMemset(memory, 0, bytes));
  CUDA(cudaDeviceSynchronize());
  return memory;
}

float exact(int step, int i) { return ((i * 7 + step * 3 + i / 5) % 3 ? 0.5F : -0.5F); }

void load(void *to, size_t bytes) {
  CUDA(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream));
  CUDA(cudaStreamSynchronize(stream));
}

void fetch(const void *from, size_t bytes) {
  CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
}

void fill(float *to, int count, int step, float times) {
  for (int i = 0; i < count; i++)
    host[i] = exact(step, i) * times;
  load(to, (size_t)count * sizeof *to);
}

void check(const char *what, const float *from, int count, int step, float times) {
  fetch(from, (size_t)count * sizeof *from);
  for (int i = 0; i < count; i++)
    if (host[i] != exact(step, i) * times)
      fail(what, step, i, host[i], exact(step, i) * times);
}

void sum(const void *from, void *to, size_t count) {
  NCCL(ncclAllReduce(from, to, count, ncclFloat, ncclSum, comm, stream));
}

void captured_begin(void) {
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

cudaGraphExec_t captured_end(void) {
  cudaGraph_t captured;
  cudaGraphExec_t ready;
  CUDA(cudaStreamEndCapture(stream, &captured));
  CUDA(cudaGraphInstantiate(&ready, captured, 0));
  CUDA(cudaGraphDestroy(captured));
  return ready;
}
