/*
 * 0/1 Adam: what is its own.
 *
 * Bytes of memory that a step reads and writes for a parameter, besides those of messages, where
 * all is float32:
 *
 *   dense     36   gradient 4, mean 4; mean 4, momentum 8, variance 8, parameter 8
 *   bits      32   gradient 4, kept value 8; momentum 8, variance 4, parameter 8
 *   silent    28   a look at the gradient, 4; gradient 4, momentum 8, variance 4, parameter 8
 *   meeting   56   gradient, momentum, variance, parameter, anchor and movement 4 each; movement 4,
 *                  kept value 8; variance 4, anchor 8, momentum 4, parameter 4
 *
 * In profile deepspeed what was moved is one array more: 8 in a silent step and in a meeting.
 */
#include "onebit/zero_one_adam.h"

#include <float.h>
#include <math.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"
#include "optimizers/zero_one_schedule.h"

static const struct ob_zero_one_schedule *schedule_of(const struct onebit_optimizer *optimizer) {
  return optimizer->own;
}

static bool is_deepspeed(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* Is the step being made one of the local stage? */
static bool is_local(const struct onebit_optimizer *optimizer) {
  return ob_zero_one_is_local(schedule_of(optimizer), optimizer->steps + 1);
}

static double corrected_rate(const struct onebit_optimizer *optimizer, uint64_t step) {
  float factor = ob_factors_of(optimizer, step).adam.momentum_factor;
  return (double)optimizer->step.learning_rate * (double)factor;
}

/* The sums of the rates since the ranks met last, with that of the step being made. */
static float rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(optimizer->rates + (double)optimizer->step.learning_rate);
}

static float corrected_rate_sum(const struct onebit_optimizer *optimizer) {
  return (float)(optimizer->corrected_rates + corrected_rate(optimizer, optimizer->steps + 1));
}

/* The variance was not brought up to date in every step: its bias goes by the number of those in
 * which it was. */
static struct ob_pass_sink sink_of(const struct onebit_optimizer *optimizer,
                                   const struct ob_unit *unit, enum ob_pass_kind kind,
                                   uint64_t step) {
  struct ob_pass_sink sink = ob_unit_sink(optimizer, unit, kind, step);
  struct ob_pass_factors *factors = &sink.factors;
  if (!optimizer->moments.no_bias_correction)
    factors->adam.variance_factor = ob_adam_variance_factor(
        optimizer->moments.beta2, ob_zero_one_updates(schedule_of(optimizer), step));
  factors->rate_sum = corrected_rate_sum(optimizer);
  factors->anchor_decay = is_deepspeed(optimizer) ? 0 : rate_sum(optimizer);
  factors->adds_up = is_deepspeed(optimizer);
  sink.rate_factors = unit->factors;
  return sink;
}

static onebit_status_t pass(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                            enum ob_pass_kind kind, uint64_t step) {
  struct ob_pass_sink sink = sink_of(optimizer, unit, kind, step);
  return optimizer->place->pass(optimizer, unit, &sink);
}

/* Over all units that are compressed. */
static onebit_status_t pass_all(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                uint64_t step) {
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (!optimizer->units[u].uncompressed)
      OB_TRY(pass(optimizer, &optimizer->units[u], kind, step));
  return ONEBIT_OK;
}

/* Of tensors that stay uncompressed: Adam in every step. */
static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return ob_unit_pass(optimizer, unit, OB_PASS_ADAM, optimizer->steps + 1);
}

static enum ob_exchange exchange(const struct onebit_optimizer *optimizer) {
  return ob_zero_one_exchange(schedule_of(optimizer), optimizer->steps + 1);
}

/* When the ranks meet: what this one would have come to goes out, and neither its parameters nor
 * its momentum change before all is known to be well. */
static onebit_status_t prepare(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return is_local(optimizer) ? pass(optimizer, unit, OB_PASS_ZERO_ONE_MEET, optimizer->steps + 1)
                             : ONEBIT_OK;
}

static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  bool meeting = is_local(optimizer);
  unit->sink = sink_of(optimizer, unit, meeting ? OB_PASS_ZERO_ONE_MET : OB_PASS_ZERO_ONE,
                       optimizer->steps + 1);
  call->sink = &unit->sink;
  call->hold = optimizer->unit_count > 1;
  call->source.weight = optimizer->step.gradient_factor;
  if (!meeting)
    return;
  call->source.inputs = (const void *const *)unit->means; /* OB_SCRATCH, where MEET leaves them */
  call->source.float32 = true;
  call->source.weight = 1;
  call->agreed = ob_bits_of(rate_sum(optimizer));
  call->agreed_name = "the sum of learning_rate since the ranks met last";
}

/* Are this rank's gradients numbers whose squares are? Where gradients are clipped that is known
 * of all ranks before anything is made of them. */
static onebit_status_t look(struct onebit_optimizer *optimizer, bool *finite) {
  double sum = 0, of_unit, factor = (double)optimizer->step.gradient_factor;
  *finite = true;
  if (optimizer->options.clip_norm > 0)
    return ONEBIT_OK;
  OB_TRY(pass_all(optimizer, OB_PASS_SQUARES, optimizer->steps + 1));
  for (size_t u = 0; u < optimizer->unit_count; u++) {
    struct ob_unit *unit = &optimizer->units[u];
    if (unit->uncompressed)
      continue;
    OB_TRY(optimizer->place->sum(optimizer, unit, 0, 0, unit->bits->layout.blocks, &of_unit));
    sum += of_unit;
  }
  *finite = sum * factor * factor <= (double)FLT_MAX;
  return ONEBIT_OK;
}

