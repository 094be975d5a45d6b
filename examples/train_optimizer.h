/*
 * The optimizer of a training, with the same few functions for each kind: an optimizer of the
 * library, compressed or dense, or a dense one on each rank with an outer step.
 */
#ifndef EXAMPLES_TRAIN_OPTIMIZER_H
#define EXAMPLES_TRAIN_OPTIMIZER_H

#include "examples/train_task.h"

/* Arrays that an optimizer uses in place of the model's own: 16-bit parameters and gradients, and
 * sums over micro-batches. The model computes in float32, from the rounded parameters. */
typedef struct train_arrays {
  const train_task_t *task;
  onebit_dtype_t parameter_dtype, gradient_dtype;
  size_t micro_batches;
  uint16_t **parameter, **gradient; /* [tensor]; NULL if parameters, or gradients, are float32 */
  float **sum;                      /* NULL if a step has one micro-batch */
} train_arrays_t;

/* State of --outer: each rank trains alone, with the dense form of the optimizer. After a number of
 * steps the ranks exchange how far their parameters have moved (onebit/outer.h). */
typedef struct train_outer {
  onebit_comm_t alone;   /* a communicator of this rank only, for the inner optimizer; NULL: no
                          * --outer */
  onebit_outer_t onebit; /* the outer step of all ranks of the team */
  const train_task_t *task;
  const train_options_t *options;
  size_t steps;
} train_outer_t;

/* Creates the outer step. The parameters must be equal on all ranks. Returns 0, or -1 after
 * printing the reason. */
int train_outer_create(train_outer_t *outer, const train_task_t *task,
                       const train_options_t *options);
void train_outer_destroy(train_outer_t *outer);

/* Makes the outer step after a step of the inner optimizer. After the last step all ranks have the
 * same parameters. Does nothing without --outer. */
onebit_status_t train_outer_step(train_outer_t *outer);

/* With --outer-patience, prints how often a site was left out. */
void train_outer_report(const train_outer_t *outer, const team_t *team);

/* Returns the outer step's info, or zeros without --outer. */
onebit_outer_info_t train_outer_info(const train_outer_t *outer);

typedef struct train_optimizer {
  form_t form; /* with --outer, the inner optimizer's form: DENSE */
  const train_options_t *options;
  train_task_t *task;
  onebit_optimizer_t onebit;
  train_outer_t outer;
  onebit_comm_t comm; /* the communicator of the library's optimizer */
  train_arrays_t arrays;
  int in_parts;           /* gradients are reported to the optimizer when they become final */
  size_t micro_batch;     /* number of the current micro-batch */
  float loss_scale;       /* the loss scale of this step */
  onebit_status_t status; /* the first error of these reports */
} train_optimizer_t;

/* Creates the optimizer. Returns 0, or -1 after printing the reason. The struct must not be moved:
 * the task's model has a pointer to it. */
int train_optimizer_create(train_optimizer_t *optimizer, form_t form, train_task_t *task,
                           const train_options_t *options);
void train_optimizer_destroy(train_optimizer_t *optimizer);

/* The parts of a step, in this order. `begin` and `step` get the same learning rate. `gradient`
 * returns the loss on this rank's samples; steps are numbered from 0. */
onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate);
double train_optimizer_gradient(train_optimizer_t *optimizer, size_t step);
onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate);

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer);

/* Returns this rank's residual relative to the signal, as onebit/statistics.h defines it. With an
 * outer step, the residual is relative to the mean drift. Returns 0 if there is no residual. */
double train_optimizer_residual_ratio(const train_optimizer_t *optimizer);

/* Returns the bytes that this rank has sent for the optimizer so far. */
uint64_t train_optimizer_sent(const train_optimizer_t *optimizer);

/* Loads the state and the parameters that were saved in a directory of checkpoints. */
onebit_status_t train_optimizer_load(train_optimizer_t *optimizer, const char *directory);

#endif
