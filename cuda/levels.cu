/*
 * Kernels for messages of 2, 4 and 8 bits per element: they compress, reduce, sum and store.
 *
 * Bytes per element with w bits and N members, in blocks of 2048 elements, without scales: compress
 * reads 4 of float32 input and 4 of residuals, and writes 4 of residuals and w/8 of levels, 13.00
 * with 8 bits; reduce reads 4 + N w/8 and writes 4 + w/8; sum reads N w/8 and writes 4; store reads
 * w/8 and writes 4. A block's values stay in shared memory until its scale is known, so nothing is
 * read or written twice. A thread block takes 32 KiB of shared memory, and an H200's multiprocessor
 * has six thread blocks at once.
 */
#include "cuda/headers.cuh"
#include "cuda/levels.cuh"
#include "cuda/location.cuh"

/* --- Compressing */

struct weighed_input {
  const float *residual;
  const void *input;
  unsigned valid, given; /* elements without padding; elements that have input */
  bool aligned;
  float weight;
  const float *reciprocals; /* or NULL */
  float limit;
};

/* Does the work of compress_tile in compress.cu, without momentum; `divided`: with reciprocals and
 * a limit. */
template <onebit_dtype_t dtype, bool divided, bool whole>
static __device__ inline void compress_tile(const struct level_block &run,
                                            const struct weighed_input &in, unsigned first,
                                            struct level_sums *sums) {
  float residual[fours_a_tile][4], value[fours_a_tile][4], own[fours_a_tile][4];
  load_parts<ONEBIT_FLOAT32, whole>(in.residual, first, run.end, true, residual);
  if (divided)
    load_parts<ONEBIT_FLOAT32, whole>(in.reciprocals, first, run.end, true, own);
  load_tile<dtype>(in.input, first, in.given, in.aligned, value);
  OB_UNROLL
  for (unsigned e = 0; e < fours_a_tile * 4; e++) {
    const unsigned i = first + four_at(e / 4) + e % 4;
    float input = in.weight * value[e / 4][e % 4];
    if (divided)
      input = ob_bound_product(input, own[e / 4][e % 4], in.limit);
    if (!whole && i >= in.valid)
      input = 0;
    value[e / 4][e % 4] = ob_residual_of(residual[e / 4][e % 4], 0) + input;
    if (!whole && i >= run.count)
      value[e / 4][e % 4] = 0;
  }
  keep_tile<whole>(run, first, value, sums);
}

static __device__ inline struct weighed_input describe_input(const struct ob_cuda_plan &plan,
                                                             uint32_t now,
                                                             const struct ob_cuda_source &source,
                                                             const struct location &location,
                                                             size_t element) {
  const struct ob_block &block = location.block;
  const void *input = source.values
                          ? source.values + blockIdx.y * source.step + location.word * OB_LANES
                          : (const void *)block_address(source.inputs, 0, block, element);
  return {values_of(plan.worker, now, block),
          input,
          (unsigned)block.valid,
          input ? (unsigned)block.valid : 0,
          is_aligned(input, 4 * element),
          source.weight,
          source.reciprocals ? source.reciprocals + block.word * OB_LANES : NULL,
          source.limit};
}

/* grid.y is the member that the message is for. */
template <onebit_dtype_t dtype, unsigned width, bool divided>
static __device__ inline void compress_block(const struct ob_cuda_plan &plan,
                                             const struct ob_cuda_source &source, float4 *tiles) {
  struct location location;
  if (!find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  const uint32_t now = plan.state->now;
  const struct ob_view out = view_of(message_to(plan, now, blockIdx.y), location);
  const struct level_block run = make_level_block(plan.worker, now, location, out, width, tiles);
  const struct weighed_input in = describe_input(plan, now, source, location, size_of<dtype>);
  struct level_sums sums = {};
  for (unsigned first = 0; first < run.count; first += tile_elements)
    if (first + tile_elements <= in.given)
      compress_tile<dtype, divided, true>(run, in, first, &sums);
    else
      compress_tile<dtype, divided, false>(run, in, first, &sums);
  quantise_tiles<width>(run, set_level_scale(plan, now, false, location, out, width, sums));
}

template <onebit_dtype_t dtype, unsigned width, bool besides>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    compress_levels_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                           const __grid_constant__ struct ob_cuda_source source) {
  __shared__ float4 tiles[warps_a_block][resident_elements / 4];
  await_kernels_ahead();
  compress_block<dtype, width, false>(plan, source, tiles[threadIdx.x / OB_LANES]);
  if (besides)
    finish_messages(plan);
}

