/*
 * What 1-bit LAMB and other optimizers with trust ratios have in common (lamb.c): optimizer->own is
 * a struct ob_lamb, and the method says so.
 */
#ifndef OB_OPTIMIZERS_LAMB_H
#define OB_OPTIMIZERS_LAMB_H

#include "optimizers/optimizer.h"

/* A step of dense LAMB on mean gradients. */
onebit_status_t ob_lamb_dense(struct onebit_optimizer *optimizer, struct ob_unit *unit);

/* Fills in the numbers of `count` tensors, all in one array. Without memory the recipe fails. */
void ob_lamb_make_own(struct ob_recipe *recipe, const struct ob_lamb_limits *limits, size_t count);

/* An error that names them unless 0 < least <= most. */
onebit_status_t ob_lamb_check_order(const char *least_name, double least, const char *most_name,
                                    double most);

/* Of a method. */
onebit_status_t ob_lamb_tell(const struct onebit_optimizer *optimizer, size_t tensor,
                             onebit_tensor_statistics_t *statistics);
size_t ob_lamb_numbers(struct onebit_optimizer *optimizer,
                       struct ob_numbers list[OB_NUMBERS_AT_MOST]);

#endif
