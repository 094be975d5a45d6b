/* Optimizers whose checkpoints are read: one of each method, of a few small tensors. */
#ifndef ONEBIT_TESTS_FUZZ_OPTIMIZERS_H
#define ONEBIT_TESTS_FUZZ_OPTIMIZERS_H

#include "onebit/onebit.h"

enum { FUZZ_OPTIMIZERS = 8, FUZZ_ELEMENTS = 137 };

struct fuzz_optimizer {
  onebit_optimizer_t optimizer;
  float parameters[FUZZ_ELEMENTS], gradients[FUZZ_ELEMENTS];
};

/* Number `kind` of them. Not to be moved: it points into itself. */
onebit_status_t fuzz_optimizer_create(struct fuzz_optimizer *made, int kind, onebit_comm_t comm);

/* So many steps with gradients of their own. */
onebit_status_t fuzz_optimizer_train(struct fuzz_optimizer *made, int steps);

#endif
