/*
 * Adds up the members' messages in the members' order: with residuals to a new message (reduce), or
 * to the outputs (sum).
 *
 * Bytes per element of the segment with N members, in blocks of 2048 elements. Reduce reads 4 of
 * residuals and N/8 of signs, writes 4 of residuals and 1/8 of signs, and has 4 (N + 3)/2048 of
 * scales: 9.15 for 8 members. Sum reads N/8 of signs and writes 4 as float32: 5.02 for 8.
 *
 * Additions have a fixed order, so each member costs one instruction for each of a lane's elements,
 * and one and a half to choose the term: 50 instructions per tile in all (80 before a table in
 * shared memory had the members' words and scales, and signs were predicates).
 * tests/scripts/check-kernels counts instructions in SASS, and expects both kernels to reach 0.9 of
 * the copy bandwidth up to 8 members. With 16 members, reduce takes 1150 instructions per tile and
 * 530 more per block, while the memory's time allows 1120 per tile, and words are loaded in two
 * groups per tile, one after the other: it reaches 0.77 of the copy bandwidth. Sum takes 890
 * instructions, while 660 are allowed. A segment is then so small a part of the elements that
 * compressing takes most of the time anyway.
 */
#include "cuda/headers.cuh"
#include "cuda/location.cuh"

/* The number of members decides how they are added up. FEW are one group, all of whose words are
 * loaded before the first is used. SOME are several groups, of eight members if registers allow it.
 * MANY are so many that a warp does not hold the parts of all at once. */
constexpr unsigned few_members = 4;
enum member_class { FEW, SOME, MANY };

/* Loads for each of the lane's fours the word with its signs. Eight lanes read the same word, so no
 * lane has to get the word from another lane. `whole`: the tile is whole, and no load has a
 * condition. */
template <bool whole>
static __device__ inline void load_member(const struct part &part, unsigned first, unsigned count,
                                          uint32_t (&signs)[fours_a_tile]) {
  const uint32_t *words = part.words + (first + four_at(0)) / OB_LANES;
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    signs[k] = whole || first + four_at(k) < count ? __ldcs(&words[4 * k]) : 0;
}

/* Adds a member's values. The signs of a group of four are shifted to the top of a word, so that
 * the last one is a float's sign bit; the other three become predicates at once (R2P). That takes
 * ten instructions per four; a shift for each sign would take twelve. */
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

/* Adds the values of a group of members, whose parts the warp has, for the tile from `first` on. */
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

template <enum member_class member_class, bool whole, unsigned large_group>
static __device__ inline void sum_tile(const struct ob_cuda_plan &plan,
                                       const struct location &location, const struct parts &parts,
                                       unsigned first, unsigned count,
                                       float (&total)[fours_a_tile][4]) {
  constexpr unsigned group = member_class == SOME ? large_group : few_members;
  const unsigned members = (unsigned)plan.geometry.members;
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    total[i / 4][i % 4] = -0.0f; /* -0 leaves the first term as it is, also a -0 */
  if (member_class == FEW)
    add_group<group, whole>(parts.known, first, count, total);
  for (unsigned member = 0; member_class != FEW && member < members; member += group) {
    if (member_class == MANY && member % known_members == 0)
      find_parts(plan, location, parts, member);
    add_group<group, whole>(parts.known + member % known_members, first, count, total);
  }
}

/* Sets the elements past the end to zero. */
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
static __device__ inline void update_server(const struct ob_reduce_run &run, unsigned element,
                                            float *residual, float *value) {
  const float before = *residual, mean = *value;
  if (rule == OB_SERVE_LION) {
    const struct ob_lion_factors &lion = run.serving.lion;
    *residual = ob_lion_momentum(before, mean, &lion);
    *value = ob_lion_replace_zero(ob_lion_direction(before, mean, &lion), element);
  } else {
    *residual = *value = ob_residual_of(before, run.residual_scale) + mean;
  }
}

