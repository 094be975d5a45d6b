/*
 * Whether a tensor is like a gradient: what an optimizer averages over its steps, so that few
 * bits an element with error feedback do no harm. A rank keeps a sample of what it gives to some
 * calls in a row, while they are dense, and judges it. What is judged is only what is known to be
 * wrong for sums that must be right each time; docs/preload.md has the bounds and the streams by
 * which they were chosen.
 *
 * Pure bookkeeping: no MPI, no messages. A finding is one rank's: ranks agree on the largest.
 */
#ifndef OB_DROPIN_WATCH_H
#define OB_DROPIN_WATCH_H

#include <stdbool.h>

#include "dropin/elements.h"

/* Calls of a first look, and of one at a tensor that is being compressed. */
#define OB_WATCH_CALLS 24
#define OB_WATCH_AGAIN 8

/* Elements in a sample: so many runs of neighbours, evenly over the tensor. */
#define OB_WATCH_RUNS     8
#define OB_WATCH_RUN      64
#define OB_WATCH_ELEMENTS (OB_WATCH_RUNS * OB_WATCH_RUN)

/* What speaks against a gradient. Of several the largest is told. */
enum ob_finding {
  OB_FINDING_NONE = 0,   /* like a gradient */
  OB_FINDING_UNFAITHFUL, /* the residual is more than four times the values */
  OB_FINDING_VARYING,    /* magnitudes of calls differ more than 64 times */
  OB_FINDING_SHRINKING,  /* to less than a quarter */
  OB_FINDING_GROWING,
  OB_FINDING_RELATED,     /* equal calls of one step correlate: steps of a solver */
  OB_FINDING_PREDICTED,   /* from the two calls before, near each element: a field on a grid */
  OB_FINDING_ALTERNATING, /* a call goes against the one before: steps of a solver */
  OB_FINDING_REPEATED,    /* values come back some calls later */
  OB_FINDING_SMOOTH,      /* constant, or moves slowly or steadily from call to call */
  OB_FINDING_ONE_SIGNED,
  OB_FINDING_INTEGER,
  OB_FINDING_SPARSE,
  OB_FINDING_UNSEEN, /* no memory, or too few values that are finite */
  OB_FINDING_COUNT
};
const char *ob_finding_text(enum ob_finding finding);

struct ob_watch;

/* NULL without memory. */
struct ob_watch *ob_watch_create(void);
void ob_watch_destroy(struct ob_watch *watch);

/* Keeps a sample of a call's values; one that is not finite leaves none. After OB_WATCH_CALLS
 * calls no more are kept. */
void ob_watch_add(struct ob_watch *watch, onebit_dtype_t dtype, const void *values, size_t count);

/* What the samples say, of `calls` calls that have been added. NULL: UNSEEN. */
enum ob_finding ob_watch_judge(const struct ob_watch *watch, unsigned calls);

/* Whether the values of two tensors correlate, call by call. */
bool ob_watch_related(const struct ob_watch *one, const struct ob_watch *other);

#endif
