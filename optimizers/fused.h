/*
 * Profile deepspeed's one buffer of several tensors: they follow each other, then comes padding,
 * and each rank serves an equal share of all. Pieces end where a tensor or a share does. The
 * padding is a piece of no tensor, or several: it takes part in scales and has residuals.
 */
#ifndef OB_OPTIMIZERS_FUSED_H
#define OB_OPTIMIZERS_FUSED_H

#include <stddef.h>

#include "onebit/optimizer.h"

struct ob_fused {
  size_t total, pieces; /* elements without padding */
  /* By piece: elements, those of them that are no padding, which tensor it is of (tensor_count: of
   * none), and how far into it the piece begins. */
  size_t *counts, *real, *tensor, *offset;
  size_t *segment_pieces; /* as in struct ob_plan_shape */
};

struct onebit_optimizer;

/* The tensors of this bucket. ONEBIT_ERROR_MEMORY; the cut is then safe to release. */
onebit_status_t ob_fused_cut(const struct onebit_optimizer *optimizer, size_t bucket,
                             struct ob_fused *cut);
void ob_fused_release(struct ob_fused *cut);

#endif
