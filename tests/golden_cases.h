/*
 * Exchanges whose digests are recorded (test_codec.c). For each width, scale rule and dtype, the
 * digests cover the messages and residuals of two ranks and a server in three steps with fixed
 * inputs. If these bits change, checkpoints and runs that mix versions of the library break. The
 * file needs no test framework, so that an emulated processor can run the cases too
 * (codec_digest.c).
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

/* Runs a case with the codec. The returned `name` is NULL if memory runs out. */
struct golden golden_run(size_t index, const struct ob_codec *codec);

#endif
