/*
 * Any optimizer: a row of the table of methods, and its options as memory, which tests set by the
 * names in the row. So an optimizer is one line in a table of tests, and no code.
 */
#ifndef ONEBIT_TESTS_SUPPORT_OPTIMIZERS_H
#define ONEBIT_TESTS_SUPPORT_OPTIMIZERS_H

#include "onebit/onebit.h"
#include "optimizers/method.h"
#include "tests/support.h"

/* An entry of such a table: an optimizer and its options, as {ANY(lion, .beta2 = 0.9)}. */
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

/* Returns the options of a method, those of all optimizers included: a copy of `given`, or the
 * defaults if it is NULL. */
struct any_options any_options_of(const struct ob_method *method, const void *given);

/* Sets an option, unless the method has none of that name. */
void any_set(struct any_options *options, const char *name, double value);
void any_count(struct any_options *options, const char *name, size_t value);

onebit_optimizer_options_t *any_common(struct any_options *options);
const onebit_optimizer_options_t *any_case_common(const struct any_case *what);

onebit_status_t any_create(const struct any_options *options, onebit_comm_t comm,
                           const onebit_tensor_t *tensors, size_t count,
                           onebit_optimizer_t *optimizer);

/* Optimizers for tests of statistics. */

enum {
  SUBJECT_TENSORS = 4,
  SUBJECT_LENGTH = 3000,
  SUBJECT_TOTAL = SUBJECT_TENSORS * SUBJECT_LENGTH
};

struct subject {
  const struct ob_method *method;
  onebit_profile_t profile;
  onebit_dtype_t dtype; /* of the parameters */
  double clip_norm;
  onebit_shards_t shards; /* of 1-bit Adam */
};

/* Creates an optimizer of SUBJECT_TENSORS tensors that freezes early, if at all. */
onebit_status_t subject_create(const struct subject *subject, onebit_comm_t comm,
                               const onebit_tensor_t *tensors, onebit_optimizer_t *optimizer);

/* Lists SUBJECT_TENSORS tensors of SUBJECT_LENGTH, one behind the other. The second stays
 * uncompressed, in its own unit. */
void subject_list(void *parameters, onebit_dtype_t dtype, const float *gradients,
                  onebit_tensor_t *tensors);

/* Momentum SGD on one rank, compressed from the first step on. */
struct subject_alone {
  onebit_comm_t comm;
  onebit_optimizer_t optimizer;
  float parameters[SUBJECT_TOTAL], gradients[SUBJECT_TOTAL];
};
struct subject_alone *alone_create(void);
void alone_step(struct subject_alone *alone, int steps);
void alone_destroy(struct subject_alone *alone);

/* Return the statistics; a failure fails the test. */
onebit_tensor_statistics_t tensor_statistics(onebit_optimizer_t optimizer, size_t tensor);
onebit_optimizer_statistics_t statistics_of(onebit_optimizer_t optimizer);

#endif
