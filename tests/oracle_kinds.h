/* The optimizers of the oracle that are built on its Adam. */
#ifndef ONEBIT_TESTS_ORACLE_KINDS_H
#define ONEBIT_TESTS_ORACLE_KINDS_H

#include "onebit/lamb.h"
#include "tests/oracle.h"

/*
 * 1-bit LAMB of the oracle. It uses the tensors, exchanges, moments and parameters of the oracle's
 * Adam, but makes its own steps.
 */

struct oracle_lamb {
  /* The `momentum` of `state` is the latest exchanged momentum, without scaling. In profile
   * deepspeed `state` has a single exchange. It contains all compressed tensors, followed by
   * padding. */
  struct oracle_adam *state;
  double min_coefficient, max_coefficient, coefficient_beta;
  double min_factor, max_factor, factor_change;
  double *coefficient, *factor; /* of each tensor */
  float *scaling;
  float *fresh, *update, *plain; /* [total] */
  /* `received` is the result of the exchange, with scaling. `carried` is the momentum, without
   * scaling, with which a worker's next step starts. */
  float *received, *carried;
  float *padding; /* [padding_count]: `received` and `carried` of the padding */
  size_t padding_count;
};

/* Creates the oracle as oracle_adam_create does. */
struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options);
void oracle_lamb_destroy(struct oracle_lamb *lamb);

/* Returns the sum of squares of tensor k's part of the values. Sums of the tensor's runs are added
 * in double. */
double oracle_lamb_squares(const struct oracle_lamb *lamb, size_t k, const float *all_values);

/* Makes dense LAMB's step of tensor k with the mean gradient. */
void oracle_lamb_whole_step(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Moves tensor k by its update times its trust ratio. */
void oracle_lamb_move(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Makes a step as oracle_adam_step does. */
bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients, float learning_rate);

/*
 * The optimizers of the oracle that are built on its Adam. They use its tensors, exchanges,
 * parameters and factors of gradients (`state`), but make their own steps. Each is created like
 * oracle_adam_create, and makes a step like oracle_adam_step.
 */

struct oracle_efficient_adam {
  struct oracle_adam *state; /* its `momentum` is the step that all workers exchange */
  struct oracle_lamb *lamb;  /* NULL, or with trust ratios the LAMB that owns `state` */
  float *moment;             /* [size][total]: second moments of each worker's own gradients */
  double gain;               /* 0: the default */
  bool *table;               /* [tensors]: true for tables of embeddings */
  struct oracle_adam *warm;  /* the exchanges of the warm-up, of divided gradients */
  size_t warmup_steps;
  size_t zero_steps;       /* steps before the first gradient */
  float *divisor, *update; /* [total]: divisors of gradients, and updates of parameters, in the
                            * warm-up */
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

/* 1-bit momentum SGD is an Adam of the oracle with its own step. */
struct oracle_adam *oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                           size_t count, const onebit_momentum_options_t *options);
bool oracle_momentum_step(struct oracle_adam *oracle, const float *const *gradients,
                          float learning_rate);

#endif
