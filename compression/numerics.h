/*
 * The arithmetic of one element, written once: for the portable code here, and for device code,
 * which includes this file too. The vector codecs say the same in their own words
 * (codec_template.h) and are held to it bit for bit by the tests. Everything is IEEE float32 with
 * one rounding an operation: compile with -ffp-contract=off (nvcc: -fmad=false).
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

/* Elements in a word of sign bits, and lanes in the defined sum: element i of a block is added to
 * lane i mod 32. */
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

/* Chooses one of two values, without a branch that would make the compiler split a loop in two. */
OB_INLINE float ob_choose(int condition, float yes, float no) {
  const uint32_t all = 0u - (uint32_t)(condition != 0);
  return ob_float_of((ob_bits_of(yes) & all) | (ob_bits_of(no) & ~all));
}

/* The value of a sign: +scale, or -scale when the bit is 1. Scales are never negative. */
OB_INLINE float ob_decode(uint32_t sign, float scale) {
  return ob_float_of(ob_bits_of(scale) | sign << 31);
}

/* The residual, from the compensated value c and the scale it was sent with: e = c - s * sign(c).
 * Never -0. */
OB_INLINE float ob_residual_of(float residual, float scale) {
  return residual - ob_float_of(ob_bits_of(scale) | (ob_bits_of(residual) & OB_SIGN_BIT));
}

/* An element's contribution to its lane. */
OB_INLINE float ob_magnitude(float value, onebit_scale_t rule) {
  return rule == ONEBIT_SCALE_RMS ? value * value : ob_float_of(ob_bits_of(value) & ~OB_SIGN_BIT);
}

