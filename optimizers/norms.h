/*
 * Norms of an optimizer's state in a part of a bucket, as squares, which add up. They read the
 * state once; on a device, a part at a time.
 */
#ifndef OB_OPTIMIZERS_NORMS_H
#define OB_OPTIMIZERS_NORMS_H

#include "optimizers/sections.h"

/* Blocks first .. end - 1 of a bucket's layout, with the padding in them or without. */
struct ob_span {
  size_t first, end;
  bool padding;
};

/* The span of a bucket: all of it, or the elements in tensors; and of a tensor. */
struct ob_span ob_span_of_bucket(const struct ob_bucket *bucket, bool padding);
struct ob_span ob_span_of_tensor(const struct onebit_optimizer *optimizer, size_t tensor);

enum ob_norm {
  OB_NORM_PARAMETERS, /* or their master values */
  OB_NORM_MOMENTUM,   /* what the ranks share of it, or of what is exchanged in its place */
  OB_NORM_RESIDUAL,   /* of what this rank sends */
  OB_NORM_SIGNAL      /* of the latest exchange of bits, where this rank has a residual */
};

/* Adds the sum of squares. Errors: ONEBIT_ERROR_MEMORY and those of the bucket's memory. */
onebit_status_t ob_add_squares(const struct onebit_optimizer *optimizer,
                               const struct ob_bucket *bucket, enum ob_norm norm,
                               struct ob_span span, double *squares);

/* Elements whose latest step was beyond ONEBIT_STEP_BOUND, and so was made as long as that: of
 * 1-bit Adam and LAMB on bits, and 0 else. */
onebit_status_t ob_count_bounded(const struct onebit_optimizer *optimizer,
                                 const struct ob_bucket *bucket, struct ob_span span,
                                 size_t *beyond);

#endif
