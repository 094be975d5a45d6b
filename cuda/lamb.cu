/*
 * Computes 1-bit LAMB's ratios of tensors, and their learning rates, on the device, so that the
 * host does not wait for sums. A thread block of 128 threads processes a tensor, and loads 1024 of
 * its sums at once. A tensor of 25 M elements in blocks of 2048 has 12 times as many sums, which
 * are read twice, in about 20 us.
 */
#include "cuda/device.cuh"

/* The lanes of a tensor's sums that one thread adds. */
struct lanes {
  double first[threads_for_few], second[threads_for_few], largest[threads_for_few];
};

static __device__ inline double sum_of(const struct ob_cuda_lamb &lamb,
                                       const struct ob_cuda_tensor &tensor, int which,
                                       double *lanes) {
  return add_sums<threads_for_few>(lamb.sums[which] + tensor.first_block,
                                   tensor.end_block - tensor.first_block, lanes);
}

/* Returns the largest sum, in all lanes. No sum is negative. */
static __device__ inline double largest_of(const struct ob_cuda_lamb &lamb,
                                           const struct ob_cuda_tensor &tensor, double *lanes) {
  double largest = 0;
  for (size_t b = tensor.first_block + threadIdx.x; b < tensor.end_block; b += threads_for_few)
    largest = fmax(largest, lamb.sums[OB_LARGEST][b]);
  lanes[threadIdx.x] = largest;
  __syncthreads();
  for (unsigned k = lane_number(); k < threads_for_few; k += OB_LANES)
    largest = fmax(largest, lanes[k]);
  return largest_lane(largest);
}

/* Returns the ratio as ob_lamb_on_host computes it, in all lanes of the first warp. Only one thread
 * may store it. */
static __device__ inline double ratio_of(const struct ob_cuda_lamb &lamb,
                                         const struct ob_cuda_tensor &tensor, bool warm,
                                         struct lanes *lanes) {
  double coefficient = lamb.coefficients[tensor.number], factor = lamb.factors[tensor.number];
  const double first = sum_of(lamb, tensor, 1, lanes->first),
               second = sum_of(lamb, tensor, 2, lanes->second);
  double ratio;
  if (warm) {
    ratio = ob_lamb_warmup_ratio(&coefficient, first, second, &lamb.limits);
  } else {
    factor = ob_lamb_correct_factor(factor, first, second, largest_of(lamb, tensor, lanes->largest),
                                    &lamb.limits);
    ratio = coefficient * factor;
  }
  if (threadIdx.x == 0) { /* now all threads have passed the barrier */
    lamb.coefficients[tensor.number] = coefficient;
    lamb.factors[tensor.number] = factor;
  }
  return __shfl_sync(all_lanes, ratio, 0);
}

static __global__ void __launch_bounds__(threads_for_few)
    lamb_kernel(const struct ob_cuda_state *state, const __grid_constant__ struct ob_cuda_lamb lamb,
                bool warm, float learning_rate) {
  __shared__ struct lanes lanes;
  if (state && state->stop)
    return;
  const struct ob_cuda_tensor &tensor = lamb.tensors[blockIdx.x];
  const double ratio = ratio_of(lamb, tensor, warm, &lanes);
  if (threadIdx.x >= OB_LANES)
    return;
  for (size_t k = tensor.first_piece + threadIdx.x; k < tensor.end_piece; k += OB_LANES)
    lamb.learning_rates[k] =
        ob_lamb_rate(lamb.rate ? *lamb.rate : learning_rate, lamb.rate_factors[k], ratio);
}

cudaError_t ob_cuda_lamb_rates(const struct ob_cuda_state *state, struct ob_cuda_lamb lamb,
                               enum ob_lamb_stage stage, float learning_rate, cudaStream_t stream) {
  if (lamb.count == 0)
    return cudaSuccess;
  return launch_grid(lamb_kernel, dim3((unsigned)lamb.count), threads_for_few, stream, state, lamb,
                     stage == OB_LAMB_WARM, learning_rate);
}
