/*
 * The optimizer's local passes, over all blocks of a plan at once.
 *
 * Bytes an element: a whole step reads gradient, momentum, variance and parameter and writes the
 * last three: 28. The freeze reads and writes momentum and variance: 16. The frozen step of a rank
 * that does not compress reads gradient, momentum, reciprocal and parameter and writes momentum and
 * parameter: 24. The ceiling is the card's copy bandwidth over these.
 */
#include "cuda/place.cuh"

/* Four arrays: with two fours of each as many loads are in flight as with four of two. */
constexpr unsigned fours_at_once = 2, elements_at_once = fours_at_once * 4 * OB_LANES;

/* A block's parts of the arrays. */
struct arrays {
  float *momentum, *mean, *variance, *parameter; /* the mean is the gradient's */
  float learning_rate, weight_decay;
  unsigned valid;
  bool aligned; /* the parameters are, to 16 bytes */
};

/* What a lane has of them: two fours. */
struct fours {
  float momentum[fours_at_once][4], mean[fours_at_once][4], variance[fours_at_once][4],
      parameter[fours_at_once][4];
};

static __device__ inline struct arrays arrays_of(const struct ob_cuda_plan &plan,
                                                 const struct ob_cuda_adam &adam,
                                                 const struct ob_block &block) {
  const uint32_t now = plan.state->now;
  struct arrays arrays;
  arrays.momentum = values_of(plan.worker, now, block);
  arrays.mean = values_of(plan.worker, !now, block);
  arrays.variance = adam.variance + block.word * OB_LANES;
  arrays.parameter = adam.parameters[block.piece] + block.offset;
  arrays.learning_rate = adam.learning_rate * adam.factors[block.piece];
  arrays.weight_decay = adam.weight_decays[block.piece];
  arrays.valid = (unsigned)block.valid;
  arrays.aligned = is_aligned(arrays.parameter, 16);
  return arrays;
}

/* False when there is no such block, or the call does not end well. */
static __device__ inline bool find_block(const struct ob_cuda_plan &plan, struct ob_block *block) {
  size_t piece = 0;
  if (plan.state->stop || warp_number() >= plan.layout.blocks)
    return false;
  *block = ob_layout_block(&plan.layout, warp_number(), &piece);
  return true;
}

template <bool whole>
static __device__ inline void load_fours(const struct arrays &from, unsigned first,
                                         struct fours *fours) {
  const unsigned end = from.valid;
  OB_UNROLL
  for (unsigned k = 0; k < fours_at_once; k++) {
    const unsigned at = first + four_at(k);
    load_some<ONEBIT_FLOAT32, whole>(from.mean, at, end, true, fours->mean[k]);
    load_some<ONEBIT_FLOAT32, whole>(from.momentum, at, end, true, fours->momentum[k]);
    load_some<ONEBIT_FLOAT32, whole>(from.variance, at, end, true, fours->variance[k]);
    load_some<ONEBIT_FLOAT32, whole>(from.parameter, at, end, from.aligned, fours->parameter[k]);
  }
}

/* --- A whole step */

/* Two fours of a lane; their variances go to the tile in shared memory. */
template <bool whole>
static __device__ inline void step_fours(const struct arrays &arrays,
                                         const struct ob_adam_factors &factors, unsigned first,
                                         float4 *tile) {
  struct fours f;
  load_fours<whole>(arrays, first, &f);
  OB_UNROLL
  for (unsigned k = 0; k < fours_at_once; k++) {
    const unsigned at = first + four_at(k);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++) {
      const float gradient = f.mean[k][j];
      f.momentum[k][j] = ob_adam_momentum(f.momentum[k][j], gradient, &factors);
      f.variance[k][j] = ob_adam_variance(f.variance[k][j], gradient, &factors);
      const float step = f.momentum[k][j] * factors.momentum_factor /
                         ob_adam_denominator(f.variance[k][j], &factors);
      f.parameter[k][j] =
          ob_adam_parameter(f.parameter[k][j], step, arrays.learning_rate, arrays.weight_decay);
    }
    store_some<ONEBIT_FLOAT32, whole>(arrays.momentum, at, arrays.valid, true, f.momentum[k]);
    store_some<ONEBIT_FLOAT32, whole>(arrays.variance, at, arrays.valid, true, f.variance[k]);
    store_some<ONEBIT_FLOAT32, whole>(arrays.parameter, at, arrays.valid, arrays.aligned,
                                      f.parameter[k]);
    tile[four_at(k) / 4] =
        make_float4(f.variance[k][0], f.variance[k][1], f.variance[k][2], f.variance[k][3]);
  }
}

