/* Tests the line with which an optimizer describes itself, and the warning of
 * onebit_optimizer_check. */
#include "base/memory.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"
#include "tests/support_statistics.h"

/*
 * Tests statistics when no memory is left, and the line that describes an optimizer: the complete
 * line, a line cut at the end of the buffer, and JSON. support_wrong_optimizers.c tests wrong
 * arguments.
 */

Test(describe, without_memory) {
  struct subject_alone *alone = alone_create(0);
  onebit_optimizer_statistics_t all = {.size = sizeof all};
  alone_step(alone, 2);
  ob_memory_fail_at(1);
  CHECK_STATUS(onebit_optimizer_get_statistics(alone->optimizer, &all), ONEBIT_ERROR_MEMORY);
  ob_memory_fail_at(1);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, NULL), ONEBIT_ERROR_MEMORY);
  ob_memory_fail_at(0);
  CHECK_STATUS(onebit_optimizer_get_statistics(alone->optimizer, &all), ONEBIT_OK);
  alone_destroy(alone);
}

/* --- Lines */

/* Checks buffers of any size. Each gets as much of the text as fits, and a zero byte. Nothing is
 * written after the zero byte. */
static void check_cut_lines(onebit_optimizer_t optimizer, onebit_format_t format) {
  enum { MOST = 2000 };
  char whole[MOST], cut[MOST];
  size_t length = 0, told = 0;
  CHECK_STATUS(onebit_optimizer_describe(optimizer, format, whole, sizeof whole, &length),
               ONEBIT_OK);
  CHECK(length == strlen(whole) && length < MOST - 2 && length > 100, "%zu bytes: %s", length,
        whole);
  CHECK(!strchr(whole, '\n'), "more than a line: %s", whole);
  CHECK_STATUS(onebit_optimizer_describe(optimizer, format, NULL, 0, &told), ONEBIT_OK);
  CHECK(told == length, "%zu bytes, and %zu", told, length);
  for (size_t size = 1; size <= length + 2; size++) {
    memset(cut, '#', sizeof cut);
    CHECK_STATUS(onebit_optimizer_describe(optimizer, format, cut, size, &told), ONEBIT_OK);
    size_t kept = size <= length ? size - 1 : length;
    CHECK(told == length && strlen(cut) == kept && memcmp(cut, whole, kept) == 0 &&
              cut[size] == '#',
          "in %zu bytes: %.*s", size, (int)size + 1, cut);
  }
}

Test(describe, lines_of_any_length) {
  struct subject_alone *alone = alone_create(0);
  for (int round = 0; round < 2; round++) {
    check_cut_lines(alone->optimizer, ONEBIT_FORMAT_TEXT);
    check_cut_lines(alone->optimizer, ONEBIT_FORMAT_JSON);
    alone_step(alone, 5);
  }
  alone_destroy(alone);
}

static const char fields[] =
    "name stage steps skipped freeze_step synchronized dense_exchanges bits_exchanges "
    "local_steps variance_ratio momentum_norm residual_norm loss_scale gradient_norm "
    "warmup_bytes compressed_bytes memory_bytes bits moves residual_ratio dense_bytes "
    "bits_bytes seconds compress_seconds network_seconds update_seconds";

static void check_json(const struct subject_alone *alone) {
  char line[2000];
  CHECK_STATUS(
      onebit_optimizer_describe(alone->optimizer, ONEBIT_FORMAT_JSON, line, sizeof line, NULL),
      ONEBIT_OK);
  CHECK(json_is_valid(line), "no JSON: %s", line);
  for (const char *field = fields; *field; field += strspn(field, " ")) {
    const int length = (int)strcspn(field, " ");
    char name[40];
    snprintf(name, sizeof name, "\"%.*s\":", length, field);
    field += length;
    const char *found = strstr(line, name);
    CHECK(found && !strstr(found + 1, name), "%s is not there once: %s", name, line);
  }
}

Test(describe, json_is_json) {
  struct subject_alone *alone = alone_create(0);
  check_json(alone);
  alone_step(alone, 3);
  check_json(alone);
  const double odd[] = {NAN, INFINITY, -INFINITY, 5e-324, -1.7e308, 0.0, 123456789.0};
  for (size_t k = 0; k < sizeof odd / sizeof odd[0]; k++) {
    alone->optimizer->gradient_norm = alone->optimizer->variance_ratio = odd[k];
    check_json(alone);
  }
  alone_destroy(alone);
}

Test(describe, the_checker_of_json_can_fail) {
  static const char *const wrong[] = {"",           "{",           "{\"a\":}",    "{\"a\":nan}",
                                      "{a:1}",      "{\"a\":1,}",  "{\"a\":1}x",  "{\"a\":1.}",
                                      "{\"a\":01}", "{\"a\":inf}", "{\"a\":1,2}", "[\"a\"]"};
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++)
    cr_expect(!json_is_valid(wrong[k]), "%s", wrong[k]);
  cr_expect(json_is_valid("{}") && json_is_valid("{\"a\":-1.5e+07,\"b\":null,\"c\":\"d\"}"));
}

