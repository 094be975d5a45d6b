/*
 * The functions of 1-bit LAMB.
 *
 * Memory traffic of a step in bytes per parameter, besides messages. Warm-up: 28 for LAMB (reads
 * mean gradient, moments and parameters, writes moments and the update) and 12 for LAMB_MOVE, which
 * has to wait for the tensor's norms. Compressed: 12 to compress (residual, gradient, residual), 16
 * for LAMB_FRESH (reads reciprocal and parameters, reads and writes the fresh variance), and 12 for
 * APPLY, a separate pass because the factor depends on all elements of the tensor. The two messages
 * that LAMB_FRESH compares are a quarter of a byte.
 */
#include "onebit/lamb.h"

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/optimizer.h"

/* --- Per-tensor coefficients, on the host */

/* Finds the tensor that begins with piece *k of the bucket, and sets *k to the beginning of the
 * next tensor. Returns false after the last one. */
static bool find_next_tensor(const struct onebit_optimizer *optimizer,
                             const struct ob_bucket *bucket, size_t *k, size_t *tensor) {
  size_t pieces = ob_plan_layout(bucket->bits)->pieces;
  *tensor = *k < pieces ? bucket->tensor_of[*k] : optimizer->tensor_count;
  while (*k < pieces && bucket->tensor_of[*k] == *tensor)
    ++*k;
  return *tensor < optimizer->tensor_count;
}

static onebit_status_t sum_tensor(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                  size_t tensor, int which, double *sum) {
  const struct ob_tensor *of = &optimizer->tensors[tensor];
  return optimizer->executor->sum(optimizer, bucket, which, of->first_block, of->end_block, sum);
}

static onebit_status_t compute_warmup_ratio(struct onebit_optimizer *optimizer,
                                            struct ob_bucket *bucket, size_t tensor,
                                            double *ratio) {
  struct ob_lamb *lamb = optimizer->own;
  double parameters, updates;
  OB_TRY(sum_tensor(optimizer, bucket, tensor, 1, &parameters));
  OB_TRY(sum_tensor(optimizer, bucket, tensor, 2, &updates));
  *ratio = ob_lamb_warmup_ratio(&lamb->coefficients[tensor], parameters, updates, &lamb->limits);
  return ONEBIT_OK;
}

static onebit_status_t correct_factor(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                      size_t tensor, double *ratio) {
  struct ob_lamb *lamb = optimizer->own;
  double plain, updates, largest, *factor = &lamb->factors[tensor];
  OB_TRY(sum_tensor(optimizer, bucket, tensor, 1, &plain));
  OB_TRY(sum_tensor(optimizer, bucket, tensor, 2, &updates));
  OB_TRY(sum_tensor(optimizer, bucket, tensor, OB_LARGEST, &largest));
  *factor = ob_lamb_correct_factor(*factor, plain, updates, largest, &lamb->limits);
  *ratio = lamb->coefficients[tensor] * *factor;
  return ONEBIT_OK;
}

static onebit_status_t lamb_set_rates(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                      enum ob_lamb_stage stage) {
  size_t tensor;
  for (size_t k = 0, first = 0; find_next_tensor(optimizer, bucket, &k, &tensor); first = k) {
    double ratio = 1;
    OB_TRY(stage == OB_LAMB_WARM ? compute_warmup_ratio(optimizer, bucket, tensor, &ratio)
                                 : correct_factor(optimizer, bucket, tensor, &ratio));
    for (size_t i = first; i < k; i++)
      bucket->learning_rates[i] =
          ob_lamb_rate(optimizer->step.learning_rate, bucket->factors[i], ratio);
  }
  return ONEBIT_OK;
}

static onebit_status_t compute_level(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                     size_t tensor, double *level) {
  double squares;
  OB_TRY(sum_tensor(optimizer, bucket, tensor, 0, &squares));
  *level = ob_lamb_level(squares, optimizer->tensors[tensor].count);
  return ONEBIT_OK;
}

/* Computes the tensors' scalings from each tensor's level and the mean level, over tensors with
 * momentum. */
static onebit_status_t set_scalings(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  struct ob_lamb *lamb = optimizer->own;
  double level, total = 0;
  size_t count = 0, tensor;
  for (size_t k = 0; find_next_tensor(optimizer, bucket, &k, &tensor);) {
    OB_TRY(compute_level(optimizer, bucket, tensor, &level));
    total += level;
    count += level > 0;
  }
  for (size_t k = 0; find_next_tensor(optimizer, bucket, &k, &tensor);) {
    OB_TRY(compute_level(optimizer, bucket, tensor, &level));
    lamb->scalings[tensor] = (double)ob_lamb_scaling(total / (double)count, level);
  }
  return ONEBIT_OK;
}

