/* Tests the log, the metrics and the counters of a process. */
#include <fcntl.h>
#include <sys/stat.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/file.h"
#include "base/log.h"
#include "dropin/counters.h"
#include "onebit/counters.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"
#include "tests/support_disk.h"
#include "tests/support_optimizers.h"

/* Tests ONEBIT_DEBUG: the lines that each level prints, the file that gets them, and values that
 * are refused. */

enum { RANKS = 2, STEPS = 6, COUNT = 64 };

/* Runs a training whose warm-up ends, and whose last step is skipped. */
static void train_efficient_adam(onebit_comm_t comm, void *context) {
  static _Thread_local float parameter[COUNT], gradient[COUNT];
  const onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = COUNT};
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  onebit_efficient_adam_options_t options = {.size = sizeof options, .warmup_steps = 3};
  CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < STEPS; step++) {
    gradient[0] = step == STEPS - 1 ? (float)(1e300 * 1e300) : 1;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f),
                 step == STEPS - 1 ? ONEBIT_SKIPPED : ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
}

/* Returns the lines that two ranks print at a level, or "" if they print none. */
static const char *log_of_body(rank_body *body, void *context, const char *level) {
  static char text[1 << 14], path[] = "/tmp/onebit-log-XXXXXX", pattern[64], host[64] = "",
                             named[160];
  close(mkstemp(path));
  unlink(path);
  gethostname(host, sizeof host - 1);
  snprintf(pattern, sizeof pattern, "%s-%%h-%%r.%%", path);
  snprintf(named, sizeof named, "%s-%s-0.%%", path, host);
  if (*level)
    setenv("ONEBIT_DEBUG", level, 1);
  setenv("ONEBIT_DEBUG_FILE", pattern, 1);
  on_ranks(RANKS, body, context);
  FILE *file = fopen(named, "r");
  if (!file) { /* the other rank was the first to print */
    named[strlen(named) - 3] = '1';
    file = fopen(named, "r");
  }
  cr_assert(file, "%s", named);
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  unlink(named);
  return text;
}

static const char *log_of_training(const char *level) {
  return log_of_body(train_efficient_adam, NULL, level);
}

static int count_occurrences(const char *text, const char *part) {
  int found = 0;
  for (; (text = strstr(text, part)); text++)
    found++;
  return found;
}

static void expect_count(const char *text, const char *part, int wanted) {
  cr_expect_eq(count_occurrences(text, part), wanted, "%s: %s", part, text);
}

Test(log, warn_is_the_default_and_says_nothing_of_what_goes_well) {
  cr_expect_str_eq(log_of_training(""), "");
}

#ifdef _OPENMP
static void plan_with_threads(onebit_comm_t comm, void *processors) {
  for (int more = 0; more < 3; more++) {
    onebit_plan_t plan = NULL;
    onebit_plan_options_t options = {.size = sizeof options, .threads = *(int *)processors + more};
    CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
    onebit_plan_destroy(plan);
  }
}

Test(log, threads_without_processors_are_warned_of_once) {
  int processors = omp_get_num_procs();
  char wanted[80];
  snprintf(wanted, sizeof wanted, "threads is %d, but this rank may use only %d processor",
           processors + 1, processors);
  const char *said = log_of_body(plan_with_threads, &processors, "");
  expect_count(said, "threads is", 1);
  expect_count(said, wanted, 1);
}
#endif

/* Creates an optimizer for each case. A case without a method ends the list. */
static void create_all(onebit_comm_t comm, void *context) {
  float parameter[8] = {0}, gradient[8] = {0};
  const onebit_tensor_t tensor = {parameter, gradient, 8, 0, 0, 0};
  for (const struct any_case *what = context; what->method; what++) {
    onebit_optimizer_t made = NULL;
    CHECK_STATUS(ob_optimizer_create(comm, what->method, what->options, &tensor, 1, &made),
                 ONEBIT_OK);
    onebit_optimizer_destroy(made);
  }
}

