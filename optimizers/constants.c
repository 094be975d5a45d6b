/*
 * Factors of the learning rate, weight decays, beta1 and the tag, which the caller may change
 * between steps.
 *
 * The first two are only used where parameters are moved. 0/1 Adam's ranks make several steps apart
 * from each other, and then one on the sum of their rates: there a factor must be the same from one
 * synchronisation to the next, and a new one waits for it. At the freeze momentum is multiplied by
 * beta1, as the first compressed step wants it: a new one waits for the step after that.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "optimizers/bucket_memory.h"
#include "optimizers/optimizer.h"

static bool must_wait(const struct onebit_optimizer *optimizer) {
  return optimizer->method->adds_rates && optimizer->method->adds_rates(optimizer);
}

static bool beta1_must_wait(const struct onebit_optimizer *optimizer) {
  return optimizer->method->momentum && optimizer->frozen_at &&
         optimizer->steps == optimizer->frozen_at && ob_optimizer_compresses(optimizer);
}

static void apply_beta1(struct onebit_optimizer *optimizer) {
  if (optimizer->moments.beta1 == optimizer->beta1 || beta1_must_wait(optimizer))
    return;
  optimizer->moments.beta1 = optimizer->beta1;
  ob_buckets_set_serving(optimizer);
}

onebit_status_t ob_constants_apply(struct onebit_optimizer *optimizer) {
  apply_beta1(optimizer);
  if (!optimizer->constants_wait || must_wait(optimizer))
    return ONEBIT_OK;
  optimizer->constants_wait = false;
  for (size_t t = 0; t < optimizer->tensor_count; t++)
    OB_TRY(ob_buckets_set_constants(optimizer, t));
  return ONEBIT_OK;
}

/* The rate alone, as long as no constant was set: it then reads as a number in messages of errors.
 */
void ob_constants_agree(const struct onebit_optimizer *optimizer, float rate, const char *name,
                        struct ob_call *call) {
  call->agreed = ob_bits_of(rate) ^ optimizer->constants;
  call->agreed_name = name;
  if (optimizer->constants == 0)
    return;
  call->agreed_name = "learning_rate, or a factor of it, weight decay, beta1 or tag that was set "
                      "(their fingerprint)";
  call->agreed_whole = true;
}

static uint32_t constants_fingerprint(const struct onebit_optimizer *optimizer, size_t tensor) {
  const onebit_tensor_t *of = &optimizer->list[tensor];
  const uint64_t number = tensor;
  uint64_t hash = ob_hash(OB_HASH_START, &number, sizeof number);
  hash = ob_hash(hash, &of->learning_rate_factor, sizeof(float));
  hash = ob_hash(hash, &of->weight_decay, sizeof(float));
  return (uint32_t)(hash ^ hash >> 32);
}

static uint32_t fingerprint_of_number(const void *number) {
  const uint64_t hash = ob_hash(OB_HASH_START, number, sizeof(uint64_t));
  return (uint32_t)(hash ^ hash >> 32);
}

static onebit_status_t check_optimizer(onebit_optimizer_t optimizer) {
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  return ob_optimizer_catch_up(optimizer);
}

static onebit_status_t constants_check(onebit_optimizer_t optimizer, size_t tensor,
                                       const char *name, float value) {
  OB_TRY(check_optimizer(optimizer));
  if (tensor >= optimizer->tensor_count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "tensor is %zu, and there are %zu", tensor,
                    optimizer->tensor_count);
  if (!(value >= 0) || !ob_is_finite(value))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %g, not a finite number from 0 on", name,
                    (double)value);
  return ONEBIT_OK;
}

/* Sets a constant. The fingerprint of a value that is set and set back cancels. */
static onebit_status_t constants_set(onebit_optimizer_t optimizer, size_t tensor, float *constant,
                                     float value) {
  optimizer->constants ^= constants_fingerprint(optimizer, tensor);
  *constant = value;
  optimizer->constants ^= constants_fingerprint(optimizer, tensor);
  if (must_wait(optimizer)) {
    optimizer->constants_wait = true;
    return ONEBIT_OK;
  }
  return ob_buckets_set_constants(optimizer, tensor);
}

onebit_status_t onebit_optimizer_set_learning_rate_factor(onebit_optimizer_t optimizer,
                                                          size_t tensor, float factor) {
  OB_CALL_SCOPE;
  OB_TRY(constants_check(optimizer, tensor, "factor", factor));
  return constants_set(optimizer, tensor, &optimizer->list[tensor].learning_rate_factor, factor);
}

onebit_status_t onebit_optimizer_set_weight_decay(onebit_optimizer_t optimizer, size_t tensor,
                                                  float weight_decay) {
  OB_CALL_SCOPE;
  OB_TRY(constants_check(optimizer, tensor, "weight_decay", weight_decay));
  return constants_set(optimizer, tensor, &optimizer->list[tensor].weight_decay, weight_decay);
}

onebit_status_t onebit_optimizer_set_beta1(onebit_optimizer_t optimizer, double beta1) {
  OB_CALL_SCOPE;
  OB_TRY(check_optimizer(optimizer));
  OB_TRY(ob_check_fraction("beta1", beta1));
  optimizer->constants ^= fingerprint_of_number(&optimizer->beta1) ^ fingerprint_of_number(&beta1);
  optimizer->beta1 = beta1;
  apply_beta1(optimizer);
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_take_parameters(onebit_optimizer_t optimizer) {
  OB_CALL_SCOPE;
  OB_TRY(check_optimizer(optimizer));
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (optimizer->buckets[u].masters)
      OB_TRY(ob_bucket_make_masters(optimizer, &optimizer->buckets[u]));
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_set_tag(onebit_optimizer_t optimizer, uint64_t tag) {
  OB_CALL_SCOPE;
  OB_TRY(check_optimizer(optimizer));
  optimizer->constants ^= fingerprint_of_number(&optimizer->tag) ^ fingerprint_of_number(&tag);
  optimizer->tag = tag;
  return ONEBIT_OK;
}
