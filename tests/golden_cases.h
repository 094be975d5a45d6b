/*
 * Exchanges whose digests are recorded (golden_digests.h): of each width, scale rule and type two
 * ranks' messages, a server's, and what each of them keeps, over three steps of fixed inputs. Bits
 * that change here change for everybody: a run that mixes versions, and a checkpoint. Needs no test
 * framework, so that an emulated processor can walk it too (codec_digest.c).
 */
#ifndef ONEBIT_TESTS_GOLDEN_CASES_H
#define ONEBIT_TESTS_GOLDEN_CASES_H

#include "compression/codec.h"

struct golden {
  const char *name;
  /* 64-bit FNV-1a of all messages as they are sent, of the residuals at the end, and of the
   * results. */
  uint64_t messages, residuals, results;
};

size_t golden_count(void);

/* Runs a case with the codec; without a name where there is no memory. */
struct golden golden_run(size_t index, const struct ob_codec *codec);

#endif
