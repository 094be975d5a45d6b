/*
 * Kernels of dense messages: they convert inputs to float32, compute means, and convert the means
 * back. The last section has the kernels for messages inside a host.
 *
 * Bytes per element: load reads 4 and writes 4 (16 bits: 2 and 4), convert reads 4 and writes 4 (4
 * and 2), the mean of N members reads 4 N and writes 4. Values follow a header of 40 bytes, so they
 * are aligned to 8 bytes only, and an access has 8 bytes, or 4 if its two elements have 16 bits.
 * Eight accesses of 4 bytes are 32 bytes in flight per thread, so 40 warps have 40 KiB of reads in
 * flight; a third of the bytes are reads.
 */
#include "cuda/location.cuh"

/* --- The mean of the members' messages, added in the order of members: for a server, and inside a
 * host */

/* A thread loads four pairs of 8 bytes from each of four members before the first addition: 128
 * bytes in flight. */
constexpr unsigned mean_pairs = 4, mean_elements = mean_pairs * 2 * OB_LANES, members_at_once = 4;

/* Sums the members' values of the lane's pairs from `first` up to `end`; values of 16 bits are
 * multiplied by `factor`. In place of a member past the last one the last member is loaded again,
 * which costs less than a branch. */
template <onebit_dtype_t dtype>
static __device__ inline void sum_pairs(const struct ob_cuda_plan &plan,
                                        const struct senders &senders,
                                        const struct location &location, float factor,
                                        unsigned first, unsigned end,
                                        float (&total)[mean_pairs][2]) {
  const unsigned members = (unsigned)plan.geometry.members;
  OB_UNROLL
  for (unsigned i = 0; i < mean_pairs * 2; i++)
    total[i / 2][i % 2] = -0.0f; /* -0 leaves the first term as it is, also a -0 */
  for (unsigned member = 0; member < members; member += members_at_once) {
    float term[members_at_once][mean_pairs][2] = {};
    OB_UNROLL
    for (unsigned s = 0; s < members_at_once; s++) {
      unsigned char *message = message_from(plan, senders, min(member + s, members - 1));
      const struct ob_view view = view_of(message, location);
      const size_t at = location.word * OB_LANES;
      const void *values = dtype == ONEBIT_FLOAT32 ? (const void *)(view.values + at)
                                                   : (const void *)(view.halves + at);
      OB_UNROLL
      for (unsigned k = 0; k < mean_pairs; k++)
        if (first + k * 2 * OB_LANES < end)
          load_values<dtype, true>(values, first + k * 2 * OB_LANES, end, true, term[s][k]);
    }
    OB_UNROLL
    for (unsigned i = 0; i < members_at_once * mean_pairs * 2; i++) {
      const unsigned s = i / (mean_pairs * 2), k = i / 2 % mean_pairs;
      if (member + s < members)
        total[k][i % 2] += dtype == ONEBIT_FLOAT32 ? term[s][k][i % 2] : factor * term[s][k][i % 2];
    }
  }
}

/* Writes the block's mean; `values` is the address of the message's values, `dtype` the type of the
 * members' messages. The sum of squares shows whether the values, and the squares that an optimizer
 * computes from them, are finite. The sum has no other use, so the order of its additions does not
 * matter. */
template <onebit_dtype_t dtype>
static __device__ inline void write_mean(const struct ob_cuda_plan &plan,
                                         const struct senders &senders,
                                         const struct location &location, float factor,
                                         float weight, float *values) {
  float *out = values + location.word * OB_LANES;
  const unsigned end = padded_count((unsigned)location.block.count);
  float lane = 0;
  for (unsigned first = 2 * lane_number(); first < end; first += mean_elements) {
    float mean[mean_pairs][2];
    sum_pairs<dtype>(plan, senders, location, factor, first, end, mean);
    OB_UNROLL
    for (unsigned k = 0; k < mean_pairs && first + k * 2 * OB_LANES < end; k++) {
      mean[k][0] *= weight;
      mean[k][1] *= weight;
      lane += mean[k][0] * mean[k][0] + mean[k][1] * mean[k][1];
      store_values<ONEBIT_FLOAT32, true>(out, first + k * 2 * OB_LANES, end, true, mean[k]);
    }
  }
  const float sum = sum_lanes(lane);
  if (lane_number() == 0 && !ob_is_finite(sum))
    note_flags(plan.state, OB_FLAG_NOT_FINITE);
}

