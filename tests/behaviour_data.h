/* The inputs, memory and files of tests/behaviour_digest.c, which needs only the public headers. */
#ifndef ONEBIT_TESTS_BEHAVIOUR_DATA_H
#define ONEBIT_TESTS_BEHAVIOUR_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/plan.h"

/* The input does not repeat at any size that the library knows; some elements and blocks are
 * zero. */
float input(size_t i, int rank, int step);

/* Cuts the float32 `value` to the 16 bits of dtype: a bfloat16 exactly, a float16 to some
 * number. */
void store(void *buffer, size_t i, onebit_dtype_t dtype, float value);
size_t bytes_of(onebit_dtype_t dtype);

/* Returns memory of zeros; ends the process where there is none. */
void *memory(size_t bytes);

/* Digests the files of a directory, whatever their order, and removes them and the directory. */
uint64_t digest_files(const char *directory);

#endif
