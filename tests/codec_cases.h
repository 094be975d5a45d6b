/*
 * The table of cases that every codec must pass: each kernel, on counts at the edges of words and
 * blocks, every type of buffer, and values at the edges of float32; all arrays end where an
 * inaccessible page begins. It needs no test framework, so that an emulated processor can run it
 * too (codec_digest.c).
 */
#ifndef ONEBIT_TESTS_CODEC_CASES_H
#define ONEBIT_TESTS_CODEC_CASES_H

#include <stddef.h>

#include "compression/codec.h"
#include "tests/support_sample.h"

/* Returns the cases to run. The caller frees the rows. */
struct sample codec_cases_sample(void);

/* Writes the name of the case, one word. */
void codec_case_name(size_t index, char *name, size_t size);

/* Runs the case, copies all that the kernel wrote or returned to *result, which the caller frees,
 * and returns its size. */
size_t codec_case_run(size_t index, const struct ob_codec *codec, unsigned char **result);

#endif
