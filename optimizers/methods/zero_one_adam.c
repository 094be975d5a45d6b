/*
 * The functions of 0/1 Adam: the schedule of its exchanges, and its steps.
 *
 * Memory traffic of a step in bytes per parameter, besides messages, if everything is float32:
 *
 *   dense     36   gradient 4, mean 4; mean 4, momentum 8, variance 8, parameter 8
 *   bits      32   gradient 4, residual 8; momentum 8, variance 4, parameter 8
 *   local     28   check of the gradient 4; gradient 4, momentum 8, variance 4, parameter 8
 *   sync      56   gradient, momentum, variance, parameter, anchor and movement 4 each; movement 4,
 *                  residual 8; variance 4, anchor 8, momentum 4, parameter 4
 *
 * Profile deepspeed has one more array, for the movement: 8 more bytes in local and synchronisation
 * steps.
 */
#include <float.h>
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "onebit/zero_one_adam.h"
#include "optimizers/methods/zero_one_schedule.h"

/* --- The schedule. Intervals double, so that there are few periods with a constant interval in any
 * number of steps. */

static uint64_t value_or_default(uint64_t value, uint64_t fallback) {
  return value ? value : fallback;
}

struct ob_zero_one_schedule ob_zero_one_fill_defaults(const struct ob_zero_one_schedule *given) {
  return (struct ob_zero_one_schedule){
      .variance_freeze_step = value_or_default(given->variance_freeze_step, 100000),
      .variance_update_scaler = value_or_default(given->variance_update_scaler, 16),
      .local_step_scaler = value_or_default(given->local_step_scaler, 32678),
      .local_step_clipper = value_or_default(given->local_step_clipper, 16),
      .before = given->before};
}

/* --- The variance stage */

/* Within one period the interval stays the same, and the variance is updated in the steps whose
 * numbers are multiples of it, from `first` on, variance_update_scaler times. */
struct period {
  uint64_t first, interval;
};

/* Returns the first step number of the period that the interval divides. */
static uint64_t find_next_update(const struct period *period) {
  uint64_t before = period->first - 1;
  return before - before % period->interval + period->interval;
}

/* Returns the number of updates from the period's beginning up to this step number, as if the
 * period had no end. */
static uint64_t count_updates_until(const struct period *period, uint64_t number) {
  uint64_t update = find_next_update(period);
  return number < update ? 0 : (number - update) / period->interval + 1;
}

/* Returns the period of a step number; sets *updates to the number of updates in earlier
 * periods. */
static struct period find_period(const struct ob_zero_one_schedule *schedule, uint64_t number,
                                 uint64_t *updates) {
  struct period period = {.first = schedule->before + 1, .interval = 1};
  const uint64_t in_each = schedule->variance_update_scaler;
  *updates = 0;
  while (count_updates_until(&period, number - 1) >= in_each) {
    period.first = find_next_update(&period) + (in_each - 1) * period.interval + 1;
    period.interval *= 2;
    *updates += in_each;
  }
  return period;
}

/* --- The local stage */

/* Returns the interval of synchronisation steps after `doublings` doublings. The numbers of these
 * steps are multiples of the interval. */
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

/* --- Both stages */

enum ob_exchange ob_zero_one_exchange(const struct ob_zero_one_schedule *schedule, uint64_t step) {
  uint64_t frozen = schedule->variance_freeze_step, number = schedule->before + step, before;
  if (step > frozen) {
    uint64_t doublings = (step - frozen - 1) / schedule->local_step_scaler;
    return number % local_interval(schedule, doublings) ? OB_EXCHANGE_NONE : OB_EXCHANGE_BITS;
  }
  return number % find_period(schedule, number, &before).interval ? OB_EXCHANGE_BITS
                                                                  : OB_EXCHANGE_DENSE;
}

void ob_zero_one_count_exchanges(const struct ob_zero_one_schedule *schedule, uint64_t steps,
                                 uint64_t counts[3]) {
  uint64_t frozen = schedule->variance_freeze_step, alive = steps < frozen ? steps : frozen, before;
  uint64_t number = schedule->before + alive;
  struct period period = find_period(schedule, number, &before);
  uint64_t dense = alive ? before + count_updates_until(&period, number) : 0;
  uint64_t synchronisations = count_synchronisations(schedule, steps - alive);
  counts[OB_EXCHANGE_DENSE] = dense;
  counts[OB_EXCHANGE_BITS] = alive - dense + synchronisations;
  counts[OB_EXCHANGE_NONE] = steps - alive - synchronisations;
}

