/*
 * The ladder of a plan: between `bits` and `max_bits` it takes twice as many bits an element where
 * the residual outgrows what is fed in, and half as many where those would do.
 *
 * Every OB_LADDER_WINDOW calls each block of this rank's residuals has been measured once. What the
 * rank makes of it goes out in flags of all its messages of the next call, in which every rank
 * hears of every other, as it does of values that are not finite; when that call is committed all
 * of them move alike, or none, and their messages have the new width from the call after it on. A
 * call that is skipped or fails measures nothing and moves nothing, on any rank.
 */
#ifndef OB_COLLECTIVES_LADDER_H
#define OB_COLLECTIVES_LADDER_H

#include <stdbool.h>
#include <stdint.h>

#include "compression/measure.h"
#include "onebit/plan.h"

struct onebit_plan;

#define OB_LADDER_WINDOW 16 /* OB_MEASURE_EVERY: each block is measured once */

struct ob_ladder {
  unsigned min, max;              /* bits; equal: it never moves */
  bool fixed;                     /* by a budget: it measures, and does not move by itself */
  uint64_t calls, moves;          /* committed; how often the width has changed */
  struct ob_norms worker, server; /* sums of this window */
  size_t elements;                /* of the worker residual */
  size_t max_stride;              /* bytes of the longest message of all widths */
  double ratio; /* of this rank's residual to its input, in the window before: the larger one */
  /* In the call after a window: this rank's flags, and its residual's root mean square; what was
   * heard of all ranks so far, with the largest of those. */
  bool voting;
  unsigned wish, heard;
  float rms, max_rms;
  float agreed_rms;        /* of the latest window that all ranks know of, */
  unsigned measured_width; /* in messages of so many bits */
  unsigned fitted;         /* while a budget is spent: the bits so far */
  unsigned settling;       /* windows until it may move again */
  unsigned calm;           /* windows in a row in which all ranks could do with less */
  unsigned patience;       /* so many must be */
  bool descended;          /* since the plan was made */
};

/* Memory for norms. ONEBIT_ERROR_UNSUPPORTED: not what this plan's device has. */
onebit_status_t ob_ladder_create(struct onebit_plan *plan);
void ob_ladder_destroy(struct onebit_plan *plan);

/* Back to the fewest bits, as after making. */
void ob_ladder_reset(struct onebit_plan *plan);

/* At the beginning of a call; when it is committed. */
void ob_ladder_begin(struct onebit_plan *plan);
void ob_ladder_commit(struct onebit_plan *plan);

/* The width from the next call on, which is then another's to choose. */
void ob_ladder_fix(struct onebit_plan *plan, unsigned width);

/* What a message of another rank says. */
void ob_ladder_hear(struct ob_ladder *ladder, unsigned flags, float rms);

/* Bytes that may arrive in the place of `messages` messages of `bytes` in all: a rank that has
 * refused a message may be at another width than the others, and says so in messages of that one.
 * ob_ladder_width_of: the width of such a message. */
size_t ob_ladder_max_bytes(const struct onebit_plan *plan, size_t messages, size_t bytes);
unsigned ob_ladder_width_of(const struct ob_ladder *ladder, unsigned flags, unsigned width);

#endif
