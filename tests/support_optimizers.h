/*
 * Functions for tests that work with any optimizer: a row of the table of methods, and its options
 * as untyped memory. Tests set options by their names in the row. A table of tests therefore needs
 * one line per optimizer, and no code.
 */
#ifndef ONEBIT_TESTS_SUPPORT_OPTIMIZERS_H
#define ONEBIT_TESTS_SUPPORT_OPTIMIZERS_H

#include "onebit/onebit.h"
#include "optimizers/method.h"

/* An entry of a table of optimizers: a method with its options, written as {ANY(lion, .beta2 =
 * 0.9)}. */
struct any_case {
  const struct ob_method *method;
  const void *options;
};

#define ANY(kind, ...)                                                                             \
  &ob_method_##kind, &(const onebit_##kind##_options_t) {                                          \
    .size = sizeof(onebit_##kind##_options_t), __VA_ARGS__                                         \
  }

struct any_options {
  const struct ob_method *method;
  _Alignas(double) unsigned char memory[512];
};

/* Returns the options of a method, including those that all optimizers have: a copy of `given`, or
 * the defaults if `given` is NULL. */
struct any_options any_options_of(const struct ob_method *method, const void *given);

/* Set an option. They do nothing if the method has no option of that name. */
void any_set(struct any_options *options, const char *name, double value);
void any_count(struct any_options *options, const char *name, size_t value);

onebit_optimizer_options_t *any_common(struct any_options *options);
const onebit_optimizer_options_t *any_case_common(const struct any_case *what);

onebit_status_t any_create(const struct any_options *options, onebit_comm_t comm,
                           const onebit_tensor_t *tensors, size_t count,
                           onebit_optimizer_t *optimizer);

#endif
