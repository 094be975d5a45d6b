/* 1-bit momentum SGD of the oracle. Tensors, their exchanges and parameters are those of an Adam,
 * whose beta1 is the momentum; the steps are its own. */
#include "tests/oracle_kinds.h"

struct oracle_adam *oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                           size_t count, const onebit_momentum_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.common = options->common;
  adam.beta1 = options->momentum;
  adam.freeze_step = options->warmup_steps;
  struct oracle_adam *oracle = oracle_adam_create(size, hosts, tensors, count, &adam);
  oracle->compressed = options->warmup_steps == 0;
  return oracle;
}

static float own_momentum(const void *context, const struct oracle_exchange *exchange, size_t w,
                          size_t at, size_t i) {
  const struct oracle_adam *oracle = context;
  (void)exchange, (void)at;
  return (float)oracle->options.beta1 * oracle->momentum[i] + oracle->means[w * oracle->total + i];
}

static void dense_momentum(struct oracle_adam *oracle, size_t k) {
  for (size_t i = oracle->first[k]; i < oracle->first[k] + oracle->count[k]; i++)
    oracle->momentum[i] =
        (float)oracle->options.beta1 * oracle->momentum[i] + oracle_mean_gradient(oracle, i);
}

bool oracle_momentum_step(struct oracle_adam *oracle, const float *const *gradients,
                          float learning_rate) {
  bool made = oracle_take_gradients(oracle, gradients) &&
              (!oracle->compressed || oracle_exchange_all(oracle, own_momentum, oracle));
  oracle_rescale(&oracle->weigher, !made);
  if (!made)
    return false;
  oracle->steps++;
  for (size_t k = 0; k < oracle->tensors; k++) {
    if (!oracle->compressed || oracle->uncompressed[k])
      dense_momentum(oracle, k);
    oracle_move(oracle, k, oracle->momentum, learning_rate);
  }
  if (!oracle->compressed && oracle->steps >= oracle->options.freeze_step) {
    oracle->compressed = true;
    oracle->freeze_step = oracle->steps;
  }
  return true;
}
