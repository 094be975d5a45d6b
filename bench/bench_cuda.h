/*
 * onebit-bench -d cuda: what its files share. They are in builds with CUDA only.
 *
 * Whatever is measured is an entry that puts work on a stream, and is timed by events.
 * bench_kernels_cuda.c has the kernels and what they work on; bench_collective_cuda.c the device,
 * its events, and the collectives, NCCL's too.
 */
#ifndef BENCH_CUDA_H
#define BENCH_CUDA_H

#include <cuda_runtime_api.h>

#include "bench/bench_collective.h"
#include "bench/bench_passes.h"
#include "cuda/kernels.h"

#define BENCH_TRY_CUDA(call)                                                                       \
  do {                                                                                             \
    cudaError_t bench_try_error = (call);                                                          \
    if (bench_try_error != cudaSuccess)                                                            \
      return bench_cuda_failed(bench_try_error, #call);                                            \
  } while (0)

/* Prints CUDA's message; returns BENCH_FAILED. */
int bench_cuda_failed(cudaError_t error, const char *what);

/* --- The device */

#ifdef ONEBIT_EMULATED_CUDA
#define BENCH_EMULATED 1
#else
#define BENCH_EMULATED 0
#endif

/* Launches of a kernel in one timed call. */
#define BENCH_LAUNCHES (BENCH_EMULATED ? 1 : 20)

struct bench_device {
  int number;
  int ranks; /* on this machine */
  struct cudaDeviceProp properties;
  cudaStream_t stream;
  cudaEvent_t started, ended;
};

/* Makes the device of a rank current: those of a machine are dealt out to its ranks in turn. team:
 * NULL, or all of it calls this. Returns an exit status; the first rank prints the reason of a
 * failure. */
int bench_device_open(struct bench_team *team, struct bench_device *device);
void bench_device_close(struct bench_device *device);

/* Prints notes: the device, and that an emulated one's times mean nothing. */
void bench_device_note(struct bench_job *job);

/* --- The kernels, as passes over arrays in memory of the device */

int bench_kernels_create(struct bench_job *job, size_t count, size_t streams,
                         struct bench_passes *passes);
int bench_kernels_extend(struct bench_passes *passes); /* with what only optimizers need */
void bench_kernels_destroy(struct bench_kernels *kernels);
cudaStream_t bench_kernels_stream(const struct bench_passes *passes);
extern const struct bench_list bench_codec_kernels, bench_adam_kernels, bench_optimizer_kernels;

/* Prints a row of PyTorch's fused Adam, or a note of why there is none. */
void bench_torch(const struct bench_sheet *sheet);

#endif