constexpr unsigned pairs_a_tile = 8; /* the pairs of a tile that a lane has */

/* --- Load */

/* Loads the lane's elements of a tile into a message; returns whether they are finite. */
template <onebit_dtype_t dtype>
static __device__ inline bool load_dense(const void *input, float factor,
                                         const struct ob_block &block, bool aligned, unsigned first,
                                         float *values) {
  const unsigned end = padded_count((unsigned)block.count);
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
  const struct ob_view out = view_of(message_to(plan, plan.state->now, blockIdx.y), location);
  const void *input = block_address(source.inputs, 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(input, 2 * size_of<dtype>);
  float *values = out.values + location.word * OB_LANES;
  bool finite = true;
  for (unsigned first = 0; first < location.block.count; first += tile_elements)
    finite =
        load_dense<dtype>(input, source.factor, location.block, aligned, first, values) && finite;
  if (!finite)
    note_flags(plan.state, OB_FLAG_NOT_FINITE);
}

cudaError_t ob_cuda_load(struct ob_cuda_plan plan, struct ob_cuda_source source, size_t chunk,
                         cudaStream_t stream) {
  const onebit_dtype_t dtype = source.float32 ? ONEBIT_FLOAT32 : plan.dtype;
  return launch_kernel(KERNEL_OF(dtype, load_kernel), plan.max_blocks,
                       plan.geometry.whole ? 1 : plan.geometry.members, stream,
                       select_chunk(plan, chunk), source);
}

/* --- Mean */

static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    mean_kernel(const __grid_constant__ struct ob_cuda_plan plan, float weight) {
  const uint32_t now = plan.state->now; /* loaded first, so that no other load waits for it */
  struct location location;
  if (!find_location(plan, segment_of(plan, plan.geometry.member), &location))
    return;
  unsigned char *message = plan.geometry.whole
                               ? plan.geometry.outgoing
                               : result_of(plan, next_copy(plan, now), plan.geometry.member);
  write_mean<ONEBIT_FLOAT32>(plan, senders_of(plan, now), location, 1, weight,
                             view_of(message, location).values);
}

cudaError_t ob_cuda_mean(struct ob_cuda_plan plan, size_t chunk, cudaStream_t stream) {
  return launch_kernel(mean_kernel, plan.max_blocks, 1, stream, select_chunk(plan, chunk),
                       (float)(1.0 / (double)plan.geometry.members));
}

/* --- Convert */

/* Returns true if the result is one message with the mean; otherwise each member has a result. */
static bool is_mean_of_all(const struct ob_cuda_plan &plan) {
  return plan.geometry.whole && !plan.gathered;
}

/* grid.y is the member whose result is converted. Elements from `valid` on are not in the caller's
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
                               : result_of(plan, next_copy(plan, plan.state->now), blockIdx.y);
  const float *values = view_of(message, location).values + location.word * OB_LANES;
  const unsigned valid = (unsigned)location.block.valid;
  void *output =
      block_address(outputs, plan.gathered ? blockIdx.y : 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 2 * size_of<dtype>);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    float pair[pairs_a_tile][2];
    load_tile<ONEBIT_FLOAT32>(values, first, valid, true, pair);
    OB_UNROLL
    for (unsigned k = 0; k < pairs_a_tile; k++)
      bound_values<dtype>(pair[k]);
    store_tile<dtype>(output, first, valid, aligned, pair);
  }
}

cudaError_t ob_cuda_convert(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                            cudaStream_t stream) {
  return launch_kernel(KERNEL_OF(plan.output_dtype, convert_kernel), plan.max_blocks,
                       is_mean_of_all(plan) ? 1 : plan.geometry.members, stream,
                       select_chunk(plan, chunk), outputs, is_mean_of_all(plan));
}

/*
 * ---- Inside a host ----
 *
 * The kernels that a hierarchical plan runs inside its host compute the mean of the ranks' inputs
 * from the dense messages in which the ranks have sent inputs to each other. Inputs of 16 bits are
 * sent in their own type.
 *
 * Bytes per element with L ranks on the host: putting reads 4 and writes 4, the mean reads 4 L and
 * writes 4; with inputs of 16 bits 2 and 2, then 2 L and 4.
 */

/* --- Inputs */

/* Loads the lane's four elements from `first` on; elements from `valid` on are zeros. */
static __device__ inline void load_four(const uint16_t *input, unsigned first, unsigned valid,
                                        bool aligned, uint32_t (&raw)[2]) {
  if (aligned && first + 4 <= valid)
    return load_raw(input + first, raw);
  OB_UNROLL
  for (unsigned j = 0; j < 4; j++)
    raw[j / 2] |= (first + j < valid ? (uint32_t)input[first + j] : 0) << j % 2 * 16;
}

/* Copies the lane's elements of a tile. Returns whether their products with the factor are
 * finite. */
template <onebit_dtype_t dtype>
static __device__ inline bool put_tile(const uint16_t *input, const struct ob_block &block,
                                       unsigned first, bool aligned, float factor,
                                       uint16_t *values) {
  const unsigned end = padded_count((unsigned)block.count);
  const unsigned valid = input ? (unsigned)block.valid : 0; /* without input: zeros */
  uint32_t raw[fours_a_tile][2] = {};
  bool finite = true;
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    load_four(input, first + four_at(k), valid, aligned, raw[k]);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    float four[4];
    unpack_values<dtype>(raw[k], four);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++)
      finite = finite && ob_is_finite(factor * four[j]);
    if (first + four_at(k) < end)
      store_raw(values + first + four_at(k), raw[k]);
  }
  return finite;
}

