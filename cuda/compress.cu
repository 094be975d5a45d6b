/*
 * Compresses inputs and residuals into sign bits, scales and new residuals.
 *
 * Memory traffic in bytes per element of float32 input, in blocks of 2048 elements: 4 of input and
 * 4 of residuals are read, 4 of residuals and 1/8 of signs are written, and each block writes 2
 * scales and reads 1 (12/2048): 12.13 in all. With momentum, its signs are read too: 12.26. Input
 * of 16 bits takes 10.13 and 10.26. When the step is sent in place of the momentum, 4 of
 * reciprocals are read: 16.26; with second moments, 2 more are read and 2 more written: 16.26. The
 * limit is the card's copy bandwidth: 346e9 elements per second at 4.2 TB/s.
 */
#include "cuda/headers.cuh"

/* The preparation of a gradient before it is weighted: none; multiplication by reciprocals; or
 * division by the root of its second moment. */
enum treatment { AS_IT_IS, RECIPROCALS, SECOND_MOMENTS, TABLES };

/* Tables of outputs (ONEBIT_TABLE) also use second moments, and their mean. */
static __device__ constexpr bool has_moments(enum treatment treatment) {
  return treatment == SECOND_MOMENTS || treatment == TABLES;
}

struct moments {
  const uint16_t *now;
  uint16_t *next;
  float factor;
  struct ob_moment_factors factors;
};

/* Loads moments, which are stored in the order of the residuals; a lane's four moments are 8
 * bytes. */
template <bool whole>
static __device__ inline void load_moments(const struct moments &moments, unsigned first,
                                           unsigned end, uint32_t (&raw)[fours_a_tile][2]) {
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    if (whole || first + four_at(k) < end)
      load_raw(moments.now + first + four_at(k), raw[k]);
}

template <enum ob_moment_rule rule, bool whole>
static __device__ inline void apply_moments(const struct moments &moments, unsigned first,
                                            unsigned end, const uint32_t (&before)[2],
                                            const float (&residual)[4], float residual_scale,
                                            float (&value)[4]) {
  uint32_t after[2] = {};
  OB_UNROLL
  for (unsigned j = 0; j < 4; j++) {
    uint16_t moment = (uint16_t)(before[j / 2] >> 16 * (j % 2));
    value[j] = ob_moment_input(rule, moments.factor * value[j], &moment,
                               ob_residual_of(residual[j], residual_scale), &moments.factors);
    after[j / 2] |= (uint32_t)moment << 16 * (j % 2);
  }
  if (whole || first < end)
    store_raw(moments.next + first, after);
}

/* Computes the compensated values of the tile from `first` on, as group_weigh, group_momentum and
 * group_compensate do, and stores them as residuals and in the tile in shared memory. `whole`:
 * there is an input and no padding. */
template <onebit_dtype_t dtype, bool momentum, enum treatment treatment, bool whole>
static __device__ inline void compress_tile(const struct ob_compress_run &run,
                                            const struct moments &moments, unsigned first,
                                            unsigned given, bool aligned, float4 *tile) {
  const unsigned count = (unsigned)run.count, valid = (unsigned)run.valid,
                 end = padded_count(count);
  float residual[fours_a_tile][4], value[fours_a_tile][4], own[fours_a_tile][4];
  uint32_t before[fours_a_tile][2] = {};
  load_parts<ONEBIT_FLOAT32, whole>(run.residual, first, end, true, residual);
  if (treatment == RECIPROCALS)
    load_parts<ONEBIT_FLOAT32, whole>(run.reciprocals, first, end, true, own);
  if (has_moments(treatment))
    load_moments<whole>(moments, first, end, before);
  load_tile<dtype>(run.input, first, given, aligned, value);
  const uint32_t signs = momentum ? load_signs(run.momentum_bits, first, count) : 0;
  const float decayed = run.decay * (run.momentum_scale / run.scaling);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    const uint32_t four = momentum ? four_signs(signs, k, 0) : 0;
    if (has_moments(treatment))
      apply_moments<OB_MOMENTS_SECOND, whole>(moments, first + four_at(k), end, before[k],
                                              residual[k], run.residual_scale, value[k]);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++) {
      const unsigned i = first + four_at(k) + j;
      float input = run.weight * value[k][j];
      if (treatment == RECIPROCALS)
        input = input * own[k][j];
      const float error = ob_residual_of(residual[k][j], run.residual_scale);
      if (momentum && run.momentum_in_residual)
        input = error + input;
      if (momentum)
        input = run.scaling * (ob_decode(four >> j & 1, decayed) + input);
      if (!whole && i >= valid) /* padding has no momentum */
        input = 0;
      value[k][j] = momentum && run.momentum_in_residual ? input : error + input;
      if (!whole && i >= count)
        value[k][j] = 0;
    }
    store_values<ONEBIT_FLOAT32, whole>(run.residual_out, first + four_at(k), end, true, value[k]);
    tile[four_at(k) / 4] = make_float4(value[k][0], value[k][1], value[k][2], value[k][3]);
  }
}

