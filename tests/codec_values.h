/* Values for tests of codecs and kernels: a function of their position, the same on every
 * machine. */
#ifndef ONEBIT_TESTS_CODEC_VALUES_H
#define ONEBIT_TESTS_CODEC_VALUES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum codec_values {
  VALUES_GRADIENTS,
  VALUES_EDGES,
  VALUES_OVERFLOW, /* squares are infinite */
  VALUES_NAN,
  VALUES_LARGE, /* squares are finite, and the sum of many is not */
  VALUES_KINDS
};

static inline uint32_t scramble(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

static const float edge_values[] = {
    0.0f,     -0.0f,      0x1p-149f,     -0x1p-149f,      0x1p-126f, -0x1.fffffep-127f,
    1.0f,     -1.0f,      0x1p-24f,      65504.0f,        65520.0f,  -65519.996f,
    0x1p-25f, 0x1.8p-25f, 3.3895314e38f, 0x1.fffffep-15f, 0.1f};

static inline float value_at(size_t i, uint32_t salt, enum codec_values kind) {
  uint32_t random = scramble((uint32_t)i * 2654435761u + salt);
  float gradient = ((float)(random >> 8) * 0x1p-24f - 0.5f) * (float)(1 + i / 512 % 7);
  if (kind == VALUES_EDGES)
    return i % 3 ? gradient * 1e-3f
                 : edge_values[random % (sizeof edge_values / sizeof edge_values[0])];
  if (kind == VALUES_OVERFLOW)
    return gradient * 1e30f;
  if (kind == VALUES_LARGE)
    return gradient * 1e18f;
  if (kind == VALUES_NAN && i % 97 == 5)
    return i % 2 ? NAN : -INFINITY;
  return gradient;
}

#endif
