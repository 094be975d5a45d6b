/*
 * The table of cases that every codec must pass. It combines each kernel with element counts around
 * multiples of words and blocks, every buffer dtype, and extreme float32 values. All arrays end
 * where an inaccessible page begins. The table needs no test framework, so that an emulated
 * processor can run it too (codec_digest.c).
 */
#ifndef ONEBIT_TESTS_CODEC_CASES_H
#define ONEBIT_TESTS_CODEC_CASES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "compression/codec.h"
#include "tests/support_sample.h"

/* Returns the cases to run. The caller frees the rows. */
struct sample codec_cases_sample(void);

/* Writes the name of the case, which contains no blank. */
void codec_case_name(size_t index, char *name, size_t size);

/* Runs the case and returns the size of *result, which the caller frees. *result is a copy of
 * everything that the kernel wrote or returned. */
size_t codec_case_run(size_t index, const struct ob_codec *codec, unsigned char **result);

/*
 * Arrays for codec kernels, and the results that tests compare. Each array ends where an
 * inaccessible page begins.
 */

struct guarded_array {
  void *data, *mapping;
  size_t mapped;
};

struct guarded_array array_create(size_t bytes);
void array_destroy(struct guarded_array *array);

/* Returns the number of words that hold `count` elements. */
size_t count_words(size_t count);

/* Creates finite float32 values with the layout of residuals, which is padded to whole words. Each
 * `salt` gives different values. */
struct guarded_array words_create(size_t count, uint32_t salt);

/* Creates second moments in the same layout. Some are zero, as before the first gradient. */
struct guarded_array moments_create(size_t count, uint32_t salt);

/* Create payloads of messages: fields_create makes fields of `width` bits, bits_create makes
 * signs. */
struct guarded_array fields_create(size_t count, unsigned width, uint32_t salt);
struct guarded_array bits_create(size_t count, uint32_t salt);

/* Everything that a kernel wrote or returned; the caller frees the bytes. */
struct result {
  unsigned char *bytes;
  size_t size;
};

void result_add(struct result *result, const void *data, size_t size);

/* Appends a sum to a result. All NaNs are stored alike, since the payload bits of a NaN are not
 * defined. */
void result_add_sum(struct result *result, float sum);

/* Append an array to a result, and destroy the array. All NaNs are stored as the same number, since
 * processors make NaNs of different signs. */
void result_add_array(struct result *result, struct guarded_array *array, size_t size);
void result_add_numbers(struct result *result, struct guarded_array *array, size_t count);

/* Values for tests of codecs and kernels. Each value depends only on its position and is the same
 * on every machine. */

enum codec_values {
  VALUES_GRADIENTS,
  VALUES_EDGES,
  VALUES_OVERFLOW, /* squares are infinite */
  VALUES_NAN,
  VALUES_LARGE, /* squares are finite, but the sum of many is infinite */
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
