/* Efficient-Adam with one bit: what is its own. Without a warm-up the first step is compressed
 * already: residuals are zeros, and so is the step of the messages before it. */
#include "onebit/efficient_adam.h"

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/methods/lamb.h"
#include "optimizers/sections.h"

static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  return ob_bucket_pass(optimizer, bucket, OB_PASS_ADAM, optimizer->steps + 1);
}

static void call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                 struct ob_call *call) {
  const struct ob_moments *moments = &optimizer->moments;
  ob_momentum_call(optimizer, bucket, OB_PASS_STEP, call);
  const struct ob_adam_factors *adam = &bucket->sink.factors.adam;
  call->source.weight *= (float)moments->gain;
  call->source.moment_rule = OB_MOMENTS_SECOND;
  call->source.moment = (struct ob_moment_factors){
      .beta2 = adam->beta2, .one_minus_beta2 = adam->one_minus_beta2, .epsilon = adam->epsilon};
  ob_moment_correct(&call->source.moment, moments->beta2, (double)bucket->bits->geometry.members,
                    optimizer->steps + 1);
}

/* --- With trust ratios */

/* A tensor's ratio is of all its elements: nothing is applied before all are here. */
static void hold(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                 struct ob_call *into) {
  call(optimizer, bucket, into);
  into->hold = true;
}

static onebit_status_t set_rates(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct ob_pass_sink sink =
      ob_bucket_sink(optimizer, bucket, OB_PASS_STEP_NORMS, optimizer->steps + 1);
  ob_plan_visit(bucket->bits, &sink);
  return optimizer->executor->lamb(optimizer, bucket, OB_LAMB_WARM);
}

static onebit_status_t update(struct onebit_optimizer *optimizer) {
  if (optimizer->step.exchange == OB_EXCHANGE_BITS)
    OB_TRY(ob_buckets_each(optimizer, set_rates));
  return ob_buckets_apply(optimizer);
}

static const struct ob_method with_trust_ratios = {.name = "efficient_lamb",
                                                   .momentum = true,
                                                   .moments = true,
                                                   .lamb = true,
                                                   .dense_arrays = OB_MASK(OB_VARIANCE),
                                                   .dense = ob_lamb_dense,
                                                   .exchange = ob_freeze_exchange,
                                                   .call = hold,
                                                   .update = update,
                                                   .tell = ob_lamb_tell,
                                                   .numbers = ob_lamb_numbers};

/* --- With a warm-up: steps of dense Adam */

static onebit_status_t create_chunks(struct onebit_optimizer *optimizer) {
  optimizer->own = ob_optimizer_allocate(optimizer, 2 * OB_CHUNK, sizeof(float));
  return optimizer->own ? ONEBIT_OK
                        : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d moments", 2 * OB_CHUNK);
}

static onebit_status_t update_warm(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_buckets_pass(optimizer, OB_PASS_ADAM, optimizer->steps + 1));
  return ONEBIT_OK;
}

struct beginning {
  struct ob_section variance, moments;
  float members, *values; /* two chunks */
};

static onebit_status_t begin_run(void *context, const struct ob_run *run) {
  const struct beginning *beginning = context;
  float *values = beginning->values;
  OB_TRY(ob_section_read(NULL, &beginning->variance, run, values)); /* which is an array */
  for (size_t i = 0; i < run->count; i++)
    values[i] *= beginning->members;
  return ob_section_write(&beginning->moments, run, values, values + OB_CHUNK);
}

/* The moments of this rank's gradients, as if the ranks' were independent. */
static onebit_status_t begin_moments(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct beginning beginning = {.variance =
                                    ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_VARIANCE),
                                .moments = ob_section_of(bucket, OB_STAGE_WARMUP, OB_SAVED_MOMENTS),
                                .members = (float)bucket->bits->geometry.members,
                                .values = optimizer->own};
  return ob_each_run(&bucket->bits->geometry.layout, beginning.moments.first, beginning.moments.end,
                     begin_run, &beginning);
}

static onebit_status_t advance(struct onebit_optimizer *optimizer) {
  bool due;
  OB_TRY(ob_freeze_is_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  OB_TRY(ob_buckets_each(optimizer, begin_moments));
  OB_TRY(ob_buckets_pass(optimizer, OB_PASS_FREEZE_STEP, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

static const struct ob_method with_warmup = {.name = "efficient_adam",
                                             .momentum = true,
                                             .moments = true,
                                             .arrays = OB_MASK(OB_VARIANCE),
                                             .create = create_chunks,
                                             .dense = dense,
                                             .exchange = ob_freeze_exchange,
                                             .call = call,
                                             .update = update_warm,
                                             .advance = advance};

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

static onebit_status_t resolve(struct ob_recipe *recipe, size_t ntensors) {
  const struct ob_lamb_limits *limits = &recipe->moments.limits;
  OB_TRY(
      ob_check_order("min_ratio", limits->min_coefficient, "max_ratio", limits->max_coefficient));
  if (recipe->moments.warmup_steps) {
    if (recipe->moments.trust_ratio)
      return ob_error(ONEBIT_ERROR_UNSUPPORTED, "warmup_steps is %zu, with trust_ratio: leave it 0",
                      recipe->moments.warmup_steps);
    recipe->moments.no_warmup = false;
    recipe->moments.freeze_step = recipe->moments.warmup_steps;
    recipe->method = &with_warmup;
  }
  if (!recipe->moments.trust_ratio)
    return ONEBIT_OK;
  recipe->method = &with_trust_ratios;
  return ob_lamb_make_own(recipe, ntensors);
}

const struct ob_method ob_method_efficient_adam = {
    .name = "efficient_adam",
    OB_OPTIONS("ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT", options_of),
    .initial = {.no_warmup = true,
                .freeze_step = ONEBIT_FREEZE_NEVER,
                .limits = {.coefficient_beta = 0.9, .min_factor = 1, .max_factor = 1}},
    .not_deepspeeds = "Efficient-Adam",
    .resolve = resolve,
    .momentum = true,
    .moments = true,
    .dense_arrays = OB_MASK(OB_VARIANCE),
    .dense = dense,
    .exchange = ob_freeze_exchange,
    .call = call,
    .update = ob_buckets_apply};

onebit_status_t onebit_efficient_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                             size_t ntensors,
                                             const onebit_efficient_adam_options_t *options,
                                             onebit_optimizer_t *optimizer) {
  OB_CALL_SCOPE;
  return ob_optimizer_create(comm, &ob_method_efficient_adam, options, tensors, ntensors,
                             optimizer);
}
