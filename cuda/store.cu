/*
 * Stores results in the outputs.
 *
 * Bytes per element, 2048 elements a block: 1/8 signs read, 4 written as float32 or 2 of 16 bits:
 * 4.13 or 2.13. The limit is the card's copy bandwidth; a kernel that mostly writes may be somewhat
 * faster or slower than a copy.
 */
#include "cuda/location.cuh"

/* Returns the scale as raw words to which only signs are added: the conversion does not depend on
 * the sign, so it is made once for all elements. */
template <onebit_dtype_t dtype> static __device__ inline uint32_t unsigned_word(float scale) {
  if (dtype == ONEBIT_FLOAT32)
    return ob_bits_of(scale);
  return narrow_pair<dtype>(scale, scale);
}

/* Stores four elements at once, by adding signs to `word`. */
template <onebit_dtype_t dtype>
static __device__ inline void store_four(void *output, unsigned first, uint32_t four,
                                         uint32_t word) {
  constexpr unsigned elements = 4 / size_of<dtype>; /* in a word */
  uint32_t raw[4 / elements];
  OB_UNROLL
  for (unsigned i = 0; i < 4 / elements; i++) {
    const uint32_t signs = four >> i * elements;
    raw[i] = word | (elements == 1 ? signs << 31 : signs << 30 & OB_SIGN_BIT) |
             (elements == 1 ? 0 : (signs & 1) << 15);
  }
  store_raw((char *)output + (size_t)first * size_of<dtype>, raw);
}

/* grid.y is the member whose result is stored. Elements from `valid` on are not in the caller's
 * buffer. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block)
    store_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                 const __grid_constant__ struct ob_cuda_pieces outputs) {
  await_kernels_ahead();
  struct location location;
  if (plan.state->stop || !find_location(plan, segment_of(plan, blockIdx.y), &location))
    return;
  const struct ob_view in =
      view_of(result_of(plan, next_copy(plan, plan.state->now), blockIdx.y), location);
  const uint32_t *words = in.words + location.word;
  const float scale = ob_bound(scale_of(in, location), dtype);
  const uint32_t word = unsigned_word<dtype>(scale);
  const unsigned valid = (unsigned)location.block.valid;
  void *output =
      block_address(outputs, plan.gathered ? blockIdx.y : 0, location.block, size_of<dtype>);
  const bool aligned = is_aligned(output, 4 * size_of<dtype>);
  for (unsigned first = 0; first < valid; first += tile_elements) {
    const uint32_t signs = load_signs(words, first, valid);
    OB_UNROLL
    for (unsigned k = 0; k < fours_a_tile; k++) {
      const unsigned at = first + four_at(k);
      const uint32_t four = four_signs(signs, k, 0);
      if (aligned && at + 4 <= valid)
        store_four<dtype>(output, at, four, word);
      else
        for (unsigned j = 0; j < 4 && at + j < valid; j++)
          store_one<dtype>(output, at + j, ob_decode(four >> j & 1, scale));
    }
  }
}

cudaError_t ob_cuda_store(struct ob_cuda_plan plan, struct ob_cuda_pieces outputs, size_t chunk,
                          cudaStream_t stream) {
  if (plan.geometry.width > 1)
    return ob_cuda_store_levels(plan, outputs, chunk, stream);
  return launch_early_kernel(KERNEL_OF(plan.output_dtype, store_kernel), plan.max_blocks,
                             plan.geometry.members, stream, select_chunk(plan, chunk), outputs);
}

/*
 * ---- A result after its call ----
 *
 * Scales a result after the call that computed it.
 *
 * Bytes per element: its size read and written, or nothing if the call ended well and the factor is
 * 1.
 */

/* The architectures that the kernels are compiled for. The package's onebit.info finds them in the
 * library's file. */
#ifdef __CUDA_ARCH_LIST__
#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...)    TEXT_OF(__VA_ARGS__)
__attribute__((used)) static const char kernels[] = "onebit kernels: " TEXT(__CUDA_ARCH_LIST__);
#endif

/* Scales a tile with each warp. The same bits are a quiet NaN in each type; a product too large for
 * float16 becomes infinity, as the dense sum would. */
template <onebit_dtype_t dtype>
static __global__ void __launch_bounds__(threads_a_block)
    scale_kernel(const struct ob_cuda_state *state, char *result, size_t count, float factor) {
  const bool stopped = state->stop;
  const size_t first = warp_number() * tile_elements;
  if ((!stopped && factor == 1) || first >= count)
    return;
  result += first * size_of<dtype>;
  const unsigned end = (unsigned)(count - first < tile_elements ? count - first : tile_elements);
  const bool aligned = is_aligned(result, 4 * size_of<dtype>);
  float four[fours_a_tile][4];
  load_tile<dtype>(result, 0, end, aligned, four);
  OB_UNROLL
  for (unsigned i = 0; i < fours_a_tile * 4; i++)
    four[i / 4][i % 4] = stopped ? ob_float_of(0x7fc00000) : four[i / 4][i % 4] * factor;
  store_tile<dtype>(result, 0, end, aligned, four);
}

cudaError_t ob_cuda_scale(const struct ob_cuda_state *state, void *result, onebit_dtype_t dtype,
                          size_t count, float factor, cudaStream_t stream) {
  return launch_kernel(KERNEL_OF(dtype, scale_kernel), (count + tile_elements - 1) / tile_elements,
                       1, stream, state, (char *)result, count, factor);
}
