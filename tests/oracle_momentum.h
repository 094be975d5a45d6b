/* 1-bit momentum SGD of the oracle. Tensors, their exchanges and parameters are those of an Adam of
 * the oracle; the steps are its own. */
#ifndef ONEBIT_TESTS_ORACLE_MOMENTUM_H
#define ONEBIT_TESTS_ORACLE_MOMENTUM_H

#include "tests/oracle.h"

struct oracle_momentum {
  struct oracle_adam *state; /* its `momentum` and `parameter` are this one's */
  float decay, gradient_factor;
  size_t warmup_steps;
};

/* As oracle_adam_create. */
struct oracle_momentum oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                              size_t count,
                                              const onebit_momentum_options_t *options);
void oracle_momentum_destroy(struct oracle_momentum *oracle);

/* As oracle_adam_step. */
bool oracle_momentum_step(struct oracle_momentum *oracle, const float *const *gradients,
                          float learning_rate);

#endif