Test(log, what_is_not_recommended_is_said_once) {
  struct any_case mixed[] = {{ANY(adam, .common.profile = ONEBIT_PROFILE_DEEPSPEED)},
                             {ANY(adam, .freeze_step = ONEBIT_FREEZE_NEVER)},
                             {ANY(adam, 0)},
                             {ANY(adam, 0)},
                             {ANY(lamb, 0)},
                             {ANY(efficient_adam, 0)},
                             {ANY(efficient_adam, .trust_ratio = 1)},
                             {ANY(lion, .common.dense_below = SIZE_MAX)},
                             {ANY(lion, 0)},
                             {ANY(lion, 0)},
                             {NULL, NULL}};
  const char *text = log_of_body(create_all, mixed, "WARN");
  expect_count(text, "\n", 4);
  expect_count(text, "lion is not recommended where most parameters are tables of words", 1);
  expect_count(text, "Use Efficient-Adam without trust_ratio", 1);
  expect_count(text, "rank 0: adam is not recommended", 1);
  expect_count(text, "Use Efficient-Adam (onebit_efficient_adam_create)", 3);
}

/* The advice is printed only once per process, so each of these tests needs a process of its
 * own. */
Test(log, a_dense_form_is_not_advised_against) {
  struct any_case dense[] = {{ANY(adam, .freeze_step = ONEBIT_FREEZE_NEVER)},
                             {ANY(lion, .common.dense_below = SIZE_MAX)},
                             {NULL, NULL}};
  const char *text = log_of_body(create_all, dense, "WARN");
  cr_expect_str_empty(text, "%s", text);
}

Test(log, no_warmup_is_no_dense_form) {
  struct any_case at_once[] = {
      {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = ONEBIT_WARMUP_NONE)}, {NULL, NULL}};
  const char *text = log_of_body(create_all, at_once, "WARN");
  expect_count(text, "Use Efficient-Adam without trust_ratio", 1);
}

Test(log, info_says_what_is_decided) {
  const char *text = log_of_training("INFO");
  expect_count(text, "onebit INFO ", count_occurrences(text, "\n"));
  expect_count(text, ": communicator of 2 ranks on ", RANKS);
  expect_count(text, ": plan 1: 64 elements, schedule ", RANKS);
  expect_count(text, ": efficient_adam: frozen after step 3\n", RANKS);
  expect_count(text, ": efficient_adam: a step after step 5 is skipped: ", RANKS);
  cr_expect(count_occurrences(text, " rank 0: ") > 0 && count_occurrences(text, " rank 1: ") > 0,
            "%s", text);
}

Test(log, trace_says_each_call) {
  const char *text = log_of_training("TRACE");
  expect_count(text, "onebit TRACE ", RANKS * STEPS);
  expect_count(text, " ms, ONEBIT_OK\n", RANKS * (STEPS - 1));
  expect_count(text, " ms, ONEBIT_SKIPPED\n", RANKS);
  cr_expect(count_occurrences(text, "allreduce call 1 of plan ") >= RANKS, "%s", text);
  expect_count(text, " bytes sent, ", RANKS * STEPS);
}

static void check_refused(const char *name, const char *value, onebit_status_t wanted,
                          const char *message) {
  onebit_comm_t comm = NULL;
  setenv(name, value, 1);
  CHECK_STATUS(onebit_comm_create_self(&comm), wanted);
  CHECK_WORDS(message);
  unsetenv(name);
}

Test(log, what_is_wrong_is_refused) {
  char longer[2000] = "";
  memset(longer, 'a', sizeof longer - 1);
  check_refused("ONEBIT_DEBUG", "info", ONEBIT_ERROR_ARGUMENT,
                "ONEBIT_DEBUG=info: neither WARN, INFO nor TRACE");
  check_refused("ONEBIT_DEBUG_FILE", "/nowhere/at.all", ONEBIT_ERROR_FILE,
                "ONEBIT_DEBUG_FILE=/nowhere/at.all: No such file");
  check_refused("ONEBIT_DEBUG_FILE", longer, ONEBIT_ERROR_FILE, "too long");
  char path[] = "/tmp/onebit-log-XXXXXX";
  for (enum irregular kind = A_FIFO; kind <= A_DIRECTORY; kind++) {
    strcpy(path + sizeof path - 7, "XXXXXX");
    close(mkstemp(path));
    unlink(path);
    irregular_make(kind, path);
    check_refused("ONEBIT_DEBUG_FILE", path, ONEBIT_ERROR_FILE,
                  kind == A_DIRECTORY ? "Is a directory" : "not a regular file");
    irregular_remove(kind, path);
  }
}

