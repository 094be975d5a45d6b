/* ONEBIT_METRICS: rows of a training as CSV, and what is refused. */
#include <sys/stat.h>

#include "tests/support.h"
#include "tests/support_irregular.h"

enum { RANKS = 2, STEPS = 7, COUNT = 64, COLUMNS = 17 };

static char directory[] = "/tmp/onebit-metrics-XXXXXX";
static onebit_optimizer_statistics_t told[STEPS]; /* of rank 0, behind each step */

static onebit_optimizer_t make_adam(onebit_comm_t comm, float *parameter, float *gradient,
                                    onebit_status_t wanted) {
  const onebit_tensor_t tensor = {.parameter = parameter, .gradient = gradient, .count = COUNT};
  onebit_optimizer_t optimizer = NULL;
  onebit_adam_options_t options = {.size = sizeof options, .freeze_step = 2};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), wanted);
  return optimizer;
}

/* The third step is skipped. */
static void train(onebit_comm_t comm, void *context) {
  static _Thread_local float parameter[COUNT], gradient[COUNT];
  (void)context;
  onebit_optimizer_t optimizer = make_adam(comm, parameter, gradient, ONEBIT_OK);
  for (int step = 0; step < STEPS; step++) {
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

static const char *file_in(const char *name) {
  static char path[160];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return path;
}

static size_t read_file(const char *name, unsigned char *data, size_t size) {
  FILE *file = fopen(file_in(name), "rb");
  cr_assert(file, "%s", name);
  size_t count = fread(data, 1, size - 1, file);
  data[count] = 0;
  fclose(file);
  unlink(file_in(name));
  return count;
}

static void train_into(const char *name) {
  cr_assert(mkdtemp(directory));
  setenv("ONEBIT_METRICS", file_in(name), 1);
  setenv("ONEBIT_METRICS_EVERY", "3", 1);
  on_ranks(RANKS, train, NULL);
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
  train_into("run.csv");
  on_ranks(RANKS, train, NULL); /* a second training does not take the first one's file */
  check_csv("run.csv");
  check_csv("run-2.csv");
  cr_expect(rmdir(directory) == 0, "more files than these");
}

Test(metrics, each_rank_writes_a_file_of_its_own) {
  train_into("run.%r.csv");
  check_csv("run.0.csv");
  check_csv("run.1.csv");
  cr_expect(rmdir(directory) == 0, "more files than these");
}

/* A failed step counts in no row, and its error message stays. */
static void fail_between(onebit_comm_t comm, void *context) {
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
  setenv("ONEBIT_METRICS", file_in("run.csv"), 1);
  setenv("ONEBIT_METRICS_EVERY", "2", 1);
  on_ranks(RANKS, fail_between, NULL);
  read_file("run.csv", text, sizeof text);
  const char *row = strchr((char *)text, '\n');
  cr_assert(row);
  cr_expect(strncmp(row, "\n2,", 3) == 0 && strchr(row + 1, '\n') == row + strlen(row) - 1, "%s",
            (char *)text);
  cr_expect(rmdir(directory) == 0);
}

/* --- What is wrong */

static void make_in_vain(onebit_comm_t comm, void *wanted) {
  float parameter[COUNT] = {0}, gradient[COUNT] = {0};
  const onebit_status_t status = *(const onebit_status_t *)wanted;
  const bool mine = onebit_comm_rank(comm) == 0 || status == ONEBIT_ERROR_ARGUMENT;
  CHECK(!make_adam(comm, parameter, gradient, mine ? status : ONEBIT_ERROR_PEER), "made");
  CHECK_WORDS(mine ? "ONEBIT_METRICS" : "rank 0");
}

Test(metrics, what_cannot_be_written_fails_on_all_ranks) {
  onebit_status_t file = ONEBIT_ERROR_FILE, argument = ONEBIT_ERROR_ARGUMENT;
  setenv("ONEBIT_METRICS", "/nowhere/at.all", 1);
  on_ranks(RANKS, make_in_vain, &file);
  setenv("ONEBIT_METRICS", "/dev/full", 1);
  on_ranks(RANKS, make_in_vain, &file);
  cr_assert(mkdtemp(directory));
  for (enum irregular kind = A_FIFO; kind <= A_DIRECTORY; kind++) {
    irregular_make(kind, file_in(irregular_names[kind]));
    setenv("ONEBIT_METRICS", file_in(irregular_names[kind]), 1);
    on_ranks(RANKS, make_in_vain, &file);
    irregular_remove(kind, file_in(irregular_names[kind]));
  }
  rmdir(directory);
  setenv("ONEBIT_METRICS_EVERY", "0", 1);
  on_ranks(RANKS, make_in_vain, &argument);
}