Test(describe, text_tells_what_there_is) {
  struct subject_alone *alone = alone_create(0);
  char line[1000];
  alone_step(alone, 4);
  alone->gradients[0] = NAN;
  CHECK_STATUS(onebit_optimizer_step(alone->optimizer, 1e-3f), ONEBIT_SKIPPED);
  CHECK_STATUS(
      onebit_optimizer_describe(alone->optimizer, ONEBIT_FORMAT_TEXT, line, sizeof line, NULL),
      ONEBIT_OK);
  static const char *const parts[] = {"momentum: 4 steps (1 skipped)",
                                      "compressed without a warm-up",
                                      "0 in the warm-up, 4 compressed", "residual", "network"};
  for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++)
    CHECK(strstr(line, parts[k]), "no \"%s\": %s", parts[k], line);
  alone_destroy(alone);
}

/*
 * The warning must name a tensor whose residual has outgrown its signal, at the limit that the
 * header states. There must be no warning for healthy runs.
 */

/* Gives tensor `tensor` a residual of `ratio` times its momentum, and gives the other tensors a
 * residual as large as their momentum. */
static void set_residuals(struct subject_alone *alone, size_t tensor, double ratio) {
  onebit_plan_t plan = alone_plan(alone);
  float *error = allocate((SUBJECT_TENSORS - 1) * SUBJECT_LENGTH, sizeof *error);
  for (size_t t = 0, first = 0; t < SUBJECT_TENSORS; t++) {
    if (t == 1)
      continue;
    double wanted =
        tensor_statistics(alone->optimizer, t).momentum_norm * (t == tensor ? ratio : 1);
    for (size_t i = 0; i < SUBJECT_LENGTH; i++)
      error[first + i] = (float)((i % 2 ? 1 : -1) * wanted / sqrt(SUBJECT_LENGTH));
    first += SUBJECT_LENGTH;
  }
  CHECK_STATUS(onebit_plan_import_residual(plan, error, NULL), ONEBIT_OK);
  free(error);
}

Test(check, a_tensor_of_too_large_an_error_is_named) {
  static const size_t tensors[] = {0, 2, 3};
  struct subject_alone *alone = alone_create(0);
  alone_step(alone, 5);
  for (size_t k = 0; k < 3; k++) {
    size_t named = 77;
    char number[20];
    set_residuals(alone, tensors[k], 40);
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
  struct subject_alone *alone = alone_create(0);
  size_t named = 77;
  alone_step(alone, 5);
  set_residuals(alone, 2, 0.99 * ONEBIT_RESIDUAL_RATIO_LIMIT);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_OK);
  CHECK(named == 77, "a tensor is named where nothing is wrong");
  set_residuals(alone, 2, 1.01 * ONEBIT_RESIDUAL_RATIO_LIMIT);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_WARNING);
  alone_destroy(alone);
}

/* Tests a residual without a signal: momentum and gradient are zero. */
Test(check, error_without_a_signal) {
  struct subject_alone *alone = alone_create(0);
  size_t named = 77;
  CHECK_STATUS(onebit_optimizer_step(alone->optimizer, 0.0f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_OK);
  float *error = allocate((SUBJECT_TENSORS - 1) * SUBJECT_LENGTH, sizeof *error);
  error[SUBJECT_LENGTH] = 1;
  CHECK_STATUS(onebit_plan_import_residual(alone_plan(alone), error, NULL), ONEBIT_OK);
  CHECK(isinf(tensor_statistics(alone->optimizer, 2).residual_ratio), "the ratio is %g",
        tensor_statistics(alone->optimizer, 2).residual_ratio);
  CHECK_STATUS(onebit_optimizer_check(alone->optimizer, &named), ONEBIT_WARNING);
  CHECK(named == 2, "tensor %zu is named", named);
  free(error);
  alone_destroy(alone);
}

/* Checks that a run of an optimizer never warns. */
static void check_healthy_run(onebit_comm_t comm, void *context) {
  const struct subject *subject = context;
  float *parameters = allocate(SUBJECT_TOTAL, sizeof(float)),
        *gradients = allocate(SUBJECT_TOTAL, sizeof(float));
  onebit_tensor_t tensors[SUBJECT_TENSORS];
  onebit_optimizer_t optimizer;
  fill_input(parameters, ONEBIT_FLOAT32, SUBJECT_TOTAL, 90, 0);
  subject_list(parameters, ONEBIT_FLOAT32, gradients, tensors);
  check_case("%s", subject->method->name);
  CHECK_STATUS(subject_create(subject, comm, tensors, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 40; step++) {
    for (size_t i = 0; i < SUBJECT_TOTAL; i++)
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
    on_ranks(3, check_healthy_run, &subject);
  }
}