Test(log, paths_are_expanded_or_too_long) {
  char path[8];
  cr_expect(ob_expand_path("a%r%x%", 17, path, sizeof path) && strcmp(path, "a17%x%") == 0);
  cr_expect(ob_expand_path("1234567", 0, path, sizeof path) && strcmp(path, "1234567") == 0);
  cr_expect_not(ob_expand_path("12345678", 0, path, sizeof path));
  cr_expect_not(ob_expand_path("12345%r", 123, path, sizeof path));
}

/* A FIFO whose reader does not keep up must not block the writer. */
Test(log, a_fifo_with_a_reader_does_not_block) {
  char directory[] = "/tmp/onebit-log-XXXXXX", path[64];
  FILE *file;
  cr_assert(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/fifo", directory);
  cr_assert(mkfifo(path, 0600) == 0);
  cr_expect_eq(ob_output_open(&file, path, true), OB_INPUT_IRREGULAR);
  int reader = open(path, O_RDONLY | O_NONBLOCK);
  cr_assert_eq(ob_output_open(&file, path, true), 0);
  bool well = true;
  for (int k = 0; k < 10000 && well; k++)
    well = fprintf(file, "%0100d\n", k) > 0 && fflush(file) == 0;
  cr_expect(!well && errno == EAGAIN);
  fclose(file);
  close(reader);
  unlink(path);
  rmdir(directory);
}

/* Tests ONEBIT_METRICS: the rows of a training in CSV, and values that are refused. */

enum { ROWED_STEPS = 7, COLUMNS = 17 };

static char directory[] = "/tmp/onebit-metrics-XXXXXX";
static onebit_optimizer_statistics_t told[ROWED_STEPS]; /* of rank 0, after each step */

static onebit_optimizer_t make_adam(onebit_comm_t comm, float *parameter, float *gradient,
                                    onebit_status_t wanted) {
  const onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = COUNT};
  onebit_optimizer_t optimizer = NULL;
  onebit_adam_options_t options = {.size = sizeof options, .freeze_step = 2};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), wanted);
  return optimizer;
}

/* Runs a training whose third step is skipped. */
static void train_adam(onebit_comm_t comm, void *context) {
  static _Thread_local float parameter[COUNT], gradient[COUNT];
  (void)context;
  onebit_optimizer_t optimizer = make_adam(comm, parameter, gradient, ONEBIT_OK);
  for (int step = 0; step < ROWED_STEPS; step++) {
    onebit_optimizer_statistics_t now = {.size = sizeof now};
    for (int i = 0; i < COUNT; i++)
      gradient[i] = (float)(i - 20 + 3 * step) * 0.01f;
    gradient[0] = step == 2 ? INFINITY : 1;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.5f), step == 2 ? ONEBIT_SKIPPED : ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_statistics(optimizer, &now), ONEBIT_OK);
    if (onebit_comm_rank(comm) == 0)
      told[step] = now;
  }
  onebit_optimizer_destroy(optimizer);
}

static const char *metrics_path(const char *name) {
  static char path[160];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return path;
}

static size_t read_file(const char *name, unsigned char *data, size_t size) {
  FILE *file = fopen(metrics_path(name), "rb");
  cr_assert(file, "%s", name);
  size_t count = fread(data, 1, size - 1, file);
  data[count] = 0;
  fclose(file);
  unlink(metrics_path(name));
  return count;
}

static void train_with_metrics(const char *name) {
  cr_assert(mkdtemp(directory));
  setenv("ONEBIT_METRICS", metrics_path(name), 1);
  setenv("ONEBIT_METRICS_EVERY", "3", 1);
  on_ranks(RANKS, train_adam, NULL);
}

