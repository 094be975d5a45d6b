/* Optimizers and outer steps whose checkpoints are read: each kind, of a few small tensors. */
#ifndef ONEBIT_TESTS_FUZZ_OPTIMIZERS_H
#define ONEBIT_TESTS_FUZZ_OPTIMIZERS_H

#include "onebit/onebit.h"

enum { FUZZ_OPTIMIZERS = 8, FUZZ_OUTER_STEPS = 6, FUZZ_ELEMENTS = 137 };

struct fuzz_optimizer {
  onebit_optimizer_t optimizer;
  float parameters[FUZZ_ELEMENTS], gradients[FUZZ_ELEMENTS];
};

/* Number `kind` of them. Not to be moved: it points into itself. */
onebit_status_t fuzz_optimizer_create(struct fuzz_optimizer *made, int kind, onebit_comm_t comm);

/* So many steps with gradients of their own. */
onebit_status_t fuzz_optimizer_train(struct fuzz_optimizer *made, int steps);

struct fuzz_outer {
  onebit_outer_t outer;
  onebit_dtype_t dtype;
  union {
    float floats[FUZZ_ELEMENTS];
    uint16_t halves[FUZZ_ELEMENTS];
  } parameters;
};

/* The same of outer steps, with local steps that add to all parameters. */
onebit_status_t fuzz_outer_create(struct fuzz_outer *made, int kind, onebit_comm_t comm);
onebit_status_t fuzz_outer_train(struct fuzz_outer *made, int steps);

#endif
