/*
 * Arrays for kernels of codecs, which end where an inaccessible page begins, and what is left of
 * them to compare. As codec_cases.h without a test framework.
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

/* Words of so many elements. */
size_t words_of(size_t count);

/* Float32 in whole words, as residuals lie; finite. `salt` makes arrays differ. */
struct guarded_array words_create(size_t count, uint32_t salt);

/* Moments, as they lie beside them: some are zero, as before the first gradient. */
struct guarded_array moments_create(size_t count, uint32_t salt);

/* Payloads of messages: fields of so many bits, and signs. */
struct guarded_array fields_create(size_t count, unsigned width, uint32_t salt);
struct guarded_array bits_create(size_t count, uint32_t salt);

/* All that a kernel wrote or returned; the bytes are the caller's to free. */
struct result {
  unsigned char *bytes;
  size_t size;
};

void result_add(struct result *result, const void *data, size_t size);

/* The payload of a NaN is not defined: a sum that is one is kept as "not finite". */
void result_add_sum(struct result *result, float sum);

/* These destroy the array. Processors make NaNs of different signs: of numbers all are kept as
 * one. */
void result_add_array(struct result *result, struct guarded_array *array, size_t size);
void result_add_numbers(struct result *result, struct guarded_array *array, size_t count);

#endif