/* Reduces the tile from `first` on: stores residuals in their array, and compensated values in the
 * tile in shared memory. A four is within one word, so it exists as a whole or not at all. */
template <enum ob_serve_rule rule, enum member_class member_class>
static __device__ inline void reduce_tile(const struct ob_reduce_run &run,
                                          const struct ob_cuda_plan &plan,
                                          const struct location &location,
                                          const struct parts &parts, unsigned first, float4 *tile) {
  constexpr unsigned group = rule == OB_SERVE_LION ? few_members : 2 * few_members;
  const unsigned count = (unsigned)run.count, end = padded_count(count);
  float residual[fours_a_tile][4] = {}, total[fours_a_tile][4];
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    if (first + four_at(k) < end)
      load_values<ONEBIT_FLOAT32, true>(run.residual, first + four_at(k), end, true, residual[k]);
  if (first + tile_elements <= count)
    sum_tile<member_class, true, group>(plan, location, parts, first, count, total);
  else
    sum_tile<member_class, false, group>(plan, location, parts, first, count, total);
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    update_server<rule>(run, i, &residual[i / 4][i % 4], &total[i / 4][i % 4]);
  if (first + tile_elements > count) {
    cut_tile(residual, first, count);
    cut_tile(total, first, count);
  }
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    if (first + four_at(k) < end)
      store_values<ONEBIT_FLOAT32, true>(run.residual_out, first + four_at(k), end, true,
                                         residual[k]);
    tile[four_at(k) / 4] = make_float4(total[k][0], total[k][1], total[k][2], total[k][3]);
  }
}

/* Reduces a block as a codec does; lane 0 gets the sum of the block's magnitudes. */
template <enum ob_serve_rule rule, enum member_class member_class>
static __device__ inline float reduce_tiles(const struct ob_reduce_run &run,
                                            const struct ob_cuda_plan &plan,
                                            const struct location &location,
                                            const struct parts &parts, float4 *tile) {
  const unsigned count = (unsigned)run.count;
  float lane = 0;
  if (member_class != MANY)
    find_parts(plan, location, parts, 0);
  for (unsigned first = 0; first < count; first += tile_elements) {
    reduce_tile<rule, member_class>(run, plan, location, parts, first, tile);
    store_signs(run.out, first, count, add_tile(tile, run.rule, &lane));
  }
  return sum_lanes(lane);
}

/* Members' words take registers, so a multiprocessor runs one thread block fewer, and with Lion two
 * fewer. */
constexpr unsigned blocks_with(enum ob_serve_rule rule) {
  return rule == OB_SERVE_LION ? blocks_at_once - 2 : blocks_at_once - 1;
}

