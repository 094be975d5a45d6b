/* Lion in one bit: what is its own. Ranks send normalised gradients and keep no momentum; the
 * server of a share keeps it, and sends the signs of a step. */
#include "onebit/lion.h"

#include "base/error.h"
#include "optimizers/optimizer.h"

static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return ob_unit_pass(optimizer, unit, OB_PASS_LION, optimizer->steps + 1);
}

static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  unit->sink = ob_unit_sink(optimizer, unit, OB_PASS_STEP, optimizer->steps + 1);
  const struct ob_adam_factors *adam = &unit->sink.factors.adam;
  call->source.weight = 1;
  call->source.moment_rule = OB_MOMENTS_SECOND;
  call->source.moment = (struct ob_moment_factors){
      .beta2 = adam->beta2, .one_minus_beta2 = adam->one_minus_beta2, .epsilon = adam->epsilon};
  ob_moment_correct(&call->source.moment, optimizer->moments.beta2,
                    (double)unit->bits->geometry.members, optimizer->steps + 1);
  call->sink = &unit->sink;
  call->hold = optimizer->unit_count > 1;
}

static const struct ob_method method = {.name = "lion",
                                        .moments = true,
                                        .serve_rule = OB_SERVE_LION,
                                        .dense = dense,
                                        .exchange = ob_freeze_exchange,
                                        .call = call,
                                        .update = ob_units_apply};

/* The beta of the second moments is what others call beta2. */
static onebit_status_t resolve(const onebit_lion_options_t *given, struct ob_recipe *recipe) {
  static const onebit_lion_options_t defaults = ONEBIT_LION_OPTIONS_INIT;
  const onebit_lion_options_t *options = given ? given : &defaults;
  OB_TRY(ob_check_size(options->size, sizeof *options, "ONEBIT_LION_OPTIONS_INIT"));
  recipe->common = options->common;
  recipe->moments = (struct ob_moments){.beta1 = options->beta1,
                                        .beta2 = options->beta3,
                                        .lion_beta2 = ob_given_or(options->beta2, 0.99),
                                        .epsilon = options->epsilon,
                                        .no_warmup = true,
                                        .freeze_step = ONEBIT_FREEZE_NEVER};
  OB_TRY(ob_check_fraction("beta2", recipe->moments.lion_beta2));
  OB_TRY(ob_check_fraction("beta3", ob_given_or(options->beta3, 0.999)));
  if (options->common.profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, and DeepSpeed has no Lion in one bit");
  return ob_moments_resolve(&recipe->moments, options->common.profile);
}

onebit_status_t onebit_lion_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                   size_t ntensors, const onebit_lion_options_t *options,
                                   onebit_optimizer_t *optimizer) {
  struct ob_recipe recipe = {.method = &method};
  recipe.status = resolve(options, &recipe);
  const struct ob_moments *moments = &recipe.moments;
  const struct ob_term terms[] = {
      {"beta1 (as bits)", ob_bits_of_double(moments->beta1)},
      {"beta2 (as bits)", ob_bits_of_double(moments->lion_beta2)},
      {"beta3 (as bits)", ob_bits_of_double(moments->beta2)},
      {"epsilon (as bits)", ob_bits_of_double(moments->epsilon)},
  };
  recipe.terms = terms;
  recipe.term_count = sizeof terms / sizeof terms[0];
  return ob_optimizer_create(comm, &recipe, tensors, ntensors, optimizer);
}
