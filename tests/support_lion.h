/* Cases of Lion in one bit, run and compared with the oracle after every step. */
#ifndef ONEBIT_TESTS_SUPPORT_LION_H
#define ONEBIT_TESTS_SUPPORT_LION_H

#include "tests/support_adam.h"

enum { LION_STEPS = 12 };

struct lion_case {
  int size, hosts;
  onebit_lion_options_t options;
  const struct adam_tensors *tensors;
  unsigned uncompressed; /* tensors, as bits */
  bool parts;            /* tensors are ready one after the other */
  bool still;            /* every 13th element never gets a gradient */
  float
      poison; /* when not 0: before each step comes one where a gradient of poisoned_rank has it */
  int poisoned_rank;
};

struct lion_run {
  const struct lion_case *what;
  size_t total;
  float *start, *parameters[LION_STEPS];
  double momentum_norm[LION_STEPS], residual_norm[LION_STEPS][16];
};

/* Of three ranks, with the defaults. */
struct lion_case lion_case_of(const struct adam_tensors *tensors);

/* The oracle's run; the library's on one rank, with the run as context. */
struct lion_run *lion_prepare(const struct lion_case *what);
void lion_on_rank(onebit_comm_t comm, void *run);
void lion_release(struct lion_run *run);

#endif
