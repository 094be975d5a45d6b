/* Cases of 1-bit LAMB against the oracle. */
#include "tests/support_lamb.h"

static onebit_lamb_options_t options_of(const struct adam_case *what) {
  onebit_lamb_options_t options = ONEBIT_LAMB_OPTIONS_INIT;
  if (what->more)
    options = *(const onebit_lamb_options_t *)what->more;
  options.size = sizeof options;
  options.beta1 = what->options.beta1;
  options.beta2 = what->options.beta2;
  options.epsilon = what->options.epsilon;
  options.freeze_step = what->options.freeze_step;
  options.freeze_threshold = what->options.freeze_threshold;
  options.no_bias_correction = what->options.no_bias_correction;
  options.common = what->options.common;
  return options;
}

static onebit_status_t create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                              const struct adam_case *what, onebit_optimizer_t *optimizer) {
  onebit_lamb_options_t options = options_of(what);
  return onebit_lamb_create(comm, tensors, what->tensors->count, &options, optimizer);
}

static void *create_oracle(const struct adam_case *what, const onebit_tensor_t *tensors) {
  onebit_lamb_options_t options = options_of(what);
  return oracle_lamb_create(what->size, what->hosts ? what->hosts : 1, tensors,
                            what->tensors->count, &options);
}

static struct oracle_adam *state(void *oracle) { return ((struct oracle_lamb *)oracle)->state; }

static bool step(void *oracle, const float *const *gradients, float learning_rate) {
  return oracle_lamb_step(oracle, gradients, learning_rate);
}

static void destroy(void *oracle) { oracle_lamb_destroy(oracle); }

const struct optimizer_kind lamb = {"lamb", create, create_oracle, state, step, destroy};
