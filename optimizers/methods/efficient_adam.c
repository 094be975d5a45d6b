/*
 * The functions of Efficient-Adam with one bit. In its warm-up ranks exchange gradients that are
 * divided by the root of second moments, which are the same on all ranks
 * (compression/pass_element.h: ob_divisor). A step of the warm-up makes these passes:
 *
 *   VARIANCES   the mean variance of each block, from the variances
 *   DIVISORS    the factors of gradients, to scratch, where compress reads them
 *   DIVIDED     moments and update, from the mean of divided gradients, which then is in scratch
 *   LAMB_MOVE   parameters, by the update; with trust ratios each tensor has its own rate
 *
 * Without a warm-up the first step is compressed: the residuals and the previous step are zeros
 * then.
 */
#include "onebit/efficient_adam.h"

#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/state.h"

/* --- Steps of the warm-up */

/* Returns the step's number, counted from the first step that had gradients. */
static uint64_t step_number(const struct onebit_optimizer *optimizer) {
  return optimizer->steps + 1 - optimizer->zero_steps;
}

static bool is_in_warmup(const struct onebit_optimizer *optimizer) {
  return optimizer->step.exchange == OB_EXCHANGE_DENSE;
}

static onebit_status_t efficient_adam_prepare(struct onebit_optimizer *optimizer,
                                              struct ob_bucket *bucket) {
  if (!is_in_warmup(optimizer))
    return ONEBIT_OK;
  const uint64_t step = step_number(optimizer);
  OB_TRY(ob_bucket_run_pass(optimizer, bucket, OB_PASS_VARIANCES, step));
  return ob_bucket_run_pass(optimizer, bucket, OB_PASS_DIVISORS, step);
}

/* The limit of a rank's divided gradient, as a multiple of its usual size if the gradients of ranks
 * are independent. It limits elements whose first gradients were almost zero. Divided gradients of
 * rare rows are 10 times as large as usual, and a limit of 5 raised the loss by half a per cent. */
#define LIMIT 50

static void fill_divided_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                              struct ob_call *call) {
  (void)optimizer;
  call->source.reciprocals = bucket->arrays[OB_SCRATCH];
  call->source.limit = LIMIT * sqrtf((float)ob_plan_geometry(bucket->dense)->members);
}

static onebit_status_t update_divided(struct onebit_optimizer *optimizer,
                                      struct ob_bucket *bucket) {
  const uint64_t step = step_number(optimizer);
  OB_TRY(ob_bucket_run_pass(optimizer, bucket, OB_PASS_DIVIDED, step));
  if (optimizer->method->lamb)
    OB_TRY(ob_lamb_run(optimizer, bucket, OB_LAMB_WARM));
  return ob_bucket_run_pass(optimizer, bucket, OB_PASS_LAMB_MOVE, step);
}

/* --- The end of the warm-up */

/* Sets the moments of this rank's gradients from the variance, as if ranks' gradients were
 * independent. */
static onebit_status_t set_initial_moments(struct onebit_optimizer *optimizer,
                                           struct ob_bucket *bucket) {
  const struct ob_section variance = ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_VARIANCE);
  const struct ob_section moments = ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_MOMENTS);
  const struct ob_layout *layout = ob_plan_layout(bucket->bits);
  const float members = (float)ob_plan_geometry(bucket->bits)->members;
  float *values = optimizer->chunks;
  for (struct ob_run run = {0}; ob_find_next_run(layout, moments.first, moments.end, &run);) {
    OB_TRY(ob_section_read(NULL, &variance, &run,
                           values)); /* the variance is an array, which needs no reader */
    for (size_t i = 0; i < run.count; i++)
      values[i] *= members;
    OB_TRY(ob_section_write(&moments, &run, values, values + OB_CHUNK));
  }
  return ONEBIT_OK;
}

/* Counts a step before the first gradient. All ranks know the variances, so all count the same. */
static onebit_status_t count_zero_steps(struct onebit_optimizer *optimizer) {
  double variances;
  OB_TRY(ob_freeze_sum_variances(optimizer, &variances)); /* this waits for passes of a device */
  if (optimizer->zero_steps + 1 == optimizer->steps && !(variances > 0))
    optimizer->zero_steps = optimizer->steps;
  return ONEBIT_OK;
}