static double mean_bytes(int from, int to) {
  const double before = from < 0 ? 0 : (double)(told[from].dense_bytes + told[from].bits_bytes);
  return ((double)(told[to].dense_bytes + told[to].bits_bytes) - before) / 3;
}

/* --- CSV */

static void check_csv(const char *name) {
  static unsigned char text[1 << 13];
  read_file(name, text, sizeof text);
  char *line = strtok((char *)text, "\n");
  cr_assert(line && strncmp(line, "step,seconds,library_seconds,", 29) == 0, "%s", line);
  for (int row = 0; row < 2; row++) {
    double value[COLUMNS];
    const int latest = 3 * row + 2;
    char *at = line = strtok(NULL, "\n");
    cr_assert(line);
    for (int k = 0; k < COLUMNS; k++, at += *at == ',')
      value[k] = strtod(at, &at);
    cr_expect(*at == '\0', "more than %d columns: %s", COLUMNS, line);
    const double bytes = mean_bytes(latest - 3, latest);
    cr_expect_eq(value[0], (double)told[latest].info.steps, "%s", line);
    cr_expect(value[1] >= value[2] && value[2] > 0 && value[2] >= value[4], "times: %s", line);
    cr_expect(fabs(value[6] - bytes) < 1e-6 * bytes, "%g bytes: %s", bytes, line);
    cr_expect(fabs(value[7] - COUNT * 4 / bytes) < 1e-6, "compression: %s", line);
    cr_expect(value[8] == 1 && value[13] == 0.5 && value[14] == 1, "%s", line);
    cr_expect(value[15] == 1 && value[16] == 1, "skipped, compressed: %s", line);
    if (!strstr(name, "1."))
      cr_expect(fabs(value[10] - told[latest].info.residual_norm) < 1e-6, "residual: %s", line);
  }
  cr_expect_null(strtok(NULL, "\n"));
}

Test(metrics, rank_0_writes_rows_as_csv) {
  train_with_metrics("run.csv");
  on_ranks(RANKS, train_adam, NULL); /* a second training does not overwrite the first one's file */
  check_csv("run.csv");
  check_csv("run-2.csv");
  cr_expect(rmdir(directory) == 0, "more files than these");
}

Test(metrics, each_rank_writes_a_file_of_its_own) {
  train_with_metrics("run.%r.csv");
  check_csv("run.0.csv");
  check_csv("run.1.csv");
  cr_expect(rmdir(directory) == 0, "more files than these");
}

/* Makes four steps, of which two fail. No row of the metrics counts a failed step, and its error
 * message is kept. */
static void fail_between_steps(onebit_comm_t comm, void *context) {
  static _Thread_local float parameter[COUNT], gradient[COUNT];
  static const float rates[] = {0.5f, NAN, NAN, 0.5f};
  (void)context;
  onebit_optimizer_t optimizer = make_adam(comm, parameter, gradient, ONEBIT_OK);
  for (int k = 0; k < 4; k++)
    CHECK_STATUS(onebit_optimizer_step(optimizer, rates[k]),
                 rates[k] > 0 ? ONEBIT_OK : ONEBIT_ERROR_ARGUMENT);
  onebit_optimizer_destroy(optimizer);
}

Test(metrics, steps_that_fail_are_left_out) {
  static unsigned char text[1 << 13];
  cr_assert(mkdtemp(directory));
  setenv("ONEBIT_METRICS", metrics_path("run.csv"), 1);
  setenv("ONEBIT_METRICS_EVERY", "2", 1);
  on_ranks(RANKS, fail_between_steps, NULL);
  read_file("run.csv", text, sizeof text);
  const char *row = strchr((char *)text, '\n');
  cr_assert(row);
  cr_expect(strncmp(row, "\n2,", 3) == 0 && strchr(row + 1, '\n') == row + strlen(row) - 1, "%s",
            (char *)text);
  cr_expect(rmdir(directory) == 0);
}

/* --- Wrong settings */

