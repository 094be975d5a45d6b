/*
 * Tasks on which one-bit optimizers have diverged, or could: each is a sum of squares whose rows
 * are drawn, scaled or silenced so that a frozen variance, or one scale for a block, is wrong for
 * some elements. Dense Adam comes close to the optimum in all of them. They are the same on every
 * machine.
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
  TASK_ZEROS_LATER, /* no one has one in half of the steps, from a quarter on */
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

/* Writes the parameters to start from. */
void task_start(const struct task *task, float *parameters);

/* Returns the learning rate of a step, the first being 0: it rises for a twentieth of the steps,
 * then falls linearly to a tenth. */
float task_rate(const struct task *task, int step);

/* Writes the gradient of a rank in a step at these parameters. Returns false, and zeros, if the
 * rank has none (NULL, for the optimizer). */
bool task_gradient(const struct task *task, const float *parameters, int rank, int step,
                   float *gradient);

/* Returns the root mean square of the distance from the optimum; not a number if a parameter is
 * not. */
double task_distance(const struct task *task, const float *parameters);

/* Returns that distance of the start. */
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
  double distance_warned; /* the distance then */
};

/* Runs the task on TASK_RANKS ranks, threads of this process. */
struct task_end task_run(const struct task *task, task_create *create, const void *options);

#endif
