/*
 * The common part of 1-bit LAMB and other optimizers with trust ratios (lamb.c): optimizer->own is
 * a struct ob_lamb, and the method says so.
 */
#ifndef OB_OPTIMIZERS_LAMB_H
#define OB_OPTIMIZERS_LAMB_H

#include "optimizers/optimizer.h"

/* A step of dense LAMB on mean gradients. */
onebit_status_t ob_lamb_dense(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);

/* Makes recipe->own, with the recipe's limits. */
onebit_status_t ob_lamb_make_own(struct ob_recipe *recipe, size_t ntensors);

/* Members of a method. */
onebit_status_t ob_lamb_tell(const struct onebit_optimizer *optimizer, size_t tensor,
                             onebit_tensor_statistics_t *statistics);
size_t ob_lamb_numbers(struct onebit_optimizer *optimizer, struct ob_numbers list[OB_MAX_NUMBERS]);

#endif
