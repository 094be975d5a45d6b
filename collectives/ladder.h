/*
 * The ladder of a plan: between `bits` and `max_bits` it doubles the bits an element where the
 * residual outgrows the input, and halves them where that suffices (docs/ladder.md). A rank sends
 * the width that it asks for in flags of all its messages of a call, so every rank receives the
 * flags of every other one. When that call is committed all ranks change to the same width, or none
 * does; messages have the new width from the next call on. A call that is skipped or fails measures
 * and changes nothing, on any rank.
 */
#ifndef OB_COLLECTIVES_LADDER_H
#define OB_COLLECTIVES_LADDER_H

#include <stdbool.h>
#include <stdint.h>

#include "compression/blocks.h"
#include "compression/message.h"
#include "onebit/plan.h"

struct onebit_plan;

#define OB_LADDER_WINDOW 16 /* OB_MEASURE_EVERY: each block is measured once */

/* The plan takes fewer bits after this number of windows in which they would have sufficed on all
 * ranks. It doubles after every climb, so that a width that is too small is tried less often. */
#define OB_LADDER_PATIENCE 4

/* The state that decides the width of the next calls. In a checkpoint it is a row of numbers, so
 * each member is 8 bytes, and ladder_number of optimizers/checkpoint/optimizer.c has their
 * ranges. */
struct ob_ladder_state {
  uint64_t width, last_width; /* of the next call and of the last; set by ob_ladder_get_state */
  uint64_t calls, moves;      /* committed; how often the width has changed */
  uint64_t settling;          /* windows until it may move again */
  uint64_t calm;              /* windows in a row in which fewer bits would suffice on all ranks */
  uint64_t patience;          /* the value of `calm` at which the width falls */
  uint64_t descended;         /* 1: the width has fallen at least once */
  /* voting is 1 in the call after a window; its messages have the flags `wish` of this rank. */
  uint64_t voting, wish;
  double ratio; /* residual to input in the window before, of the worker or server: the larger */
  struct ob_norms worker, server; /* sums of this window */
};

enum { OB_LADDER_NUMBERS = sizeof(struct ob_ladder_state) / sizeof(uint64_t) };

struct ob_ladder {
  unsigned min, max; /* bits; equal: it never moves */
  bool fixed;        /* a budget sets the width: the ladder measures, but does not move */
  struct ob_ladder_state state;
  unsigned width;    /* of the next call; geometry.width is that of the call in flight */
  size_t elements;   /* of the worker residual */
  size_t max_stride; /* bytes of the longest message of all widths */
  /* The flags received from all ranks so far in the call after a window; the root mean square of
   * this rank's residual, and the largest one received. */
  unsigned flags;
  float rms, max_rms;
  float agreed_rms;        /* max_rms of the latest window whose flags all ranks have */
  unsigned measured_width; /* bits an element of that window's messages */
  unsigned fitted;         /* the bits so far, in onebit_plan_fit_budget; else 0 */
};

/* True if the plan moves between widths. */
static inline bool ob_ladder_is_used(const struct ob_ladder *ladder) {
  return ladder->max > ladder->min;
}

/* Adds the flags of another rank's message, and takes its residual if it is the largest so far. */
static inline void ob_ladder_add_flags(struct ob_ladder *ladder, unsigned flags, float rms) {
  if (!ob_ladder_is_used(ladder))
    return;
  ladder->flags |= flags & OB_LADDER_FLAGS;
  ladder->max_rms = rms > ladder->max_rms ? rms : ladder->max_rms;
}

/* Returns the capacity to receive `messages` messages of `bytes` in all. A rank that has refused a
 * message may have another width than the others, and reports its error in messages of that width,
 * which ob_ladder_width_of returns. */
static inline size_t ob_ladder_max_bytes(const struct ob_ladder *ladder, size_t messages,
                                         size_t bytes) {
  return ob_ladder_is_used(ladder) ? messages * ladder->max_stride : bytes;
}
static inline unsigned ob_ladder_width_of(const struct ob_ladder *ladder, unsigned flags,
                                          unsigned width) {
  return ob_ladder_is_used(ladder) ? ob_flags_width(flags) : width;
}

/* Allocates the norms of blocks. ONEBIT_ERROR_UNSUPPORTED: the plan's device has no ladder. */
onebit_status_t ob_ladder_create(struct onebit_plan *plan);
void ob_ladder_destroy(const struct onebit_plan *plan);

/* Sets the width back to the fewest bits, as after creation. */
void ob_ladder_reset(struct onebit_plan *plan);

/* Update a ladder that is used: at the beginning of a call; when the call is committed. */
void ob_ladder_begin(const struct onebit_plan *plan);
void ob_ladder_commit(const struct onebit_plan *plan);

/* Ends a call: gives the plan the width that the ladder has chosen. */
void ob_ladder_apply_width(struct onebit_plan *plan);

/* Return the state of the ladder for a checkpoint, and restore it in a plan without a call in
 * flight; widths outside of the plan's range become the nearest one in it. A width that a budget
 * has fixed stays fixed. */
struct ob_ladder_state ob_ladder_get_state(const struct onebit_plan *plan);
void ob_ladder_restore(struct onebit_plan *plan, const struct ob_ladder_state *state);

/* Returns the smallest width of the plan that is not below a checkpoint's width, or its largest. */
unsigned ob_ladder_width_in(const struct onebit_plan *plan, uint64_t width);

#endif
