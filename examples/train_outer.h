/*
 * --outer: each rank trains by itself, with the optimizer's dense form, and every so many steps the
 * ranks exchange their drift (onebit/outer.h).
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

/* Creates the outer step; the parameters are the same on all ranks. 0, or -1 after saying why. */
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

#endif