/* The reciprocals of a warm-up of divided gradients take registers: a multiprocessor runs two
 * thread blocks fewer. */
template <onebit_dtype_t dtype, unsigned width>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once - 2)
    compress_divided_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                            const __grid_constant__ struct ob_cuda_source source, bool besides) {
  __shared__ float4 tiles[warps_a_block][resident_elements / 4];
  await_kernels_ahead();
  compress_block<dtype, width, true>(plan, source, tiles[threadIdx.x / OB_LANES]);
  if (besides)
    finish_messages(plan);
}

/* --- Adding up */

/* The number of members whose codes are loaded before the first is used. */
constexpr unsigned members_at_once = 4;

template <unsigned width, bool whole, unsigned members>
static __device__ inline void add_members(const struct part *known, unsigned first, unsigned count,
                                          float (&total)[fours_a_tile][4]) {
  const unsigned own = first + four_at(0);
  uint32_t codes[members][fours_a_tile];
  OB_UNROLL
  for (unsigned s = 0; s < members; s++)
    for (unsigned k = 0; k < fours_a_tile; k++)
      codes[s][k] = whole || first + four_at(k) < count
                        ? load_codes<width>(known[s].words, own, k * OB_LANES)
                        : 0;
  OB_UNROLL
  for (unsigned s = 0; s < members; s++)
    for (unsigned i = 0; i < fours_a_tile * 4; i++)
      total[i / 4][i % 4] += level_of<width>(codes[s][i / 4], i % 4) * known[s].scale;
}

/* Adds the values of all members whose parts the warp has read. */
template <unsigned width, bool whole>
static __device__ inline void add_known(const struct part *known, unsigned members, unsigned first,
                                        unsigned count, float (&total)[fours_a_tile][4]) {
  unsigned member = 0;
  for (; member + members_at_once <= members; member += members_at_once)
    add_members<width, whole, members_at_once>(known + member, first, count, total);
  if (members - member == 3)
    add_members<width, whole, 3>(known + member, first, count, total);
  else if (members - member == 2)
    add_members<width, whole, 2>(known + member, first, count, total);
  else if (members - member == 1)
    add_members<width, whole, 1>(known + member, first, count, total);
}

/* Returns the sum of the elements from `first` on; elements past `count` may hold any value. */
template <unsigned width, bool whole>
static __device__ inline void sum_tile(const struct ob_cuda_plan &plan,
                                       const struct location &location, const struct parts &parts,
                                       unsigned first, unsigned count,
                                       float (&total)[fours_a_tile][4]) {
  const unsigned members = (unsigned)plan.geometry.members;
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    total[i / 4][i % 4] = -0.0f; /* -0 leaves the first term as it is, also a -0 */
  for (unsigned base = 0; base < members; base += known_members) {
    if (members > known_members)
      find_parts<width>(plan, location, parts, base);
    add_known<width, whole>(parts.known, min(members - base, known_members), first, count, total);
  }
}

