/* When 0/1 Adam sends what. */
#include "optimizers/zero_one_schedule.h"

/* While the variance's interval is the same: its steps are those whose numbers it divides, from
 * `first_number` on, until there were variance_update_scaler of them. */
struct period {
  uint64_t first_number, interval;
};

/* The first number from there on that the interval divides. */
static uint64_t next_update(const struct period *period) {
  uint64_t past = (period->first_number - 1) % period->interval;
  return period->first_number - 1 - past + period->interval;
}

/* Updates of the period up to this number, were it never to end. */
static uint64_t updates_until(const struct period *period, uint64_t number) {
  uint64_t first = next_update(period);
  return number < first ? 0 : (number - first) / period->interval + 1;
}

/* Intervals double, so there are few periods before any number. `updates`: in those before it. */
static struct period period_of(const struct ob_zero_one_schedule *schedule, uint64_t number,
                               uint64_t *updates) {
  struct period period = {.first_number = schedule->before + 1, .interval = 1};
  const uint64_t in_all = schedule->variance_update_scaler;
  *updates = 0;
  while (updates_until(&period, number - 1) >= in_all) {
    period.first_number = next_update(&period) + (in_all - 1) * period.interval + 1;
    period.interval *= 2;
    *updates += in_all;
  }
  return period;
}

bool ob_zero_one_is_local(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  return step > schedule->variance_freeze_step;
}

uint64_t ob_zero_one_updates(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  uint64_t before, number = schedule->before + step;
  struct period period = period_of(schedule, number, &before);
  return before + updates_until(&period, number);
}

/* Meetings are in the steps whose numbers this divides. */
static uint64_t local_interval(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  uint64_t steps_before = step - schedule->variance_freeze_step - 1;
  uint64_t doublings = steps_before / schedule->local_step_scaler;
  if (doublings > 63 || schedule->local_step_clipper >> doublings == 0)
    return schedule->local_step_clipper;
  return (uint64_t)1 << doublings;
}

enum ob_exchange ob_zero_one_exchange(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  uint64_t before, number = schedule->before + step;
  if (ob_zero_one_is_local(schedule, step))
    return number % local_interval(schedule, step) ? OB_EXCHANGE_NONE : OB_EXCHANGE_BITS;
  return number % period_of(schedule, number, &before).interval ? OB_EXCHANGE_BITS
                                                                : OB_EXCHANGE_DENSE;
}
