/* The memory of a bucket, whose plans are there already: arrays of the state, and lists of what is
 * known of its pieces. */
#ifndef OB_OPTIMIZERS_BUCKET_MEMORY_H
#define OB_OPTIMIZERS_BUCKET_MEMORY_H

#include "optimizers/optimizer.h"

/* Everything of a bucket but its plans. ONEBIT_ERROR_MEMORY: then some of it may be there. */
onebit_status_t ob_bucket_allocate(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
void ob_bucket_release(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket);

/* Fills in the master values, from parameters that are placed. */
onebit_status_t ob_bucket_make_masters(const struct onebit_optimizer *optimizer,
                                       struct ob_bucket *bucket);

#endif
