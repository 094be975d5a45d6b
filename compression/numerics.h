/*
 * The arithmetic of one element, shared by the portable code and device code, which both include
 * this file. The vector codecs (codec_template.h) do the same operations; tests compare the results
 * bit for bit. All arithmetic is IEEE float32, and every operation is rounded separately: compile
 * with -ffp-contract=off (nvcc: -fmad=false).
 */
#ifndef OB_COMPRESSION_NUMERICS_H
#define OB_COMPRESSION_NUMERICS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "onebit/plan.h"

#ifdef __CUDACC__
#define OB_INLINE static __host__ __device__ inline
#else
#define OB_INLINE static inline
#endif

/* The number of elements in a word of sign bits, and of lanes in the defined sum: element i of a
 * block is added to lane i mod 32. */
#define OB_LANES 32

#define OB_SIGN_BIT 0x80000000u

OB_INLINE uint32_t ob_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

OB_INLINE float ob_float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Returns one of two values, without a branch, which would make the compiler split a loop in
 * two. */
OB_INLINE float ob_select(int condition, float yes, float no) {
  const uint32_t all = 0u - (uint32_t)(condition != 0);
  return ob_float_of((ob_bits_of(yes) & all) | (ob_bits_of(no) & ~all));
}

/* Returns the value of a sign bit: +scale if the bit is 0, and -scale if it is 1. Scales are never
 * negative. */
OB_INLINE float ob_decode(uint32_t sign, float scale) {
  return ob_float_of(ob_bits_of(scale) | sign << 31);
}

/* Returns the residual from the compensated value c and the scale s with which it was sent: e = c -
 * s * sign(c). Never -0. */
OB_INLINE float ob_residual_of(float residual, float scale) {
  return residual - ob_float_of(ob_bits_of(scale) | (ob_bits_of(residual) & OB_SIGN_BIT));
}

/* Returns an element's contribution to its lane of the sum. */
OB_INLINE float ob_magnitude(float value, onebit_scale_t rule) {
  return rule == ONEBIT_SCALE_RMS ? value * value : ob_float_of(ob_bits_of(value) & ~OB_SIGN_BIT);
}

