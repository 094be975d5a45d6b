/*
 * The warning: a tensor whose residual has outgrown its signal is named, at the limit that the
 * header tells, and healthy runs are not warned of.
 */
#include "optimizers/optimizer.h"
#include "tests/support_statistics.h"

/* Returns the plan of the compressed tensors: all but number 1. */
static onebit_plan_t compressed_plan(const struct alone *alone) {
  return alone->optimizer->buckets[alone->optimizer->tensors[0].bucket].bits;
}

/* Gives tensor `tensor` a residual of so many times its momentum, and the others one as large as
 * theirs. */
static void make_errors(struct alone *alone, size_t tensor, double ratio) {
  onebit_plan_t plan = compressed_plan(alone);
  float *error = allocate((TENSORS - 1) * LENGTH, sizeof *error);
  for (size_t t = 0, first = 0; t < TENSORS; t++) {
    if (t == 1)
      continue;
    double wanted = tensor_of(alone->optimizer, t).momentum_norm * (t == tensor ? ratio : 1);
    for (size_t i = 0; i < LENGTH; i++)
      error[first + i] = (float)((i % 2 ? 1 : -1) * wanted / sqrt(LENGTH));
    first += LENGTH;
  }
  CHECK_STATUS(onebit_plan_import_residual(plan, error, NULL), ONEBIT_OK);
  free(error);
}

Test(check, a_tensor_of_too_large_an_error_is_named) {
  static const size_t tensors[] = {0, 2, 3};
  struct alone *alone = alone_create();
  alone_step(alone, 5);
  for (size_t k = 0; k < 3; k++) {
    size_t named = 77;
    char number[20];
    make_errors(alone, tensors[k], 40);
    CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_WARNING);
    CHECK(named == tensors[k], "tensor %zu is named, not %zu", named, tensors[k]);
    snprintf(number, sizeof number, "tensor %zu (", tensors[k]);
    CHECK_WORDS(number);
    CHECK_WORDS("40 times");
    CHECK_WORDS("block_size");
    CHECK_WORDS("uncompressed = 1");
    CHECK_WORDS("ONEBIT_ADAM_EXCHANGE_STEP");
    CHECK_STATUS(onebit_optimizer_check(alone->optimizer, NULL), ONEBIT_WARNING);
  }
  alone_destroy(alone);
}

Test(check, the_limit_is_where_the_header_says) {
  struct alone *alone = alone_create();
  size_t named = 77;
  alone_step(alone, 5);
  make_errors(alone, 2, 0.99 * ONEBIT_RESIDUAL_RATIO_LIMIT);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_OK);
  CHECK(named == 77, "a tensor is named where nothing is wrong");
  make_errors(alone, 2, 1.01 * ONEBIT_RESIDUAL_RATIO_LIMIT);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_WARNING);
  alone_destroy(alone);
}

/* A residual without a signal: momentum and gradient are zero. */
Test(check, error_without_a_signal) {
  struct alone *alone = alone_create();
  size_t named = 77;
  CHECK_STATUS(onebit_optimizer_step(alone->optimizer, 0.0f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_OK);
  float *error = allocate((TENSORS - 1) * LENGTH, sizeof *error);
  error[LENGTH] = 1;
  CHECK_STATUS(onebit_plan_import_residual(compressed_plan(alone), error, NULL), ONEBIT_OK);
  CHECK(isinf(tensor_of(alone->optimizer, 2).residual_ratio), "the ratio is %g",
        tensor_of(alone->optimizer, 2).residual_ratio);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_WARNING);
  CHECK(named == 2, "tensor %zu is named", named);
  free(error);
  alone_destroy(alone);
}

/* A run of each optimizer never warns. */
static void stay_healthy(onebit_comm_t comm, void *context) {
  const struct subject *subject = context;
  float *parameters = allocate(TOTAL, sizeof(float)), *gradients = allocate(TOTAL, sizeof(float));
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer;
  fill_input(parameters, ONEBIT_FLOAT32, TOTAL, 90, 0);
  subject_list(parameters, ONEBIT_FLOAT32, gradients, tensors);
  check_case("%s", subject->method->name);
  CHECK_STATUS(subject_create(subject, comm, tensors, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 40; step++) {
    for (size_t i = 0; i < TOTAL; i++)
      gradients[i] = input_value(i % 701, 60, 0) + input_value(i, onebit_comm_rank(comm), step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_check(optimizer, NULL), ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  free(parameters);
  free(gradients);
}

Test(check, healthy_runs_are_not_warned_of) {
  for (const struct ob_method *const *method = ob_methods; *method; method++) {
    struct subject subject = {.method = *method};
    on_ranks(3, stay_healthy, &subject);
  }
}