/* Compresses a block as a codec does; lane 0 gets the sum of the block's magnitudes. */
template <onebit_dtype_t dtype, bool momentum, enum treatment treatment>
static __device__ inline float compress_tiles(const struct ob_compress_run &run,
                                              const struct moments &moments, float4 *tile) {
  const bool aligned = is_aligned(run.input, 4 * size_of<dtype>);
  const unsigned count = (unsigned)run.count, given = run.input ? (unsigned)run.valid : 0;
  float lane = 0;
  for (unsigned first = 0; first < count; first += tile_elements) {
    if (first + tile_elements <= given)
      compress_tile<dtype, momentum, treatment, true>(run, moments, first, given, aligned, tile);
    else
      compress_tile<dtype, momentum, treatment, false>(run, moments, first, given, aligned, tile);
    store_signs(run.bits, first, count, add_tile(tile, run.rule, &lane));
  }
  return sum_lanes(lane);
}

/* Adds the result of the last exchange of the same blocks, as momentum. */
static __device__ inline void add_momentum(const struct ob_cuda_plan &plan, uint32_t now,
                                           const struct location &location,
                                           struct ob_compress_run *run) {
  const struct ob_view last = view_of(result_of(plan, last_copy(plan, now), blockIdx.y), location);
  run->momentum_bits = last.words + location.word;
  run->momentum_scale = scale_of(last, location);
}

static __device__ inline void set_weights(const struct ob_cuda_plan &plan,
                                          const struct ob_cuda_source &source,
                                          const struct ob_block &block,
                                          struct ob_compress_run *run) {
  const float scaling = source.scalings ? source.scalings[block.piece] : 1;
  run->decay = scaling == 0 ? 1 : source.decay;
  run->weight = scaling == 0 ? 0 : source.weight;
  run->scaling = scaling == 0 ? 1 : scaling;
  run->momentum_in_residual =
      source.momentum_in_residual && !(source.only_at_first && plan.state->outcome.calls > 0);
}

/* Computes the floor of a block as compression/blocks.c does. */
static __device__ inline float compute_floor(const struct ob_cuda_plan &plan,
                                             const uint16_t *moments,
                                             const struct ob_cuda_source &source,
                                             const struct location &location,
                                             const struct ob_moment_factors &factors) {
  const float times = source.floors[location.block.piece];
  if (times == 0)
    return 0;
  const struct ob_interval words =
      ob_piece_interval(&plan.geometry.layout.piece[location.block.piece], &source.own);
  const struct ob_sample sample = ob_choose_sample(location.number, words.end - words.first);
  float lane = 0;
  moments += (words.first - plan.worker.first_word) * OB_LANES + lane_number();
  for (size_t word = sample.first; word < sample.end; word += sample.step)
    lane += ob_from_bfloat16(moments[word * OB_LANES]);
  return ob_moment_floor(times, __shfl_sync(all_lanes, sum_lanes(lane), 0), sample, &factors);
}

template <enum treatment treatment>
static __device__ inline struct moments find_moments(const struct ob_cuda_plan &plan, uint32_t now,
                                                     const struct ob_cuda_source &source,
                                                     const struct location &location,
                                                     float momentum_scale) {
  const struct ob_block &block = location.block;
  struct ob_moment_factors factors = source.moment;
  if (source.counted) {
    factors.now = plan.state->moment.now;
    factors.before = plan.state->moment.before;
    factors.fresh = plan.state->moment.fresh;
  }
  factors.floor = 0;
  if (treatment == TABLES)
    factors.floor = compute_floor(plan, plan.worker.moments[now], source, location, factors);
  return {values_of(plan.worker, plan.worker.moments[now], block),
          values_of(plan.worker, plan.worker.moments[!now], block),
          source.values ? 1 : source.factor, ob_choose_moment_factors(factors, momentum_scale)};
}

/* Code for compute capability 10.0 and newer takes more registers (nvcc 13.0). */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool few_registers = true;
#else
constexpr bool few_registers = false;
#endif

