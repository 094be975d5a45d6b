/*
 * 0/1 Adam: when it sends what, and its steps.
 *
 * Bytes of memory that a step reads and writes for a parameter, besides those of messages, where
 * all is float32:
 *
 *   dense     36   gradient 4, mean 4; mean 4, momentum 8, variance 8, parameter 8
 *   bits      32   gradient 4, residual 8; momentum 8, variance 4, parameter 8
 *   silent    28   a look at the gradient, 4; gradient 4, momentum 8, variance 4, parameter 8
 *   meeting   56   gradient, momentum, variance, parameter, anchor and movement 4 each; movement 4,
 *                  residual 8; variance 4, anchor 8, momentum 4, parameter 4
 *
 * In profile deepspeed what was moved is one array more: 8 in a silent step and in a meeting.
 */
#include <float.h>
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "onebit/zero_one_adam.h"
#include "optimizers/methods/zero_one_schedule.h"

/* --- When it sends what. Intervals double, so there are few periods in which they are the same,
 * however many steps. */

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

/* Within one period the interval stays the same, and the variance is updated in the steps whose
 * numbers are multiples of it, from `first` on, variance_update_scaler times. */
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

/* The interval of synchronisation steps after `doublings` doublings: it divides their numbers. */
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

struct zero_one {
  struct ob_zero_one_schedule schedule;
  uint64_t updates; /* steps in which the variance was brought up to date */
  uint64_t apart;   /* 1: parameters differ between ranks now */
  /* Sums over the steps since the last synchronisation: learning rates, and these times the
   * momentum's factor. */
  double rates, corrected_rates;
};

static struct zero_one *own_of(const struct onebit_optimizer *optimizer) { return optimizer->own; }

/* The options' schedule, but for the step after which the variance freezes. Once it is frozen that
 * is the step after which it did: a checkpoint may have been written with other options. Where the
 * options' step has passed without a freeze, as after loading a checkpoint of a later step, it is
 * the next one. */
static struct ob_zero_one_schedule zero_one_adam_schedule_of(
    const struct onebit_optimizer *optimizer) {
  struct ob_zero_one_schedule schedule = own_of(optimizer)->schedule;
  if (optimizer->frozen_at)
    schedule.variance_freeze_step = optimizer->frozen_at;
  else if (schedule.variance_freeze_step <= optimizer->steps)
    schedule.variance_freeze_step = optimizer->steps + 1;
  return schedule;
}

static bool is_deepspeed(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
}

static bool is_local(const struct onebit_optimizer *optimizer) { return optimizer->frozen_at; }

/* Returns the rate of the step being made, or just made. An invalid rate has been reported. */
static double rate_of(const struct onebit_optimizer *optimizer) {
  float rate = optimizer->step.learning_rate;
  return rate >= 0 && ob_is_finite(rate) ? (double)rate : 0;
}

static double corrected_rate(const struct onebit_optimizer *optimizer, uint64_t step) {
  return rate_of(optimizer) * (double)ob_factors_of(optimizer, step).adam.momentum_factor;
}

/* Returns the sum of the learning rates since the last synchronisation, including the step being
 * made. */
static float rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(own_of(optimizer)->rates + rate_of(optimizer));
}

static float corrected_rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(own_of(optimizer)->corrected_rates +
                 corrected_rate(optimizer, optimizer->steps + 1));
}

/* The variance is not updated in every step: its bias correction counts the steps that update it,
 * this one included if it does. */
static struct ob_pass_sink zero_one_adam_sink_of(const struct onebit_optimizer *optimizer,
                                                 const struct ob_bucket *bucket,
                                                 enum ob_pass_kind kind, uint64_t step) {
  struct ob_pass_sink sink = ob_bucket_sink(optimizer, bucket, kind, step);
  struct ob_pass_factors *factors = &sink.factors;
  uint64_t updates = own_of(optimizer)->updates + (kind == OB_PASS_ADAM);
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
  struct ob_pass_sink sink = zero_one_adam_sink_of(optimizer, bucket, kind, step);
  return optimizer->executor->pass(optimizer, bucket, &sink);
}

/* Runs the pass over all buckets that are compressed. */
static onebit_status_t pass_all(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                uint64_t step) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(zero_one_adam_pass(optimizer, &optimizer->buckets[u], kind, step));
  return ONEBIT_OK;
}

static enum ob_exchange zero_one_adam_exchange(const struct onebit_optimizer *optimizer) {
  const struct ob_zero_one_schedule schedule = zero_one_adam_schedule_of(optimizer);
  return ob_zero_one_exchange(&schedule, optimizer->steps + 1);
}

/* In a synchronisation step this rank sends the parameters that its step would give; parameters and
 * momentum change only once all ranks are known to be well. */
static onebit_status_t zero_one_adam_prepare(struct onebit_optimizer *optimizer,
                                             struct ob_bucket *bucket) {
  const bool synchronises = optimizer->step.exchange == OB_EXCHANGE_BITS && is_local(optimizer);
  return synchronises
             ? zero_one_adam_pass(optimizer, bucket, OB_PASS_ZERO_ONE_STORE, optimizer->steps + 1)
             : ONEBIT_OK;
}

