/* The functions of 1-bit momentum SGD. Without a warm-up the first step is compressed: the
 * residuals and the previous momentum are zeros then. The memory of the warm-up's residuals is
 * returned when the warm-up ends (freeze.c). */
#include "onebit/momentum.h"

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/optimizer.h"

/* Fills in the call. The message is the step, since there is no variance. */
static void momentum_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                          struct ob_call *call) {
  ob_fill_momentum_call(optimizer, bucket, OB_PASS_APPLY_STEP, call);
}

static onebit_status_t momentum_update(struct onebit_optimizer *optimizer) {
  OB_TRY(ob_buckets_apply(optimizer));
  if (optimizer->step.exchange == OB_EXCHANGE_DENSE)
    OB_TRY(ob_buckets_run_pass(optimizer, OB_PASS_SGD, optimizer->steps + 1));
  return ONEBIT_OK;
}

static onebit_status_t momentum_freeze(struct onebit_optimizer *optimizer) {
  return ob_buckets_run_pass(optimizer, OB_PASS_SGD_FREEZE, optimizer->steps);
}

/* --- The method's row --------------------------------------------------------------------------*/

#define OPTIONS onebit_momentum_options_t
static const struct ob_option options_of[] = {
    OB_FRACTION(momentum, beta1, 0.9),
    OB_COUNT(warmup_steps),
};

static onebit_status_t momentum_resolve(struct ob_recipe *recipe, size_t ntensors) {
  struct ob_moments *moments = &recipe->moments;
  (void)ntensors;
  moments->no_warmup = moments->warmup_steps == ONEBIT_WARMUP_NONE;
  moments->freeze_step = moments->warmup_steps ? moments->warmup_steps : ONEBIT_WARMUP_STEPS;
  if (!moments->warmup_steps && !recipe->common.warmup_bits)
    recipe->common.warmup_bits = 8;
  return ONEBIT_OK;
}

const struct ob_method ob_method_momentum = {
    .name = "momentum",
    OB_OPTIONS("ONEBIT_MOMENTUM_OPTIONS_INIT", options_of),
    .initial = {.beta2 = 0.999, /* no effect on results, but used in arithmetic */
                .epsilon = 1e-8,
                .no_bias_correction = true,
                .no_dampening = true},
    .not_deepspeeds = "1-bit momentum SGD",
    .resolve = momentum_resolve,
    .momentum = true,
    .begins_frozen = true,
    .dense_pass = OB_PASS_SGD,
    .call = momentum_call,
    .update = momentum_update,
    .freeze = momentum_freeze};

OB_METHOD_CREATE(momentum)
