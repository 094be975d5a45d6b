/* Options of the outer step. */

#include "base/error.h"
#include "optimizers/outer/outer.h"

/* Two bits bear this outer momentum, and no more; one bit bears none: docs/outer.md. */
#define MOMENTUM_OF_TWO_BITS 0.5

int ob_outer_bits_for(onebit_outer_rule_t rule, double momentum) {
  if (rule == ONEBIT_OUTER_MEAN)
    return 1;
  return rule == ONEBIT_OUTER_MOMENTUM && momentum <= MOMENTUM_OF_TWO_BITS ? 2 : 4;
}

static onebit_status_t resolve_rule(onebit_outer_options_t *options) {
  bool nesterov = options->rule == ONEBIT_OUTER_NESTEROV;
  if ((int)options->rule < 0 || options->rule > ONEBIT_OUTER_NESTEROV)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "rule is %d, which is no onebit_outer_rule_t",
                    (int)options->rule);
  if (options->rule == ONEBIT_OUTER_MEAN && options->momentum != 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "momentum is %g, and rule is ONEBIT_OUTER_MEAN, which has none",
                    options->momentum);
  options->learning_rate = ob_given_or(options->learning_rate, nesterov ? 0.7 : 1);
  OB_TRY(ob_check_positive("learning_rate", options->learning_rate));
  if (options->rule == ONEBIT_OUTER_MEAN)
    return ONEBIT_OK;
  options->momentum = ob_given_or(options->momentum, nesterov ? 0.9 : 0.5);
  return ob_check_fraction("momentum", options->momentum);
}

static onebit_status_t resolve_bits(onebit_outer_options_t *options) {
  int bits = options->bits ? options->bits : ob_outer_bits_for(options->rule, options->momentum);
  if (bits != 1 && bits != 2 && bits != 4 && bits != 8 && bits != ONEBIT_OUTER_DENSE &&
      bits != ONEBIT_OUTER_SPARSE)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "bits is %d, not 1, 2, 4, 8, ONEBIT_OUTER_DENSE, which is %d, or "
                    "ONEBIT_OUTER_SPARSE, which is %d",
                    bits, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE);
  options->bits = bits;
  return ONEBIT_OK;
}

static onebit_status_t resolve_times(onebit_outer_options_t *options) {
  if (!options->local_steps)
    options->local_steps = 30;
  if (!options->fragments)
    options->fragments = 1;
  if (options->fragments > options->local_steps)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "fragments is %zu, and local_steps only %zu",
                    options->fragments, options->local_steps);
  if (options->delay >= options->local_steps)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "delay is %zu, not less than local_steps, which is %zu",
                    options->delay, options->local_steps);
  options->mixing = ob_given_or(options->mixing, options->delay ? 0.5 : 1);
  if (!(options->mixing > 0 && options->mixing <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "mixing is %g, not above 0 and up to 1",
                    options->mixing);
  return ONEBIT_OK;
}

onebit_status_t ob_outer_resolve(const onebit_outer_options_t *given,
                                 onebit_outer_options_t *options) {
  *options = (onebit_outer_options_t)ONEBIT_OUTER_OPTIONS_INIT;
  if (given)
    OB_TRY(ob_size_check("options", given, sizeof *given));
  if (given)
    *options = *given;
  OB_TRY(resolve_rule(options));
  OB_TRY(resolve_bits(options));
  OB_TRY(resolve_times(options));
  options->weighted = options->weighted != 0;
  if ((int)options->parameter_dtype < 0 || options->parameter_dtype > ONEBIT_FLOAT16)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "parameter_dtype is %d, which is no onebit_dtype_t",
                    (int)options->parameter_dtype);
  if ((int)options->device < 0 || options->device > ONEBIT_DEVICE_CUDA)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "device is %d, which is no onebit_device_t",
                    (int)options->device);
  if (options->device != ONEBIT_DEVICE_HOST && options->bits == ONEBIT_OUTER_SPARSE)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "bits is ONEBIT_OUTER_SPARSE, and device is not ONEBIT_DEVICE_HOST: sparse "
                    "messages are made on the host only");
  return ONEBIT_OK;
}

onebit_status_t ob_outer_shape(const struct onebit_outer *outer, bool dense,
                               struct ob_plan_shape *shape) {
  const onebit_outer_options_t *options = &outer->options;
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  dense = dense || options->bits == ONEBIT_OUTER_SPARSE; /* words that travel as they are */
  plan.wire = dense ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
  plan.scale = dense ? ONEBIT_SCALE_RMS : options->scale;
  plan.block_size = options->block_size;
  plan.chunk_size = options->chunk_size;
  plan.no_error_feedback = options->no_error_feedback;
  plan.threads = options->threads;
  plan.schedule = options->schedule;
  plan.bits = dense ? 0 : options->bits;
  plan.device = options->device;
  return ob_plan_resolve(&plan, shape);
}
