/*
 * Statistics that there is no memory for, and the line that describes an optimizer: whole, cut
 * where the buffer ends, and JSON. Wrong arguments are in support_wrong_optimizers.c.
 */
#include "base/memory.h"
#include "optimizers/optimizer.h"
#include "tests/support_json.h"
#include "tests/support_statistics.h"

Test(describe, without_memory) {
  struct alone *alone = alone_create();
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

/* With every size of buffer as much as fits, ended by a zero, and nothing behind it. */
static void check_cuts(onebit_optimizer_t optimizer, onebit_format_t format) {
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
  struct alone *alone = alone_create();
  for (int round = 0; round < 2; round++) {
    check_cuts(alone->optimizer, ONEBIT_FORMAT_TEXT);
    check_cuts(alone->optimizer, ONEBIT_FORMAT_JSON);
    alone_step(alone, 5);
  }
  alone_destroy(alone);
}

static const char *const fields[] = {"name",
                                     "stage",
                                     "steps",
                                     "skipped",
                                     "freeze_step",
                                     "synchronized",
                                     "dense_exchanges",
                                     "bits_exchanges",
                                     "local_steps",
                                     "variance_ratio",
                                     "momentum_norm",
                                     "residual_norm",
                                     "loss_scale",
                                     "gradient_norm",
                                     "warmup_bytes",
                                     "compressed_bytes",
                                     "memory_bytes",
                                     "bits",
                                     "moves",
                                     "residual_ratio",
                                     "dense_bytes",
                                     "bits_bytes",
                                     "seconds",
                                     "compress_seconds",
                                     "network_seconds",
                                     "update_seconds"};

static void check_json(const struct alone *alone) {
  char line[2000];
  CHECK_STATUS(
      onebit_optimizer_describe(alone->optimizer, ONEBIT_FORMAT_JSON, line, sizeof line, NULL),
      ONEBIT_OK);
  CHECK(json_is_valid(line), "no JSON: %s", line);
  for (size_t k = 0; k < sizeof fields / sizeof fields[0]; k++) {
    char name[40];
    snprintf(name, sizeof name, "\"%s\":", fields[k]);
    const char *found = strstr(line, name);
    CHECK(found && !strstr(found + 1, name), "%s is not there once: %s", name, line);
  }
}

Test(describe, json_is_json) {
  struct alone *alone = alone_create();
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
  struct alone *alone = alone_create();
  char line[1000];
  alone_step(alone, 4);
  alone->gradients[0] = NAN;
  CHECK_STATUS(onebit_optimizer_step(alone->optimizer, 1e-3f), ONEBIT_SKIPPED);
  CHECK_STATUS(
      onebit_optimizer_describe(alone->optimizer, ONEBIT_FORMAT_TEXT, line, sizeof line, NULL),
      ONEBIT_OK);
  static const char *const parts[] = {"momentum: 4 steps (1 skipped)", "compressed since step 1",
                                      "0 in the warm-up, 4 in bits", "residual", "network"};
  for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++)
    CHECK(strstr(line, parts[k]), "no \"%s\": %s", parts[k], line);
  alone_destroy(alone);
}
