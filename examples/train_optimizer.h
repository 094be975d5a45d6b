/*
 * The optimizer of a training: one of the library, compressed or dense, or a dense one on each rank
 * with an outer step, behind the same few calls.
 */
#ifndef EXAMPLES_TRAIN_OPTIMIZER_H
#define EXAMPLES_TRAIN_OPTIMIZER_H

#include "examples/train_task.h"

/* The arrays that an optimizer works on, where they are not the model's own: parameters and
 * gradients of 16 bits, and sums over micro-batches. The model computes in float32, from the
 * rounded parameters. */
typedef struct train_arrays {
  const train_task_t *task;
  onebit_dtype_t parameter_dtype, gradient_dtype;
  size_t micro_batches;
  uint16_t **parameter, **gradient; /* of each tensor; NULL where they stay float32 */
  float **sum;                      /* NULL with one micro-batch a step */
} train_arrays_t;

/* --outer: each rank trains by itself, with the optimizer's dense form, and every so many steps the
 * ranks exchange their drift (onebit/outer.h). */
typedef struct train_outer {
  onebit_comm_t alone;   /* this rank alone, the inner optimizer's communicator; NULL: no --outer */
  onebit_outer_t onebit; /* over the team's ranks */
  const train_task_t *task;
  const train_options_t *options;
  size_t steps;
} train_outer_t;

/* Creates the outer step; the parameters are the same on all ranks. 0, or -1 after printing why. */
int train_outer_create(train_outer_t *outer, const train_task_t *task,
                       const train_options_t *options);
void train_outer_destroy(train_outer_t *outer);

/* Makes the outer step after a step of the inner optimizer. After the last one all ranks have the
 * same parameters. Does nothing without --outer. */
onebit_status_t train_outer_step(train_outer_t *outer);

/* Reports with --outer-patience how often a site was left out. */
void train_outer_report(const train_outer_t *outer, const team_t *team);

/* Returns zeros without --outer. */
onebit_outer_info_t train_outer_info(const train_outer_t *outer);

typedef struct train_optimizer {
  form_t form; /* with --outer the inner optimizer's, DENSE */
  const train_options_t *options;
  train_task_t *task;
  onebit_optimizer_t onebit;
  train_outer_t outer;
  onebit_comm_t comm; /* the library's optimizer is made on it */
  train_arrays_t arrays;
  int in_parts;           /* gradients are reported as they become final */
  size_t micro_batch;     /* number of the micro-batch that is computed now */
  float loss_scale;       /* of this step */
  onebit_status_t status; /* of these reports */
} train_optimizer_t;

/* 0, or -1 after printing why. The optimizer stays where it is: the task calls it back. */
int train_optimizer_create(train_optimizer_t *optimizer, form_t form, train_task_t *task,
                           const train_options_t *options);
void train_optimizer_destroy(train_optimizer_t *optimizer);

/* The parts of a step; begin and step have the same learning rate. gradient returns the loss on
 * this rank's samples of step 0, 1, ... */
onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate);
double train_optimizer_gradient(train_optimizer_t *optimizer, size_t step);
onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate);

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer);

/* Returns this rank's residual relative to the signal, as onebit/statistics.h defines it, or in an
 * outer step relative to the mean drift; 0 without a residual. */
double train_optimizer_residual_ratio(const train_optimizer_t *optimizer);

/* Returns the bytes that this rank has sent for the optimizer so far. */
uint64_t train_optimizer_sent(const train_optimizer_t *optimizer);

/* Loads the state that was saved in a directory of checkpoints, and the parameters. */
onebit_status_t train_optimizer_load(train_optimizer_t *optimizer, const char *directory);

#endif