/* Nobody else learns how this ends: the step is made, whatever this rank can do of it. */
static onebit_status_t move_alone(struct onebit_optimizer *optimizer) {
  bool finite;
  OB_TRY(look(optimizer, &finite));
  if (finite)
    return pass_all(optimizer, OB_PASS_ZERO_ONE_LOCAL, optimizer->steps + 1);
  ob_optimizer_tell(optimizer,
                    ob_error(ONEBIT_SKIPPED,
                             "skipped on this rank alone: a gradient is not finite. Step %llu "
                             "exchanges nothing, and counts",
                             (unsigned long long)optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_units_apply(optimizer));
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

/* What the kept errors are of is another thing from now on. */
static onebit_status_t freeze(struct onebit_optimizer *optimizer) {
  OB_TRY(pass_all(optimizer, OB_PASS_ZERO_ONE_FREEZE, optimizer->steps));
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (!optimizer->units[u].uncompressed)
      OB_TRY(onebit_plan_reset_error(optimizer->units[u].bits));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

static onebit_status_t advance(struct onebit_optimizer *optimizer) {
  const struct ob_zero_one_schedule *schedule = schedule_of(optimizer);
  if (optimizer->steps == schedule->variance_freeze_step)
    return freeze(optimizer);
  if (!ob_zero_one_is_local(schedule, optimizer->steps))
    return ONEBIT_OK;
  bool met = optimizer->step.exchange == OB_EXCHANGE_BITS;
  optimizer->apart = !met && optimizer->comm->size > 1;
  optimizer->rates += (double)optimizer->step.learning_rate;
  optimizer->corrected_rates += corrected_rate(optimizer, optimizer->steps);
  if (met)
    optimizer->rates = optimizer->corrected_rates = 0;
  return ONEBIT_OK;
}

/* Means and movements have an array of their own: which of the kept values' copies is free changes
 * with every exchange. */
#define ARRAYS                                                                                     \
  (OB_MASK(OB_MOMENTUM) | OB_MASK(OB_VARIANCE) | OB_MASK(OB_ANCHOR) | OB_MASK(OB_SCRATCH))
#define ZERO_ONE_ADAM(own_arrays)                                                                  \
  {                                                                                                \
    .name = "zero_one_adam", .arrays = (own_arrays), .scheduled = true, .dense = dense,            \
    .exchange = exchange, .prepare = prepare, .call = call, .update = update, .advance = advance   \
  }
static const struct ob_method method = ZERO_ONE_ADAM(ARRAYS);
static const struct ob_method method_deepspeed = ZERO_ONE_ADAM(ARRAYS | OB_MASK(OB_MOVED));

/* --- Making one */

static uint64_t given_or(size_t value, uint64_t fallback) { return value ? value : fallback; }

static onebit_status_t resolve(const onebit_zero_one_adam_options_t *given,
                               struct ob_recipe *recipe, struct ob_zero_one_schedule *schedule) {
  static const onebit_zero_one_adam_options_t defaults = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  const onebit_zero_one_adam_options_t *options = given ? given : &defaults;
  if (options->size != sizeof *options)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "options->size is %zu, not %zu: start from ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT",
                    options->size, sizeof *options);
  const bool deepspeed = options->common.profile == ONEBIT_PROFILE_DEEPSPEED;
  *schedule = (struct ob_zero_one_schedule){
      .variance_freeze_step = given_or(options->variance_freeze_step, 100000),
      .variance_update_scaler = given_or(options->variance_update_scaler, 16),
      .local_step_scaler = given_or(options->local_step_scaler, 32678),
      .local_step_clipper = given_or(options->local_step_clipper, 16),
      .before = deepspeed};
  recipe->method = deepspeed ? &method_deepspeed : &method;
  recipe->common = options->common;
  recipe->moments = (struct ob_moments){.beta1 = options->beta1,
                                        .beta2 = options->beta2,
                                        .epsilon = options->epsilon,
                                        .no_bias_correction = options->no_bias_correction,
                                        .freeze_step = schedule->variance_freeze_step};
  return ob_moments_resolve(&recipe->moments, options->common.profile);
}

onebit_status_t onebit_zero_one_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                            size_t ntensors,
                                            const onebit_zero_one_adam_options_t *options,
                                            onebit_optimizer_t *optimizer) {
  struct ob_recipe recipe = {.method = &method};
  struct ob_zero_one_schedule *own = ob_allocate(1, sizeof *own), schedule = {0};
  recipe.status = resolve(options, &recipe, &schedule);
  if (own)
    *own = schedule;
  else
    recipe.status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for a schedule");
  recipe.own = own;
  const struct ob_moments *moments = &recipe.moments;
  const struct ob_term terms[] = {
      {"beta1 (as bits)", ob_bits_of_double(moments->beta1)},
      {"beta2 (as bits)", ob_bits_of_double(moments->beta2)},
      {"epsilon (as bits)", ob_bits_of_double(moments->epsilon)},
      {"no_bias_correction", moments->no_bias_correction},
      {"variance_freeze_step", schedule.variance_freeze_step},
      {"variance_update_scaler", schedule.variance_update_scaler},
      {"local_step_scaler", schedule.local_step_scaler},
      {"local_step_clipper", schedule.local_step_clipper},
  };
  recipe.terms = terms;
  recipe.term_count = sizeof terms / sizeof terms[0];
  return ob_optimizer_create(comm, &recipe, tensors, ntensors, optimizer);
}
