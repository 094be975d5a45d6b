/*
 * Cases of 1-bit momentum SGD, run and compared with the oracle: the same code for ranks that are
 * threads and for ranks of MPI. Tensors and inputs are those of support_adam.h.
 */
#ifndef ONEBIT_TESTS_SUPPORT_MOMENTUM_H
#define ONEBIT_TESTS_SUPPORT_MOMENTUM_H

#include "tests/support_adam.h"

struct momentum_case {
  int size, hosts, steps; /* hosts: 0 is 1 */
  onebit_momentum_options_t options;
  const struct adam_tensors *tensors;
  bool parts;   /* gradients are told of one by one, from the last on */
  float poison; /* when not 0: before each step comes one where a gradient of poisoned_rank has this
                   value */
  int poisoned_rank;
};

/* What the oracle says after each step. */
struct momentum_run {
  const struct momentum_case *what;
  float *start, **parameters; /* [steps] */
  double *momentum_norm;      /* [steps] */
  double **residual_norm;     /* [steps][size] */
  size_t total;
};

struct momentum_run momentum_prepare(const struct momentum_case *what);
void momentum_release(struct momentum_run *run);

/* A rank_body whose context is the struct momentum_run: parameters equal the oracle's after each
 * step, to the bit. */
void momentum_on_rank(onebit_comm_t comm, void *run);

#endif
