/* A copy loop as the kernels are written: 16 bytes an access, several of them in flight. Its rate
 * is the goal of a kernel that reads as much as it writes. */
#include "bench/bench_copy.h"

#include "cuda/device.cuh"

constexpr unsigned threads = 256, fours = 4; /* that a thread has */

static __global__ void __launch_bounds__(threads)
    copy_kernel(float4 *to, const float4 *from, size_t count) {
  const size_t first = (size_t)blockIdx.x * threads * fours + threadIdx.x;
  float4 four[fours];
  OB_UNROLL
  for (unsigned k = 0; k < fours; k++)
    if (first + k * threads < count)
      four[k] = from[first + k * threads];
  OB_UNROLL
  for (unsigned k = 0; k < fours; k++)
    if (first + k * threads < count)
      to[first + k * threads] = four[k];
}

cudaError_t bench_copy_loop(void *to, const void *from, size_t bytes, cudaStream_t stream) {
  const size_t count = bytes / sizeof(float4), a_block = threads * fours;
  const dim3 blocks((unsigned)((count + a_block - 1) / a_block));
  return launch_grid(copy_kernel, blocks, threads, stream, (float4 *)to, (const float4 *)from,
                     count);
}
