/*
 * Test cases of 0/1 Adam. The functions that run a case and compare it with the oracle work for
 * ranks that are threads and for MPI ranks. Tensors, inputs and steps are those of support_adam.h.
 */
#ifndef ONEBIT_TESTS_SUPPORT_ZERO_ONE_H
#define ONEBIT_TESTS_SUPPORT_ZERO_ONE_H

#include "tests/oracle_zero_one.h"
#include "tests/support_adam.h"

/* `adam` has the size, hosts, steps, tensors, form and gradients of the case, and the options that
 * all optimizers have. */
struct zero_one_case {
  struct adam_case adam;
  onebit_zero_one_adam_options_t options;
  /* If not 0, a gradient of poisoned_rank has this value in every second call. It cannot be
   * combined with adam.absent. */
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

/* Runs the case on one rank. After each call the parameters must equal the oracle's to the bit.
 * This is a rank_body whose context is the struct zero_one_run. */
void zero_one_on_rank(onebit_comm_t comm, void *run);

/* Returns options with short stages. The variance is frozen after `freeze_step` steps. The interval
 * between its updates doubles after every second update. The interval between synchronisations
 * doubles after every third step. */
onebit_zero_one_adam_options_t zero_one_options(size_t freeze_step);

#endif