struct zero_one {
  struct ob_zero_one_schedule schedule;
  uint64_t updates; /* steps in which the variance was updated */
  uint64_t apart;   /* 1: parameters differ between ranks now */
  /* Sums over the steps since the last synchronisation: of learning rates, and of learning rates
   * times the momentum's factor. */
  double rates, corrected_rates;
};

static struct zero_one *get_own(const struct onebit_optimizer *optimizer) { return optimizer->own; }

/* Returns the schedule, with the step after which the variance freezes or froze. Once the variance
 * is frozen, this is the step after which it froze, since a checkpoint may have been written with
 * other options. If the step that the options set has passed without a freeze, as after loading a
 * checkpoint of a later step, the variance freezes after the next step. */
static struct ob_zero_one_schedule current_schedule(const struct onebit_optimizer *optimizer) {
  struct ob_zero_one_schedule schedule = get_own(optimizer)->schedule;
  if (optimizer->frozen_at)
    schedule.variance_freeze_step = optimizer->frozen_at;
  else if (schedule.variance_freeze_step <= optimizer->steps)
    schedule.variance_freeze_step = optimizer->steps + 1;
  return schedule;
}

static bool is_deepspeed(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
}

static bool is_local_stage(const struct onebit_optimizer *optimizer) {
  return optimizer->frozen_at;
}

/* Returns the learning rate of the step being made, or just made; 0 for an invalid rate, which has
 * been reported already. */
static double current_rate(const struct onebit_optimizer *optimizer) {
  float rate = optimizer->step.learning_rate;
  return rate >= 0 && ob_is_finite(rate) ? (double)rate : 0;
}

static double corrected_rate(const struct onebit_optimizer *optimizer, uint64_t step) {
  return current_rate(optimizer) * (double)ob_make_factors(optimizer, step).adam.momentum_factor;
}

/* Returns the sum of the learning rates since the last synchronisation, including the step being
 * made. */
static float rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(get_own(optimizer)->rates + current_rate(optimizer));
}

static float corrected_rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(get_own(optimizer)->corrected_rates +
                 corrected_rate(optimizer, optimizer->steps + 1));
}

/* Returns the operands of a pass. The variance is not updated in every step: its bias correction
 * counts only the steps that update it, including this step if it does. */
static struct ob_pass_sink zero_one_adam_make_sink(const struct onebit_optimizer *optimizer,
                                                   const struct ob_bucket *bucket,
                                                   enum ob_pass_kind kind, uint64_t step) {
  struct ob_pass_sink sink = ob_bucket_make_sink(optimizer, bucket, kind, step);
  struct ob_pass_factors *factors = &sink.factors;
  uint64_t updates = get_own(optimizer)->updates + (kind == OB_PASS_ADAM);
  if (!optimizer->moments.no_bias_correction)
    factors->adam.variance_factor = ob_adam_variance_factor(optimizer->moments.beta2, updates);
  factors->bound = ob_step_bound(optimizer);
  factors->rate_sum = corrected_rate_sum(optimizer);
  factors->anchor_decay = is_deepspeed(optimizer) ? 0 : rate_sum(optimizer);
  factors->adds_up = is_deepspeed(optimizer);
  sink.rate_factors = bucket->factors;
  return sink;
}

static onebit_status_t zero_one_adam_pass(struct onebit_optimizer *optimizer,
                                          struct ob_bucket *bucket, enum ob_pass_kind kind,
                                          uint64_t step) {
  struct ob_pass_sink sink = zero_one_adam_make_sink(optimizer, bucket, kind, step);
  return optimizer->executor->pass(optimizer, bucket, &sink);
}

/* Runs the pass over all buckets that are compressed. */
static onebit_status_t pass_compressed_buckets(struct onebit_optimizer *optimizer,
                                               enum ob_pass_kind kind, uint64_t step) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(zero_one_adam_pass(optimizer, &optimizer->buckets[u], kind, step));
  return ONEBIT_OK;
}

static enum ob_exchange zero_one_adam_exchange(const struct onebit_optimizer *optimizer) {
  const struct ob_zero_one_schedule schedule = current_schedule(optimizer);
  return ob_zero_one_exchange(&schedule, optimizer->steps + 1);
}

/* Stores, in a synchronisation step, the movement that this rank sends. Parameters and momentum
 * change only once all ranks are known to have succeeded. */