template <unsigned width, bool whole>
static __device__ inline void reduce_tile(const struct level_block &run, const float *residuals,
                                          const struct ob_cuda_plan &plan,
                                          const struct location &location,
                                          const struct parts &parts, unsigned first,
                                          struct level_sums *sums) {
  float residual[fours_a_tile][4], total[fours_a_tile][4];
  load_parts<ONEBIT_FLOAT32, whole>(residuals, first, run.end, true, residual);
  sum_tile<width, whole>(plan, location, parts, first, run.count, total);
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++) {
    total[i / 4][i % 4] = ob_residual_of(residual[i / 4][i % 4], 0) + total[i / 4][i % 4];
    if (!whole && first + four_at(i / 4) + i % 4 >= run.count)
      total[i / 4][i % 4] = 0;
  }
  keep_tile<whole>(run, first, total, sums);
}

template <unsigned width>
static __device__ inline void reduce_block(const struct ob_cuda_plan &plan, float weight,
                                           float4 *tiles, struct part *known) {
  struct location location;
  if (!find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  const uint32_t now = plan.state->now;
  const struct ob_view out =
      view_of(result_of(plan, next_copy(plan, now), plan.geometry.member), location);
  const struct level_block run = make_level_block(plan.server, now, location, out, width, tiles);
  const float *residuals = values_of(plan.server, now, location.block);
  const struct parts parts = {senders_of(plan, now), weight, known};
  struct level_sums sums = {};
  find_parts<width>(plan, location, parts, 0);
  for (unsigned first = 0; first < run.count; first += tile_elements)
    if (first + tile_elements <= run.count)
      reduce_tile<width, true>(run, residuals, plan, location, parts, first, &sums);
    else
      reduce_tile<width, false>(run, residuals, plan, location, parts, first, &sums);
  quantise_tiles<width>(run, set_level_scale(plan, now, true, location, out, width, sums));
}

template <unsigned width, bool besides>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once - 1 - besides)
    reduce_levels_kernel(const __grid_constant__ struct ob_cuda_plan plan, float weight) {
  __shared__ float4 tiles[warps_a_block][resident_elements / 4];
  __shared__ struct part known[warps_a_block][known_members];
  const unsigned warp = threadIdx.x / OB_LANES;
  await_kernels_ahead();
  if (!besides || warp_number() < round_to_thread_blocks(plan.max_blocks))
    reduce_block<width>(plan, weight, tiles[warp], known[warp]);
  else
    open_extra_messages(plan, round_to_thread_blocks(plan.max_blocks));
  if (besides)
    finish_messages(plan);
}

/* Sums levels. Elements from `valid` on are not in the caller's buffer. */
template <onebit_dtype_t dtype, unsigned width>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    sum_levels_kernel(const __grid_constant__ struct ob_cuda_plan plan,
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
  find_parts<width>(plan, location, parts, 0);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float total[fours_a_tile][4];
    if (first + tile_elements <= valid)
      sum_tile<width, true>(plan, location, parts, first, valid, total);
    else
      sum_tile<width, false>(plan, location, parts, first, valid, total);
    OB_UNROLL
    for (unsigned k = 0; k < fours_a_tile; k++)
      bound_values<dtype>(total[k]);
    store_tile<dtype>(output, first, valid, aligned, total);
  }
}

/* --- Storing */

template <onebit_dtype_t dtype, unsigned width>
static __device__ inline void store_levels_tile(const uint32_t *fields, float scale, void *output,
                                                unsigned first, unsigned valid, bool aligned) {
  uint32_t codes[fours_a_tile];
  float value[fours_a_tile][4];
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    codes[k] = first + four_at(k) < valid ? load_codes<width>(fields, first + four_at(k)) : 0;
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++)
      value[k][j] = level_of<width>(codes[k], j) * scale;
    bound_values<dtype>(value[k]);
  }
  store_tile<dtype>(output, first, valid, aligned, value);
}

