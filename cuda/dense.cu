/*
 * Dense messages: inputs to float32, the mean of messages, and back.
 *
 * Bytes an element: load 4 read and 4 written (16 bits: 2 and 4), convert 4 read and 4 written (4
 * and 2), mean of N members 4 N read and 4 written. Values lie behind a header of 40 bytes, so they
 * are aligned to 8 bytes only, and accesses are of 8; of 4 where two elements have 16 bits, eight
 * of which are 32 bytes in flight a thread, and of reading, which is a third of the bytes, 40 warps
 * have 40 KiB.
 */
#include "cuda/mean.cuh"

constexpr unsigned pairs_a_tile = 8; /* that a lane has */

/* --- Load */

/* Returns whether what the lane has of the tile is finite. */
template <onebit_dtype_t dtype>
static __device__ inline bool load_dense(const void *input, float factor,
                                         const struct ob_block &block, bool aligned, unsigned first,
                                         float *values) {
  const unsigned end = whole_words((unsigned)block.count);
  const unsigned valid = input ? (unsigned)block.valid : 0; /* without input: zeros */
  float pair[pairs_a_tile][2];
  bool finite = true;
  load_tile<dtype>(input, first, valid, aligned, pair);
  OB_UNROLL
  for (unsigned k = 0; k < pairs_a_tile; k++) {
    pair[k][0] *= factor;
    pair[k][1] *= factor;
    finite = finite && ob_is_finite(pair[k][0]) && ob_is_finite(pair[k][1]);
  }
  store_tile<ONEBIT_FLOAT32>(values, first, end, true, pair);
  return finite;
}

/* grid.y is the member that the message is for. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    load_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                const __grid_constant__ struct ob_cuda_source source) {
  struct location location;
  if (!find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  const struct ob_view out = view_of(sent_to(plan, plan.state->now, blockIdx.y), location);
  const void *input = piece_of(source.inputs, 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(input, 2 * size_of<dtype>);
  float *values = out.values + location.word * OB_LANES;
  bool finite = true;
  for (unsigned first = 0; first < location.block.count; first += tile_elements)
    finite =
        load_dense<dtype>(input, source.factor, location.block, aligned, first, values) && finite;
  if (!finite)
    note(plan.state, OB_FLAG_NOT_FINITE);
}

cudaError_t ob_cuda_load(struct ob_cuda_plan plan, struct ob_cuda_source source, size_t chunk,
                         cudaStream_t stream) {
  const onebit_dtype_t dtype = source.float32 ? ONEBIT_FLOAT32 : plan.dtype;
  return launch(KERNEL_OF(dtype, load_kernel), plan.max_blocks,
                plan.geometry.whole ? 1 : plan.geometry.members, stream, of_chunk(plan, chunk),
                source);
}

/* --- Mean */

static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    mean_kernel(const __grid_constant__ struct ob_cuda_plan plan, float weight) {
  const uint32_t now = plan.state->now; /* no load has to wait for it */
  struct location location;
  if (!find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  unsigned char *message = plan.geometry.whole
                               ? plan.geometry.outgoing
                               : result_of(plan, next_of(plan, now), plan.geometry.member);
  write_mean<ONEBIT_FLOAT32>(plan, senders_of(plan, now), location, 1, weight,
                             view_of(message, location).values);
}

cudaError_t ob_cuda_mean(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  return launch(mean_kernel, plan.max_blocks, 1, stream, of_chunk(plan, chunk),
                (float)(1.0 / (double)plan.geometry.members));
}

/* --- Convert */

/* One message to all, or one from each member. */
static bool is_mean_of_all(const struct ob_cuda_plan &plan) {
  return plan.geometry.whole && !plan.gathered;
}

/* grid.y is the member whose result it is. What is past `valid` has no place in the caller's
 * buffer. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    convert_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                   const __grid_constant__ struct ob_cuda_pieces outputs, bool mean_of_all) {
  struct location location;
  if (plan.state->stop || !find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  unsigned char *message = mean_of_all
                               ? plan.geometry.outgoing
                               : result_of(plan, next_of(plan, plan.state->now), blockIdx.y);
  const float *values = view_of(message, location).values + location.word * OB_LANES;
  const unsigned valid = (unsigned)location.block.valid;
  void *output = piece_of(outputs, plan.gathered ? blockIdx.y : 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 2 * size_of<dtype>);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float pair[pairs_a_tile][2];
    load_tile<ONEBIT_FLOAT32>(values, first, valid, true, pair);
    OB_UNROLL
    for (unsigned k = 0; k < pairs_a_tile; k++)
      bound_some<dtype>(pair[k]);
    store_tile<dtype>(output, first, valid, aligned, pair);
  }
}

cudaError_t ob_cuda_convert(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                            cudaStream_t stream) {
  return launch(KERNEL_OF(plan.output_dtype, convert_kernel), plan.max_blocks,
                is_mean_of_all(plan) ? 1 : plan.geometry.members, stream, of_chunk(plan, chunk),
                outputs, is_mean_of_all(plan));
}
