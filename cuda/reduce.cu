/*
 * The members' messages, added up in the members' order: with residuals to a new message, or to
 * the outputs.
 *
 * Bytes an element of the share, N members, 2048 elements a block. Reduce: 4 kept read, 4 kept
 * written, N/8 signs read, 1/8 written, and 4 (N + 3)/2048 scales: 9.15 for 8 members. Sum: N/8
 * signs read and 4 written as float32: 5.02 for 8.
 *
 * Additions have an order, so a member costs an instruction for each of a lane's elements, and one
 * and a half to choose what it adds: of a tile 50 in all (80 before a table in shared memory had
 * the members' words and scales, and signs were predicates). tests/scripts/check-kernels counts in
 * SASS, and expects 0.9 of the copy bandwidth up to 8 members of both. Of 16 members a tile of
 * Reduce takes 1150 instructions, and a block 530 besides, where 1120 a tile fit into the memory's
 * time, and words come in two groups a tile, one after the other: 0.77. Sum of 16 takes 890 of 660.
 * A share is then so small a part of the elements that compressing takes most of the time anyway.
 */
#include "cuda/headers.cuh"
#include "cuda/location.cuh"

/* The number of members: few are one group, all of whose words are loaded before the first is used;
 * some are groups, of eight where registers allow it; many are not all known at once. */
constexpr unsigned few_members = 4;
enum crowd { FEW, SOME, MANY };

/* Loads for each of the lane's fours the word that has its signs: eight lanes read the same one,
 * and none has to be passed on. `whole`: the tile is, and no load has a condition. */
template <bool whole>
static __device__ inline void load_member(const struct part &part, unsigned first, unsigned count,
                                          uint32_t (&signs)[fours_a_tile]) {
  const uint32_t *words = part.words + (first + four_at(0)) / OB_LANES;
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    signs[k] = whole || first + four_at(k) < count ? __ldcs(&words[4 * k]) : 0;
}

/* Moved to the top of the word a four's last sign is where a float has its own; the others choose,
 * so that they become predicates at once (R2P): ten instructions a four, where a shift for each
 * sign would make it twelve. */
static __device__ inline void add_member(const uint32_t (&signs)[fours_a_tile], float scale,
                                         float (&total)[fours_a_tile][4]) {
  const float minus = ob_decode(1, scale);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    const uint32_t four = signs[k] << (OB_LANES - 4 - four_at(k) % OB_LANES);
    OB_UNROLL
    for (unsigned j = 0; j < 3; j++)
      total[k][j] += four & 1u << (OB_LANES - 4 + j) ? minus : scale;
    total[k][3] += ob_float_of(ob_bits_of(scale) | (four & OB_SIGN_BIT));
  }
}

/* Adds the values of a group that is known, of the tile from `first` on. */
template <unsigned group, bool whole>
static __device__ inline void add_group(const struct part *known, unsigned first, unsigned count,
                                        float (&total)[fours_a_tile][4]) {
  uint32_t signs[group][fours_a_tile];
  OB_UNROLL
  for (unsigned s = 0; s < group; s++)
    load_member<whole>(known[s], first, count, signs[s]);
  OB_UNROLL
  for (unsigned s = 0; s < group; s++)
    add_member(signs[s], known[s].scale, total);
}

template <enum crowd crowd, bool whole, unsigned large_group>
static __device__ inline void sum_tile(const struct ob_cuda_plan &plan,
                                       const struct location &location, const struct parts &parts,
                                       unsigned first, unsigned count,
                                       float (&total)[fours_a_tile][4]) {
  constexpr unsigned group = crowd == SOME ? large_group : few_members;
  const unsigned members = (unsigned)plan.geometry.members;
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    total[i / 4][i % 4] = -0.0f; /* what leaves the first term as it is, be it -0 */
  if (crowd == FEW)
    add_group<group, whole>(parts.known, first, count, total);
  for (unsigned member = 0; crowd != FEW && member < members; member += group) {
    if (crowd == MANY && member % known_members == 0)
      find_parts(plan, location, parts, member);
    add_group<group, whole>(parts.known + member % known_members, first, count, total);
  }
}

/* Lanes past the end are zeros. */
static __device__ inline void cut_tile(float (&value)[fours_a_tile][4], unsigned first,
                                       unsigned count) {
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    if (first + four_at(i / 4) + i % 4 >= count)
      value[i / 4][i % 4] = 0;
}