static __global__ void __launch_bounds__(threads_a_block)
    step_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                const __grid_constant__ struct ob_cuda_adam adam) {
  __shared__ float4 tiles[warps_a_block][tile_elements / 4];
  float4 *tile = tiles[threadIdx.x / OB_LANES];
  struct ob_block block;
  if (!find_block(plan, &block))
    return;
  const struct arrays arrays = arrays_of(plan, adam, block);
  struct ob_adam_factors factors = adam.adam;
  if (adam.counted) {
    factors.momentum_factor = plan.state->momentum_factor;
    factors.variance_factor = plan.state->variance_factor;
  }
  float lane = 0;
  for (unsigned first = 0; first < arrays.valid; first += elements_at_once) {
    if (arrays.aligned && first + elements_at_once <= arrays.valid)
      step_fours<true>(arrays, factors, first, tile);
    else /* elements past the end are zeros, and so are their variances */
      step_fours<false>(arrays, factors, first, tile);
    __syncwarp();
    OB_UNROLL
    for (unsigned i = 0; i < elements_at_once; i += OB_LANES)
      lane += ((const float *)tile)[i + lane_number()];
    __syncwarp(); /* the next ones come into the same place */
  }
  const float sum = sum_lanes(lane);
  if (lane_number() == 0)
    adam.block_sums[warp_number()] = (double)sum;
}

cudaError_t ob_cuda_adam_step(struct ob_cuda_plan plan, struct ob_cuda_adam adam,
                              cudaStream_t stream) {
  return launch(step_kernel, plan.layout.blocks, 1, stream, plan, adam);
}

/* --- The freeze. Once in a training: nothing here is for speed. */

static __global__ void __launch_bounds__(threads_a_block)
    freeze_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                  const __grid_constant__ struct ob_cuda_adam adam) {
  struct ob_block block;
  if (!find_block(plan, &block))
    return;
  float *momentum = values_of(plan.worker, plan.state->now, block);
  float *variance = adam.variance + block.word * OB_LANES;
  for (unsigned i = lane_number(); i < block.count; i += OB_LANES) {
    momentum[i] = adam.adam.beta1 * momentum[i];
    variance[i] = ob_adam_reciprocal(variance[i], adam.keep_zero, &adam.adam);
  }
}

cudaError_t ob_cuda_adam_freeze(struct ob_cuda_plan plan, struct ob_cuda_adam adam,
                                cudaStream_t stream) {
  return launch(freeze_kernel, plan.layout.blocks, 1, stream, plan, adam);
}

/* --- The frozen step of a rank that does not compress */

template <bool whole>
static __device__ inline void frozen_fours(const struct arrays &arrays,
                                           const struct ob_adam_factors &factors, unsigned first) {
  struct fours f;
  load_fours<whole>(arrays, first, &f);
  OB_UNROLL
  for (unsigned k = 0; k < fours_at_once; k++) {
    const unsigned at = first + four_at(k);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++) {
      const float m = ob_adam_frozen_momentum(f.momentum[k][j], f.mean[k][j], &factors);
      f.parameter[k][j] = ob_adam_parameter(f.parameter[k][j], m * f.variance[k][j],
                                            arrays.learning_rate, arrays.weight_decay);
      f.momentum[k][j] = factors.beta1 * m;
    }
    store_some<ONEBIT_FLOAT32, whole>(arrays.momentum, at, arrays.valid, true, f.momentum[k]);
    store_some<ONEBIT_FLOAT32, whole>(arrays.parameter, at, arrays.valid, arrays.aligned,
                                      f.parameter[k]);
  }
}

static __global__ void __launch_bounds__(threads_a_block)
    frozen_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                  const __grid_constant__ struct ob_cuda_adam adam) {
  struct ob_block block;
  if (!find_block(plan, &block))
    return;
  const struct arrays arrays = arrays_of(plan, adam, block);
  for (unsigned first = 0; first < arrays.valid; first += elements_at_once)
    if (arrays.aligned && first + elements_at_once <= arrays.valid)
      frozen_fours<true>(arrays, adam.adam, first);
    else
      frozen_fours<false>(arrays, adam.adam, first);
}

cudaError_t ob_cuda_adam_frozen(struct ob_cuda_plan plan, struct ob_cuda_adam adam,
                                cudaStream_t stream) {
  return launch(frozen_kernel, plan.layout.blocks, 1, stream, plan, adam);
}

/* --- The norm */

static __global__ void __launch_bounds__(OB_LANES)
    norm_kernel(const double *sums, size_t count, double *total) {
  const double sum = sum_in_order(sums, count);
  if (lane_number() == 0)
    *total = sum;
}

cudaError_t ob_cuda_adam_norm(struct ob_cuda_plan plan, struct ob_cuda_adam adam, double *total,
                              cudaStream_t stream) {
  return launch_one_warp(norm_kernel, stream, adam.block_sums, plan.layout.blocks, total);
}
