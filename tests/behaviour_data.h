/* Inputs, memory and files of tests/behaviour_digest.c, which the public headers are enough for. */
#ifndef ONEBIT_TESTS_BEHAVIOUR_DATA_H
#define ONEBIT_TESTS_BEHAVIOUR_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/plan.h"

/* Repeats in no size that the library knows; some elements and blocks are zero. */
float input(size_t i, int rank, int step);

/* Numbers of 16 bits are made by cutting float32: as bfloat16 exactly, as float16 some number. */
void store(void *buffer, size_t i, onebit_dtype_t dtype, float value);
size_t bytes_of(onebit_dtype_t dtype);

/* Zeros; ends the process where there is no memory. */
void *memory(size_t bytes);

/* Digests the files of a directory, whatever their order, and removes them and the directory. */
uint64_t digest_files(const char *directory);

#endif
