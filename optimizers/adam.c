/* 1-bit Adam: what is its own. */
#include "onebit/adam.h"

#include "base/error.h"
#include "optimizers/optimizer.h"

static bool sends_step(const struct onebit_optimizer *optimizer) {
  return optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
}

static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return ob_unit_pass(optimizer, unit, OB_PASS_ADAM, optimizer->steps + 1);
}

static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  ob_momentum_call(optimizer, unit, sends_step(optimizer) ? OB_PASS_APPLY_STEP : OB_PASS_APPLY,
                   call);
  unit->sink.factors.bound = ob_step_bound(optimizer);
  if (sends_step(optimizer))
    call->source.reciprocals = unit->arrays[OB_VARIANCE];
}

/* One rank alone, where it does not compress, goes on with a frozen variance. */
static onebit_status_t update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_units_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_units_pass(optimizer, optimizer->frozen_at ? OB_PASS_FROZEN : OB_PASS_ADAM,
                         optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t advance(struct onebit_optimizer *optimizer) {
  bool due;
  OB_TRY(ob_freeze_is_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  bool step = sends_step(optimizer) && ob_optimizer_compresses(optimizer);
  OB_TRY(ob_units_pass(optimizer, step ? OB_PASS_FREEZE_STEP : OB_PASS_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

static const struct ob_method method = {.name = "adam",
                                        .momentum = true,
                                        .arrays = OB_MASK(OB_VARIANCE),
                                        .dense = dense,
                                        .exchange = ob_freeze_exchange,
                                        .call = call,
                                        .update = update,
                                        .advance = advance};

static onebit_status_t resolve(const onebit_adam_options_t *given, struct ob_recipe *recipe) {
  static const onebit_adam_options_t defaults = ONEBIT_ADAM_OPTIONS_INIT;
  const onebit_adam_options_t *options = given ? given : &defaults;
  OB_TRY(ob_check_size(options->size, sizeof *options, "ONEBIT_ADAM_OPTIONS_INIT"));
  recipe->common = options->common;
  recipe->moments = (struct ob_moments){.beta1 = options->beta1,
                                        .beta2 = options->beta2,
                                        .epsilon = options->epsilon,
                                        .no_bias_correction = options->no_bias_correction,
                                        .freeze_step = options->freeze_step,
                                        .freeze_threshold = options->freeze_threshold,
                                        .exchange = options->exchange,
                                        .shards = options->shards};
  if (options->exchange > ONEBIT_ADAM_EXCHANGE_STEP)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "exchange is %d, which is no onebit_adam_exchange_t",
                    (int)options->exchange);
  if (options->shards > ONEBIT_SHARDS_PARAMETERS)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "shards is %d, which is no onebit_shards_t",
                    (int)options->shards);
  if (options->shards != ONEBIT_SHARDS_NONE) {
    recipe->method = &ob_method_shards;
    OB_TRY(ob_shards_check(options));
  }
  return ob_moments_resolve(&recipe->moments, options->common.profile);
}

onebit_status_t onebit_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_adam_options_t *options,
                                   onebit_optimizer_t *optimizer) {
  struct ob_recipe recipe = {.method = &method};
  recipe.status = resolve(options, &recipe);
  const struct ob_moments *moments = &recipe.moments;
  const struct ob_term terms[] = {
      OB_MOMENT_TERMS(moments),
      {"exchange", (uint64_t)moments->exchange},
      {"shards", (uint64_t)moments->shards},
  };
  recipe.terms = terms;
  recipe.term_count = sizeof terms / sizeof terms[0];
  return ob_optimizer_create(comm, &recipe, tensors, ntensors, optimizer);
}
