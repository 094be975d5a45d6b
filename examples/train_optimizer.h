/*
 * The optimizer of a training: one of the library, compressed or dense, or a dense one on each rank
 * with an outer step, behind the same few calls.
 */
#ifndef EXAMPLES_TRAIN_OPTIMIZER_H
#define EXAMPLES_TRAIN_OPTIMIZER_H

#include "examples/train_arrays.h"
#include "examples/train_outer.h"

typedef struct train_optimizer {
  form_t form; /* of --outer that of the inner optimizer, DENSE */
  const train_options_t *options;
  train_task_t *task;
  onebit_optimizer_t onebit;
  train_outer_t outer;
  onebit_comm_t comm; /* the library's optimizer is made on it */
  train_arrays_t arrays;
  int in_parts;           /* gradients are told of as they become final */
  size_t micro_batch;     /* of the step, that is computed now */
  float loss_scale;       /* of this step */
  onebit_status_t status; /* of telling */
} train_optimizer_t;

/* 0, or -1 after saying why. The optimizer stays where it is: the task calls it back. */
int train_optimizer_create(train_optimizer_t *optimizer, form_t form, train_task_t *task,
                           const train_options_t *options);
void train_optimizer_destroy(train_optimizer_t *optimizer);

/* The parts of a step; begin and step have the same learning rate. gradient returns the loss on
 * this rank's samples of step 0, 1, ... */
onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate);
double train_optimizer_gradient(train_optimizer_t *optimizer, size_t step);
onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate);

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer);

/* This rank's residual relative to the signal, as onebit/statistics.h defines it, or with an outer
 * step relative to the mean drift; 0 without one. */
double train_optimizer_residual_ratio(const train_optimizer_t *optimizer);

/* The bytes that this rank has sent for it so far. */
uint64_t train_optimizer_sent(const train_optimizer_t *optimizer);

#endif
