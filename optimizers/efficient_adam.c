/* Efficient-Adam with one bit: what is its own. The first step is compressed already: residuals are
 * zeros, and so is the step of the messages before it. */
#include "onebit/efficient_adam.h"

#include "base/error.h"
#include "optimizers/lamb.h"

static onebit_status_t dense(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  return ob_unit_pass(optimizer, unit, OB_PASS_ADAM, optimizer->steps + 1);
}

static void call(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *call) {
  const struct ob_moments *moments = &optimizer->moments;
  ob_momentum_call(optimizer, unit, OB_PASS_STEP, call);
  const struct ob_adam_factors *adam = &unit->sink.factors.adam;
  call->source.weight *= (float)moments->gain;
  call->source.moment_rule = OB_MOMENTS_SECOND;
  call->source.moment = (struct ob_moment_factors){
      .beta2 = adam->beta2, .one_minus_beta2 = adam->one_minus_beta2, .epsilon = adam->epsilon};
  ob_moment_correct(&call->source.moment, moments->beta2, (double)unit->bits->geometry.members,
                    optimizer->steps + 1);
}

static const struct ob_method method = {.name = "efficient_adam",
                                        .momentum = true,
                                        .moments = true,
                                        .dense_arrays = OB_MASK(OB_VARIANCE),
                                        .dense = dense,
                                        .exchange = ob_freeze_exchange,
                                        .call = call,
                                        .update = ob_units_apply};

/* --- With trust ratios */

/* A tensor's ratio is of all its elements: nothing is applied before all are here. */
static void hold(struct onebit_optimizer *optimizer, struct ob_unit *unit, struct ob_call *into) {
  call(optimizer, unit, into);
  into->hold = true;
}

static onebit_status_t set_rates(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  struct ob_pass_sink sink =
      ob_unit_sink(optimizer, unit, OB_PASS_STEP_NORMS, optimizer->steps + 1);
  ob_plan_visit(unit->bits, &sink);
  return optimizer->place->lamb(optimizer, unit, OB_LAMB_WARM);
}

static onebit_status_t update(struct onebit_optimizer *optimizer) {
  if (optimizer->step.exchange == OB_EXCHANGE_BITS)
    OB_TRY(ob_units_each(optimizer, set_rates));
  return ob_units_apply(optimizer);
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

/* --- Options */

static onebit_status_t resolve_ratios(const onebit_efficient_adam_options_t *options,
                                      struct ob_lamb_limits *limits) {
  *limits = (struct ob_lamb_limits){.min_coefficient = ob_given_or(options->min_ratio, 0.01),
                                    .max_coefficient = ob_given_or(options->max_ratio, 10),
                                    .coefficient_beta = 0.9,
                                    .min_factor = 1,
                                    .max_factor = 1};
  return ob_lamb_check_order("min_ratio", limits->min_coefficient, "max_ratio",
                             limits->max_coefficient);
}

static onebit_status_t resolve(const onebit_efficient_adam_options_t *given,
                               struct ob_recipe *recipe, struct ob_lamb_limits *limits) {
  static const onebit_efficient_adam_options_t defaults = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  const onebit_efficient_adam_options_t *options = given ? given : &defaults;
  OB_TRY(ob_check_size(options->size, sizeof *options, "ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT"));
  recipe->common = options->common;
  recipe->moments = (struct ob_moments){.beta1 = options->beta1,
                                        .beta2 = options->beta2,
                                        .epsilon = options->epsilon,
                                        .gain = ob_given_or(options->gain, 1),
                                        .no_warmup = true,
                                        .freeze_step = ONEBIT_FREEZE_NEVER};
  recipe->method = options->trust_ratio ? &with_trust_ratios : &method;
  OB_TRY(ob_check_positive("gain", recipe->moments.gain));
  OB_TRY(resolve_ratios(options, limits));
  if (options->common.profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "profile is ONEBIT_PROFILE_DEEPSPEED, and DeepSpeed has no Efficient-Adam");
  return ob_moments_resolve(&recipe->moments, options->common.profile);
}

onebit_status_t onebit_efficient_adam_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                             size_t ntensors,
                                             const onebit_efficient_adam_options_t *options,
                                             onebit_optimizer_t *optimizer) {
  struct ob_recipe recipe = {.method = &method};
  struct ob_lamb_limits limits = {0};
  recipe.status = resolve(options, &recipe, &limits);
  if (recipe.method->lamb)
    ob_lamb_make_own(&recipe, &limits, ntensors);
  const struct ob_moments *moments = &recipe.moments;
  const struct ob_term terms[] = {
      OB_MOMENT_TERMS(moments),
      {"gain (as bits)", ob_bits_of_double(moments->gain)},
      {"min_ratio (as bits)", ob_bits_of_double(limits.min_coefficient)},
      {"max_ratio (as bits)", ob_bits_of_double(limits.max_coefficient)},
  };
  recipe.terms = terms;
  recipe.term_count = sizeof terms / sizeof terms[0];
  return ob_optimizer_create(comm, &recipe, tensors, ntensors, optimizer);
}
