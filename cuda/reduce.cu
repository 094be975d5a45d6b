/*
 * The members' messages, added up in the members' order: with kept values to a new message, or to
 * the outputs.
 *
 * Bytes an element of the share, N members, 2048 elements a block. Reduce: 4 kept read, 4 kept
 * written, N/8 signs read, 1/8 written, and 4 (N + 3)/2048 scales: 9.2 for 8 members. Sum: N/8 read
 * and 4 written as float32. From about 24 members on the additions take longer than the memory, two
 * integer operations and one addition an element and member; a share is then so small a part of the
 * elements that compressing takes most of the time anyway.
 */
#include "cuda/place.cuh"

/* Members whose scales the lanes hold, and whose words are loaded before the first is used. */
constexpr unsigned members_at_once = 8;

/* Adds the values of one member to a lane's fours; its words are with the lanes from `base` on. */
static __device__ inline void add_member(uint32_t signs, unsigned base, float scale,
                                         float (&total)[fours_a_tile][4]) {
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    const uint32_t four = four_signs(signs, k, base);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++)
      total[k][j] += ob_decode(four >> j & 1, scale);
  }
}

/* The scale of the member whose number in the group of 32 is the lane's, with its share of the
 * mean. */
static __device__ inline float member_scale(const struct ob_cuda_plan &plan, uint32_t now,
                                            const struct place &place, size_t member, float share) {
  if (member >= plan.members)
    return 0;
  return scale_of(view_of(sent_by(plan, now, member), place), place) * share;
}

/* The sum of the members' values, for the tile from `first` on. Half a warp loads a member's sixteen
 * words, so a load serves two members. */
static __device__ inline void sum_tile(const struct ob_cuda_plan &plan, uint32_t now,
                                       const struct place &place, unsigned first, float share,
                                       float (&total)[fours_a_tile][4]) {
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    total[i / 4][i % 4] = -0.0f; /* what leaves the first term as it is, be it -0 */
  float scales = 0;
  for (size_t member = 0; member < plan.members; member += members_at_once) {
    if (member % OB_LANES == 0)
      scales = member_scale(plan, now, place, member + lane_number(), share);
    uint32_t signs[members_at_once / 2];
    OB_UNROLL
    for (unsigned pair = 0; pair < members_at_once / 2; pair++) {
      const size_t mine = member + 2 * pair + lane_number() / tile_words;
      signs[pair] = mine < plan.members
                        ? load_signs(view_of(sent_by(plan, now, mine), place).words + place.word,
                                     first, (unsigned)place.block.count)
                        : 0;
    }
    OB_UNROLL
    for (unsigned s = 0; s < members_at_once; s++)
      if (member + s < plan.members)
        add_member(signs[s / 2], s % 2 * tile_words,
                   __shfl_sync(all_lanes, scales, (int)((member + s) % OB_LANES)), total);
  }
}

/* The sum and the kept error of the elements from `first` on, to the kept values and to the tile in
 * shared memory. */
static __device__ inline void reduce_tile(const struct ob_reduce_run &run,
                                          const struct ob_cuda_plan &plan, uint32_t now,
                                          const struct place &place, unsigned first, float share,
                                          float4 *tile) {
  const unsigned count = (unsigned)run.count, end = whole_words(count);
  float kept[fours_a_tile][4] = {}, total[fours_a_tile][4];
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    if (first + four_at(k) < end) /* a four lies in one word: it is all there, or not at all */
      load_some<ONEBIT_FLOAT32, true>(run.kept, first + four_at(k), end, true, kept[k]);
  sum_tile(plan, now, place, first, share, total);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++) {
      const float value = ob_kept_error(kept[k][j], run.kept_scale) + total[k][j];
      total[k][j] = first + four_at(k) + j < count ? value : 0;
    }
    if (first + four_at(k) < end)
      store_some<ONEBIT_FLOAT32, true>(run.kept_out, first + four_at(k), end, true, total[k]);
    tile[four_at(k) / 4] = make_float4(total[k][0], total[k][1], total[k][2], total[k][3]);
  }
}

/* As a codec's reduce; the sum is lane 0's. */
static __device__ inline float reduce(const struct ob_reduce_run &run,
                                      const struct ob_cuda_plan &plan, uint32_t now,
                                      const struct place &place, float share, float4 *tile) {
  const unsigned count = (unsigned)run.count;
  float lane = 0;
  for (unsigned first = 0; first < count; first += tile_elements) {
    reduce_tile(run, plan, now, place, first, share, tile);
    store_signs(run.out, first, count, add_tile(tile, run.rule, &lane));
  }
  return sum_lanes(lane);
}

static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    reduce_kernel(const __grid_constant__ struct ob_cuda_plan plan, float share) {
  __shared__ float4 tiles[warps_a_block][tile_elements / 4];
  struct place place;
  if (!find_place(plan, share_of(plan, plan.place), &place))
    return;
  const uint32_t now = plan.state->now;
  const struct ob_view out = view_of(result_of(plan, !now, plan.place), place);
  struct ob_reduce_run run = {};
  run.count = place.block.count;
  run.rule = plan.rule;
  run.kept = values_of(plan.server, now, place.block);
  run.kept_scale = kept_scale(plan.server, now, place);
  run.kept_out = values_of(plan.server, !now, place.block);
  run.out = out.words + place.word;
  const float sum = reduce(run, plan, now, place, share, tiles[threadIdx.x / OB_LANES]);
  if (lane_number() == 0)
    settle(plan, now, true, place, out, sum);
}

/* What is past `valid` has no place in the caller's buffer. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    sum_kernel(const __grid_constant__ struct ob_cuda_plan plan,
               const __grid_constant__ struct ob_cuda_pieces outputs, float share) {
  struct place place;
  if (plan.state->stop || !find_place(plan, share_of(plan, plan.place), &place))
    return;
  const uint32_t now = plan.state->now;
  const unsigned valid = (unsigned)place.block.valid;
  void *output = piece_of(outputs, 0, place.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 4 * size_of<dtype>);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float total[fours_a_tile][4];
    sum_tile(plan, now, place, first, share, total);
    OB_UNROLL
    for (unsigned k = 0; k < fours_a_tile; k++)
      store_some<dtype, false>(output, first + four_at(k), valid, aligned, total[k]);
  }
}

/* A member's share of the mean, which goes into its scale. */
static float share_of_mean(const struct ob_cuda_plan &plan) {
  return (float)(1.0 / (double)plan.members);
}

cudaError_t ob_cuda_reduce(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  return launch(reduce_kernel, plan.most_blocks, 1, stream, of_chunk(plan, chunk),
                share_of_mean(plan));
}

cudaError_t ob_cuda_sum(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                        cudaStream_t stream) {
  return launch(KERNEL_OF(plan.dtype, sum_kernel), plan.most_blocks, 1, stream,
                of_chunk(plan, chunk), outputs, share_of_mean(plan));
}