/* Returns the sum of the lanes, which are added in halves: 16, 8, 4, 2, 1. Overwrites the lanes. */
OB_INLINE float ob_sum_lanes(float lanes[OB_LANES]) {
  for (int width = OB_LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lanes[i] += lanes[i + width];
  return lanes[0];
}

/* The number of lanes in the defined sum of doubles. A thread block of a device has at most this
 * number of threads, and with so many lanes the additions of a vector or a warp need not wait for
 * each other. */
#define OB_SUM_LANES 1024

/* Returns the sum of the blocks' sums, in double: sum number i is added to lane i mod 1024, in
 * order, and then the lanes are added in halves: 512, 256 .. 1. Lanes from `count` on are zeros and
 * left out, which changes nothing: no sum is negative, so none is -0. */
OB_INLINE double ob_add_sums(const double *sums, size_t count) {
  double lanes[OB_SUM_LANES];
  size_t width = 1;
  while (width < count && width < OB_SUM_LANES)
    width *= 2;
  for (size_t i = 0; i < width; i++)
    lanes[i] = i < count ? sums[i] : 0;
  size_t first = width;
  for (; first + width <= count; first += width)
    for (size_t i = 0; i < width; i++)
      lanes[i] += sums[first + i];
  for (size_t i = 0; first + i < count; i++)
    lanes[i] += sums[first + i];
  for (width /= 2; width > 0; width /= 2)
    for (size_t i = 0; i < width; i++)
      lanes[i] += lanes[i + width];
  return lanes[0];
}

/* Returns the scale of `count` > 0 elements whose magnitudes have the sum `sum`. The scale is not
 * finite if the sum is not. */
OB_INLINE float ob_scale(double sum, size_t count, onebit_scale_t rule) {
  double mean = sum / (double)count;
  return (float)(rule == ONEBIT_SCALE_RMS ? sqrt(mean) : mean);
}

/* Returns the one scale of a whole buffer or segment as DeepSpeed computes it: the norm and the
 * root of the count are rounded to float32 before they are divided. The root's rounding error is
 * the same in every step and accumulates, so it has to be reproduced. */
OB_INLINE float ob_buffer_scale(double sum, size_t count, onebit_scale_t rule) {
  if (rule != ONEBIT_SCALE_RMS)
    return ob_scale(sum, count, rule);
  return (float)sqrt(sum) / (float)sqrt((double)count);
}

OB_INLINE int ob_is_finite(float value) { return (ob_bits_of(value) & 0x7f800000u) != 0x7f800000u; }

/* bfloat16 is the upper half of a float32. Rounding is to nearest, ties to even. A NaN stays a NaN:
 * its quiet bit is set, since rounding could turn a NaN whose payload is in the lower half into
 * infinity. */
OB_INLINE float ob_from_bfloat16(uint16_t value) { return ob_float_of((uint32_t)value << 16); }

OB_INLINE uint16_t ob_to_bfloat16(float value) {
  uint32_t bits = ob_bits_of(value);
  if ((bits & ~OB_SIGN_BIT) > 0x7f800000u)
    return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Converts float16 to float32, which is exact. The value of a subnormal is mantissa * 2^-24; a NaN
 * becomes quiet, as in hardware. */
OB_INLINE float ob_from_float16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000) << 16, exponent = value >> 10 & 31,
           mantissa = value & 0x3ff;
  if (exponent == 31)
    return ob_float_of(sign | 0x7f800000u | (mantissa ? 0x400000u : 0) | mantissa << 13);
  if (exponent == 0)
    return ob_float_of(sign | ob_bits_of((float)mantissa * 0x1p-24f));
  return ob_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Rounds to nearest, ties to even; a value beyond 65504 plus half a step becomes infinity. For
 * subnormals 0.5 is added: the addition itself rounds to a multiple of 2^-24, which is then in the
 * low bits of the sum. */
OB_INLINE uint16_t ob_to_float16(float value) {
  uint32_t bits = ob_bits_of(value), sign = bits >> 16 & 0x8000, size = bits & ~OB_SIGN_BIT;
  if (size > 0x7f800000u)
    return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
  if (size >= 0x477ff000u)
    return (uint16_t)(sign | 0x7c00);
  if (size < 0x38800000u)
    return (uint16_t)(sign | (ob_bits_of(ob_float_of(size) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | (size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13);
}

/* The largest float16. */
#define OB_FLOAT16_MAX 65504.0f

/* Bounds a result that is stored as float16, before it is rounded. A number or infinity beyond the
 * largest float16 becomes the largest: finite inputs must not give infinity, and cutting off is the
 * smaller error. NaN stays NaN. */
OB_INLINE float ob_bound_float16(float value) {
  const float below = value > OB_FLOAT16_MAX ? OB_FLOAT16_MAX : value;
  return below < -OB_FLOAT16_MAX ? -OB_FLOAT16_MAX : below;
}

/* Bounds a result to the range of its type; bfloat16 has the range of float32. */
OB_INLINE float ob_bound(float value, onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT16 ? ob_bound_float16(value) : value;
}

OB_INLINE size_t ob_dtype_size(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

/* Returns one element of a buffer as float32. */
OB_INLINE float ob_load(const void *buffer, size_t index, onebit_dtype_t dtype) {
  if (dtype == ONEBIT_FLOAT32)
    return ((const float *)buffer)[index];
  uint16_t value = ((const uint16_t *)buffer)[index];
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(value) : ob_from_float16(value);
}

OB_INLINE void ob_store(void *buffer, size_t index, onebit_dtype_t dtype, float value) {
  if (dtype == ONEBIT_FLOAT32)
    ((float *)buffer)[index] = value;
  else
    ((uint16_t *)buffer)[index] =
        dtype == ONEBIT_BFLOAT16 ? ob_to_bfloat16(value) : ob_to_float16(value);
}

/* Rounds a scale to the type of the buffer. A scale that is not finite is not changed, so that
 * later checks find it. */
OB_INLINE float ob_round(float value, onebit_dtype_t dtype) {
  if (dtype == ONEBIT_FLOAT32 || !ob_is_finite(value))
    return value;
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(ob_to_bfloat16(value))
                                  : ob_from_float16(ob_to_float16(ob_bound_float16(value)));
}

/* Returns base^exponent by repeated squaring. The multiplications are the same on every machine,
 * which a library's pow does not promise. */
OB_INLINE double ob_power(double base, uint64_t exponent) {
  double power = 1;
  for (; exponent; exponent >>= 1, base *= base)
    if (exponent & 1)
      power *= base;
  return power;
}

/* Return Adam's bias corrections for step number `step`; the first step is 1. */
OB_INLINE float ob_adam_momentum_factor(double beta1, uint64_t step) {
  return (float)(1 / (1 - ob_power(beta1, step)));
}

OB_INLINE float ob_adam_variance_factor(double beta2, uint64_t step) {
  return (float)(1 / sqrt(1 - ob_power(beta2, step)));
}

/* The factors of Adam, which are the same for all elements of a step. */
struct ob_adam_factors {
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float momentum_factor; /* 1 / (1 - beta1^t), or 1 */
  float variance_factor; /* 1 / sqrt(1 - beta2^t), or 1 */
  float epsilon;
};

OB_INLINE float ob_adam_momentum(float momentum, float gradient, const struct ob_adam_factors *f) {
  return f->beta1 * momentum + f->one_minus_beta1 * gradient;
}

OB_INLINE float ob_adam_variance(float variance, float gradient, const struct ob_adam_factors *f) {
  return f->beta2 * variance + (f->one_minus_beta2 * gradient) * gradient;
}

OB_INLINE float ob_adam_denominator(float variance, const struct ob_adam_factors *f) {
  return sqrtf(variance) * f->variance_factor + f->epsilon;
}

/* ob_reciprocal_root computes 1 / sqrt(value) of a normal positive number, in a fifth of the time
 * of a square root and a division. Its relative error is at most 7e-4, which is small enough for a
 * value that is sent as one bit. ob_root_guess makes a first guess by negating and halving the
 * exponent. One step of Newton's method follows, with constants that minimise the largest error
 * (Kadlec, "Improving the fast inverse square root", 2010). The result for infinity is not
 * finite. */
#define OB_ROOT_GUESS  0x5f1ffff9
#define OB_ROOT_FACTOR 0.703952253f
#define OB_ROOT_TERM   2.38924456f

OB_INLINE float ob_root_guess(float value) {
  return ob_float_of(OB_ROOT_GUESS - (ob_bits_of(value) >> 1));
}

OB_INLINE float ob_reciprocal_root(float value) {
  const float guess = ob_root_guess(value);
  return guess * (OB_ROOT_FACTOR * (OB_ROOT_TERM - value * guess * guess));
}

/* The rules for the moments that an optimizer stores of this rank's own gradients, one bfloat16
 * number for each element. */
enum ob_moment_rule {
  OB_MOMENTS_NONE,
  OB_MOMENTS_SECOND /* Efficient-Adam: a running mean of squares */
};

/* Rounds a finite moment up or down at random, more likely to the nearer value. A running mean over
 * 1,000 values changes in one step by less than half of bfloat16's spacing, so if it were rounded
 * to nearest, it would never change. The low half of `chance`, the element's residual, serves as
 * the random number, so that it is the same on every codec and after a checkpoint. */
OB_INLINE uint16_t ob_moment_round(float moment, float chance) {
  return (uint16_t)((ob_bits_of(moment) + (ob_bits_of(chance) & 0xffff)) >> 16);
}

/* The factors of a moment's update, and of an unbiased estimate of the mean gradient's second
 * moment. With P ranks whose gradients are independent, the mean gradient's second moment is 1 /
 * P^2 times the sum of all ranks' moments. A rank knows only its own moment. It assumes that the
 * moments of the other ranks equal its own moment before this step. So the estimate is `now` times
 * the moment after this step plus `before` times the moment before it. In a block that has had no
 * step yet the estimate is `fresh` times the moment after this step. */
struct ob_moment_factors {
  float beta2, one_minus_beta2, epsilon;
  float now, before, fresh;
  float floor; /* the floor that is added to the estimate in a table's block; or 0 */
};

/* Sets the factors that depend on the number of the step. With more than four ranks, a quarter of
 * them is assumed to have a moment that includes this step's gradient. So if an element gets its
 * first gradient after a long time, on all ranks at once, that gradient is weighted by at most 2
 * sqrt(P), and not by P. */
OB_INLINE void ob_moment_set_factors(struct ob_moment_factors *f, double beta2, double ranks,
                                     uint64_t step) {
  const double now = 1 / (1 - ob_power(beta2, step));
  const double as_new = ranks > 4 ? 1 / (4 * ranks) : 1 / (ranks * ranks);
  f->now = (float)(now * as_new);
  f->fresh = (float)(now / ranks);
  f->before = step > 1 ? (float)((1 / ranks - as_new) / (1 - ob_power(beta2, step - 1))) : 0;
}

/* Returns the factors for a block whose last step had the scale momentum_scale. The scale is 0 if
 * the block has had no step, or none is stored. */
OB_INLINE struct ob_moment_factors ob_choose_moment_factors(struct ob_moment_factors f,
                                                            float momentum_scale) {
  f.now = momentum_scale > 0 ? f.now : f.fresh;
  f.before = momentum_scale > 0 ? f.before : 0;
  return f;
}

/* The floor of a table (an embedding) is this factor times the mean of the table's moments before
 * this step. The factors 0.3 and 1 were compared in training runs with 4 ranks and 1,000 steps on
 * words of C headers: with 1 the loss ended nearer to dense Adam's. */
#define OB_TABLE_FLOOR 1.0f

/* A sample of the words of 32 elements in a rank's part of a table: the words first, first + step
 * and so on, up to `end`. The table's mean moment is computed from a sample, a different one for
 * each block. The block itself would be too small as a sample: it may be a single row. */
struct ob_sample {
  size_t first, end, step;
};
/* A sample has at least OB_SAMPLE_MIN words, or all words if the part has fewer. It has fewer
 * than twice OB_SAMPLE_MIN words, since the step is rounded down. */
#define OB_SAMPLE_MIN 64

OB_INLINE struct ob_sample ob_choose_sample(size_t block, size_t words) {
  const size_t step = words > OB_SAMPLE_MIN ? words / OB_SAMPLE_MIN : 1;
  const struct ob_sample sample = {block % step, words, step};
  return sample;
}

OB_INLINE float ob_moment_floor(float times, float moments, struct ob_sample sample,
                                const struct ob_moment_factors *f) {
  const size_t words = (sample.end - sample.first + sample.step - 1) / sample.step;
  return times * f->fresh * (moments / (float)(words * OB_LANES));
}

/* Updates the element's moment, and returns the divided gradient, which is exchanged. The divisor
 * is the square root of the sum of the estimate, epsilon squared and the floor. The result is not
 * finite if the moment is too large. */
OB_INLINE float ob_moment_input(enum ob_moment_rule rule, float gradient, uint16_t *moment,
                                float chance, const struct ob_moment_factors *f) {
  if (rule == OB_MOMENTS_NONE)
    return gradient;
  const float before = ob_from_bfloat16(*moment);
  const float now = f->beta2 * before + (f->one_minus_beta2 * gradient) * gradient;
  const float mean = f->now * now + f->before * before;
  *moment = ob_moment_round(now, chance);
  /* A floor of 0 is not added, since the addition would take one more register in a kernel. */
  const float least = f->epsilon * f->epsilon;
  return gradient * ob_reciprocal_root(mean + (f->floor == 0 ? least : least + f->floor));
}

/* The factors of Lion, whose step is the sign of a direction. */
struct ob_lion_factors {
  float beta1, one_minus_beta1; /* factors of the direction */
  float beta2, one_minus_beta2; /* factors of the momentum */
};

OB_INLINE float ob_lion_direction(float momentum, float gradient, const struct ob_lion_factors *f) {
  return f->beta1 * momentum + f->one_minus_beta1 * gradient;
}

OB_INLINE float ob_lion_momentum(float momentum, float gradient, const struct ob_lion_factors *f) {
  return f->beta2 * momentum + f->one_minus_beta2 * gradient;
}

/* The signs of elements whose direction is 0. One bit cannot represent 0, so the signs of such
 * elements alternate between + and -, and a block of them does not move as a whole. */
#define OB_LION_ZEROS 0xaaaaaaaau

/* Returns the direction; if it is 0, a zero with the sign that OB_LION_ZEROS has for this
 * element. */
OB_INLINE float ob_lion_replace_zero(float direction, unsigned element) {
  return direction == 0 ? ob_float_of(element % 2 ? OB_SIGN_BIT : 0) : direction;
}

/* The rules by which a server uses the mean of the ranks' values, and the state that it stores. */
enum ob_serve_rule {
  OB_SERVE_MEAN, /* adds the residual, sends signs and a scale, stores the new residual */
  OB_SERVE_LION  /* stores the momentum; sends signs of the direction, and the scale 1 */
};

struct ob_serving {
  enum ob_serve_rule rule;
  struct ob_lion_factors lion;
};

/* Returns the bits per element of a server's messages if ranks send `width` bits; with Lion always
 * 1, a sign. */
OB_INLINE unsigned ob_serve_width(enum ob_serve_rule rule, unsigned width) {
  return rule == OB_SERVE_LION ? 1 : width;
}

/* Returns the rule by which a server computes its scale. */
OB_INLINE onebit_scale_t ob_serve_scale_rule(enum ob_serve_rule rule, onebit_scale_t scale) {
  return rule == OB_SERVE_LION ? ONEBIT_SCALE_MEAN_ABSOLUTE : scale;
}

/* Returns the scale in a server's message. With Lion it is 1, or 0 for a block in which every
 * direction is 0, as in a layer that is not trained. */
OB_INLINE float ob_serve_scale(enum ob_serve_rule rule, float scale) {
  return rule == OB_SERVE_LION && scale > 0 ? 1 : scale;
}

/* Returns a server's state of an element: with Lion the momentum, otherwise the residual. */
OB_INLINE float ob_serve_state(enum ob_serve_rule rule, float residual, float scale) {
  return rule == OB_SERVE_LION ? residual : ob_residual_of(residual, scale);
}

/* Returns 1 / denominator, which replaces the variance once that is frozen. With `keep_zero` an
 * element whose variance is 0 does not change. */
OB_INLINE float ob_adam_reciprocal(float variance, int keep_zero, const struct ob_adam_factors *f) {
  return keep_zero && variance == 0 ? 0 : 1 / ob_adam_denominator(variance, f);
}

/* Returns the momentum of a step with frozen variance. `stored` is the last momentum times beta1;
 * after the freeze momentum is stored in this form. */
OB_INLINE float ob_adam_frozen_momentum(float stored, float gradient,
                                        const struct ob_adam_factors *f) {
  return stored + f->one_minus_beta1 * gradient;
}

/* Bounds a step to -bound .. bound; a NaN becomes `bound`. */
OB_INLINE float ob_bound_step(float step, float bound) {
  const float below = step < bound ? step : bound;
  return below > -bound ? below : -bound;
}

/* Bounds value * reciprocal to -limit .. limit. If the value's square is not finite, the result is
 * not finite either: such a step has to be skipped, and a bounded value would hide that. */
OB_INLINE float ob_bound_product(float value, float reciprocal, float limit) {
  const float square = value * value;
  return ob_bound_step(value * reciprocal, limit) + (square - square);
}

/* Returns the new parameter; `step` is the corrected momentum divided by the denominator. */
OB_INLINE float ob_adam_parameter(float parameter, float step, float learning_rate,
                                  float weight_decay) {
  return parameter - learning_rate * (step + weight_decay * parameter);
}

#endif
