/* The baseline of the device's kernels. */
#ifndef BENCH_COPY_H
#define BENCH_COPY_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copies memory of the device, aligned to 16 bytes, except the bytes beyond a multiple of 16. */
cudaError_t bench_copy_loop(void *to, const void *from, size_t bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
