/*
 * Arrays for codec kernels, each of which ends where an inaccessible page begins, and the results
 * to compare. Needs no test framework, as codec_cases.h.
 */
#ifndef ONEBIT_TESTS_CODEC_ARRAYS_H
#define ONEBIT_TESTS_CODEC_ARRAYS_H

#include <stddef.h>
#include <stdint.h>

struct guarded_array {
  void *data, *mapping;
  size_t mapped;
};

struct guarded_array array_create(size_t bytes);
void array_destroy(struct guarded_array *array);

/* Returns how many words hold `count` elements. */
size_t words_of(size_t count);

/* Finite float32 values in whole words, laid out as residuals. `salt` makes arrays differ. */
struct guarded_array words_create(size_t count, uint32_t salt);

/* Moments in the same layout: some are zero, as before the first gradient. */
struct guarded_array moments_create(size_t count, uint32_t salt);

/* Payloads of messages: fields of `width` bits, and signs. */
struct guarded_array fields_create(size_t count, unsigned width, uint32_t salt);
struct guarded_array bits_create(size_t count, uint32_t salt);

/* Everything that a kernel wrote or returned; the caller frees the bytes. */
struct result {
  unsigned char *bytes;
  size_t size;
};

void result_add(struct result *result, const void *data, size_t size);

/* Adds a sum; a NaN becomes "not finite", since its payload is not defined. */
void result_add_sum(struct result *result, float sum);

/* These destroy the array. Numbers keep one NaN for all, since processors make NaNs of different
 * signs. */
void result_add_array(struct result *result, struct guarded_array *array, size_t size);
void result_add_numbers(struct result *result, struct guarded_array *array, size_t count);

#endif