/* Replaces the server's state of an element by its new state, and the mean by the value whose sign
 * the server sends. */
template <enum ob_serve_rule rule>
static __device__ inline void serve(const struct ob_reduce_run &run, unsigned element,
                                    float *residual, float *value) {
  const float before = *residual, mean = *value;
  if (rule == OB_SERVE_LION) {
    const struct ob_lion_factors &lion = run.serving.lion;
    *residual = ob_lion_momentum(before, mean, &lion);
    *value = ob_lion_signed(ob_lion_direction(before, mean, &lion), element);
  } else {
    *residual = *value = ob_residual_of(before, run.residual_scale) + mean;
  }
}

/* The sum and the residuals of the elements from `first` on, to their array and to the tile
 * in shared memory. A four lies in one word, so it is all there or not at all. */
template <enum ob_serve_rule rule, enum crowd crowd>
static __device__ inline void reduce_tile(const struct ob_reduce_run &run,
                                          const struct ob_cuda_plan &plan,
                                          const struct location &location,
                                          const struct parts &parts, unsigned first, float4 *tile) {
  constexpr unsigned group = rule == OB_SERVE_LION ? few_members : 2 * few_members;
  const unsigned count = (unsigned)run.count, end = whole_words(count);
  float residual[fours_a_tile][4] = {}, total[fours_a_tile][4];
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    if (first + four_at(k) < end)
      load_some<ONEBIT_FLOAT32, true>(run.residual, first + four_at(k), end, true, residual[k]);
  if (first + tile_elements <= count)
    sum_tile<crowd, true, group>(plan, location, parts, first, count, total);
  else
    sum_tile<crowd, false, group>(plan, location, parts, first, count, total);
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    serve<rule>(run, i, &residual[i / 4][i % 4], &total[i / 4][i % 4]);
  if (first + tile_elements > count) {
    cut_tile(residual, first, count);
    cut_tile(total, first, count);
  }
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    if (first + four_at(k) < end)
      store_some<ONEBIT_FLOAT32, true>(run.residual_out, first + four_at(k), end, true,
                                       residual[k]);
    tile[four_at(k) / 4] = make_float4(total[k][0], total[k][1], total[k][2], total[k][3]);
  }
}

/* Reduces as a codec's reduce does; the sum is lane 0's. */
template <enum ob_serve_rule rule, enum crowd crowd>
static __device__ inline float reduce(const struct ob_reduce_run &run,
                                      const struct ob_cuda_plan &plan,
                                      const struct location &location, const struct parts &parts,
                                      float4 *tile) {
  const unsigned count = (unsigned)run.count;
  float lane = 0;
  if (crowd != MANY)
    find_parts(plan, location, parts, 0);
  for (unsigned first = 0; first < count; first += tile_elements) {
    reduce_tile<rule, crowd>(run, plan, location, parts, first, tile);
    store_signs(run.out, first, count, add_tile(tile, run.rule, &lane));
  }
  return sum_lanes(lane);
}

/* A block less at once, since members' words take registers too; of Lion two. */
constexpr unsigned blocks_with(enum ob_serve_rule rule) {
  return rule == OB_SERVE_LION ? blocks_at_once - 2 : blocks_at_once - 1;
}

