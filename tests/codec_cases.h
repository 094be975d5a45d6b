/*
 * The table of cases that every codec is held to: each kernel, on counts at the edges of words and
 * blocks, every type of buffer, and values at the edges of float32; all arrays end where an
 * inaccessible page begins. Needs no test framework, so that an emulated processor can walk it too
 * (codec_digest.c).
 */
#ifndef ONEBIT_TESTS_CODEC_CASES_H
#define ONEBIT_TESTS_CODEC_CASES_H

#include <stddef.h>

#include "compression/codec.h"
#include "tests/support_sample.h"

/* The cases to walk. The caller frees the rows. */
struct sample codec_cases_sample(void);

/* Writes what the case is, as one word. */
void codec_case_name(size_t index, char *name, size_t size);

/* Runs the case and copies all that the kernel wrote or returned to *result, which the caller
 * frees; gives its size. */
size_t codec_case_run(size_t index, const struct ob_codec *codec, unsigned char **result);

#endif
