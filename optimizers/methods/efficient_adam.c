/*
 * Efficient-Adam with one bit: what is its own. A warm-up comes first, in which the ranks exchange
 * gradients that are divided by the root of second moments which all of them have alike
 * (compression/pass_element.h: ob_divisor). A step of it makes these passes:
 *
 *   VARIANCES   the mean variance of each block, from the variances
 *   DIVISORS    what gradients are multiplied with, to scratch, where compress reads it
 *   DIVIDED     from the mean of divided gradients, in scratch by now, to moments and update
 *   LAMB_MOVE   the update to the parameters; with trust ratios each tensor's by its own rate
 *
 * Without a warm-up the first step is compressed already: residuals are zeros, and so is the step
 * of the messages before it.
 */
#include "onebit/efficient_adam.h"

#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/state.h"

/* --- Steps of the warm-up */

/* The step's number counts from the first step that had gradients. */
static uint64_t number_of_step(const struct onebit_optimizer *optimizer) {
  return optimizer->steps + 1 - optimizer->zero_steps;
}

static bool is_warm(const struct onebit_optimizer *optimizer) {
  return optimizer->step.exchange == OB_EXCHANGE_DENSE;
}

static onebit_status_t efficient_adam_prepare(struct onebit_optimizer *optimizer,
                                              struct ob_bucket *bucket) {
  if (!is_warm(optimizer))
    return ONEBIT_OK;
  const uint64_t step = number_of_step(optimizer);
  OB_TRY(ob_bucket_pass(optimizer, bucket, OB_PASS_VARIANCES, step));
  return ob_bucket_pass(optimizer, bucket, OB_PASS_DIVISORS, step);
}

/* The largest ratio of a divided gradient to one rank's, if the gradients of ranks are independent.
 * The limit is for elements whose first gradients were next to nothing: those of rare rows
 * are 10 times as large as usual, and cutting them off at 5 costs a half per cent in loss. */
#define LIMIT 50

static void call_divided(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                         struct ob_call *call) {
  (void)optimizer;
  call->source.reciprocals = bucket->arrays[OB_SCRATCH];
  call->source.limit = LIMIT * sqrtf((float)ob_plan_geometry(bucket->dense)->members);
}

static onebit_status_t update_divided(struct onebit_optimizer *optimizer,
                                      struct ob_bucket *bucket) {
  const uint64_t step = number_of_step(optimizer);
  OB_TRY(ob_bucket_pass(optimizer, bucket, OB_PASS_DIVIDED, step));
  if (optimizer->method->lamb)
    OB_TRY(ob_lamb_run(optimizer, bucket, OB_LAMB_WARM));
  return ob_bucket_pass(optimizer, bucket, OB_PASS_LAMB_MOVE, step);
}

/* --- The end of the warm-up */

/* The moments of this rank's gradients, as if the ranks' were independent. */
static onebit_status_t begin_moments(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_section variance = ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_VARIANCE);
  const struct ob_section moments = ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_MOMENTS);
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const float members = (float)ob_plan_geometry(bucket->bits)->members;
  float *values = optimizer->chunks;
  for (struct ob_run run = {0}; ob_next_run(layout, moments.first, moments.end, &run);) {
    OB_TRY(ob_section_read(NULL, &variance, &run, values)); /* which is an array */
    for (size_t i = 0; i < run.count; i++)
      values[i] *= members;
    OB_TRY(ob_section_write(&moments, &run, values, values + OB_CHUNK));
  }
  return ONEBIT_OK;
}

/* Steps before the first gradient do not count. All ranks know the variances. */
static onebit_status_t count_zero_steps(struct onebit_optimizer *optimizer) {
  double variances;
  OB_TRY(ob_freeze_sum(optimizer, &variances)); /* which waits for a device's passes */
  if (optimizer->zero_steps + 1 == optimizer->steps && !(variances > 0))
    optimizer->zero_steps = optimizer->steps;
  return ONEBIT_OK;
}

/* Bias corrections continue from the warm-up's number of steps; w, the step that the ranks agreed
 * on last, becomes the residual of an empty message. */
