/*
 * 1-bit LAMB of the oracle. It uses the tensors, exchanges, moments and parameters of the oracle's
 * Adam and makes its own steps.
 */
#ifndef ONEBIT_TESTS_ORACLE_LAMB_H
#define ONEBIT_TESTS_ORACLE_LAMB_H

#include "onebit/lamb.h"
#include "tests/oracle.h"

struct oracle_lamb {
  /* Its `momentum` is the latest exchanged one, without scaling. In profile deepspeed it has one
   * exchange, of all compressed tensors and padding after them. */
  struct oracle_adam *state;
  double min_coefficient, max_coefficient, coefficient_beta;
  double min_factor, max_factor, factor_change;
  double *coefficient, *factor; /* of each tensor */
  float *scaling;
  float *fresh, *update, *plain; /* [total] */
  /* The result of the exchange, with scaling; the start of a worker's next momentum, without. */
  float *received, *carried;
  float *padding; /* both, of the padding */
  size_t padding_count;
};

/* Creates the oracle as oracle_adam_create does. */
struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options);
void oracle_lamb_destroy(struct oracle_lamb *lamb);

/* Returns the sum of squares of tensor k's part of the values, over its runs, added in double. */
double oracle_lamb_squares(const struct oracle_lamb *lamb, size_t k, const float *all_values);

/* Makes dense LAMB's step of tensor k with the mean gradient. */
void oracle_lamb_whole_step(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Moves tensor k by its update times its trust ratio. */
void oracle_lamb_move(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Makes a step as oracle_adam_step does. */
bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients, float learning_rate);

#endif
