/* Passes over buckets, of which methods consist. */
#include <math.h>

#include "base/error.h"
#include "optimizers/optimizer.h"

struct ob_lion_factors ob_lion_factors_of(const struct onebit_optimizer *optimizer) {
  const struct ob_moments *moments = &optimizer->moments;
  return (struct ob_lion_factors){.beta1 = (float)moments->beta1,
                                  .one_minus_beta1 = (float)(1 - moments->beta1),
                                  .beta2 = (float)moments->server_beta,
                                  .one_minus_beta2 = (float)(1 - moments->server_beta)};
}

struct ob_pass_factors ob_factors_of(const struct onebit_optimizer *optimizer, uint64_t step) {
  const struct ob_moments *moments = &optimizer->moments;
  struct ob_pass_factors factors = {
      .adam = {.beta1 = (float)moments->beta1,
               .beta2 = (float)moments->beta2,
               .one_minus_beta1 = moments->no_dampening ? 1 : (float)(1 - moments->beta1),
               .one_minus_beta2 = (float)(1 - moments->beta2),
               .momentum_factor = 1,
               .variance_factor = 1,
               .epsilon = (float)moments->epsilon},
      .lion = ob_lion_factors_of(optimizer),
      .gradient_factor = optimizer->step.gradient_factor,
      .bound = INFINITY,
      .before = step > 1 ? (float)(1 / (1 - ob_power(moments->beta2, step - 1))) : 1,
      .keep_zero = optimizer->options.profile != ONEBIT_PROFILE_DEEPSPEED,
  };
  if (!moments->no_bias_correction) {
    factors.adam.momentum_factor = ob_adam_momentum_factor(moments->beta1, step);
    factors.adam.variance_factor = ob_adam_variance_factor(moments->beta2, step);
  }
  return factors;
}

float ob_step_bound(const struct onebit_optimizer *optimizer) {
  return optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED ? INFINITY : ONEBIT_STEP_BOUND;
}

struct ob_pass_sink ob_bucket_sink(const struct onebit_optimizer *optimizer,
                                   const struct ob_bucket *bucket, enum ob_pass_kind kind,
                                   uint64_t step) {
  const unsigned uses = ob_pass_reads(kind) | ob_pass_writes(kind);
  struct ob_pass_sink sink = {.kind = kind,
                              .first_word = bucket->first_word,
                              .parameters = bucket->parameters,
                              .copies = bucket->masters ? bucket->copies : NULL,
                              .gradients = bucket->gradients,
                              .copy_dtype = optimizer->options.parameter_dtype,
                              .gradient_dtype = optimizer->options.gradient_dtype,
                              .learning_rates = bucket->learning_rates,
                              .weight_decays = bucket->weight_decays,
                              .scalings = bucket->scalings,
                              .last_decay = (float)optimizer->moments.beta1,
                              .factors = ob_factors_of(optimizer, step),
                              .variances = bucket->sums[0],
                              .device = bucket->device};
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    sink.arrays[slot] = uses & OB_MASK(slot) ? bucket->arrays[slot] : NULL;
  if (optimizer->method->sharded && uses & OB_MASK(OB_PARAMETER))
    sink.masters = bucket->masters;
  for (int k = 0; k < OB_SUMS; k++)
    sink.sums[k] = ob_pass_sums(kind) & OB_MASK(k) ? bucket->sums[k] : NULL;
  return sink;
}

onebit_status_t ob_bucket_pass(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               enum ob_pass_kind kind, uint64_t step) {
  struct ob_pass_sink sink = ob_bucket_sink(optimizer, bucket, kind, step);
  return optimizer->executor->pass(optimizer, bucket, &sink);
}

onebit_status_t ob_buckets_pass(struct onebit_optimizer *optimizer, enum ob_pass_kind kind,
                                uint64_t step) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(ob_bucket_pass(optimizer, &optimizer->buckets[u], kind, step));
  return ONEBIT_OK;
}

onebit_status_t ob_buckets_each(struct onebit_optimizer *optimizer,
                                onebit_status_t (*of)(struct onebit_optimizer *optimizer,
                                                      struct ob_bucket *bucket)) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (!optimizer->buckets[u].uncompressed)
      OB_TRY(of(optimizer, &optimizer->buckets[u]));
  return ONEBIT_OK;
}

/* Applies the buckets' results. With one bucket they were not held, if the host knows how they
 * ended. */
onebit_status_t ob_buckets_apply(struct onebit_optimizer *optimizer) {
  struct ob_outcome outcome = {.status = ONEBIT_OK};
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    struct ob_bucket *bucket = &optimizer->buckets[u];
    enum ob_exchange exchange = ob_bucket_exchange(optimizer, bucket);
    onebit_plan_t plan = exchange == OB_EXCHANGE_BITS ? bucket->bits : bucket->dense;
    if (exchange != OB_EXCHANGE_NONE)
      ob_outcome_add(&outcome, ob_plan_apply(plan)); /* other streams may read its outputs */
  }
  return ob_outcome_tell(&outcome);
}

/* When there are several buckets nothing is applied until all are known to be well. */
void ob_momentum_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      enum ob_pass_kind kind, struct ob_call *call) {
  bucket->sink = ob_bucket_sink(optimizer, bucket, kind, optimizer->steps + 1);
  const struct ob_pass_factors *factors = &bucket->sink.factors;
  call->source.momentum = true;
  call->source.decay = factors->adam.beta1;
  call->source.weight = factors->adam.one_minus_beta1;
  call->source.scalings = bucket->scalings;
  call->sink = &bucket->sink;
  call->hold = optimizer->bucket_count > 1;
}

/* --- In memory of the processor ----------------------------------------------------------------*/

static onebit_status_t pass_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                    const struct ob_pass_sink *sink) {
  (void)optimizer;
  ob_pass_blocks(ob_plan_work(bucket->bits), NULL, NULL, NULL, sink);
  return ONEBIT_OK;
}

static onebit_status_t sum_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                   int which, size_t first, size_t end, double *sum) {
  (void)optimizer;
  *sum = ob_total_of(which, bucket->sums[which] + first, end - first);
  return ONEBIT_OK;
}

static onebit_status_t check_on_host(const char *name, const void *array) {
  return ob_executor_check_host(NULL, name, array);
}

static onebit_status_t no_bucket(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  (void)optimizer, (void)bucket;
  return ONEBIT_OK;
}

static void do_nothing(struct ob_bucket *bucket) { (void)bucket; }

static onebit_status_t no_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               struct ob_call *call) {
  (void)optimizer, (void)bucket, (void)call;
  return ONEBIT_OK;
}

static onebit_status_t no_piece(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                size_t piece) {
  (void)optimizer, (void)bucket, (void)piece;
  return ONEBIT_OK;
}

static onebit_status_t not_needed(struct onebit_optimizer *optimizer) {
  (void)optimizer;
  return ONEBIT_OK;
}

const struct ob_optimizer_executor ob_optimizer_executor_host = {.check = check_on_host,
                                                                 .create = no_bucket,
                                                                 .destroy = do_nothing,
                                                                 .prepare = no_call,
                                                                 .join = not_needed,
                                                                 .pass = pass_on_host,
                                                                 .sum = sum_on_host,
                                                                 .repoint = no_piece,
                                                                 .reweigh = no_piece,
                                                                 .serve = do_nothing,
                                                                 .finish = not_needed,
                                                                 .wait = not_needed};
