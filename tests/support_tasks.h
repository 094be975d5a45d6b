/*
 * Tasks that one-bit optimizers have run away on, or could: each is a sum of squares whose rows are
 * drawn, scaled or silenced so that a variance which is frozen, or one scale a block, is wrong for
 * some elements. Dense Adam comes close to the optimum in all of them. The same on every machine.
 */
#ifndef ONEBIT_TESTS_SUPPORT_TASKS_H
#define ONEBIT_TESTS_SUPPORT_TASKS_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/onebit.h"

enum task_kind {
  TASK_EMBEDDING,   /* rows of a table are drawn, by Zipf's law: most have a gradient rarely */
  TASK_SCALES,      /* gradients of one tensor differ by six orders of magnitude */
  TASK_QUIET,       /* 2 % of the elements are near silent until a quarter of the steps is over */
  TASK_ZEROS_FIRST, /* nobody has a gradient in the first half of the steps */
  TASK_ZEROS_LATER, /* nor here in a half of them that begins after a quarter */
  TASK_IDLE,        /* one rank never has a gradient */
  TASK_KINDS
};

enum { TASK_RANKS = 4 };

struct task {
  enum task_kind kind;
  const char *name;
  size_t count; /* parameters, in one tensor */
  int steps;
  float rate; /* the highest one */
};

/* The task in its usual size. */
struct task task_of(enum task_kind kind);

/* Parameters to start from. */
void task_start(const struct task *task, float *parameters);

/* The learning rate of a step, the first being 0: it rises for a twentieth of them, and falls
 * linearly to a tenth. */
float task_rate(const struct task *task, int step);

/* The gradient of a rank in a step at these parameters. False: it has none (NULL, for the
 * optimizer), and the array is zeros. */
bool task_gradient(const struct task *task, const float *parameters, int rank, int step,
                   float *gradient);

/* Root mean square of the distance from the optimum. Not a number where some parameter is none. */
double task_distance(const struct task *task, const float *parameters);

/* The distance of the parameters to start from. */
double task_start_distance(const struct task *task);

/* Makes an optimizer of the tensor on a rank. */
typedef onebit_status_t task_create(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                    const void *options, onebit_optimizer_t *optimizer);

/* The results of a run. */
struct task_end {
  double distance;        /* the worst rank's */
  double largest;         /* distance of all steps */
  int skipped;            /* steps */
  int warned;             /* the step after which onebit_optimizer_check warned first; -1: never */
  double distance_warned; /* then */
};

/* Runs the task on TASK_RANKS ranks, threads of this process. */
struct task_end task_run(const struct task *task, task_create *create, const void *options);

#endif
