/*
 * Exchanges whose digests are recorded (test_codec.c): for each width, scale rule and type the
 * messages of two ranks and a server, and their residuals, over three steps of fixed inputs. A
 * change of these bits breaks runs that mix versions, and checkpoints. Needs no test framework, so
 * that an emulated processor can run them too (codec_digest.c).
 */
#ifndef ONEBIT_TESTS_GOLDEN_CASES_H
#define ONEBIT_TESTS_GOLDEN_CASES_H

#include "compression/codec.h"

struct golden {
  const char *name;
  /* Digests (64-bit FNV-1a) of all messages sent, of the final residuals, and of the results. */
  uint64_t messages, residuals, results;
};

size_t golden_count(void);

/* Runs a case with the codec; returns no name if there is no memory. */
struct golden golden_run(size_t index, const struct ob_codec *codec);

#endif