static onebit_status_t efficient_adam_advance(struct onebit_optimizer *optimizer) {
  if (ob_optimizer_is_frozen(optimizer))
    return ONEBIT_OK;
  OB_TRY(count_zero_steps(optimizer));
  const uint64_t made = optimizer->steps - optimizer->zero_steps;
  if (made == 1) /* the residuals of the first step are in other units */
    OB_TRY(ob_buckets_each(optimizer, ob_freeze_forget_residuals));
  if (made < optimizer->moments.freeze_step)
    return ONEBIT_OK;
  OB_TRY(ob_buckets_each(optimizer, begin_moments));
  OB_TRY(ob_buckets_pass(optimizer, OB_PASS_SGD_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* --- Compressed steps */

static onebit_status_t efficient_adam_dense(struct onebit_optimizer *optimizer,
                                            struct ob_bucket *bucket) {
  return ob_bucket_pass(optimizer, bucket, OB_PASS_ADAM, number_of_step(optimizer));
}

/* Returns the part that this rank compresses, in a hierarchical schedule. */
static struct ob_interval own_interval(const struct onebit_plan *plan) {
  const struct ob_layout *layout = ob_plan_layout(plan);
  size_t first, end;
  ob_plan_find_compressed(plan, &first, &end);
  return (struct ob_interval){ob_layout_word(layout, first), ob_layout_word(layout, end)};
}

static void efficient_adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                struct ob_call *call) {
  ob_momentum_call(optimizer, bucket, OB_PASS_STEP, call);
  ob_moments_call(optimizer, bucket, number_of_step(optimizer), call);
  call->source.weight *= (float)optimizer->moments.gain;
  call->source.floors = bucket->has_tables ? bucket->floors : NULL;
  call->source.own = own_interval(bucket->bits);
}

static onebit_status_t efficient_adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  return is_warm(optimizer) ? ob_buckets_each(optimizer, update_divided) : ONEBIT_OK;
}

/* Adds the steps before the first gradient to the numbers of a checkpoint. */
static size_t add_zero_steps(struct onebit_optimizer *optimizer,
                             struct ob_numbers list[OB_MAX_NUMBERS], size_t at) {
  list[at] = (struct ob_numbers){.kind = OB_NUMBERS_WHOLE,
                                 .at = &optimizer->zero_steps,
                                 .count = 1,
                                 .max = (double)UINT64_MAX};
  return at + 1;
}

static size_t efficient_adam_numbers(struct onebit_optimizer *optimizer,
                                     struct ob_numbers list[OB_MAX_NUMBERS]) {
  return add_zero_steps(optimizer, list, 0);
}

/* --- With trust ratios */

/* A trust ratio needs all elements of a tensor: nothing is applied before all are here. */
static void call_held(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      struct ob_call *into) {
  efficient_adam_call(optimizer, bucket, into);
  into->hold = true;
}

static onebit_status_t efficient_adam_set_rates(struct onebit_optimizer *optimizer,
                                                struct ob_bucket *bucket) {
  struct ob_pass_sink sink =
      ob_bucket_sink(optimizer, bucket, OB_PASS_STEP_NORMS, optimizer->steps + 1);
  ob_plan_visit(bucket->bits, &sink);
  return ob_lamb_run(optimizer, bucket, OB_LAMB_WARM);
}

static onebit_status_t update_by_ratios(struct onebit_optimizer *optimizer) {
  if (optimizer->step.exchange == OB_EXCHANGE_BITS)
    OB_TRY(ob_buckets_each(optimizer, efficient_adam_set_rates));
  return efficient_adam_update(optimizer);
}

static size_t numbers_by_ratios(struct onebit_optimizer *optimizer,
                                struct ob_numbers list[OB_MAX_NUMBERS]) {
  return add_zero_steps(optimizer, list, ob_lamb_numbers(optimizer, list));
}

/* The two rows have this in common. */
#define DIVIDES                                                                                    \
  .momentum = true, .moments = true, .divides = true, .arrays = OB_MASK(OB_VARIANCE),              \
  .prepare = efficient_adam_prepare, .call_dense = call_divided, .advance = efficient_adam_advance

static const struct ob_method with_trust_ratios = {.name = "efficient_lamb",
                                                   DIVIDES,
                                                   .lamb = true,
                                                   .recommended =
                                                       "Efficient-Adam without trust_ratio",
                                                   .dense = ob_lamb_dense,
                                                   .call = call_held,
                                                   .update = update_by_ratios,
                                                   .tell = ob_lamb_tell,
                                                   .numbers = numbers_by_ratios};

/* --- Its row -----------------------------------------------------------------------------------*/

#define OPTIONS onebit_efficient_adam_options_t
static const struct ob_option options_of[] = {
    OB_ADAM_OPTIONS,
    OB_POSITIVE(gain, gain, 1),
    OB_FLAG(trust_ratio),
    OB_REAL(min_ratio, limits.min_coefficient, 0.01),
    OB_REAL(max_ratio, limits.max_coefficient, 10),
    OB_COUNT(warmup_steps),
};

static onebit_status_t efficient_adam_resolve(struct ob_recipe *recipe, size_t ntensors) {
  struct ob_moments *moments = &recipe->moments;
  const struct ob_lamb_limits *limits = &moments->limits;
  OB_TRY(
      ob_check_order("min_ratio", limits->min_coefficient, "max_ratio", limits->max_coefficient));
  moments->no_warmup = moments->warmup_steps == ONEBIT_WARMUP_NONE;
  moments->freeze_step = moments->warmup_steps ? moments->warmup_steps : ONEBIT_WARMUP_STEPS;
  if (!moments->no_warmup && !recipe->common.warmup_bits)
    recipe->common.warmup_bits = 8;
  if (!moments->trust_ratio)
    return ONEBIT_OK;
  recipe->method = &with_trust_ratios;
  return ob_lamb_make_own(recipe, ntensors);
}

const struct ob_method ob_method_efficient_adam = {
    .name = "efficient_adam",
    OB_OPTIONS("ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT", options_of),
    .initial = {.limits = {.coefficient_beta = 0.9, .min_factor = 1, .max_factor = 1}},
    .not_deepspeeds = "Efficient-Adam",
    .resolve = efficient_adam_resolve,
    DIVIDES,
    .dense = efficient_adam_dense,
    .call = efficient_adam_call,
    .update = efficient_adam_update,
    .numbers = efficient_adam_numbers};

OB_METHOD_CREATE(efficient_adam)
