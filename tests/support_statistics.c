/* Creates optimizers for tests of statistics. */
#include "tests/support_statistics.h"

#include "optimizers/optimizer.h"

onebit_status_t subject_create(const struct subject *subject, onebit_comm_t comm,
                               const onebit_tensor_t *tensors, onebit_optimizer_t *optimizer) {
  struct any_options options = any_options_of(subject->method, NULL);
  any_count(&options, "freeze_step", 3);
  any_count(&options, "variance_freeze_step", 4);
  any_count(&options, "variance_update_scaler", 1);
  any_count(&options, "local_step_scaler", 1);
  any_set(&options, "shards", subject->shards);
  *any_common(&options) = (onebit_optimizer_options_t){.profile = subject->profile,
                                                       .parameter_dtype = subject->dtype,
                                                       .clip_norm = subject->clip_norm};
  return any_create(&options, comm, tensors, SUBJECT_TENSORS, optimizer);
}

void subject_list(void *parameters, onebit_dtype_t dtype, const float *gradients,
                  onebit_tensor_t *tensors) {
  for (size_t t = 0; t < SUBJECT_TENSORS; t++)
    tensors[t] =
        (onebit_tensor_t){.parameter = (char *)parameters + t * SUBJECT_LENGTH * dtype_size(dtype),
                          .gradient = gradients + t * SUBJECT_LENGTH,
                          .count = SUBJECT_LENGTH,
                          .uncompressed = t == 1};
}

struct subject_alone *alone_create(int no_error_feedback) {
  struct subject_alone *alone = allocate(1, sizeof *alone);
  onebit_tensor_t tensors[SUBJECT_TENSORS];
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  options.warmup_steps = ONEBIT_WARMUP_NONE;
  options.common.no_error_feedback = no_error_feedback;
  subject_list(alone->parameters, ONEBIT_FLOAT32, alone->gradients, tensors);
  cr_assert_eq(onebit_comm_create_self(&alone->comm), ONEBIT_OK);
  cr_assert_eq(
      onebit_momentum_create(alone->comm, tensors, SUBJECT_TENSORS, &options, &alone->optimizer),
      ONEBIT_OK, "%s", onebit_last_error());
  return alone;
}

void alone_step(struct subject_alone *alone, int steps) {
  for (int step = 0; step < steps; step++) {
    fill_input(alone->gradients, ONEBIT_FLOAT32, SUBJECT_TOTAL, 0, step);
    CHECK_STATUS(onebit_optimizer_step(alone->optimizer, 1e-3f), ONEBIT_OK);
  }
}

void alone_destroy(struct subject_alone *alone) {
  onebit_optimizer_destroy(alone->optimizer);
  onebit_comm_destroy(alone->comm);
  free(alone);
}

onebit_plan_t alone_plan(const struct subject_alone *alone) {
  return alone->optimizer->buckets[alone->optimizer->tensors[0].bucket].bits;
}

onebit_tensor_statistics_t tensor_statistics(onebit_optimizer_t optimizer, size_t tensor) {
  onebit_tensor_statistics_t told = {.size = sizeof told};
  CHECK_STATUS(onebit_optimizer_get_tensor_statistics(optimizer, tensor, &told), ONEBIT_OK);
  return told;
}

onebit_optimizer_statistics_t statistics_of(onebit_optimizer_t optimizer) {
  onebit_optimizer_statistics_t told = {.size = sizeof told};
  CHECK_STATUS(onebit_optimizer_get_statistics(optimizer, &told), ONEBIT_OK);
  return told;
}
