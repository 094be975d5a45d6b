/*
 * 1-bit LAMB of the oracle. Its tensors, exchanges, moments and parameters are those of an Adam of
 * the oracle; the steps are its own.
 */
#ifndef ONEBIT_TESTS_ORACLE_LAMB_H
#define ONEBIT_TESTS_ORACLE_LAMB_H

#include "onebit/lamb.h"
#include "tests/oracle.h"

struct oracle_lamb {
  /* Its `momentum` is what came back last, without scaling. In profile deepspeed it has one
   * exchange, of all tensors that are compressed, and of padding behind them. */
  struct oracle_adam *state;
  double min_coefficient, max_coefficient, coefficient_beta;
  double min_factor, max_factor, factor_change;
  double *coefficient, *factor; /* of each tensor */
  float *scaling;
  float *fresh, *update, *plain; /* [total] */
  /* The result of the exchange, as it travels, and the beginning of a worker's next momentum, as it
   * is. */
  float *received, *carried;
  float *padding; /* likewise: both */
  size_t padding_count;
};

/* Creates the oracle as oracle_adam_create does. */
struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options);
void oracle_lamb_destroy(struct oracle_lamb *lamb);

/* The sum of squares of tensor k's part of the values, over its runs, added in double. */
double oracle_lamb_squares(const struct oracle_lamb *lamb, size_t k, const float *all_values);

/* Dense LAMB's step of tensor k, on the mean gradient. */
void oracle_lamb_whole_step(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Tensor k by its update, times its trust ratio. */
void oracle_lamb_move(struct oracle_lamb *lamb, size_t k, float learning_rate);

/* Makes a step as oracle_adam_step does. */
bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients, float learning_rate);

#endif