template <enum ob_serve_rule rule, enum crowd crowd>
static __device__ inline void reduce_block(const struct ob_cuda_plan &plan, float weight,
                                           float4 *tile, struct part *known) {
  const uint32_t now = plan.state->now; /* no load has to wait for it */
  struct location location;
  if (!find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  const struct ob_view out =
      view_of(result_of(plan, next_of(plan, now), plan.geometry.member), location);
  struct ob_reduce_run run = {};
  run.count = location.block.count;
  run.serving = plan.server.serving;
  run.rule = ob_serve_measure(rule, plan.rule);
  run.residual = values_of(plan.server, now, location.block);
  run.residual_scale = residual_scale(plan.server, now, location);
  run.residual_out = values_of(plan.server, !now, location.block);
  run.out = out.words + location.word;
  const struct parts parts = {senders_of(plan, now), weight, known};
  const float sum = reduce<rule, crowd>(run, plan, location, parts, tile);
  if (lane_number() == 0) /* not `now`: to keep it would be one register too many */
    set_scale(plan, plan.state->now, true, location, out, sum);
}

template <enum ob_serve_rule rule, enum crowd crowd, bool besides>
static __global__ void __launch_bounds__(threads_a_block, blocks_with(rule) - besides)
    reduce_kernel(const __grid_constant__ struct ob_cuda_plan plan, float weight) {
  __shared__ float4 tiles[warps_a_block][tile_elements / 4];
  __shared__ struct part known[warps_a_block][known_members];
  const unsigned warp = threadIdx.x / OB_LANES;
  await_kernels_ahead();
  if (!besides || warp_number() < whole_blocks(plan.max_blocks))
    reduce_block<rule, crowd>(plan, weight, tiles[warp], known[warp]);
  else
    open_besides(plan, whole_blocks(plan.max_blocks));
  if (besides)
    finish_messages(plan);
}

/* Sums signs. Elements past `valid` have no place in the caller's buffer. */
template <onebit_dtype_t dtype, enum crowd crowd>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    sum_kernel(const __grid_constant__ struct ob_cuda_plan plan,
               const __grid_constant__ struct ob_cuda_pieces outputs, float weight) {
  __shared__ struct part known[warps_a_block][known_members];
  struct location location;
  if (plan.state->stop || !find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  const struct parts parts = {senders_of(plan, plan.state->now), weight,
                              known[threadIdx.x / OB_LANES]};
  const unsigned valid = (unsigned)location.block.valid;
  void *output = piece_of(outputs, 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 4 * size_of<dtype>);
  if (crowd != MANY)
    find_parts(plan, location, parts, 0);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float total[fours_a_tile][4];
    if (first + tile_elements <= valid)
      sum_tile<crowd, true, 2 * few_members>(plan, location, parts, first, valid, total);
    else
      sum_tile<crowd, false, 2 * few_members>(plan, location, parts, first, valid, total);
    OB_UNROLL
    for (unsigned k = 0; k < fours_a_tile; k++) {
      bound_some<dtype>(total[k]);
      store_some<dtype, false>(output, first + four_at(k), valid, aligned, total[k]);
    }
  }
}

static enum crowd crowd_of(const struct ob_cuda_plan &plan) {
  const size_t members = plan.geometry.members;
  return members <= few_members ? FEW : members <= known_members ? SOME : MANY;
}

template <enum ob_serve_rule rule, enum crowd crowd>
static auto reduce_kernel_for(const struct ob_cuda_plan &plan) {
  return seals_or_opens(plan) ? reduce_kernel<rule, crowd, true>
                              : reduce_kernel<rule, crowd, false>;
}

template <enum crowd crowd> static auto reduce_kernel_of(const struct ob_cuda_plan &plan) {
  return plan.server.serving.rule == OB_SERVE_LION ? reduce_kernel_for<OB_SERVE_LION, crowd>(plan)
                                                   : reduce_kernel_for<OB_SERVE_MEAN, crowd>(plan);
}

template <enum crowd crowd> static auto sum_kernel_of(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32    ? sum_kernel<ONEBIT_FLOAT32, crowd>
         : dtype == ONEBIT_BFLOAT16 ? sum_kernel<ONEBIT_BFLOAT16, crowd>
                                    : sum_kernel<ONEBIT_FLOAT16, crowd>;
}

/* Chooses the kernel of a template for the plan's number of members. */
#define KERNEL_FOR(plan, kernel_of, what)                                                          \
  (crowd_of(plan) == FEW    ? kernel_of<FEW>(what)                                                 \
   : crowd_of(plan) == SOME ? kernel_of<SOME>(what)                                                \
                            : kernel_of<MANY>(what))

cudaError_t ob_cuda_reduce(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  if (plan.geometry.width > 1)
    return ob_cuda_reduce_levels(plan, chunk, stream);
  return launch_early(KERNEL_FOR(plan, reduce_kernel_of, plan),
                      whole_blocks(plan.max_blocks) + warps_besides(plan), 1, stream,
                      of_chunk(plan, chunk), weight_of_mean(plan));
}

cudaError_t ob_cuda_sum(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                        cudaStream_t stream) {
  if (plan.geometry.width > 1)
    return ob_cuda_sum_levels(plan, outputs, chunk, stream);
  return launch(KERNEL_FOR(plan, sum_kernel_of, plan.output_dtype), plan.max_blocks, 1, stream,
                of_chunk(plan, chunk), outputs, weight_of_mean(plan));
}
