/* Any optimizer, and optimizers whose statistics are looked at. */
#include "tests/support_optimizers.h"

#include "optimizers/optimizer.h"

struct any_options any_options_of(const struct ob_method *method, const void *given) {
  struct any_options options = {.method = method};
  if (method->options_size > sizeof options.memory)
    abort();
  if (given)
    memcpy(options.memory, given, method->options_size);
  memcpy(options.memory, &method->options_size, sizeof(size_t));
  return options;
}

static const struct ob_option *row_of(const struct any_options *options, const char *name) {
  const struct ob_method *method = options->method;
  for (size_t k = 0; k < method->option_count; k++)
    if (strcmp(method->options[k].name, name) == 0)
      return &method->options[k];
  return NULL;
}

void any_set(struct any_options *options, const char *name, double value) {
  const struct ob_option *row = row_of(options, name);
  int number = (int)value;
  if (row && row->kind == OB_OPTION_COUNT)
    any_count(options, name, (size_t)value);
  else if (row && row->kind <= OB_OPTION_POSITIVE)
    memcpy(options->memory + row->from, &value, sizeof value);
  else if (row)
    memcpy(options->memory + row->from, &number, sizeof number);
}

void any_count(struct any_options *options, const char *name, size_t value) {
  const struct ob_option *row = row_of(options, name);
  if (row)
    memcpy(options->memory + row->from, &value, sizeof value);
}

onebit_optimizer_options_t *any_common(struct any_options *options) {
  return (onebit_optimizer_options_t *)(void *)(options->memory + options->method->common_at);
}

const onebit_optimizer_options_t *any_case_common(const struct any_case *what) {
  const void *common = (const char *)what->options + what->method->common_at;
  return common;
}

onebit_status_t any_create(const struct any_options *options, onebit_comm_t comm,
                           const onebit_tensor_t *tensors, size_t count,
                           onebit_optimizer_t *optimizer) {
  return ob_optimizer_create(comm, options->method, options->memory, tensors, count, optimizer);
}

/* ---- Statistics ---- */

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

struct subject_alone *alone_create(void) {
  struct subject_alone *alone = allocate(1, sizeof *alone);
  onebit_tensor_t tensors[SUBJECT_TENSORS];
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  options.warmup_steps = ONEBIT_WARMUP_NONE;
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
