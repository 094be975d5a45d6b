/*
 * Cases of 0/1 Adam, run and compared with the oracle by the same code for ranks that are threads
 * and for ranks of MPI. Tensors, inputs and steps are those of support_adam.h.
 */
#ifndef ONEBIT_TESTS_SUPPORT_ZERO_ONE_H
#define ONEBIT_TESTS_SUPPORT_ZERO_ONE_H

#include "tests/oracle_zero_one.h"
#include "tests/support_adam.h"

/* `adam` has the size, hosts, steps, tensors, form and gradients of the case, and the common part
 * of its options. */
struct zero_one_case {
  struct adam_case adam;
  onebit_zero_one_adam_options_t options;
  /* When not 0, a gradient of poisoned_rank has this value in every other call. Excludes
   * adam.absent. */
  float poison;
  int poisoned_rank;
};

/* The oracle's state after each call. */
struct zero_one_moment {
  onebit_status_t *statuses;             /* [size] */
  float *parameters;                     /* [size][total] */
  double *momentum_norm, *residual_norm; /* [size] */
  uint64_t steps, skipped, freeze_step, exchanges[3];
  bool local, together, apart;
};

struct zero_one_run {
  const struct zero_one_case *what;
  struct zero_one_moment *moments; /* [steps] */
  size_t total;
};

struct zero_one_run zero_one_prepare(const struct zero_one_case *what);
void zero_one_release(struct zero_one_run *run);

/* Runs the case on one rank: the parameters must equal the oracle's after each call, to the bit.
 * This is a rank_body whose context is the struct zero_one_run. */
void zero_one_on_rank(onebit_comm_t comm, void *run);

/* Returns options with short stages: the variance is frozen after `freeze_step` steps, its
 * interval doubles after every second update, and the interval of synchronisations after every
 * third step. */
onebit_zero_one_adam_options_t zero_one_options(size_t freeze_step);

#endif