onebit_status_t ob_lamb_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                enum ob_lamb_stage stage) {
  return stage == OB_LAMB_SCALE ? set_scalings(optimizer, bucket)
                                : lamb_set_rates(optimizer, bucket, stage);
}

onebit_status_t ob_lamb_run(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                            enum ob_lamb_stage stage) {
  return (optimizer->executor->lamb ? optimizer->executor->lamb : ob_lamb_on_host)(optimizer,
                                                                                   bucket, stage);
}

/* Sets the pieces' scalings from those of their tensors. Padding keeps the scaling 0. */
static void load_scalings(const struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  const struct ob_lamb *lamb = optimizer->own;
  for (size_t k = 0; k < ob_plan_layout(bucket->bits)->pieces; k++)
    if (bucket->tensor_of[k] < optimizer->tensor_count)
      bucket->scalings[k] = (float)lamb->scalings[bucket->tensor_of[k]];
}

/* --- Steps */

static onebit_status_t lamb_run_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                     enum ob_pass_kind kind) {
  return ob_bucket_run_pass(optimizer, bucket, kind, optimizer->steps + 1 - optimizer->zero_steps);
}

onebit_status_t ob_lamb_make_dense_step(struct onebit_optimizer *optimizer,
                                        struct ob_bucket *bucket) {
  OB_TRY(lamb_run_pass(optimizer, bucket, OB_PASS_LAMB));
  OB_TRY(ob_lamb_run(optimizer, bucket, OB_LAMB_WARM));
  return lamb_run_pass(optimizer, bucket, OB_PASS_LAMB_MOVE);
}

/* Makes a step with a frozen variance, on a single rank that does not compress. */
static onebit_status_t make_frozen_step(struct onebit_optimizer *optimizer,
                                        struct ob_bucket *bucket) {
  OB_TRY(lamb_run_pass(optimizer, bucket, OB_PASS_LAMB_FROZEN));
  OB_TRY(ob_lamb_run(optimizer, bucket, OB_LAMB_CORRECT));
  return lamb_run_pass(optimizer, bucket, OB_PASS_LAMB_MOVE);
}

/* Returns true in the first compressed step. For a deferred executor it always returns true: the
 * executor itself knows which step is the first. */
static bool is_momentum_in_residual(const struct onebit_optimizer *optimizer) {
  return optimizer->deferred || optimizer->steps == optimizer->frozen_at;
}

/* Fills in the call. It is held, since the factor needs all elements of a tensor before any result
 * is applied. Scalings may come from a checkpoint. */
static void lamb_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      struct ob_call *call) {
  load_scalings(optimizer, bucket);
  ob_fill_momentum_call(optimizer, bucket, OB_PASS_APPLY, call);
  call->source.momentum_in_residual = is_momentum_in_residual(optimizer);
  bucket->sink.factors.bound = ob_step_bound(optimizer);
  call->hold = true;
}

/* Compares the momentum received with the one before it. In the first compressed step, the momentum
 * before is no message: the freeze left it, times beta1, in the residual, and the exchange has only
 * written the residual's other copy. */
static onebit_status_t lamb_compare_momentum(struct onebit_optimizer *optimizer,
                                             struct ob_bucket *bucket) {
  struct ob_pass_sink sink =
      ob_bucket_make_sink(optimizer, bucket, OB_PASS_LAMB_FRESH, optimizer->steps + 1);
  sink.factors.bound = ob_step_bound(optimizer);
  if (is_momentum_in_residual(optimizer))
    sink.last_values = bucket->arrays[OB_MOMENTUM];
  ob_plan_run_pass(bucket->bits, &sink);
  return ob_lamb_run(optimizer, bucket, OB_LAMB_CORRECT);
}

static onebit_status_t lamb_update(struct onebit_optimizer *optimizer) {
  bool sent_bits = optimizer->step.exchange == OB_EXCHANGE_BITS;
  if (sent_bits)
    OB_TRY(ob_buckets_for_each(optimizer, lamb_compare_momentum));
  OB_TRY(ob_buckets_apply(optimizer));
  if (!sent_bits)
    OB_TRY(ob_buckets_for_each(optimizer,
                               optimizer->frozen_at ? make_frozen_step : ob_lamb_make_dense_step));
  return ONEBIT_OK;
}

/* Freezes a bucket. Scalings are needed only if several tensors share one scale. */
static onebit_status_t freeze_bucket(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  if (ob_plan_geometry(bucket->bits)->one_scale && ob_optimizer_compresses(optimizer)) {
    OB_TRY(ob_bucket_run_pass(optimizer, bucket, OB_PASS_POWER, optimizer->steps));
    OB_TRY(ob_lamb_run(optimizer, bucket, OB_LAMB_SCALE));
    load_scalings(optimizer, bucket);
  }
  return ob_bucket_run_pass(optimizer, bucket, OB_PASS_LAMB_FREEZE, optimizer->steps);
}

