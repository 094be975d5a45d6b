/*
 * The bfloat16 type, with only the conversions that kernels use. NaNs are handled as in
 * cuda_fp16.h.
 */
#ifndef EMULATION_CUDA_BF16_H
#define EMULATION_CUDA_BF16_H

#include <math.h>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

/* Rounds to the nearest multiple of the smallest step at the value's exponent, ties to even. */
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (isnan(value))
    return {0x7fff};
  const int step = fabsf(value) < 0x1p-126f || isinf(value) ? -133 : ilogbf(value) - 7;
  const float rounded = (float)ldexp(rint(ldexp((double)value, -step)), step);
  return {(unsigned short)(emulation::bits<unsigned>(rounded) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}

#endif
