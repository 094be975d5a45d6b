/* Cases of Efficient-Adam against the oracle. */
#include "tests/support_efficient_adam.h"

#include "tests/oracle_efficient_adam.h"

static onebit_efficient_adam_options_t options_of(const struct adam_case *what) {
  onebit_efficient_adam_options_t options = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  if (what->more)
    options = *(const onebit_efficient_adam_options_t *)what->more;
  options.beta1 = what->options.beta1;
  options.beta2 = what->options.beta2;
  options.epsilon = what->options.epsilon;
  options.common = what->options.common;
  return options;
}

static onebit_status_t create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                              const struct adam_case *what, onebit_optimizer_t *optimizer) {
  onebit_efficient_adam_options_t options = options_of(what);
  return onebit_efficient_adam_create(comm, tensors, what->tensors->count, &options, optimizer);
}

static void *create_oracle(const struct adam_case *what, const onebit_tensor_t *tensors) {
  onebit_efficient_adam_options_t options = options_of(what);
  return oracle_efficient_adam_create(what->size, what->hosts ? what->hosts : 1, tensors,
                                      what->tensors->count, &options);
}

static struct oracle_adam *state(void *oracle) {
  return ((struct oracle_efficient_adam *)oracle)->state;
}

static bool step(void *oracle, const float *const *gradients, float learning_rate) {
  return oracle_efficient_adam_step(oracle, gradients, learning_rate);
}

static void destroy(void *oracle) { oracle_efficient_adam_destroy(oracle); }

const struct optimizer_kind efficient_adam = {"efficient_adam", create, create_oracle, state, step,
                                              destroy};
const struct optimizer_kind efficient_lamb = {"efficient_lamb", create, create_oracle, state, step,
                                              destroy};
