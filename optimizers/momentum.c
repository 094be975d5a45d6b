/* 1-bit momentum SGD: what is its own. Without a warm-up the first step is compressed: the kept
 * values are zeros, and so is the momentum of the messages before it. */
#include "onebit/momentum.h"

#include "base/error.h"
#include "optimizers/optimizer.h"

static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return ob_unit_pass(optimizer, unit, OB_PASS_SGD, optimizer->steps + 1);
}

/* The message is the step: there is no variance. */
static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  ob_momentum_call(optimizer, unit, OB_PASS_APPLY_STEP, call);
}

static onebit_status_t update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_units_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_units_pass(optimizer, OB_PASS_SGD, optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t advance(struct onebit_optimizer *optimizer) {
  bool due;
  OB_TRY(ob_freeze_is_due(optimizer, &due));
  if (!due)
    return ONEBIT_OK;
  OB_TRY(ob_units_pass(optimizer, OB_PASS_SGD_FREEZE, optimizer->steps));
  optimizer->frozen_at = optimizer->steps;
  return ONEBIT_OK;
}

static const struct ob_method method = {.name = "momentum",
                                        .momentum = true,
                                        .dense = dense,
                                        .exchange = ob_freeze_exchange,
                                        .call = call,
                                        .update = update,
                                        .advance = advance};

/* beta2 and epsilon have no part in it: their defaults do no harm. */
static onebit_status_t resolve(const onebit_momentum_options_t *given, struct ob_recipe *recipe) {
  static const onebit_momentum_options_t defaults = ONEBIT_MOMENTUM_OPTIONS_INIT;
  const onebit_momentum_options_t *options = given ? given : &defaults;
  OB_TRY(ob_check_size(options->size, sizeof *options, "ONEBIT_MOMENTUM_OPTIONS_INIT"));
  recipe->common = options->common;
  recipe->moments = (struct ob_moments){.beta1 = ob_given_or(options->momentum, 0.9),
                                        .no_bias_correction = true,
                                        .no_dampening = true,
                                        .no_warmup = options->warmup_steps == 0,
                                        .freeze_step = options->warmup_steps ? options->warmup_steps
                                                                             : ONEBIT_FREEZE_NEVER};
  OB_TRY(ob_check_fraction("momentum", recipe->moments.beta1));
  if (options->common.profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, and DeepSpeed has no 1-bit momentum SGD");
  return ob_moments_resolve(&recipe->moments, options->common.profile);
}

onebit_status_t onebit_momentum_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                       size_t ntensors, const onebit_momentum_options_t *options,
                                       onebit_optimizer_t *optimizer) {
  struct ob_recipe recipe = {.method = &method};
  recipe.status = resolve(options, &recipe);
  const struct ob_term terms[] = {
      {"momentum (as bits)", ob_bits_of_double(recipe.moments.beta1)},
      {"warmup_steps", recipe.moments.no_warmup ? 0 : recipe.moments.freeze_step},
  };
  recipe.terms = terms;
  recipe.term_count = sizeof terms / sizeof terms[0];
  return ob_optimizer_create(comm, &recipe, tensors, ntensors, optimizer);
}
