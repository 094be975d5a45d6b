/*
 * 1-bit LAMB of the oracle. Its tensors, exchanges, moments and parameters are those of an Adam of
 * the oracle; the steps are its own.
 */
#ifndef ONEBIT_TESTS_ORACLE_LAMB_H
#define ONEBIT_TESTS_ORACLE_LAMB_H

#include "onebit/lamb.h"
#include "tests/oracle.h"

struct oracle_lamb {
  /* Its `momentum` is what came back last, without scaling. Profile deepspeed has one exchange, of
   * all tensors and the padding. */
  struct oracle_adam *state;
  double coefficient_least, coefficient_most, coefficient_beta;
  double factor_least, factor_most, factor_change;
  double *coefficient, *factor; /* of each tensor */
  double *ratio;                /* what its rate was multiplied with in the latest step */
  float *scaling;
  float *fresh, *update, *plain; /* [total] */
  /* What a worker's next momentum begins with, as it travels, and what came back; the padding at
   * the end. */
  float *carried, *received;
  size_t padded;
};

/* As oracle_adam_create. */
struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options);
void oracle_lamb_destroy(struct oracle_lamb *lamb);

/* As oracle_adam_step. */
bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients, float learning_rate);

#endif
