/*
 * Scales a result after the call that gave it.
 *
 * Bytes an element: its size read and written, or nothing where the call ended well and the factor
 * is 1.
 */
#include "cuda/location.cuh"

/* What the kernels are compiled for, for whoever looks into the library's file: the package's
 * onebit.info does. */
#ifdef __CUDA_ARCH_LIST__
#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...)    TEXT_OF(__VA_ARGS__)
__attribute__((used)) static const char kernels[] = "onebit kernels: " TEXT(__CUDA_ARCH_LIST__);
#endif

/* A warp a tile. A quiet not-a-number is one in each of the types; a product that is too large for
 * float16 is infinity, as the sum would be that it stands for. */
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
  return launch(KERNEL_OF(dtype, scale_kernel), (count + tile_elements - 1) / tile_elements, 1,
                stream, state, (char *)result, count, factor);
}
