/*
 * The float16 type, with only the conversions that kernels use. A NaN becomes the NaN that the
 * hardware's arithmetic makes, of either sign. CUDA promises only that a NaN stays a NaN.
 */
#ifndef EMULATION_CUDA_FP16_H
#define EMULATION_CUDA_FP16_H

#include <math.h>

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 31, mantissa = value.bits & 0x3ff;
  if (exponent == 31 && mantissa)
    return emulation::bits<float>(0x7fffffffu);
  const float size = exponent == 31 ? INFINITY
                     : exponent     ? ldexpf((float)(0x400 | mantissa), exponent - 25)
                                    : (float)mantissa * 0x1p-24f;
  return value.bits & 0x8000 ? -size : size;
}

/* Rounds to the nearest multiple of the smallest step at the value's exponent, ties to even. */
inline __half __float2half_rn(float value) {
  if (isnan(value))
    return {0x7fff};
  const unsigned sign = signbit(value) ? 0x8000 : 0;
  if (fabsf(value) >= 65520) /* half a step beyond the largest float16 */
    return {(unsigned short)(sign | 0x7c00)};
  const int step = fabsf(value) < 0x1p-14f ? -24 : ilogbf(value) - 10;
  const unsigned steps = (unsigned)rint(ldexp(fabs((double)value), -step));
  return {(unsigned short)(sign | (step == -24 ? steps : ((unsigned)(step + 24) << 10) + steps))};
}

inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}

#endif
