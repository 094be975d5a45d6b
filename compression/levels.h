/*
 * The arithmetic of one element in messages of 2, 4 and 8 bits per element, shared by host and
 * device code.
 *
 * An element of b bits encodes a level; the decoded value is the level times the scale of its
 * block. In 2 bits the levels are -3/2, -1/2, 1/2 and 3/2: three levels with a 0 would leave a
 * quarter of the codes unused. In 4 bits they are -7 .. 7. In 8 bits they are small floating-point
 * numbers, with a sign, 4 bits of exponent and 3 of mantissa: 0, and +-(1 + m / 8) * 2^e with e
 * from -15 to 0, except +-2^-15. Their relative precision is the same for the small and the large
 * values of a block, which helps an optimizer that divides by each element's own magnitude
 * (docs/scales.md). Messages of one bit, which is a sign, are in numerics.h.
 *
 * The code of a level is: in 2 bits, the level minus 1/2, in two's complement; in 4 bits, the
 * level, in two's complement; in 8 bits, the sign, the exponent + 15, and the mantissa. A group of
 * 32 elements has b words; element i occupies b bits of them, from bit i * b on, little-endian.
 */
#ifndef OB_COMPRESSION_LEVELS_H
#define OB_COMPRESSION_LEVELS_H

#include "compression/numerics.h"

#define OB_MAX_WIDTH 8

OB_INLINE int ob_width_is_known(int bits) {
  return bits == 1 || bits == 2 || bits == 4 || bits == OB_MAX_WIDTH;
}

OB_INLINE float ob_largest_level(unsigned width) {
  return width == 2 ? 1.5f : width == 4 ? 7.0f : 1.875f;
}

/* Returns the value of the largest level with ONEBIT_SCALE_RMS, divided by the block's root mean
 * square. Larger values are cut off, and the difference stays in the residual. For 2 bits 1, 1.5, 2
 * and 3 were compared, for 4 bits 2, 3, 4, 7 and no bound. Of these, the returned values harm a
 * program's own Adam least, except for smaller values, which leave twice the residual
 * (docs/scales.md). With 8 bits nothing is cut off. */
OB_INLINE float ob_level_reach(unsigned width) {
  return width == 2 ? 1.5f : width == 4 ? 3.0f : ob_float_of(0x7f800000u);
}

/* Returns the scale at which the largest level represents this magnitude. If the reciprocal of the
 * scale would not be finite, the scale is 0: the whole block then stays in the residual. */
OB_INLINE float ob_scale_to_level(float magnitude, unsigned width) {
  const float scale = magnitude / ob_largest_level(width);
  return scale < 0x1p-126f ? 0 : scale;
}

/* Returns the scale of a block of `count` > 0 elements, from the largest magnitude and the sum of
 * squares, which must be finite. */
OB_INLINE float ob_level_scale(float sum, size_t count, float largest, onebit_scale_t rule,
                               unsigned width) {
  const float reach = ob_level_reach(width) * ob_scale((double)sum, count, ONEBIT_SCALE_RMS);
  const float limit = rule == ONEBIT_SCALE_RMS && reach < largest ? reach : largest;
  return ob_scale_to_level(limit, width);
}

OB_INLINE float ob_inverse_scale(float scale) { return scale > 0 ? 1 / scale : 0; }

OB_INLINE int32_t ob_clamp_int(int32_t value, int32_t min, int32_t max) {
  const int32_t above = value > min ? value : min;
  return above < max ? above : max;
}

/* Adding OB_ROUNDER rounds a number below 2^22 to the nearest integer, ties to even: the integer is
 * then in the low bits of the sum. */
#define OB_ROUNDER 0x1.8p23f

/* Returns the code of the level nearest to `ratio`, a value divided by its scale. For 8 bits it
 * uses the upper 12 bits of the float: sign, exponent and 3 bits of mantissa. The exponent field of
 * 2^-15 is 112. */
OB_INLINE int32_t ob_encode_level(float ratio, unsigned width) {
  if (width == 8) {
    const uint32_t bits = ob_bits_of(ratio), rounded = (bits & ~OB_SIGN_BIT) + (1u << 19);
    return ob_clamp_int((int32_t)(rounded >> 20) - 112 * 8, 0, 127) | (int32_t)(bits >> 31 << 7);
  }
  const float offset = width == 2 ? 0.5f : 0.0f;
  const int32_t level = (int32_t)(ob_bits_of(ratio - offset + OB_ROUNDER) - ob_bits_of(OB_ROUNDER));
  return width == 2 ? ob_clamp_int(level, -2, 1) : ob_clamp_int(level, -7, 7);
}

/* Returns the level that a code stands for. */
OB_INLINE float ob_decode_level(int32_t code, unsigned width) {
  if (width == 8) {
    const uint32_t magnitude = (uint32_t)code & 127, sign = (uint32_t)code >> 7 << 31;
    return ob_select(magnitude != 0, ob_float_of((magnitude + 112 * 8) << 20 | sign), 0);
  }
  return (float)code + (width == 2 ? 0.5f : 0.0f);
}

/* Returns the code of element i of a group; with 2 or 4 bits the code is sign-extended. */
OB_INLINE int32_t ob_read_code(const uint32_t *fields, unsigned i, unsigned width) {
  const uint32_t high = fields[i * width / 32] << (32 - width - i * width % 32);
  return width == 8 ? (int32_t)(high >> 24) : (int32_t)high >> (32 - width);
}

#endif
