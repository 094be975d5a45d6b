/*
 * How equal is equal: values of a replayed case against the recorded ones.
 *
 * The norm's order of summation differs between implementations, so a value within rounding of zero
 * can fall on the other side and move by two scales; error feedback brings it back. Such exceptions
 * are counted, and a few of them are allowed:
 *
 *   allreduce   relative difference 1e-5; at most one value in 10,000 is an exception, and it
 *               differs in sign alone
 *   optimizers  relative difference 1e-5 + absolute 1e-6; at most one in 1,000 is an exception, and
 *               it differs by no more than a few lengths of that parameter's update
 */
#ifndef TOOLS_REPLAY_COMPARE_H
#define TOOLS_REPLAY_COMPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/replay/case.h"

struct replay_tally {
  uint64_t values, exceptions;
  uint64_t wild; /* exceptions that rounding does not explain */
  double worst;  /* the largest |difference| / (|recorded| + absolute / relative tolerance): a value
                    is an exception when this is above the relative tolerance; infinite for a value
                    that is not a number */
  /* The first exception. */
  uint64_t first_step, first_index;
  float first_got, first_recorded;
};

/* One step's results of an allreduce. */
void replay_compare_results(struct replay_tally *tally, size_t step, const float *got,
                            const float *recorded, size_t count);

/* A parameter's update is the shorter one of the recorded step and ours, so that neither a damaged
 * record nor a wild result widens its own allowance. Makes each length at least this step's. */
void replay_lengthen(float *length, const float *recorded_before, const float *recorded,
                     const float *got_before, const float *got, size_t count);

/* One step's parameters; `length`: of each one's longest update so far. */
void replay_compare_parameters(struct replay_tally *tally, size_t step, const float *got,
                               const float *recorded, const float *length, size_t count);

/* Takes in the values of another rank. */
void replay_tally_add(struct replay_tally *sum, const struct replay_tally *more);

/* Whether the exceptions stay within the allowance; words say how they do not. */
bool replay_within_allowance(enum replay_kind kind, const struct replay_tally *tally,
                             char words[REPLAY_WORDS]);

#endif
