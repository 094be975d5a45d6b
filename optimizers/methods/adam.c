/* The functions of 1-bit Adam alone. */
#include "onebit/adam.h"

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/optimizer.h"

static bool adam_sends_step(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
}

static void adam_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      struct ob_call *call) {
  ob_momentum_call(optimizer, bucket,
                   adam_sends_step(optimizer) ? OB_PASS_APPLY_STEP : OB_PASS_APPLY, call);
  bucket->sink.factors.bound = ob_step_bound(optimizer);
  if (adam_sends_step(optimizer))
    call->source.reciprocals = bucket->arrays[OB_VARIANCE];
}

/* One rank alone, where it does not compress, goes on with a frozen variance. */
static onebit_status_t adam_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_buckets_pass(optimizer, optimizer->frozen_at ? OB_PASS_FROZEN : OB_PASS_ADAM,
                           optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t adam_advance(struct onebit_optimizer *optimizer) {
  bool due;
  OB_TRY(ob_freeze_is_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  bool step = adam_sends_step(optimizer) && ob_optimizer_compresses(optimizer);
  OB_TRY(ob_buckets_pass(optimizer, step ? OB_PASS_FREEZE_STEP : OB_PASS_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

/* --- Its row -----------------------------------------------------------------------------------*/

#define OPTIONS onebit_adam_options_t
static const struct ob_option options_of[] = {
    OB_ADAM_OPTIONS,
    OB_FREEZE_OPTIONS,
    OB_CHOICE(exchange, ONEBIT_ADAM_EXCHANGE_STEP, "onebit_adam_exchange_t"),
    OB_CHOICE(shards, ONEBIT_SHARDS_PARAMETERS, "onebit_shards_t"),
};

static onebit_status_t adam_resolve(struct ob_recipe *recipe, size_t ntensors) {
  (void)ntensors;
  return recipe->moments.shards == ONEBIT_SHARDS_NONE ? ONEBIT_OK : ob_shards_choose(recipe);
}

const struct ob_method ob_method_adam = {.name = "adam",
                                         OB_OPTIONS("ONEBIT_ADAM_OPTIONS_INIT", options_of),
                                         .recommended =
                                             "Efficient-Adam (onebit_efficient_adam_create)",
                                         .resolve = adam_resolve,
                                         .momentum = true,
                                         .arrays = OB_MASK(OB_VARIANCE),
                                         .dense_pass = OB_PASS_ADAM,
                                         .exchange = ob_freeze_exchange,
                                         .call = adam_call,
                                         .update = adam_update,
                                         .advance = adam_advance};

onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *optimizer) {
  OB_CALL_SCOPE;
  return ob_optimizer_create(comm, &ob_method_adam, options, tensors, ntensors, optimizer);
}