/* grid.y is the member whose result is stored. */
template <onebit_dtype_t dtype, unsigned width>
static __global__ void __launch_bounds__(threads_a_block)
    store_levels_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                        const __grid_constant__ struct ob_cuda_pieces outputs) {
  await_kernels_ahead();
  struct location location;
  if (plan.state->stop || !find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  const struct ob_view in =
      view_of(result_of(plan, next_copy(plan, plan.state->now), blockIdx.y), location);
  const unsigned valid = (unsigned)location.block.valid;
  void *output =
      block_address(outputs, plan.gathered ? blockIdx.y : 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 4 * size_of<dtype>);
  for (unsigned first = 0; first < valid; first += tile_elements)
    store_levels_tile<dtype, width>(in.words + location.word * width, scale_of(in, location),
                                    output, first, valid, aligned);
}

/* --- Launching */

/* These select a template's kernel by width, or by dtype and width. */
#define KERNEL_OF_WIDTH(width, kernel, last)                                                       \
  ((width) == 8 ? kernel<8, last> : (width) == 4 ? kernel<4, last> : kernel<2, last>)
#define KERNEL_OF_BOTH(dtype, width, kernel)                                                       \
  ((dtype) == ONEBIT_FLOAT32    ? KERNEL_AMONG(ONEBIT_FLOAT32, width, kernel)                      \
   : (dtype) == ONEBIT_BFLOAT16 ? KERNEL_AMONG(ONEBIT_BFLOAT16, width, kernel)                     \
                                : KERNEL_AMONG(ONEBIT_FLOAT16, width, kernel))
#define KERNEL_AMONG(dtype, width, kernel)                                                         \
  ((width) == 8 ? kernel<dtype, 8> : (width) == 4 ? kernel<dtype, 4> : kernel<dtype, 2>)

template <onebit_dtype_t dtype, unsigned width>
static auto compress_kernel_of(const struct ob_cuda_plan &plan) {
  return seals_or_opens(plan) ? compress_levels_kernel<dtype, width, true>
                              : compress_levels_kernel<dtype, width, false>;
}

cudaError_t ob_cuda_compress_levels(struct ob_cuda_plan part, struct ob_cuda_source source,
                                    cudaStream_t stream) {
  const onebit_dtype_t dtype = source.values || source.float32 ? ONEBIT_FLOAT32 : part.dtype;
  const unsigned messages = part.geometry.whole ? 1 : (unsigned)part.geometry.members;
  if (source.reciprocals) {
    auto *const kernel = KERNEL_OF_BOTH(dtype, part.geometry.width, compress_divided_kernel);
    return launch_early_kernel(kernel, part.max_blocks, messages, stream, part, source,
                               seals_or_opens(part));
  }
  auto *const kernel_of = KERNEL_OF_BOTH(dtype, part.geometry.width, compress_kernel_of);
  return launch_early_kernel(kernel_of(part), part.max_blocks, messages, stream, part, source);
}

cudaError_t ob_cuda_reduce_levels(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  const unsigned width = plan.geometry.width;
  auto *const kernel = seals_or_opens(plan) ? KERNEL_OF_WIDTH(width, reduce_levels_kernel, true)
                                            : KERNEL_OF_WIDTH(width, reduce_levels_kernel, false);
  return launch_early_kernel(kernel, round_to_thread_blocks(plan.max_blocks) + extra_warps(plan), 1,
                             stream, select_chunk(plan, chunk), weight_of_mean(plan));
}

cudaError_t ob_cuda_sum_levels(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs,
                               size_t chunk, cudaStream_t stream) {
  auto *const kernel = KERNEL_OF_BOTH(plan.output_dtype, plan.geometry.width, sum_levels_kernel);
  return launch_kernel(kernel, plan.max_blocks, 1, stream, select_chunk(plan, chunk), outputs,
                       weight_of_mean(plan));
}

cudaError_t ob_cuda_store_levels(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs,
                                 size_t chunk, cudaStream_t stream) {
  auto *const kernel = KERNEL_OF_BOTH(plan.output_dtype, plan.geometry.width, store_levels_kernel);
  return launch_early_kernel(kernel, plan.max_blocks, plan.geometry.members, stream,
                             select_chunk(plan, chunk), outputs);
}
