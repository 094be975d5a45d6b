/* The device's conversions of 16 bits against numerics.h's: all numbers, times factors. */
#include "compression/numerics.h"
#include "cuda/kernels.h"
#include "tests/gpu/harness.h"

#define NUMBERS ((size_t)1 << 16)

/* Products that are exact; halfway between two numbers, also among subnormal ones; between them;
 * on both sides of the largest; too small. 1 would leave a result alone. */
static const float factors[] = {-1,      1.5f,  0.5f,  0x1.8p-3f, 0x1p-13f, 0.7f,
                                1.0003f, 16384, 2.31f, 0x1p-30f,  1e-38f,   3e38f};

static float number_of(onebit_dtype_t dtype, uint16_t bits) {
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(bits) : ob_from_float16(bits);
}

/* Whatever its payload, a NaN is one. */
static bool is_right(onebit_dtype_t dtype, uint16_t from, float factor, uint16_t got) {
  const float product = number_of(dtype, from) * factor;
  uint16_t wanted;
  ob_store(&wanted, 0, dtype, product);
  return isnan(product) ? isnan(number_of(dtype, got)) : got == wanted;
}

/* From `first` on, so that 1 is the form for what is not aligned. */
static void convert(onebit_dtype_t dtype, float factor, size_t first,
                    const struct ob_cuda_state *state, uint16_t *device) {
  static uint16_t numbers[NUMBERS];
  size_t wrong = 0, last = 0;
  for (size_t i = 0; i < NUMBERS; i++)
    numbers[i] = (uint16_t)i;
  CHECK_CUDA(cudaMemcpy(device, numbers, sizeof numbers, cudaMemcpyHostToDevice));
  CHECK_CUDA(ob_cuda_scale(state, device + first, dtype, NUMBERS - first, factor, 0));
  CHECK_CUDA(cudaMemcpy(numbers, device, sizeof numbers, cudaMemcpyDeviceToHost));
  for (size_t i = first; i < NUMBERS; i++)
    if (!is_right(dtype, (uint16_t)i, factor, numbers[i])) {
      wrong++;
      last = i;
    }
  CHECK(wrong == 0, "dtype %d times %g, from %zu on: %zu are wrong, the last is %04zx, got %04x",
        (int)dtype, (double)factor, first, wrong, last, numbers[last]);
}

static void all_numbers(void) {
  struct ob_cuda_state *state;
  uint16_t *device;
  if (!CHECK_CUDA(cudaMalloc((void **)&state, sizeof *state)) ||
      !CHECK_CUDA(cudaMalloc((void **)&device, NUMBERS * sizeof *device)))
    return;
  CHECK_CUDA(cudaMemset(state, 0, sizeof *state));
  for (size_t f = 0; f < sizeof factors / sizeof factors[0]; f++)
    for (size_t first = 0; first < 2; first++) {
      convert(ONEBIT_BFLOAT16, factors[f], first, state, device);
      convert(ONEBIT_FLOAT16, factors[f], first, state, device);
    }
  CHECK_CUDA(cudaFree(device));
  CHECK_CUDA(cudaFree(state));
}

static const struct gpu_test tests[] = {{"all numbers", all_numbers, false}};
GPU_SUITE("conversions", tests)
