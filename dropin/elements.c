/* Loops over elements have no branches, so that compilers vectorise them. */
#include "dropin/elements.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bfloat16_to_float(uint16_t half) { return bits_to_float((uint32_t)half << 16); }

/* Rounds to nearest, ties to even. A NaN becomes a quiet NaN. */
static inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_to_bits(value);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  uint32_t quiet = bits >> 16 | 0x40;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* Shifts the exponent field to its position in a float. A multiplication corrects the difference of
 * the biases, 127 - 15, and normalises subnormal numbers. Infinity gets its exponent back. */
static inline float float16_to_float(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  float value = bits_to_float(magnitude) * 0x1p112f;
  uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : float_to_bits(value);
  return bits_to_float(bits | sign);
}

/* Rounds to nearest, ties to even. A value that is subnormal as a half is rounded by adding 0.5:
 * the last bit of the sum then stands for 2^-24, the smallest half. */
static inline uint16_t float_to_float16(float value) {
  uint32_t sign = float_to_bits(value) >> 16 & 0x8000, bits = float_to_bits(value) & 0x7fffffff;
  uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  uint32_t small = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000;
  uint32_t large = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
  uint32_t magnitude = bits < 0x38800000 ? small : bits < 0x477ff000 ? normal : large;
  return (uint16_t)(sign | magnitude);
}

size_t ob_elements_size(onebit_dtype_t dtype) {
  return dtype == OB_DOUBLE        ? sizeof(double)
         : dtype == ONEBIT_FLOAT32 ? sizeof(float)
                                   : sizeof(uint16_t);
}

/* Runs a loop over elements of a type. `expression` computes with floats: `a` is the element of
 * `to`, `b` that of `from`. */
#define LOOP(type, wide, narrow, to, from, count, expression)                                      \
  do {                                                                                             \
    type *t = (to);                                                                                \
    const type *f = (from);                                                                        \
    for (size_t i = 0; i < (count); i++) {                                                         \
      float a = wide(t[i]), b = wide(f[i]);                                                        \
      t[i] = narrow(expression);                                                                   \
      (void)a, (void)b;                                                                            \
    }                                                                                              \
  } while (0)
#define FOR_EACH(dtype, to, from, count, expression)                                               \
  do {                                                                                             \
    if ((dtype) == ONEBIT_FLOAT32)                                                                 \
      LOOP(float, , , to, from, count, expression);                                                \
    else if ((dtype) == ONEBIT_BFLOAT16)                                                           \
      LOOP(uint16_t, bfloat16_to_float, float_to_bfloat16, to, from, count, expression);           \
    else                                                                                           \
      LOOP(uint16_t, float16_to_float, float_to_float16, to, from, count, expression);             \
  } while (0)

void ob_elements_read(onebit_dtype_t dtype, float *to, const void *from, size_t count) {
  if (dtype == ONEBIT_FLOAT32) {
    memcpy(to, from, count * sizeof *to);
    return;
  }
  const uint16_t *narrow = from;
  const double *wide = from;
  for (size_t i = 0; i < count; i++)
    to[i] = dtype == OB_DOUBLE         ? (float)wide[i]
            : dtype == ONEBIT_BFLOAT16 ? bfloat16_to_float(narrow[i])
                                       : float16_to_float(narrow[i]);
}

void ob_elements_multiply(onebit_dtype_t dtype, void *to, const void *from, size_t count,
                          float factor) {
  FOR_EACH(dtype, to, from, count, b * factor);
}

void ob_elements_divide(onebit_dtype_t dtype, void *to, size_t count, float divisor) {
  if (dtype == OB_DOUBLE) {
    for (size_t i = 0; i < count; i++)
      ((double *)to)[i] /= (double)divisor;
    return;
  }
  FOR_EACH(dtype, to, to, count, a / divisor);
}

void ob_elements_add(onebit_dtype_t dtype, void *to, const void *from, size_t count) {
  FOR_EACH(dtype, to, from, count, a + b);
}

bool ob_elements_narrow(float *to, const double *from, size_t count) {
  double largest = 0;
  bool finite = true;
  for (size_t i = 0; i < count; i++) {
    double magnitude = fabs(from[i]);
    finite = finite && magnitude <= FLT_MAX;
    largest = magnitude > largest ? magnitude : largest;
    to[i] = (float)from[i];
  }
  return finite && (largest == 0 || largest >= FLT_MIN / FLT_EPSILON);
}

void ob_elements_widen(double *to, const float *from, size_t count, double factor) {
  for (size_t i = 0; i < count; i++)
    to[i] = (double)from[i] * factor;
}

double ob_elements_norm(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}
