/* The schedule of 0/1 Adam's exchanges. It depends only on the step's number and the options, so
 * that all ranks get the same result. */
#ifndef OB_OPTIMIZERS_ZERO_ONE_SCHEDULE_H
#define OB_OPTIMIZERS_ZERO_ONE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "optimizers/optimizer.h"

/* Members of onebit_zero_one_adam_options_t, with every default filled in; none of them is 0. */
struct ob_zero_one_schedule {
  uint64_t variance_freeze_step, variance_update_scaler;
  uint64_t local_step_scaler, local_step_clipper;
  /* The number of steps that count before the first one: 1 in profile deepspeed, for a call of
   * DeepSpeed that makes no step. Intervals count these too. */
  uint64_t before;
};

/* Returns the schedule with the defaults filled in. */
struct ob_zero_one_schedule ob_zero_one_fill_defaults(const struct ob_zero_one_schedule *given);

/* Returns the form of the exchange of step number `step`; the first step is 1. */
enum ob_exchange ob_zero_one_exchange(const struct ob_zero_one_schedule *schedule, uint64_t step);

/* Counts the steps 1 .. steps by the form of their exchange. */
void ob_zero_one_count_exchanges(const struct ob_zero_one_schedule *schedule, uint64_t steps,
                                 uint64_t counts[3]);

#endif
