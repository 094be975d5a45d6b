/* Optimizers and outer steps whose checkpoints are read: each kind, of a few small tensors. */
#ifndef ONEBIT_TESTS_FUZZ_OPTIMIZERS_H
#define ONEBIT_TESTS_FUZZ_OPTIMIZERS_H

#include "onebit/onebit.h"

/* The kinds: optimizers, outer steps of each width, and those of a site, which exclude SparseLoCo's
 * messages. */
enum {
  FUZZ_OPTIMIZERS = 8,
  FUZZ_WIDTHS = 6,
  FUZZ_KINDS = FUZZ_OPTIMIZERS + 2 * FUZZ_WIDTHS - 1,
  FUZZ_ELEMENTS = 137
};

struct fuzz_object {
  onebit_optimizer_t optimizer; /* or */
  onebit_outer_t outer;
  onebit_dtype_t dtype;
  union {
    float floats[FUZZ_ELEMENTS];
    uint16_t halves[FUZZ_ELEMENTS];
  } parameters;
  float gradients[FUZZ_ELEMENTS];
};

/* Creates the object of that kind, which must not be moved: it contains pointers to itself. */
void fuzz_object_create(struct fuzz_object *made, int kind, onebit_comm_t comm);
void fuzz_object_destroy(struct fuzz_object *made);

/* Makes steps with the object's own gradients, or local steps. */
onebit_status_t fuzz_object_train(struct fuzz_object *made, size_t steps);

/* Returns the saved part, which the caller frees. */
unsigned char *fuzz_object_save(const struct fuzz_object *made, size_t *bytes);
onebit_status_t fuzz_object_load(struct fuzz_object *made, const void *const *parts,
                                 const size_t *bytes, int count);

#endif
