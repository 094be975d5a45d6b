/*
 * The optimizers of the oracle that are built upon its Adam: they use its tensors, exchanges,
 * parameters and factors of gradients (`state`) and make their own steps. Each is created as by
 * oracle_adam_create and steps as by oracle_adam_step. 1-bit LAMB is in oracle_lamb.h.
 */
#ifndef ONEBIT_TESTS_ORACLE_KINDS_H
#define ONEBIT_TESTS_ORACLE_KINDS_H

#include "tests/oracle_lamb.h"

struct oracle_efficient_adam {
  struct oracle_adam *state; /* its `momentum` is the common step */
  struct oracle_lamb *lamb;  /* with trust ratios, the LAMB that owns `state`; or NULL */
  float *moment;             /* [size][total]: of each worker's own gradients */
  double gain;               /* 0: the default */
  bool *table;               /* [tensors] */
  /* The warm-up: exchanges of divided gradients, their state being nothing else; how many steps;
   * steps before the first gradient; [total]: by what they are divided, the update. */
  struct oracle_adam *warm;
  size_t warmup_steps, zero_steps;
  float *divisor, *update;
};

struct oracle_efficient_adam *oracle_efficient_adam_create(
    int size, int hosts, const onebit_tensor_t *tensors, size_t count,
    const onebit_efficient_adam_options_t *options);
void oracle_efficient_adam_destroy(struct oracle_efficient_adam *oracle);
bool oracle_efficient_adam_step(struct oracle_efficient_adam *oracle, const float *const *gradients,
                                float learning_rate);

struct oracle_lion {
  struct oracle_adam *state;
  double beta2;
  float *moment; /* [size][total]: of each worker's own gradients */
};

struct oracle_lion *oracle_lion_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lion_options_t *options);
void oracle_lion_destroy(struct oracle_lion *lion);
bool oracle_lion_step(struct oracle_lion *lion, const float *const *gradients, float learning_rate);

/* 1-bit momentum SGD is an Adam of the oracle with its own step. */
struct oracle_adam *oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                           size_t count, const onebit_momentum_options_t *options);
bool oracle_momentum_step(struct oracle_adam *oracle, const float *const *gradients,
                          float learning_rate);

#endif