static onebit_status_t zero_one_adam_prepare(struct onebit_optimizer *optimizer,
                                             struct ob_bucket *bucket) {
  const bool synchronises =
      optimizer->step.exchange == OB_EXCHANGE_BITS && is_local_stage(optimizer);
  return synchronises
             ? zero_one_adam_pass(optimizer, bucket, OB_PASS_ZERO_ONE_STORE, optimizer->steps + 1)
             : ONEBIT_OK;
}

static void zero_one_adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               struct ob_call *call) {
  bool synchronises = is_local_stage(optimizer);
  bucket->sink = zero_one_adam_make_sink(optimizer, bucket,
                                         synchronises ? OB_PASS_ZERO_ONE_MET : OB_PASS_ZERO_ONE,
                                         optimizer->steps + 1);
  call->sink = &bucket->sink;
  call->hold = optimizer->bucket_count > 1;
  if (!synchronises)
    return;
  call->source.inputs =
      (const void *const *)
          bucket->means; /* OB_SCRATCH, to which ZERO_ONE_STORE writes the movements */
  call->source.float32 = true;
  call->source.factor = 1;
  ob_constants_agree(optimizer, rate_sum(optimizer),
                     "the sum of learning_rate since the last synchronisation", call);
}

/* Checks that this rank's gradients are finite. With clipping their norm is known already. */
static onebit_status_t check_gradients_finite(struct onebit_optimizer *optimizer, bool *finite) {
  double sum = 0, of_bucket;
  *finite = isfinite(optimizer->gradient_norm);
  if (optimizer->options.clip_norm > 0)
    return ONEBIT_OK;
  OB_TRY(pass_compressed_buckets(optimizer, OB_PASS_SQUARES, optimizer->steps + 1));
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    if (bucket->uncompressed)
      continue;
    OB_TRY(optimizer->executor->sum(optimizer, bucket, 0, 0, ob_plan_layout(bucket->bits)->blocks,
                                    &of_bucket));
    sum += of_bucket;
  }
  *finite = isfinite(sum);
  return ONEBIT_OK;
}

/* Makes a local step. Other ranks do not learn its outcome: the step counts as made, and after an
 * error this rank's parameters stay unchanged. */
