/*
 * Data-parallel training as a program without this library does it, for comparison: gradients
 * summed by MPI_Allreduce in one call, then an optimizer of train_update.h.
 */
#ifndef EXAMPLES_TRAIN_DENSE_H
#define EXAMPLES_TRAIN_DENSE_H

#include "examples/train_task.h"

typedef struct train_dense {
  const train_options_t *options;
  const train_task_t *task;
  size_t steps;
  float *gradient, *momentum, *variance; /* of all tensors, one after the other */
} train_dense_t;

/* Returns NULL when memory is out. */
train_dense_t *train_dense_create(const train_task_t *task, const train_options_t *options);
void train_dense_destroy(train_dense_t *dense);

void train_dense_step(train_dense_t *dense, float learning_rate);

/* The least bytes that an allreduce of the gradients can send from a rank. */
size_t train_dense_bytes(const train_dense_t *dense);

#endif
