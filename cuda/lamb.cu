/*
 * The numbers of 1-bit LAMB that are a tensor's own, where no host waits for its sums. A warp takes
 * a tensor: 16 or 24 bytes a block, added one after the other (device.cuh), so that the largest
 * tensor takes as long as there are blocks in it: 0.1 ms for 25 M elements in blocks of 2048.
 */
#include "cuda/device.cuh"

static __device__ inline double sum_of(const struct ob_cuda_lamb &lamb,
                                       const struct ob_cuda_tensor &tensor, int which) {
  return sum_in_order(lamb.sums[which] + tensor.first_block, tensor.end_block - tensor.first_block);
}

/* No sum is negative. */
static __device__ inline double largest_of(const struct ob_cuda_lamb &lamb,
                                           const struct ob_cuda_tensor &tensor) {
  double lane = 0;
  for (size_t b = tensor.first_block + lane_number(); b < tensor.end_block; b += OB_LANES)
    lane = lamb.sums[OB_LARGEST][b] > lane ? lamb.sums[OB_LARGEST][b] : lane;
  return largest_lane(lane);
}

/* In all lanes, as ob_lamb_on_host has it. Only one may store. */
static __device__ inline double ratio_of(const struct ob_cuda_lamb &lamb,
                                         const struct ob_cuda_tensor &tensor, bool warm) {
  double coefficient = lamb.coefficients[tensor.number], factor = lamb.factors[tensor.number];
  const double first = sum_of(lamb, tensor, 1), second = sum_of(lamb, tensor, 2);
  double ratio;
  if (warm) {
    ratio = ob_lamb_warm(&coefficient, first, second, &lamb.limits);
  } else {
    factor = ob_lamb_correct(factor, first, second, largest_of(lamb, tensor), &lamb.limits);
    ratio = coefficient * factor;
  }
  __syncwarp();
  if (lane_number() == 0) {
    lamb.coefficients[tensor.number] = coefficient;
    lamb.factors[tensor.number] = factor;
  }
  return __shfl_sync(all_lanes, ratio, 0);
}

static __global__ void __launch_bounds__(threads_a_block)
    lamb_kernel(const struct ob_cuda_state *state, const __grid_constant__ struct ob_cuda_lamb lamb,
                bool warm, float learning_rate) {
  if (warp_number() >= lamb.count || (state && state->stop))
    return;
  const struct ob_cuda_tensor &tensor = lamb.tensors[warp_number()];
  const double ratio = ratio_of(lamb, tensor, warm);
  for (size_t k = tensor.first_piece + lane_number(); k < tensor.end_piece; k += OB_LANES)
    lamb.learning_rates[k] =
        ob_lamb_rate(lamb.rate ? *lamb.rate : learning_rate, lamb.rate_factors[k], ratio);
}

cudaError_t ob_cuda_lamb_rates(const struct ob_cuda_state *state, struct ob_cuda_lamb lamb,
                               enum ob_lamb_stage stage, float learning_rate, cudaStream_t stream) {
  return launch(lamb_kernel, lamb.count, 1, stream, state, lamb, stage == OB_LAMB_WARM,
                learning_rate);
}
