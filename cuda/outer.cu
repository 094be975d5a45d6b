/*
 * The passes of the outer step: loops around optimizers/outer/element.h.
 *
 * A warp processes a run of OB_OUTER_RUN elements, and lane l the elements l, l + 32, ... of the
 * run, as the lanes of the sum of squares do. So a piece may begin anywhere in a buffer. Eight
 * words of each array are loaded at once, as in the optimizers' passes (passes.cu).
 *
 * Bytes per element of float32: drift 12, or 16 if a residual is left in the parameters; update 12,
 * or 20 with momentum; set 8, or 12 with a residual or a mixing; checksum 4; export 8. All of this
 * happens once in local_steps steps; in each of these steps the inner optimizer moves 24 to 28
 * bytes.
 */
#include <type_traits>

#include "cuda/headers.cuh"
#include "cuda/location.cuh"

constexpr unsigned words_at_once = 8, group_elements = words_at_once * OB_LANES;

/* A warp's part of the arrays: the number of elements, and the number of the first element. */
struct run {
  size_t first;
  unsigned count;
};

static __device__ inline struct run run_of(size_t count) {
  const size_t first = warp_number() * OB_OUTER_RUN, left = first < count ? count - first : 0;
  return {first, left < OB_OUTER_RUN ? (unsigned)left : OB_OUTER_RUN};
}

/* Calls group(whole, at) for each group of a run: `at` is the lane's first element in the group. In
 * a whole group no access has a condition. */
template <typename Group>
static __device__ inline void for_each_group(const struct run &run, const Group &group) {
  for (unsigned first = 0; first < run.count; first += group_elements)
    if (first + group_elements <= run.count)
      group(std::true_type(), first + lane_number());
    else
      group(std::false_type(), first + lane_number());
}

template <bool whole, onebit_dtype_t dtype>
static __device__ inline void load_group(const void *from, unsigned at, unsigned count,
                                         float (&values)[words_at_once]) {
  OB_UNROLL
  for (unsigned w = 0; w < words_at_once; w++) {
    const unsigned i = at + w * OB_LANES;
    values[w] = whole || i < count ? load_one<dtype>(from, i) : 0;
  }
}

template <bool whole, onebit_dtype_t dtype>
static __device__ inline void store_group(void *to, unsigned at, unsigned count,
                                          const float (&values)[words_at_once]) {
  OB_UNROLL
  for (unsigned w = 0; w < words_at_once; w++) {
    const unsigned i = at + w * OB_LANES;
    if (whole || i < count)
      store_one<dtype>(to, i, values[w]);
  }
}

/* --- Before the exchange */

template <onebit_dtype_t dtype, bool keeps>
static __global__ void __launch_bounds__(threads_a_block)
    outer_drift_kernel(const struct ob_cuda_outer of, uint32_t *unsound) {
  const struct run run = run_of(of.count);
  const float *consensus = of.consensus + run.first;
  const char *parameters = (const char *)of.parameters + run.first * size_of<dtype>;
  float *drift = of.drift + run.first;
  bool sound = true;
  for_each_group(run, [&](auto whole, unsigned at) {
    constexpr bool all = decltype(whole)::value;
    float x[words_at_once], p[words_at_once], d[words_at_once] = {};
    load_group<all, ONEBIT_FLOAT32>(consensus, at, run.count, x);
    load_group<all, dtype>(parameters, at, run.count, p);
    if (keeps)
      load_group<all, ONEBIT_FLOAT32>(drift, at, run.count, d);
    OB_UNROLL
    for (unsigned w = 0; w < words_at_once; w++) {
      d[w] = ob_outer_drift(x[w], d[w], p[w], dtype);
      sound &= ob_outer_can_send(d[w]) != 0;
    }
    store_group<all, ONEBIT_FLOAT32>(drift, at, run.count, d);
  });
  if (!sound)
    atomicOr(unsound, 1u);
}

template <onebit_dtype_t dtype>
static cudaError_t launch_drift(const struct ob_cuda_outer &of, bool keeps, uint32_t *unsound,
                                cudaStream_t stream) {
  const size_t runs = (of.count + OB_OUTER_RUN - 1) / OB_OUTER_RUN;
  if (keeps)
    return launch_kernel(outer_drift_kernel<dtype, true>, runs, 1, stream, of, unsound);
  return launch_kernel(outer_drift_kernel<dtype, false>, runs, 1, stream, of, unsound);
}

cudaError_t ob_cuda_outer_drift(struct ob_cuda_outer of, onebit_dtype_t dtype, bool keeps,
                                uint32_t *unsound, cudaStream_t stream) {
  return KERNEL_OF(dtype, launch_drift)(of, keeps, unsound, stream);
}

static __global__ void __launch_bounds__(threads_a_block)
    outer_checksum_kernel(const struct ob_cuda_outer of, uint32_t *checksum) {
  if (warp_number() * OB_CHECK_RUN >= of.count)
    return;
  uint32_t lane =
      check_lanes((const uint32_t *)(const void *)of.consensus, of.count, warp_number());
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2)
    lane += __shfl_xor_sync(all_lanes, lane, (int)width);
  if (lane_number() == 0)
    atomicAdd(checksum, lane);
}

cudaError_t ob_cuda_outer_checksum(struct ob_cuda_outer of, uint32_t *checksum,
                                   cudaStream_t stream) {
  const size_t runs = (of.count + OB_CHECK_RUN - 1) / OB_CHECK_RUN;
  return launch_kernel(outer_checksum_kernel, runs, 1, stream, of, checksum);
}

/* --- After the exchange */