static void fail_to_make_adam(onebit_comm_t comm, void *wanted) {
  float parameter[COUNT] = {0}, gradient[COUNT] = {0};
  const onebit_status_t status = *(const onebit_status_t *)wanted;
  const bool mine = onebit_comm_rank(comm) == 0 || status == ONEBIT_ERROR_ARGUMENT;
  CHECK(!make_adam(comm, parameter, gradient, mine ? status : ONEBIT_ERROR_PEER), "made");
  CHECK_WORDS(mine ? "ONEBIT_METRICS" : "rank 0");
}

Test(metrics, what_cannot_be_written_fails_on_all_ranks) {
  onebit_status_t file = ONEBIT_ERROR_FILE, argument = ONEBIT_ERROR_ARGUMENT;
  setenv("ONEBIT_METRICS", "/nowhere/at.all", 1);
  on_ranks(RANKS, fail_to_make_adam, &file);
  setenv("ONEBIT_METRICS", "/dev/full", 1);
  on_ranks(RANKS, fail_to_make_adam, &file);
  cr_assert(mkdtemp(directory));
  for (enum irregular kind = A_FIFO; kind <= A_DIRECTORY; kind++) {
    irregular_make(kind, metrics_path(irregular_names[kind]));
    setenv("ONEBIT_METRICS", metrics_path(irregular_names[kind]), 1);
    on_ranks(RANKS, fail_to_make_adam, &file);
    irregular_remove(kind, metrics_path(irregular_names[kind]));
  }
  rmdir(directory);
  setenv("ONEBIT_METRICS_EVERY", "0", 1);
  on_ranks(RANKS, fail_to_make_adam, &argument);
}

/*
 * The counters of onebit/counters.h in a program that is not preloaded are zero.
 * tests/scripts/check-preload tests them in preloaded programs.
 */

Test(counters, are_zero_where_nothing_is_preloaded) {
  onebit_counters_t counters, none = {.size = sizeof none};
  memset(&counters, 0x5a, sizeof counters);
  counters.size = sizeof counters;
  CHECK_STATUS(onebit_counters_get(&counters), ONEBIT_OK);
  CHECK(memcmp(&counters, &none, sizeof none) == 0, "something was counted");
  counters.size--;
  CHECK_STATUS(onebit_counters_get(&counters), ONEBIT_ERROR_ARGUMENT);
}

Test(counters, reasons_have_words_and_other_places_none) {
  CHECK(onebit_counters_reason(OB_REASON_NONE) == NULL, "the first is no reason");
  for (size_t reason = OB_REASON_NONE + 1; reason < OB_REASON_COUNT; reason++)
    CHECK(onebit_counters_reason(reason) && *onebit_counters_reason(reason), "reason %zu", reason);
  CHECK(onebit_counters_reason(OB_REASON_COUNT) == NULL, "a place that is not used");
  CHECK(onebit_counters_reason((size_t)-1) == NULL, "no place");
}

/* The difference from exact sums is computed from a tensor's latest samples only, for each tensor
 * separately. */
Test(counters, differences_from_exact_sums_are_of_the_latest) {
  static struct ob_record record;
  for (int i = 0; i < OB_SHADOW_SAMPLES; i++)
    ob_record_count_shadow(&record, 1, 0.25, 1, false);
  ob_record_count_shadow(&record, 2, 4, 16, false);
  const struct ob_record_shadow *second = atomic_load(&record.shadows), *first = second->next;
  CHECK(second->tensor == 2 && first->tensor == 1 && !first->next, "tensors are not listed");
  cr_expect_float_eq(ob_record_difference(first), 0.5, 1e-12);
  cr_expect_float_eq(ob_record_difference(second), 0.5, 1e-12);
  for (int i = 0; i < OB_SHADOW_SAMPLES; i++)
    ob_record_count_shadow(&record, 1, 0.01, 1, i == 0);
  cr_expect_float_eq(ob_record_difference(first), 0.1, 1e-12);
  cr_expect_float_eq(first->largest, 0.5, 1e-12);
  CHECK(first->refused && !second->refused, "the wrong tensor is exact");
  ob_record_count_shadow(&record, 3, 0, 0, false);
  CHECK(ob_record_difference(atomic_load(&record.shadows)) == 0, "of sums that are zero");
  ob_record_count_shadow(NULL, 1, 1, 1, false);
}
