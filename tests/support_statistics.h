/* Optimizers for tests of statistics. */
#ifndef ONEBIT_TESTS_SUPPORT_STATISTICS_H
#define ONEBIT_TESTS_SUPPORT_STATISTICS_H

#include "tests/support.h"
#include "tests/support_optimizers.h"

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
  onebit_shards_t shards; /* an option of 1-bit Adam */
};

/* Creates an optimizer of SUBJECT_TENSORS tensors. If the method freezes its variance, it does so
 * after few steps. */
onebit_status_t subject_create(const struct subject *subject, onebit_comm_t comm,
                               const onebit_tensor_t *tensors, onebit_optimizer_t *optimizer);

/* Lists SUBJECT_TENSORS tensors of SUBJECT_LENGTH elements, one after the other. The second tensor
 * stays uncompressed, in a bucket of its own. */
void subject_list(void *parameters, onebit_dtype_t dtype, const float *gradients,
                  onebit_tensor_t *tensors);

/* Momentum SGD on one rank, compressed from the first step on. */
struct subject_alone {
  onebit_comm_t comm;
  onebit_optimizer_t optimizer;
  float parameters[SUBJECT_TOTAL], gradients[SUBJECT_TOTAL];
};
struct subject_alone *alone_create(int no_error_feedback);
void alone_step(struct subject_alone *alone, int steps);
void alone_destroy(struct subject_alone *alone);
/* Returns the plan of the optimizer's compressed tensors. */
onebit_plan_t alone_plan(const struct subject_alone *alone);

/* Return the statistics. If the call fails, the test fails. */
onebit_tensor_statistics_t tensor_statistics(onebit_optimizer_t optimizer, size_t tensor);
onebit_optimizer_statistics_t statistics_of(onebit_optimizer_t optimizer);

#endif