/* The sum of the lanes, by halving: 16, 8, 4, 2, 1. Overwrites the lanes. */
OB_INLINE float ob_sum_lanes(float lanes[OB_LANES]) {
  for (int width = OB_LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lanes[i] += lanes[i + width];
  return lanes[0];
}

/* Lanes of the defined sum of doubles: the most threads of a device's block, and so many that the
 * additions of a vector or a warp do not wait for each other. */
#define OB_SUM_LANES 1024

/* Adds the sums of blocks in double: sum number i goes to lane i mod 1024, in order, and the lanes
 * are halved: 512, 256 .. 1. Lanes past `count` are zeros, and left out: no sum is negative, so
 * none is -0. */
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

/* The scale of `count` > 0 elements whose magnitudes sum to `sum`. Not finite when the sum is
 * not. */
OB_INLINE float ob_scale(double sum, size_t count, onebit_scale_t rule) {
  double mean = sum / (double)count;
  return (float)(rule == ONEBIT_SCALE_RMS ? sqrt(mean) : mean);
}

/* The one scale of a whole buffer or share, as DeepSpeed has it: the norm and the root of the count
 * are float32 before they are divided. The root's rounding is the same in every step, so that it
 * adds up. */
OB_INLINE float ob_buffer_scale(double sum, size_t count, onebit_scale_t rule) {
  if (rule != ONEBIT_SCALE_RMS)
    return ob_scale(sum, count, rule);
  return (float)sqrt(sum) / (float)sqrt((double)count);
}

OB_INLINE int ob_is_finite(float value) { return (ob_bits_of(value) & 0x7f800000u) != 0x7f800000u; }

/* bfloat16 is the upper half of a float32; rounding is to nearest, ties to even. A NaN stays one:
 * its quiet bit is set, since rounding could turn a payload in the lower half into infinity. */
OB_INLINE float ob_from_bfloat16(uint16_t value) { return ob_float_of((uint32_t)value << 16); }

OB_INLINE uint16_t ob_to_bfloat16(float value) {
  uint32_t bits = ob_bits_of(value);
  if ((bits & ~OB_SIGN_BIT) > 0x7f800000u)
    return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* float16 to float32 is exact. A subnormal's value is mantissa * 2^-24; a NaN becomes quiet, as
 * hardware has it. */
OB_INLINE float ob_from_float16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000) << 16, exponent = value >> 10 & 31,
           mantissa = value & 0x3ff;
  if (exponent == 31)
    return ob_float_of(sign | 0x7f800000u | (mantissa ? 0x400000u : 0) | mantissa << 13);
  if (exponent == 0)
    return ob_float_of(sign | ob_bits_of((float)mantissa * 0x1p-24f));
  return ob_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Rounds to nearest, ties to even; beyond 65504 + half a step it is infinity. Subnormals: adding
 * 0.5 leaves the value's multiple of 2^-24, rounded by the addition itself, in the low bits of the
 * sum. */
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

/* Bounds a result that is stored as float16, before it is rounded: a number (or infinity) beyond
 * the largest float16 becomes the largest, since finite inputs must not give infinity and cutting
 * off is the smaller error. NaN stays NaN. */
OB_INLINE float ob_bound_float16(float value) {
  const float below = value > OB_FLOAT16_MAX ? OB_FLOAT16_MAX : value;
  return below < -OB_FLOAT16_MAX ? -OB_FLOAT16_MAX : below;
}

/* Bounds a result of any type: bfloat16 has the range of float32. */
OB_INLINE float ob_bound(float value, onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT16 ? ob_bound_float16(value) : value;
}

OB_INLINE size_t ob_dtype_size(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

/* One element of a buffer as float32. */
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

/* Rounds a scale to the type of the buffer; a scale that is not finite stays so, so that it is
 * noticed. */
OB_INLINE float ob_round(float value, onebit_dtype_t dtype) {
  if (dtype == ONEBIT_FLOAT32 || !ob_is_finite(value))
    return value;
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(ob_to_bfloat16(value))
                                  : ob_from_float16(ob_to_float16(ob_bound_float16(value)));
}

/* Returns base^exponent, by squaring: it makes the same multiplications on every machine, which a
 * library's pow does not promise. */
OB_INLINE double ob_power(double base, uint64_t exponent) {
  double power = 1;
  for (; exponent; exponent >>= 1, base *= base)
    if (exponent & 1)
      power *= base;
  return power;
}

/* The bias corrections of step number `step`, the first being 1. */
OB_INLINE float ob_adam_momentum_factor(double beta1, uint64_t step) {
  return (float)(1 / (1 - ob_power(beta1, step)));
}

OB_INLINE float ob_adam_variance_factor(double beta2, uint64_t step) {
  return (float)(1 / sqrt(1 - ob_power(beta2, step)));
}

/* The factors of Adam that are the same for all elements of a step. */
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

/* 1 / sqrt(value) of a normal positive number, to 7e-4 of it, at a fifth of the time of a root and
 * a quotient: it is for what one bit will stand for. The first guess has minus half of the value's
 * exponent; one step of Newton's method, whose constants make the largest error smallest, follows
 * (Kadlec, "Improving the fast inverse square root", 2010). Infinity gives what is not finite. */
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

/* The moments that an optimizer keeps of this rank's own gradients, one an element, in bfloat16. */
enum ob_moment_rule {
  OB_MOMENTS_NONE,
  OB_MOMENTS_SECOND /* Efficient-Adam: running mean of squares */
};

/* Rounds a finite moment up or down by chance, the more likely to the nearer value: a running mean
 * of 1,000 values changes by less than half of bfloat16's spacing a step, which rounding to nearest
 * would never let it. The chance is the low half of the element's residual, which is as good as
 * random, and the same on every codec and after a checkpoint. */
OB_INLINE uint16_t ob_moment_round(float moment, float chance) {
  return (uint16_t)((ob_bits_of(moment) + (ob_bits_of(chance) & 0xffff)) >> 16);
}

/* Factors of the moments' update, and of the unbiased estimate of the mean gradient's second
 * moment: `now` times the moment of this step, plus `before` times the one before it. With P ranks
 * whose gradients are independent the mean has 1 / P^2 of the sum of all ranks' moments, and the
 * others' are most likely what this rank's was before its own gradient of this step came. In a
 * block that has no step yet they are as new as this rank's: `fresh` times that of this step. */
struct ob_moment_factors {
  float beta2, one_minus_beta2, epsilon;
  float now, before, fresh;
  float floor; /* of a block, added to the estimate; or 0 */
};

/* Sets the factors that depend on the number of the step. With many ranks a quarter is taken to be
 * as new as this one: so the first gradient of an element after a long time counts at most 2
 * sqrt(P) times, and not P times, if it came to all ranks at once. */
OB_INLINE void ob_moment_correct(struct ob_moment_factors *f, double beta2, double ranks,
                                 uint64_t step) {
  const double now = 1 / (1 - ob_power(beta2, step));
  const double as_new = ranks > 4 ? 1 / (4 * ranks) : 1 / (ranks * ranks);
  f->now = (float)(now * as_new);
  f->fresh = (float)(now / ranks);
  f->before = step > 1 ? (float)((1 / ranks - as_new) / (1 - ob_power(beta2, step - 1))) : 0;
}

/* The factors for a block whose last step had this scale; 0 also where no step is stored. */
OB_INLINE struct ob_moment_factors ob_moment_factors_for(struct ob_moment_factors f,
                                                         float momentum_scale) {
  f.now = momentum_scale > 0 ? f.now : f.fresh;
  f.before = momentum_scale > 0 ? f.before : 0;
  return f;
}

/* The weight of the mean of a table's moments before this step. Of 0.3 and 1 this one ended nearer
 * to dense Adam, with 4 ranks and 1,000 steps on words of C headers. */
#define OB_TABLE_FLOOR 1.0f

/* Words of 32 elements, from `first` on, of a table's part of a rank's residual: the mean moment is
 * computed from this sample, another one for each block. The block alone would be too small a
 * sample: it may be a single row. */
struct ob_sample {
  size_t first, end, step;
};
/* The least number of words in a sample, or all where there are fewer. It has less than twice as
 * many, since the step is rounded down. */
#define OB_SAMPLE_MIN 64

OB_INLINE struct ob_sample ob_sample_for(size_t block, size_t words) {
  const size_t step = words > OB_SAMPLE_MIN ? words / OB_SAMPLE_MIN : 1;
  const struct ob_sample sample = {block % step, words, step};
  return sample;
}

OB_INLINE float ob_moment_floor(float times, float moments, struct ob_sample sample,
                                const struct ob_moment_factors *f) {
  const size_t words = (sample.end - sample.first + sample.step - 1) / sample.step;
  return times * f->fresh * (moments / (float)(words * OB_LANES));
}

/* The gradient divided for the exchange, before it is weighed; moves its moment. The divisor is the
 * root of the estimate plus epsilon squared and the floor. Not finite where the moment is too
 * large. */
OB_INLINE float ob_moment_input(enum ob_moment_rule rule, float gradient, uint16_t *moment,
                                float chance, const struct ob_moment_factors *f) {
  if (rule == OB_MOMENTS_NONE)
    return gradient;
  const float before = ob_from_bfloat16(*moment);
  const float now = f->beta2 * before + (f->one_minus_beta2 * gradient) * gradient;
  const float mean = f->now * now + f->before * before;
  *moment = ob_moment_round(now, chance);
  /* Without a floor nothing is added, since that would take a register more in a kernel. */
  const float least = f->epsilon * f->epsilon;
  return gradient * ob_reciprocal_root(mean + (f->floor == 0 ? least : least + f->floor));
}

/* The factors of Lion: its step is the sign of a direction. */
struct ob_lion_factors {
  float beta1, one_minus_beta1; /* of the direction */
  float beta2, one_minus_beta2; /* of the momentum */
};

OB_INLINE float ob_lion_direction(float momentum, float gradient, const struct ob_lion_factors *f) {
  return f->beta1 * momentum + f->one_minus_beta1 * gradient;
}

OB_INLINE float ob_lion_momentum(float momentum, float gradient, const struct ob_lion_factors *f) {
  return f->beta2 * momentum + f->one_minus_beta2 * gradient;
}

/* The signs of elements without a direction: one bit cannot say 0, so elements of a word alternate
 * between + and -, and a block of them does not move as a whole. */
#define OB_LION_ZEROS 0xaaaaaaaau

OB_INLINE float ob_lion_signed(float direction, unsigned element) {
  return direction == 0 ? ob_float_of(element % 2 ? OB_SIGN_BIT : 0) : direction;
}

/* A server's use of the mean of the ranks' values, and the state that it keeps. */
enum ob_serve_rule {
  OB_SERVE_MEAN, /* adds the residual, sends signs and a scale, keeps the new error */
  OB_SERVE_LION  /* keeps the momentum; sends signs of the direction, and 1 for a scale */
};

struct ob_serving {
  enum ob_serve_rule rule;
  struct ob_lion_factors lion;
};

/* Bits an element of a server's messages where ranks send `width`: with Lion always a sign. */
OB_INLINE unsigned ob_serve_width(enum ob_serve_rule rule, unsigned width) {
  return rule == OB_SERVE_LION ? 1 : width;
}

/* The rule of a server's scale, and the scale in its message: with Lion a block without a direction
 * anywhere, as of a layer that is not trained, has the scale 0. */
OB_INLINE onebit_scale_t ob_serve_measure(enum ob_serve_rule rule, onebit_scale_t scale) {
  return rule == OB_SERVE_LION ? ONEBIT_SCALE_MEAN_ABSOLUTE : scale;
}

OB_INLINE float ob_serve_scale(enum ob_serve_rule rule, float scale) {
  return rule == OB_SERVE_LION && scale > 0 ? 1 : scale;
}

/* A server's state of an element: with Lion its momentum, else its residual. */
OB_INLINE float ob_residual_content(enum ob_serve_rule rule, float residual, float scale) {
  return rule == OB_SERVE_LION ? residual : ob_residual_of(residual, scale);
}

/* The reciprocal 1 / denominator, which replaces the variance once it is frozen. With `keep_zero`
 * an element without variance does not move. */
OB_INLINE float ob_adam_reciprocal(float variance, int keep_zero, const struct ob_adam_factors *f) {
  return keep_zero && variance == 0 ? 0 : 1 / ob_adam_denominator(variance, f);
}

/* The momentum of a frozen step, from the last one times beta1, which is how it is stored from then
 * on. */
OB_INLINE float ob_adam_frozen_momentum(float stored, float gradient,
                                        const struct ob_adam_factors *f) {
  return stored + f->one_minus_beta1 * gradient;
}

/* Bounds a step, whatever it was, by -bound .. bound. */
OB_INLINE float ob_bounded(float step, float bound) {
  const float below = step < bound ? step : bound;
  return below > -bound ? below : -bound;
}

/* Bounds value * reciprocal by -limit .. limit. The result is not finite where the value's square
 * is not: such a step has to be skipped, and a bounded value would hide that. */
OB_INLINE float ob_limited(float value, float reciprocal, float limit) {
  const float square = value * value;
  return ob_bounded(value * reciprocal, limit) + (square - square);
}

/* The new parameter, from the step m^ / denominator. */
OB_INLINE float ob_adam_parameter(float parameter, float step, float learning_rate,
                                  float weight_decay) {
  return parameter - learning_rate * (step + weight_decay * parameter);
}

#endif
