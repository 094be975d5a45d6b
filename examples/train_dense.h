/*
 * Data-parallel Adam as a program without this library has it: gradients summed by MPI_Allreduce in
 * one call, then one pass over parameters and moments. For train_text to compare with.
 */
#ifndef EXAMPLES_TRAIN_DENSE_H
#define EXAMPLES_TRAIN_DENSE_H

#include "examples/train_options.h"
#include "examples/train_team.h"
#include "examples/transformer.h"

typedef struct train_dense {
  const team_t *team;
  transformer_t *model;
  double beta1, beta2;
  float epsilon, weight_decay;
  size_t steps;
  float *gradient, *momentum, *variance; /* of all tensors, one after the other */
} train_dense_t;

/* NULL when memory is out. */
train_dense_t *train_dense_create(const team_t *team, const train_options_t *options,
                                  transformer_t *model);
void train_dense_destroy(train_dense_t *dense);

void train_dense_step(train_dense_t *dense, float learning_rate);

/* The least that an allreduce of the gradients can send from a rank. */
size_t train_dense_bytes(const train_dense_t *dense);

#endif