/* A multiprocessor runs one thread block fewer if moments or reciprocals take registers, and one
 * fewer again if the momentum's signs or a table's mean would not fit into the remaining
 * registers. */
constexpr unsigned blocks_with(bool momentum, enum treatment treatment) {
  return blocks_at_once - (treatment != AS_IT_IS) - (treatment == TABLES) -
         (momentum && few_registers);
}

/* grid.y is the member that the message is for. */
template <onebit_dtype_t dtype, bool momentum, enum treatment treatment>
static __device__ inline void compress_block(const struct ob_cuda_plan &plan,
                                             const struct ob_cuda_source &source, float4 *tile) {
  struct location location;
  if (!find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  const uint32_t now = plan.state->now;
  const struct ob_view out = view_of(message_to(plan, now, blockIdx.y), location);
  struct ob_compress_run run = {};
  run.count = location.block.count;
  run.valid = location.block.valid;
  run.input = source.values
                  ? source.values + blockIdx.y * source.step + location.word * OB_LANES
                  : (const void *)block_address(source.inputs, 0, location.block, size_of<dtype>);
  run.rule = plan.rule;
  run.residual = values_of(plan.worker, now, location.block);
  run.residual_scale = residual_scale(plan.worker, now, location);
  run.residual_out = values_of(plan.worker, !now, location.block);
  run.bits = out.words + location.word;
  set_weights(plan, source, location.block, &run);
  struct moments moments = {};
  if (treatment == RECIPROCALS)
    run.reciprocals = source.reciprocals + location.block.word * OB_LANES;
  if (momentum)
    add_momentum(plan, now, location, &run);
  if (has_moments(treatment))
    moments = find_moments<treatment>(plan, now, source, location, run.momentum_scale);
  const float sum = compress_tiles<dtype, momentum, treatment>(run, moments, tile);
  if (lane_number() == 0)
    set_scale(plan, now, false, location, out, sum);
}

template <onebit_dtype_t dtype, bool momentum, enum treatment treatment, bool besides>
static __global__ void __launch_bounds__(threads_a_block,
                                         blocks_with(momentum, treatment) - besides)
    compress_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                    const __grid_constant__ struct ob_cuda_source source) {
  __shared__ float4 tiles[warps_a_block][tile_elements / 4];
  await_kernels_ahead();
  compress_block<dtype, momentum, treatment>(plan, source, tiles[threadIdx.x / OB_LANES]);
  if (besides)
    finish_messages(plan);
}

using compress_function = void(struct ob_cuda_plan, struct ob_cuda_source);

template <onebit_dtype_t dtype, bool momentum, bool besides>
static compress_function *kernel_of(const struct ob_cuda_source &source) {
  return source.floors        ? compress_kernel<dtype, momentum, TABLES, besides>
         : source.moment_rule ? compress_kernel<dtype, momentum, SECOND_MOMENTS, besides>
         : source.reciprocals ? compress_kernel<dtype, momentum, RECIPROCALS, besides>
                              : compress_kernel<dtype, momentum, AS_IT_IS, besides>;
}

template <onebit_dtype_t dtype>
static cudaError_t launch_compress(const struct ob_cuda_plan &plan,
                                   const struct ob_cuda_source &source, cudaStream_t stream) {
  static compress_function *(*const kernels[2][2])(const struct ob_cuda_source &) = {
      {kernel_of<dtype, false, false>, kernel_of<dtype, false, true>},
      {kernel_of<dtype, true, false>, kernel_of<dtype, true, true>}};
  return launch_early_kernel(kernels[source.momentum][seals_or_opens(plan)](source),
                             plan.max_blocks, plan.geometry.whole ? 1 : plan.geometry.members,
                             stream, plan, source);
}

cudaError_t ob_cuda_compress(struct ob_cuda_plan plan, struct ob_cuda_source source, size_t chunk,
                             cudaStream_t stream) {
  const struct ob_cuda_plan part = select_chunk(plan, chunk);
  if (!source.values && !source.moment_rule) /* source.values include the factor */
    source.weight *= source.factor;
  if (plan.geometry.width > 1)
    return ob_cuda_compress_levels(part, source, stream);
  switch (source.values || source.float32 ? ONEBIT_FLOAT32 : plan.dtype) {
  case ONEBIT_BFLOAT16:
    return launch_compress<ONEBIT_BFLOAT16>(part, source, stream);
  case ONEBIT_FLOAT16:
    return launch_compress<ONEBIT_FLOAT16>(part, source, stream);
  default:
    return launch_compress<ONEBIT_FLOAT32>(part, source, stream);
  }
}