static onebit_status_t lamb_freeze(struct onebit_optimizer *optimizer) {
  return ob_buckets_for_each(optimizer, freeze_bucket);
}

size_t ob_lamb_numbers(struct onebit_optimizer *optimizer, struct ob_numbers list[OB_MAX_NUMBERS]) {
  struct ob_lamb *lamb = optimizer->own;
  const struct ob_lamb_limits *limits = &lamb->limits;
  list[0] = (struct ob_numbers){.kind = OB_NUMBERS_REAL,
                                .at = lamb->coefficients,
                                .count = lamb->count,
                                .max = limits->max_coefficient};
  list[1] = (struct ob_numbers){.kind = OB_NUMBERS_REAL,
                                .at = lamb->factors,
                                .count = lamb->count,
                                .min = fmin(limits->min_factor, 1),
                                .max = fmax(limits->max_factor, 1)};
  list[2] = (struct ob_numbers){.kind = OB_NUMBERS_REAL,
                                .at = lamb->scalings,
                                .count = lamb->count,
                                .min = (double)FLT_TRUE_MIN,
                                .max = (double)FLT_MAX};
  return 3;
}

static double *lamb_get_scalings(struct onebit_optimizer *optimizer) {
  struct ob_lamb *lamb = optimizer->own;
  return lamb->scalings;
}

onebit_status_t ob_lamb_fill_statistics(const struct onebit_optimizer *optimizer, size_t tensor,
                                        onebit_tensor_statistics_t *statistics) {
  const struct ob_lamb *lamb = optimizer->own;
  statistics->coefficient = lamb->coefficients[tensor];
  statistics->factor = lamb->factors[tensor];
  return ONEBIT_OK;
}

onebit_status_t ob_lamb_make_own(struct ob_recipe *recipe, size_t ntensors) {
  size_t head = sizeof(struct ob_lamb);
  bool fits = ntensors <= (SIZE_MAX - head) / (3 * sizeof(double));
  struct ob_lamb *lamb = fits ? ob_allocate(1, head + 3 * ntensors * sizeof(double)) : NULL;
  recipe->own = lamb;
  if (!lamb)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu tensors", ntensors);
  double *numbers = (double *)(void *)(lamb + 1);
  *lamb = (struct ob_lamb){recipe->moments.limits, ntensors, numbers, numbers + ntensors,
                           numbers + 2 * ntensors};
  for (size_t t = 0; t < ntensors; t++)
    lamb->factors[t] = lamb->scalings[t] = 1;
  return ONEBIT_OK;
}

/* --- The method's row --------------------------------------------------------------------------*/

#define OPTIONS onebit_lamb_options_t
static const struct ob_option options_of[] = {
    OB_ADAM_OPTIONS,
    OB_FREEZE_OPTIONS,
    OB_REAL(max_coefficient, limits.max_coefficient, 10),
    OB_REAL(min_coefficient, limits.min_coefficient, 0.01),
    OB_FRACTION(coefficient_beta, limits.coefficient_beta, 0.9),
    OB_REAL(max_factor, limits.max_factor, 0),
    OB_REAL(min_factor, limits.min_factor, 0.5),
    OB_FRACTION(factor_change, limits.factor_change, 0.1),
};

static onebit_status_t lamb_resolve(struct ob_recipe *recipe, size_t ntensors) {
  struct ob_lamb_limits *limits = &recipe->moments.limits;
  const bool deepspeed = recipe->common.profile == ONEBIT_PROFILE_DEEPSPEED;
  limits->max_factor = ob_value_or_default(limits->max_factor, deepspeed ? 4 : 1.5);
  OB_TRY(ob_check_order("min_coefficient", limits->min_coefficient, "max_coefficient",
                        limits->max_coefficient));
  OB_TRY(ob_check_order("min_factor", limits->min_factor, "max_factor", limits->max_factor));
  return ob_lamb_make_own(recipe, ntensors);
}

const struct ob_method ob_method_lamb = {.name = "lamb",
                                         OB_OPTIONS("ONEBIT_LAMB_OPTIONS_INIT", options_of),
                                         .recommended =
                                             "Efficient-Adam (onebit_efficient_adam_create)",
                                         .resolve = lamb_resolve,
                                         .momentum = true,
                                         .fused = true,
                                         .lamb = true,
                                         .arrays = OB_MASK(OB_VARIANCE) | OB_MASK(OB_FRESH),
                                         .dense = ob_lamb_make_dense_step,
                                         .call = lamb_call,
                                         .update = lamb_update,
                                         .freeze = lamb_freeze,
                                         .add_statistics = ob_lamb_fill_statistics,
                                         .numbers = ob_lamb_numbers,
                                         .scalings = lamb_get_scalings};

OB_METHOD_CREATE(lamb)
