/* When 0/1 Adam sends what. Intervals double, so there are few periods in which they are the same,
 * however many steps. */
#include "optimizers/methods/zero_one_schedule.h"

static uint64_t given_or(uint64_t value, uint64_t fallback) { return value ? value : fallback; }

struct ob_zero_one_schedule ob_zero_one_resolve(const struct ob_zero_one_schedule *given) {
  return (struct ob_zero_one_schedule){
      .variance_freeze_step = given_or(given->variance_freeze_step, 100000),
      .variance_update_scaler = given_or(given->variance_update_scaler, 16),
      .local_step_scaler = given_or(given->local_step_scaler, 32678),
      .local_step_clipper = given_or(given->local_step_clipper, 16),
      .before = given->before};
}

/* --- The variance stage */

/* While its interval is the same the variance is brought up to date in the steps whose numbers that
 * divides, from `first` on, until there were variance_update_scaler of them. */
struct period {
  uint64_t first, interval;
};

/* The first number from there on that the interval divides. */
static uint64_t next_update(const struct period *period) {
  uint64_t before = period->first - 1;
  return before - before % period->interval + period->interval;
}

/* Updates of the period up to this number, were it never to end. */
static uint64_t updates_until(const struct period *period, uint64_t number) {
  uint64_t update = next_update(period);
  return number < update ? 0 : (number - update) / period->interval + 1;
}

/* The period of this number; `updates`: in the periods before. */
static struct period period_of(const struct ob_zero_one_schedule *schedule, uint64_t number,
                               uint64_t *updates) {
  struct period period = {.first = schedule->before + 1, .interval = 1};
  const uint64_t in_each = schedule->variance_update_scaler;
  *updates = 0;
  while (updates_until(&period, number - 1) >= in_each) {
    period.first = next_update(&period) + (in_each - 1) * period.interval + 1;
    period.interval *= 2;
    *updates += in_each;
  }
  return period;
}

/* --- The local stage */

/* The interval of synchronisation steps after so many doublings: it divides their numbers. */
static uint64_t local_interval(const struct ob_zero_one_schedule *schedule, uint64_t doublings) {
  if (doublings > 63 || schedule->local_step_clipper >> doublings == 0)
    return schedule->local_step_clipper;
  return (uint64_t)1 << doublings;
}

/* Counts the synchronisation steps among the first `steps` steps of the local stage. */
static uint64_t count_synchronisations(const struct ob_zero_one_schedule *schedule,
                                       uint64_t steps) {
  uint64_t synchronisations = 0, number = schedule->before + schedule->variance_freeze_step;
  for (uint64_t doublings = 0; steps > 0; doublings++) {
    uint64_t interval = local_interval(schedule, doublings);
    bool last = steps <= schedule->local_step_scaler || interval == schedule->local_step_clipper;
    uint64_t many = last ? steps : schedule->local_step_scaler;
    synchronisations += (number + many) / interval - number / interval;
    number += many;
    steps -= many;
  }
  return synchronisations;
}

/* --- Both */

enum ob_exchange ob_zero_one_exchange(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  uint64_t frozen = schedule->variance_freeze_step, number = schedule->before + step, before;
  if (step > frozen) {
    uint64_t doublings = (step - frozen - 1) / schedule->local_step_scaler;
    return number % local_interval(schedule, doublings) ? OB_EXCHANGE_NONE : OB_EXCHANGE_BITS;
  }
  return number % period_of(schedule, number, &before).interval ? OB_EXCHANGE_BITS
                                                                : OB_EXCHANGE_DENSE;
}

void ob_zero_one_count(const struct ob_zero_one_schedule *schedule, uint64_t steps,
                       uint64_t counts[3]) {
  uint64_t frozen = schedule->variance_freeze_step, alive = steps < frozen ? steps : frozen, before;
  uint64_t number = schedule->before + alive;
  struct period period = period_of(schedule, number, &before);
  uint64_t dense = alive ? before + updates_until(&period, number) : 0;
  uint64_t synchronisations = count_synchronisations(schedule, steps - alive);
  counts[OB_EXCHANGE_DENSE] = dense;
  counts[OB_EXCHANGE_BITS] = alive - dense + synchronisations;
  counts[OB_EXCHANGE_NONE] = steps - alive - synchronisations;
}