/* Ends the warm-up after its last step. Bias corrections continue to count the warm-up's steps. The
 * last update w, which is equal on all ranks, becomes the residual, as if it had not been sent. */
static onebit_status_t efficient_adam_advance(struct onebit_optimizer *optimizer) {
  if (ob_optimizer_is_frozen(optimizer))
    return ONEBIT_OK;
  OB_TRY(count_zero_steps(optimizer));
  const uint64_t made = optimizer->steps - optimizer->zero_steps;
  if (made == 1) /* the residuals of the first step have another unit */
    OB_TRY(ob_buckets_for_each(optimizer, ob_freeze_forget_residuals));
  if (made < optimizer->moments.freeze_step)
    return ONEBIT_OK;
  OB_TRY(ob_buckets_for_each(optimizer, set_initial_moments));
  OB_TRY(ob_buckets_run_pass(optimizer, OB_PASS_SGD_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* --- Compressed steps */

static onebit_status_t efficient_adam_dense(struct onebit_optimizer *optimizer,
                                            struct ob_bucket *bucket) {
  return ob_bucket_run_pass(optimizer, bucket, OB_PASS_ADAM, step_number(optimizer));
}

/* Returns the words that this rank compresses: in a hierarchical schedule, only a part of all
 * words. */
static struct ob_interval find_own_range(const struct onebit_plan *plan) {
  const struct ob_layout *layout = ob_plan_layout(plan);
  size_t first, end;
  ob_plan_find_compressed(plan, &first, &end);
  return (struct ob_interval){ob_layout_word(layout, first), ob_layout_word(layout, end)};
}

static void efficient_adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                struct ob_call *call) {
  ob_fill_momentum_call(optimizer, bucket, OB_PASS_STEP, call);
  ob_fill_moments_call(optimizer, bucket, step_number(optimizer), call);
  call->source.weight *= (float)optimizer->moments.gain;
  call->source.floors = bucket->has_tables ? bucket->floors : NULL;
  call->source.own = find_own_range(bucket->bits);
}

static onebit_status_t efficient_adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  return is_in_warmup(optimizer) ? ob_buckets_for_each(optimizer, update_divided) : ONEBIT_OK;
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

/* Sends a step that is held: a trust ratio needs all elements of a tensor before any result is
 * applied. */
static void fill_held_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                           struct ob_call *into) {
  efficient_adam_call(optimizer, bucket, into);
  into->hold = true;
}

static onebit_status_t efficient_adam_set_rates(struct onebit_optimizer *optimizer,
                                                struct ob_bucket *bucket) {
  struct ob_pass_sink sink =
      ob_bucket_make_sink(optimizer, bucket, OB_PASS_STEP_NORMS, optimizer->steps + 1);
  ob_plan_run_pass(bucket->bits, &sink);
  return ob_lamb_run(optimizer, bucket, OB_LAMB_WARM);
}

static onebit_status_t update_by_ratios(struct onebit_optimizer *optimizer) {
  if (optimizer->step.exchange == OB_EXCHANGE_BITS)
    OB_TRY(ob_buckets_for_each(optimizer, efficient_adam_set_rates));
  return efficient_adam_update(optimizer);
}

static size_t numbers_by_ratios(struct onebit_optimizer *optimizer,
                                struct ob_numbers list[OB_MAX_NUMBERS]) {
  return add_zero_steps(optimizer, list, ob_lamb_numbers(optimizer, list));
}

/* The members that the two rows have in common. */
#define DIVIDES                                                                                    \
  .momentum = true, .moments = true, .divides = true, .arrays = OB_MASK(OB_VARIANCE),              \
  .prepare = efficient_adam_prepare, .call_dense = fill_divided_call,                              \
  .advance = efficient_adam_advance

static const struct ob_method with_trust_ratios = {.name = "efficient_lamb",
                                                   DIVIDES,
                                                   .lamb = true,
                                                   .recommended =
                                                       "Efficient-Adam without trust_ratio",
                                                   .dense = ob_lamb_make_dense_step,
                                                   .call = fill_held_call,
                                                   .update = update_by_ratios,
                                                   .add_statistics = ob_lamb_fill_statistics,
                                                   .numbers = numbers_by_ratios};

/* --- The methods' rows -------------------------------------------------------------------------*/

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
