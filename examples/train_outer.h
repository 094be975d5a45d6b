/*
 * --outer: each rank trains by itself, with the optimizer's dense form, and the ranks exchange how
 * far they have come every so many steps (onebit/outer.h).
 */
#ifndef EXAMPLES_TRAIN_OUTER_H
#define EXAMPLES_TRAIN_OUTER_H

#include "examples/train_task.h"

typedef struct train_outer {
  onebit_comm_t alone;   /* what the inner optimizer is made on: this rank; NULL: no --outer */
  onebit_outer_t onebit; /* over the team's ranks */
  const train_task_t *task;
  const train_options_t *options;
  size_t steps;
} train_outer_t;

/* The parameters are the same on all ranks. 0, or -1 after saying why. */
int train_outer_create(train_outer_t *outer, const train_task_t *task,
                       const train_options_t *options);
void train_outer_destroy(train_outer_t *outer);

/* After a step of the inner optimizer. After the last one all ranks have the same parameters.
 * Without --outer nothing. */
onebit_status_t train_outer_step(train_outer_t *outer);

/* With --outer-patience: says how often a site was left out. */
void train_outer_report(const train_outer_t *outer, const team_t *team);

/* Zeros without --outer. */
onebit_outer_info_t train_outer_info(const train_outer_t *outer);

#endif