template <onebit_outer_rule_t rule>
static __global__ void __launch_bounds__(threads_a_block)
    outer_update_kernel(const struct ob_cuda_outer of, float rate, float decay, double *sums) {
  constexpr bool moves = rule != ONEBIT_OUTER_MEAN;
  const struct run run = run_of(of.count);
  float *consensus = of.consensus + run.first, *momentum = moves ? of.momentum + run.first : NULL;
  const float *drift = of.drift + run.first;
  double squares = 0;
  if (run.count == 0)
    return;
  for_each_group(run, [&](auto whole, unsigned at) {
    constexpr bool all = decltype(whole)::value;
    float x[words_at_once], d[words_at_once], m[words_at_once] = {};
    load_group<all, ONEBIT_FLOAT32>(consensus, at, run.count, x);
    load_group<all, ONEBIT_FLOAT32>(drift, at, run.count, d);
    if (moves)
      load_group<all, ONEBIT_FLOAT32>(momentum, at, run.count, m);
    OB_UNROLL
    for (unsigned w = 0; w < words_at_once; w++) {
      x[w] -= rate * ob_outer_apply_rule(rule, &m[w], d[w], decay);
      squares += (double)d[w] * (double)d[w];
    }
    store_group<all, ONEBIT_FLOAT32>(consensus, at, run.count, x);
    if (moves)
      store_group<all, ONEBIT_FLOAT32>(momentum, at, run.count, m);
  });
  squares = sum_lanes(squares);
  if (lane_number() == 0)
    sums[warp_number()] = squares;
}

cudaError_t ob_cuda_outer_update(struct ob_cuda_outer of, onebit_outer_rule_t rule, float rate,
                                 float decay, double *sums, cudaStream_t stream) {
  const size_t runs = (of.count + OB_OUTER_RUN - 1) / OB_OUTER_RUN;
  auto *kernel = rule == ONEBIT_OUTER_MEAN       ? outer_update_kernel<ONEBIT_OUTER_MEAN>
                 : rule == ONEBIT_OUTER_MOMENTUM ? outer_update_kernel<ONEBIT_OUTER_MOMENTUM>
                                                 : outer_update_kernel<ONEBIT_OUTER_NESTEROV>;
  return launch_kernel(kernel, runs, 1, stream, of, rate, decay, sums);
}

enum set_form { CONSENSUS, LESS_DRIFT, MIXED };

template <onebit_dtype_t dtype, enum set_form form>
static __global__ void __launch_bounds__(threads_a_block)
    outer_set_kernel(const struct ob_cuda_outer of, float mixing) {
  const struct run run = run_of(of.count);
  const float *consensus = of.consensus + run.first, *drift = of.drift + run.first;
  char *parameters = (char *)of.parameters + run.first * size_of<dtype>;
  for_each_group(run, [&](auto whole, unsigned at) {
    constexpr bool all = decltype(whole)::value;
    float x[words_at_once], other[words_at_once] = {};
    load_group<all, ONEBIT_FLOAT32>(consensus, at, run.count, x);
    if (form == LESS_DRIFT)
      load_group<all, ONEBIT_FLOAT32>(drift, at, run.count, other);
    if (form == MIXED)
      load_group<all, dtype>(parameters, at, run.count, other);
    OB_UNROLL
    for (unsigned w = 0; w < words_at_once; w++)
      x[w] = form == LESS_DRIFT ? x[w] - other[w]
                                : ob_outer_mix(other[w], x[w], form == MIXED ? mixing : 1);
    store_group<all, dtype>(parameters, at, run.count, x);
  });
}

template <onebit_dtype_t dtype>
static cudaError_t launch_set(const struct ob_cuda_outer &of, bool keeps, float mixing,
                              cudaStream_t stream) {
  auto *kernel = keeps        ? outer_set_kernel<dtype, LESS_DRIFT>
                 : mixing < 1 ? outer_set_kernel<dtype, MIXED>
                              : outer_set_kernel<dtype, CONSENSUS>;
  return launch_kernel(kernel, (of.count + OB_OUTER_RUN - 1) / OB_OUTER_RUN, 1, stream, of, mixing);
}

/* Sets parameters; with `keeps`, they are not mixed. */
cudaError_t ob_cuda_outer_set(struct ob_cuda_outer of, onebit_dtype_t dtype, bool keeps,
                              float mixing, cudaStream_t stream) {
  return KERNEL_OF(dtype, launch_set)(of, keeps, mixing, stream);
}

/* --- The export of the residual, as ob_residual_export does it, one warp a block */

static __global__ void __launch_bounds__(threads_a_block)
    outer_export_kernel(const __grid_constant__ struct ob_cuda_plan plan, int copy,
                        void *const *pieces) {
  const struct ob_cuda_residual &residual = plan.worker;
  if (warp_number() >= residual.blocks)
    return;
  size_t piece = 0;
  const struct ob_block block =
      ob_layout_block(&plan.geometry.layout, residual.first + warp_number(), &piece);
  const float *values = values_of(residual, (uint32_t)copy, block);
  const float scale = residual.scales[copy][plan.geometry.one_scale ? 0 : warp_number()];
  float *error = (float *)pieces[block.piece] + block.offset;
  for (unsigned i = lane_number(); i < block.count; i += OB_LANES)
    __stcs(&error[i], ob_residual_of(__ldcs(&values[i]), scale));
}

cudaError_t ob_cuda_outer_export(struct ob_cuda_plan plan, int copy, void *const *pieces,
                                 cudaStream_t stream) {
  return launch_kernel(outer_export_kernel, plan.worker.blocks, 1, stream, plan, copy, pieces);
}