static void zero_one_adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               struct ob_call *call) {
  bool synchronises = is_local(optimizer);
  bucket->sink = zero_one_adam_sink_of(optimizer, bucket,
                                       synchronises ? OB_PASS_ZERO_ONE_MET : OB_PASS_ZERO_ONE,
                                       optimizer->steps + 1);
  call->sink = &bucket->sink;
  call->hold = optimizer->bucket_count > 1;
  if (!synchronises)
    return;
  call->source.inputs =
      (const void *const *)bucket->means; /* OB_SCRATCH, where ZERO_ONE_STORE leaves them */
  call->source.float32 = true;
  call->source.factor = 1;
  ob_constants_agree(optimizer, rate_sum(optimizer),
                     "the sum of learning_rate since the last synchronisation", call);
}

/* Checks that this rank's gradients are finite. If they are clipped their norm is known already. */
static onebit_status_t zero_one_adam_look(struct onebit_optimizer *optimizer, bool *finite) {
  double sum = 0, of_bucket;
  *finite = isfinite(optimizer->gradient_norm);
  if (optimizer->options.clip_norm > 0)
    return ONEBIT_OK;
  OB_TRY(pass_all(optimizer, OB_PASS_SQUARES, optimizer->steps + 1));
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

/* Makes a local step. No other rank learns of its outcome: the step counts, and after an error this
 * rank's parameters stay as they are. */
static onebit_status_t move_alone(struct onebit_optimizer *optimizer) {
  bool finite;
  if (optimizer->step.outcome.status != ONEBIT_OK)
    return ONEBIT_OK;
  OB_TRY(zero_one_adam_look(optimizer, &finite));
  if (finite)
    return pass_all(optimizer, OB_PASS_ZERO_ONE_LOCAL, optimizer->steps + 1);
  ob_step_note(optimizer,
               ob_error(ONEBIT_SKIPPED,
                        "skipped on this rank alone: a gradient is not finite. Step %llu "
                        "sends nothing, and counts",
                        (unsigned long long)optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t zero_one_adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  switch (optimizer->step.exchange) {
  case OB_EXCHANGE_DENSE:
    return pass_all(optimizer, OB_PASS_ADAM, optimizer->steps + 1);
  case OB_EXCHANGE_NONE:
    return move_alone(optimizer);
  case OB_EXCHANGE_BITS:
    break;
  }
  return ONEBIT_OK;
}

/* Freezes the variance. The residuals then belong to another quantity. */
static onebit_status_t zero_one_adam_freeze(struct onebit_optimizer *optimizer) {
  OB_TRY(pass_all(optimizer, OB_PASS_ZERO_ONE_FREEZE, optimizer->steps));
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(onebit_plan_reset_residual(optimizer->buckets[u].bits));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* True if local steps move something: uncompressed tensors are exchanged in every step. */
static bool moves_alone(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed && optimizer->buckets[u].filled > 0)
      return optimizer->comm->size > 1;
  return false;
}

static void count_rates(struct onebit_optimizer *optimizer) {
  struct zero_one *own = own_of(optimizer);
  bool met = optimizer->step.exchange == OB_EXCHANGE_BITS;
  own->apart = !met && moves_alone(optimizer);
  own->rates = met ? 0 : own->rates + rate_of(optimizer);
  own->corrected_rates =
      met ? 0 : own->corrected_rates + corrected_rate(optimizer, optimizer->steps);
}

static onebit_status_t zero_one_adam_advance(struct onebit_optimizer *optimizer) {
  struct zero_one *own = own_of(optimizer);
  if (is_local(optimizer)) {
    count_rates(optimizer);
    return ONEBIT_OK;
  }
  own->updates += optimizer->step.exchange == OB_EXCHANGE_DENSE;
  return optimizer->steps >= own->schedule.variance_freeze_step ? zero_one_adam_freeze(optimizer)
                                                                : ONEBIT_OK;
}

static size_t zero_one_adam_numbers(struct onebit_optimizer *optimizer,
                                    struct ob_numbers list[OB_MAX_NUMBERS]) {
  struct zero_one *own = own_of(optimizer);
  list[0] = (struct ob_numbers){OB_NUMBERS_WHOLE, &own->updates, 1, 0, 0x1p63};
  list[1] = (struct ob_numbers){OB_NUMBERS_WHOLE, &own->apart, 1, 0, 1};
  list[2] = (struct ob_numbers){OB_NUMBERS_REAL, &own->rates, 1, 0, DBL_MAX};
  list[3] = (struct ob_numbers){OB_NUMBERS_REAL, &own->corrected_rates, 1, 0, DBL_MAX};
  return 4;
}

static bool ranks_are_apart(const struct onebit_optimizer *optimizer) {
  return own_of(optimizer)->apart;
}

static bool adds_rates(const struct onebit_optimizer *optimizer) {
  return own_of(optimizer)->apart || own_of(optimizer)->rates > 0;
}

/* --- Its row -----------------------------------------------------------------------------------*/

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

/* Means and movements have an array of their own: which of the residuals' copies is free changes
 * with every exchange. */
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
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer");
  own->schedule = ob_zero_one_resolve(
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
