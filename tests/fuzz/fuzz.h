/*
 * Functions that all fuzzers use. Each fuzzer defines libFuzzer's LLVMFuzzerTestOneInput. Its first
 * inputs are in seeds/NAME, which seeds.c writes by the library's own code. If a flag in the input
 * says so, the fuzzer corrects the data's checksum, so that it reaches the code after the checksum
 * test.
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

/* ---- Optimizers and outer steps of a few small tensors, which load fuzzed checkpoints ---- */

/* The kinds of object: optimizers, outer steps of each width, and outer steps of sites. Sites
 * cannot send SparseLoCo's sparse messages. */
enum {
  FUZZ_OPTIMIZERS = 8,
  FUZZ_WIDTHS = 6,
  FUZZ_KINDS = FUZZ_OPTIMIZERS + 2 * FUZZ_WIDTHS - 1,
  FUZZ_ELEMENTS = 137
};

struct fuzz_object {
  onebit_optimizer_t optimizer; /* NULL if the object is an outer step */
  onebit_outer_t outer;
  onebit_dtype_t dtype;
  union {
    float floats[FUZZ_ELEMENTS];
    uint16_t halves[FUZZ_ELEMENTS];
  } parameters;
  float gradients[FUZZ_ELEMENTS];
};

/* Creates an object of that kind in *made, which must not be moved: it contains pointers to
 * itself. */
void fuzz_object_create(struct fuzz_object *made, int kind, onebit_comm_t comm);
void fuzz_object_destroy(struct fuzz_object *made);

/* Makes steps of the optimizer with the object's own gradients, or local steps of the outer
 * step. */
onebit_status_t fuzz_object_train(struct fuzz_object *made, size_t steps);

/* Returns the object's checkpoint part, which the caller frees. */
unsigned char *fuzz_object_save(const struct fuzz_object *made, size_t *bytes);
onebit_status_t fuzz_object_load(struct fuzz_object *made, const void *const *parts,
                                 const size_t *bytes, int count);

#endif
