/*
 * The kernels of a hierarchical plan inside its host: the mean of the ranks' inputs, from the dense
 * messages in which they have sent them to each other. Inputs of 16 bits travel as they are.
 *
 * Bytes an element, L ranks on the host: 4 read and 4 written, then 4 L read and 4 written; of 16
 * bits 2 and 2, then 2 L and 4.
 */
#include "cuda/mean.cuh"

/* --- Inputs */

/* The lane's four from `first` on, zeros from `valid` on. */
static __device__ inline void load_four(const uint16_t *input, unsigned first, unsigned valid,
                                        bool aligned, uint32_t (&raw)[2]) {
  if (aligned && first + 4 <= valid)
    return load_raw(input + first, raw);
  OB_UNROLL
  for (unsigned j = 0; j < 4; j++)
    raw[j / 2] |= (first + j < valid ? (uint32_t)input[first + j] : 0) << j % 2 * 16;
}

/* Copies what the lane has of a tile. Returns whether it counts as finite. */
template <onebit_dtype_t dtype>
static __device__ inline bool put_tile(const uint16_t *input, const struct ob_block &block,
                                       unsigned first, bool aligned, float factor,
                                       uint16_t *values) {
  const unsigned end = whole_words((unsigned)block.count);
  const unsigned valid = input ? (unsigned)block.valid : 0; /* without input: zeros */
  uint32_t raw[fours_a_tile][2] = {};
  bool finite = true;
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    load_four(input, first + four_at(k), valid, aligned, raw[k]);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    float four[4];
    unpack<dtype>(raw[k], four);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++)
      finite = finite && ob_is_finite(factor * four[j]);
    if (first + four_at(k) < end)
      store_raw(values + first + four_at(k), raw[k]);
  }
  return finite;
}

/* grid.y is the segment that the message is about. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    put_kernel(const __grid_constant__ struct ob_cuda_plan window,
               const __grid_constant__ struct ob_cuda_source source) {
  struct location location;
  if (!find_location(window, segment_of(window, blockIdx.y), &location))
    return;
  const struct ob_view out = view_of(sent_to(window, 0, blockIdx.y), location);
  const uint16_t *input =
      (const uint16_t *)piece_of(source.inputs, 0, location.block, sizeof *input);
  const bool aligned = is_aligned(input, 4 * sizeof *input);
  uint16_t *values = out.halves + location.word * OB_LANES;
  bool finite = true;
  for (unsigned first = 0; first < location.block.count; first += tile_elements)
    finite =
        put_tile<dtype>(input, location.block, first, aligned, source.factor, values) && finite;
  if (!finite)
    note(window.state, OB_FLAG_NOT_FINITE);
}

cudaError_t ob_cuda_host_put(struct ob_cuda_plan window, struct ob_cuda_source source, size_t chunk,
                             cudaStream_t stream) {
  if (!window.geometry.half)
    return ob_cuda_load(window, source, chunk, stream);
  return launch(
      window.dtype == ONEBIT_BFLOAT16 ? put_kernel<ONEBIT_BFLOAT16> : put_kernel<ONEBIT_FLOAT16>,
      window.max_blocks, window.geometry.members, stream, of_chunk(window, chunk), source);
}

/* --- Their mean */

/* grid.y is the member of the group whose share it is. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    host_mean_kernel(const __grid_constant__ struct ob_cuda_plan host, size_t apart, float factor,
                     float weight, float *values, size_t step) {
  struct location location;
  if (!find_location(host, segment_of(host, host.geometry.member) + blockIdx.y, &location))
    return;
  struct senders senders = senders_of(host, 0);
  senders.own += blockIdx.y * apart;
  senders.before += blockIdx.y * apart;
  senders.after += blockIdx.y * apart;
  write_mean<dtype>(host, senders, location, factor, weight, values + blockIdx.y * step);
}

cudaError_t ob_cuda_host_mean(struct ob_cuda_plan host, float factor, size_t members, float *values,
                              size_t step, size_t chunk, cudaStream_t stream) {
  const onebit_dtype_t dtype = host.geometry.half ? host.dtype : ONEBIT_FLOAT32;
  return launch(KERNEL_OF(dtype, host_mean_kernel), host.max_blocks, members, stream,
                of_chunk(host, chunk), host.geometry.peer_stride / members, factor,
                (float)(1.0 / (double)host.geometry.members), values, step);
}
