/* Declares the oracle's optimizers that are built on struct oracle_adam. */
#ifndef ONEBIT_TESTS_ORACLE_KINDS_H
#define ONEBIT_TESTS_ORACLE_KINDS_H

#include "onebit/lamb.h"
#include "tests/oracle.h"

/*
 * The oracle's 1-bit LAMB. It uses the tensors, exchanges, moments and parameters of a struct
 * oracle_adam, but makes its own steps.
 */

struct oracle_lamb {
  /* state->momentum is the latest exchanged momentum, without scaling. In profile deepspeed `state`
   * has a single exchange, which contains all compressed tensors, followed by padding. */
  struct oracle_adam *state;
  double min_coefficient, max_coefficient, coefficient_beta;
  double min_factor, max_factor, factor_change;
  double *coefficient, *factor; /* of each tensor */
  float *scaling;
  float *fresh, *update, *plain; /* [total] */
  /* `received` is the result of the exchange, with scaling. `carried` is the momentum without
   * scaling, from which a worker's next step starts. */
  float *received, *carried;
  float *padding; /* [padding_count]: `received` and `carried` of the padding */
  size_t padding_count;
};

/* Creates the optimizer with arguments as in oracle_adam_create. */
struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options);
void oracle_lamb_destroy(struct oracle_lamb *lamb);

/* Returns the sum of squares of tensor k's elements in all_values. Each run is summed in float32,
 * and the sums of runs are added in double. */
double oracle_lamb_squares(const struct oracle_lamb *lamb, size_t k, const float *all_values);

/* Makes dense LAMB's step on tensor k with the mean gradient. */
void oracle_lamb_whole_step(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Changes tensor k's parameters by its update times its trust ratio. */
void oracle_lamb_move(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Makes a step as oracle_adam_step does. */
bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients, float learning_rate);

/*
 * Further optimizers. They use the tensors, exchanges, parameters and gradient factors of a struct
 * oracle_adam (`state`), but make their own steps. Their functions have the arguments of
 * oracle_adam_create and oracle_adam_step.
 */

struct oracle_efficient_adam {
  struct oracle_adam *state; /* state->momentum is the step that all workers exchange */
  struct oracle_lamb *lamb;  /* with trust ratios, the LAMB that owns `state`; otherwise NULL */
  float *moment;             /* [size][total]: second moments of each worker's own gradients */
  double gain;               /* the option; 0 means the default */
  bool *table;               /* [tensors]: true for tables of embeddings */
  struct oracle_adam *warm;  /* for the warm-up, which exchanges divided gradients */
  size_t warmup_steps;
  size_t zero_steps;       /* steps before the first gradient that is not zero */
  float *divisor, *update; /* [total]: in the warm-up: divisors of gradients, and parameter
                            * updates */
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
  float *moment; /* [size][total]: second moments of each worker's own gradients */
};

struct oracle_lion *oracle_lion_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lion_options_t *options);
void oracle_lion_destroy(struct oracle_lion *lion);
bool oracle_lion_step(struct oracle_lion *lion, const float *const *gradients, float learning_rate);

/* Creates 1-bit momentum SGD: a struct oracle_adam for which oracle_momentum_step makes the
 * steps. */
struct oracle_adam *oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                           size_t count, const onebit_momentum_options_t *options);
bool oracle_momentum_step(struct oracle_adam *oracle, const float *const *gradients,
                          float learning_rate);

#endif