template <enum ob_serve_rule rule, enum member_class member_class>
static __device__ inline void reduce_block(const struct ob_cuda_plan &plan, float weight,
                                           float4 *tile, struct part *known) {
  const uint32_t now = plan.state->now; /* loaded first, so that no other load waits for it */
  struct location location;
  if (!find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  const struct ob_view out =
      view_of(result_of(plan, next_copy(plan, now), plan.geometry.member), location);
  struct ob_reduce_run run = {};
  run.count = location.block.count;
  run.serving = plan.server.serving;
  run.rule = ob_serve_scale_rule(rule, plan.rule);
  run.residual = values_of(plan.server, now, location.block);
  run.residual_scale = residual_scale(plan.server, now, location);
  run.residual_out = values_of(plan.server, !now, location.block);
  run.out = out.words + location.word;
  const struct parts parts = {senders_of(plan, now), weight, known};
  const float sum = reduce_tiles<rule, member_class>(run, plan, location, parts, tile);
  if (lane_number() == 0) /* `now` is read again: keeping it takes one register too many */
    set_scale(plan, plan.state->now, true, location, out, sum);
}

template <enum ob_serve_rule rule, enum member_class member_class, bool besides>
static __global__ void __launch_bounds__(threads_a_block, blocks_with(rule) - besides)
    reduce_kernel(const __grid_constant__ struct ob_cuda_plan plan, float weight) {
  __shared__ float4 tiles[warps_a_block][tile_elements / 4];
  __shared__ struct part known[warps_a_block][known_members];
  const unsigned warp = threadIdx.x / OB_LANES;
  await_kernels_ahead();
  if (!besides || warp_number() < round_to_thread_blocks(plan.max_blocks))
    reduce_block<rule, member_class>(plan, weight, tiles[warp], known[warp]);
  else
    open_extra_messages(plan, round_to_thread_blocks(plan.max_blocks));
  if (besides)
    finish_messages(plan);
}

/* Sums signs. Elements from `valid` on are not in the caller's buffer. */
template <onebit_dtype_t dtype, enum member_class member_class>
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
  void *output = block_address(outputs, 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 4 * size_of<dtype>);
  if (member_class != MANY)
    find_parts(plan, location, parts, 0);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float total[fours_a_tile][4];
    if (first + tile_elements <= valid)
      sum_tile<member_class, true, 2 * few_members>(plan, location, parts, first, valid, total);
    else
      sum_tile<member_class, false, 2 * few_members>(plan, location, parts, first, valid, total);
    OB_UNROLL
    for (unsigned k = 0; k < fours_a_tile; k++) {
      bound_values<dtype>(total[k]);
      store_values<dtype, false>(output, first + four_at(k), valid, aligned, total[k]);
    }
  }
}

static enum member_class member_class_of(const struct ob_cuda_plan &plan) {
  const size_t members = plan.geometry.members;
  return members <= few_members ? FEW : members <= known_members ? SOME : MANY;
}

template <enum ob_serve_rule rule, enum member_class member_class>
static auto reduce_kernel_for(const struct ob_cuda_plan &plan) {
  return seals_or_opens(plan) ? reduce_kernel<rule, member_class, true>
                              : reduce_kernel<rule, member_class, false>;
}

template <enum member_class member_class>
static auto reduce_kernel_of(const struct ob_cuda_plan &plan) {
  return plan.server.serving.rule == OB_SERVE_LION
             ? reduce_kernel_for<OB_SERVE_LION, member_class>(plan)
             : reduce_kernel_for<OB_SERVE_MEAN, member_class>(plan);
}

template <enum member_class member_class> static auto sum_kernel_of(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32    ? sum_kernel<ONEBIT_FLOAT32, member_class>
         : dtype == ONEBIT_BFLOAT16 ? sum_kernel<ONEBIT_BFLOAT16, member_class>
                                    : sum_kernel<ONEBIT_FLOAT16, member_class>;
}

/* Chooses the kernel of a template for the plan's number of members. */
#define KERNEL_FOR(plan, kernel_of, what)                                                          \
  (member_class_of(plan) == FEW    ? kernel_of<FEW>(what)                                          \
   : member_class_of(plan) == SOME ? kernel_of<SOME>(what)                                         \
                                   : kernel_of<MANY>(what))

cudaError_t ob_cuda_reduce(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  if (plan.geometry.width > 1)
    return ob_cuda_reduce_levels(plan, chunk, stream);
  return launch_early_kernel(KERNEL_FOR(plan, reduce_kernel_of, plan),
                             round_to_thread_blocks(plan.max_blocks) + extra_warps(plan), 1, stream,
                             select_chunk(plan, chunk), weight_of_mean(plan));
}

cudaError_t ob_cuda_sum(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                        cudaStream_t stream) {
  if (plan.geometry.width > 1)
    return ob_cuda_sum_levels(plan, outputs, chunk, stream);
  return launch_kernel(KERNEL_FOR(plan, sum_kernel_of, plan.output_dtype), plan.max_blocks, 1,
                       stream, select_chunk(plan, chunk), outputs, weight_of_mean(plan));
}
