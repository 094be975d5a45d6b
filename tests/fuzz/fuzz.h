/*
 * The common part of the fuzzers. Each fuzzer defines libFuzzer's function; its first inputs are
 * in seeds/NAME, which the library writes (seeds.c). A checksum is corrected before it is read if
 * the input asks for that, so that the fuzzer reaches the code after the check.
 */
#ifndef ONEBIT_TESTS_FUZZ_FUZZ_H
#define ONEBIT_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/onebit.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the run with a report if the condition does not hold. */
#define FUZZ_CHECK(condition) ((condition) ? (void)0 : abort())

/* Copies the data, plus `more` zeros, to memory of exactly that size, so that the address sanitizer
 * sees reads behind it. The caller frees it. */
static inline void *fuzz_copy(const uint8_t *data, size_t size, size_t more) {
  unsigned char *copy = calloc(size + more ? size + more : 1, 1);
  FUZZ_CHECK(copy);
  if (size)
    memcpy(copy, data, size);
  return copy;
}

/* ---- Optimizers and outer steps of a few small tensors, whose checkpoints are read ---- */

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
