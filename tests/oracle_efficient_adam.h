/* Efficient-Adam of the oracle. Tensors, their exchanges and parameters are those of an Adam of the
 * oracle, or with trust ratios of a LAMB; the steps are its own. */
#ifndef ONEBIT_TESTS_ORACLE_EFFICIENT_ADAM_H
#define ONEBIT_TESTS_ORACLE_EFFICIENT_ADAM_H

#include "tests/oracle_lamb.h"

struct oracle_efficient_adam {
  struct oracle_adam *state; /* its `momentum` is the step that was agreed on */
  struct oracle_lamb *lamb;  /* with trust ratios, whose state it is; or NULL */
  float *moment;             /* [size][total]: of each worker's own gradients */
  double gain;               /* 0: the default */
};

/* As oracle_adam_create. */
struct oracle_efficient_adam *oracle_efficient_adam_create(
    int size, int hosts, const onebit_tensor_t *tensors, size_t count,
    const onebit_efficient_adam_options_t *options);
void oracle_efficient_adam_destroy(struct oracle_efficient_adam *oracle);

/* As oracle_adam_step. */
bool oracle_efficient_adam_step(struct oracle_efficient_adam *oracle, const float *const *gradients,
                                float learning_rate);

#endif