/* grid.y is the segment of the message. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    put_kernel(const __grid_constant__ struct ob_cuda_plan window,
               const __grid_constant__ struct ob_cuda_source source) {
  struct location location;
  if (!find_location(window, segment_of(window, blockIdx.y), &location))
    return;
  const struct ob_view out = view_of(message_to(window, 0, blockIdx.y), location);
  const uint16_t *input =
      (const uint16_t *)block_address(source.inputs, 0, location.block, sizeof *input);
  const bool aligned = is_aligned(input, 4 * sizeof *input);
  uint16_t *values = out.halves + location.word * OB_LANES;
  bool finite = true;
  for (unsigned first = 0; first < location.block.count; first += tile_elements)
    finite =
        put_tile<dtype>(input, location.block, first, aligned, source.factor, values) && finite;
  if (!finite)
    note_flags(window.state, OB_FLAG_NOT_FINITE);
}

cudaError_t ob_cuda_host_put(struct ob_cuda_plan window, struct ob_cuda_source source, size_t chunk,
                             cudaStream_t stream) {
  if (!window.geometry.half)
    return ob_cuda_load(window, source, chunk, stream);
  return launch_kernel(
      window.dtype == ONEBIT_BFLOAT16 ? put_kernel<ONEBIT_BFLOAT16> : put_kernel<ONEBIT_FLOAT16>,
      window.max_blocks, window.geometry.members, stream, select_chunk(window, chunk), source);
}

/* --- The mean of inputs */

/* grid.y is the member of the group whose segment is averaged. */
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
  return launch_kernel(KERNEL_OF(dtype, host_mean_kernel), host.max_blocks, members, stream,
                       select_chunk(host, chunk), host.geometry.peer_stride / members, factor,
                       (float)(1.0 / (double)host.geometry.members), values, step);
}
