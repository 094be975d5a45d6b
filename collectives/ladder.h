/*
 * The ladder of a plan changes its width, the bits per element, between `bits` and `max_bits`. It
 * doubles the width if the residual outgrows the input, and halves it if half the bits suffice
 * (docs/ladder.md). A rank asks for a width by flags in all its messages of a call, so every rank
 * receives the flags of all others. When that call is committed, all ranks change to the same
 * width, or none does. Messages have the new width from the next call on. A call that is skipped or
 * fails neither measures nor changes anything, on any rank.
 */
#ifndef OB_COLLECTIVES_LADDER_H
#define OB_COLLECTIVES_LADDER_H

#include <stdbool.h>
#include <stdint.h>

#include "compression/blocks.h"
#include "compression/message.h"
#include "onebit/plan.h"

struct onebit_plan;

#define OB_LADDER_WINDOW 16 /* equals OB_MEASURE_EVERY: each block is measured once */

/* The width is halved after this number of windows in a row in which fewer bits would have sufficed
 * on all ranks. The number doubles each time the width has to be doubled again, so that a width
 * that is too small is tried less often. */
#define OB_LADDER_PATIENCE 4

/* The state from which the width of the next calls is decided. A checkpoint contains it as an array
 * of numbers, so each member has 8 bytes. The function ladder_number in
 * optimizers/checkpoint/optimizer.c has the members' ranges. */
struct ob_ladder_state {
  uint64_t width, last_width; /* of the next and of the last call; ob_ladder_get_state sets them */
  uint64_t calls, moves;      /* number of committed calls; number of changes of width */
  uint64_t settling;          /* windows (groups of calls) until the width may change again */
  uint64_t calm;              /* windows in a row in which fewer bits would suffice on all ranks */
  uint64_t patience;          /* the value of `calm` at which the width is halved */
  uint64_t descended;         /* 1: the width was halved at least once */
  /* `voting` is 1 in the call that follows a window; the messages of that call have this rank's
   * flags `wish`. */
  uint64_t voting, wish;
  double ratio; /* residual / input in the last window; the larger of worker and server */
  struct ob_norms worker, server; /* sums of this window */
};

enum { OB_LADDER_NUMBERS = sizeof(struct ob_ladder_state) / sizeof(uint64_t) };

struct ob_ladder {
  unsigned min, max; /* bits per element; if both are equal, the width never changes */
  bool fixed;        /* a budget sets the width: the ladder only measures */
  struct ob_ladder_state state;
  unsigned width;    /* width of the next call; geometry.width is that of the call in flight */
  size_t elements;   /* number of elements of the worker residual */
  size_t max_stride; /* bytes of the longest message of all widths */
  /* In the call that follows a window: the flags received from all ranks so far; the root mean
   * square of this rank's residual, and the largest one received. */
  unsigned flags;
  float rms, max_rms;
  float agreed_rms;        /* max_rms of the latest window for which all ranks' flags arrived */
  unsigned measured_width; /* bits per element of that window's messages */
  unsigned fitted;         /* the width chosen so far, during onebit_plan_fit_budget; else 0 */
};

/* True if the plan's width can change. */
static inline bool ob_ladder_is_used(const struct ob_ladder *ladder) {
  return ladder->max > ladder->min;
}

/* Adds the flags of another rank's message, and sets max_rms to that rank's residual if it is
 * larger. */
static inline void ob_ladder_add_flags(struct ob_ladder *ladder, unsigned flags, float rms) {
  if (!ob_ladder_is_used(ladder))
    return;
  ladder->flags |= flags & OB_LADDER_FLAGS;
  ladder->max_rms = rms > ladder->max_rms ? rms : ladder->max_rms;
}

/* Returns the capacity in bytes to receive `messages` messages, which have `bytes` bytes in all at
 * the current width. A rank that has refused a message may have another width than the others. It
 * reports its error in messages of its own width, so the capacity is that of the largest width. */
static inline size_t ob_ladder_max_bytes(const struct ob_ladder *ladder, size_t messages,
                                         size_t bytes) {
  return ob_ladder_is_used(ladder) ? messages * ladder->max_stride : bytes;
}
static inline unsigned ob_ladder_width_of(const struct ob_ladder *ladder, unsigned flags,
                                          unsigned width) {
  return ob_ladder_is_used(ladder) ? ob_flags_width(flags) : width;
}

/* Allocates the norms of blocks. ONEBIT_ERROR_UNSUPPORTED: the plan is on a device, where widths do
 * not change. */
onebit_status_t ob_ladder_create(struct onebit_plan *plan);
void ob_ladder_destroy(const struct onebit_plan *plan);

/* Sets the width back to the smallest one, as after creation. */
void ob_ladder_reset(struct onebit_plan *plan);

/* Update a ladder that is used: ob_ladder_begin at the beginning of a call, ob_ladder_commit when
 * the call is committed. */
void ob_ladder_begin(const struct onebit_plan *plan);
void ob_ladder_commit(const struct onebit_plan *plan);

/* Sets the plan's width to the one that the ladder has chosen. Called at the end of a call. */
void ob_ladder_apply_width(struct onebit_plan *plan);

/* ob_ladder_get_state returns the state of the ladder for a checkpoint. ob_ladder_restore restores
 * it in a plan without a call in flight; a width outside of the plan's range becomes the nearest
 * one within it. A width that a budget has fixed stays fixed. */
struct ob_ladder_state ob_ladder_get_state(const struct onebit_plan *plan);
void ob_ladder_restore(struct onebit_plan *plan, const struct ob_ladder_state *state);

/* Returns the smallest width of the plan that is at least a checkpoint's width, or else the plan's
 * largest width. */
unsigned ob_ladder_width_in(const struct onebit_plan *plan, uint64_t width);

#endif