static onebit_status_t make_local_step(struct onebit_optimizer *optimizer) {
  bool finite;
  if (optimizer->step.outcome.status != ONEBIT_OK)
    return ONEBIT_OK;
  OB_TRY(check_gradients_finite(optimizer, &finite));
  if (finite)
    return pass_compressed_buckets(optimizer, OB_PASS_ZERO_ONE_LOCAL, optimizer->steps + 1);
  ob_step_note(optimizer,
               ob_error(ONEBIT_SKIPPED,
                        "skipped on this rank only: a gradient is not finite. Step %llu is a local "
                        "step: it counts as made, and other ranks do not learn of it",
                        (unsigned long long)optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t zero_one_adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  switch (optimizer->step.exchange) {
  case OB_EXCHANGE_DENSE:
    return pass_compressed_buckets(optimizer, OB_PASS_ADAM, optimizer->steps + 1);
  case OB_EXCHANGE_NONE:
    return make_local_step(optimizer);
  case OB_EXCHANGE_BITS:
    break;
  }
  return ONEBIT_OK;
}

/* Freezes the variance, and resets the residuals, which belong to the quantity exchanged so far. */
static onebit_status_t zero_one_adam_freeze(struct onebit_optimizer *optimizer) {
  OB_TRY(pass_compressed_buckets(optimizer, OB_PASS_ZERO_ONE_FREEZE, optimizer->steps));
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(onebit_plan_reset_residual(optimizer->buckets[u].bits));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* Returns true if local steps change parameters. They do not if all tensors are uncompressed, since
 * these are exchanged in every step. */
static bool local_steps_change_parameters(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed && optimizer->buckets[u].filled > 0)
      return optimizer->comm->size > 1;
  return false;
}

static void add_step_rates(struct onebit_optimizer *optimizer) {
  struct zero_one *own = get_own(optimizer);
  bool met = optimizer->step.exchange == OB_EXCHANGE_BITS;
  own->apart = !met && local_steps_change_parameters(optimizer);
  own->rates = met ? 0 : own->rates + current_rate(optimizer);
  own->corrected_rates =
      met ? 0 : own->corrected_rates + corrected_rate(optimizer, optimizer->steps);
}

static onebit_status_t zero_one_adam_advance(struct onebit_optimizer *optimizer) {
  struct zero_one *own = get_own(optimizer);
  if (is_local_stage(optimizer)) {
    add_step_rates(optimizer);
    return ONEBIT_OK;
  }
  own->updates += optimizer->step.exchange == OB_EXCHANGE_DENSE;
  return optimizer->steps >= own->schedule.variance_freeze_step ? zero_one_adam_freeze(optimizer)
                                                                : ONEBIT_OK;
}

static size_t zero_one_adam_numbers(struct onebit_optimizer *optimizer,
                                    struct ob_numbers list[OB_MAX_NUMBERS]) {
  struct zero_one *own = get_own(optimizer);
  list[0] = (struct ob_numbers){OB_NUMBERS_WHOLE, &own->updates, 1, 0, 0x1p63};
  list[1] = (struct ob_numbers){OB_NUMBERS_WHOLE, &own->apart, 1, 0, 1};
  list[2] = (struct ob_numbers){OB_NUMBERS_REAL, &own->rates, 1, 0, DBL_MAX};
  list[3] = (struct ob_numbers){OB_NUMBERS_REAL, &own->corrected_rates, 1, 0, DBL_MAX};
  return 4;
}

static bool ranks_are_apart(const struct onebit_optimizer *optimizer) {
  return get_own(optimizer)->apart;
}

static bool adds_rates(const struct onebit_optimizer *optimizer) {
  return get_own(optimizer)->apart || get_own(optimizer)->rates > 0;
}

/* --- The method's row --------------------------------------------------------------------------*/

#define OPTIONS onebit_zero_one_adam_options_t
static const struct ob_option options_of[] = {
    OB_ADAM_OPTIONS,
    OB_FLAG(no_bias_correction),
    OB_COUNT(variance_freeze_step),
    OB_COUNT(variance_update_scaler),
    OB_COUNT(local_step_scaler),
    OB_COUNT(local_step_clipper),
};

static onebit_status_t zero_one_adam_resolve(struct ob_recipe *recipe, size_t ntensors);

/* Mean gradients and movements have an array of their own, since either copy of the residual may be
 * in use: they swap with every exchange. */
#define ARRAYS                                                                                     \
  (OB_MASK(OB_MOMENTUM) | OB_MASK(OB_VARIANCE) | OB_MASK(OB_ANCHOR) | OB_MASK(OB_SCRATCH))
#define ZERO_ONE_ADAM(own_arrays)                                                                  \
  {                                                                                                \
    .name = "zero_one_adam", OB_OPTIONS("ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT", options_of),          \
    .recommended = "Efficient-Adam (onebit_efficient_adam_create)",                                \
    .resolve = zero_one_adam_resolve, .arrays = (own_arrays), .dense_pass = OB_PASS_ADAM,          \
    .exchange = zero_one_adam_exchange, .prepare = zero_one_adam_prepare,                          \
    .call = zero_one_adam_call, .update = zero_one_adam_update, .advance = zero_one_adam_advance,  \
    .numbers = zero_one_adam_numbers, .apart = ranks_are_apart, .adds_rates = adds_rates           \
  }
const struct ob_method ob_method_zero_one_adam = ZERO_ONE_ADAM(ARRAYS);
static const struct ob_method method_deepspeed = ZERO_ONE_ADAM(ARRAYS | OB_MASK(OB_MOVED));

static onebit_status_t zero_one_adam_resolve(struct ob_recipe *recipe, size_t ntensors) {
  struct ob_moments *moments = &recipe->moments;
  struct zero_one *own = recipe->own = ob_allocate(1, sizeof *own);
  const bool deepspeed = recipe->common.profile == ONEBIT_PROFILE_DEEPSPEED;
  (void)ntensors;
  if (!own)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an optimizer");
  own->schedule = ob_zero_one_fill_defaults(
      &(struct ob_zero_one_schedule){.variance_freeze_step = moments->variance_freeze_step,
                                     .variance_update_scaler = moments->variance_update_scaler,
                                     .local_step_scaler = moments->local_step_scaler,
                                     .local_step_clipper = moments->local_step_clipper,
                                     .before = deepspeed});
  recipe->method = deepspeed ? &method_deepspeed : &ob_method_zero_one_adam;
  moments->freeze_step = moments->variance_freeze_step = own->schedule.variance_freeze_step;
  moments->variance_update_scaler = own->schedule.variance_update_scaler;
  moments->local_step_scaler = own->schedule.local_step_scaler;
  moments->local_step_clipper = own->schedule.local_step_clipper;
  return ONEBIT_OK;
}

OB_METHOD_CREATE(zero_one_adam)
