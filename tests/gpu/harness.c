/*
 * gpu_tests: runs the tests, and prints the outcome and time of each, and a summary.
 *
 *   --list             prints the names of the tests
 *   --filter PATTERN   runs tests whose name contains PATTERN, or matches it as a file pattern
 *   --device           only prints the device's properties; fails if there is no device
 *
 * --rank, --size, --group and --test start a process that is one rank of a test
 * (harness_processes.c).
 */
#define _DEFAULT_SOURCE
#include <fnmatch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/process.h"
#include "tests/gpu/emulated.h"
#include "tests/gpu/harness_inside.h"

/* ---- The results of checks while a test runs ---- */

/* The number of failures that are printed for each test. Further failures are only counted. */
#define FAILURES_TOLD 10

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t failed;
static bool skipped;
static char skip_text[256];
static _Thread_local char case_text[256];

static void reset_checks(void) {
  failed = 0;
  skipped = false;
  case_text[0] = 0;
}

size_t failure_count(void) { return failed; }

const char *skip_reason(void) { return skipped ? skip_text : NULL; }

void check_case(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(case_text, sizeof case_text, format, arguments);
  va_end(arguments);
}

void check_skip(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  vsnprintf(skip_text, sizeof skip_text, format, arguments);
  skipped = true;
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

bool check_note(bool holds, const char *file, int line, const char *format, ...) {
  char message[1024];
  if (holds)
    return true;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&lock);
  if (failed++ < FAILURES_TOLD)
    printf("%s:%d: %s%s%s\n", file, line, case_text, *case_text ? ": " : "", message);
  pthread_mutex_unlock(&lock);
  return false;
}

bool check_cuda(cudaError_t got, const char *call, const char *file, int line) {
  return check_note(got == cudaSuccess, file, line, "%s: %s", call, cudaGetErrorString(got));
}

bool check_status(onebit_status_t got, onebit_status_t wanted, const char *call, const char *file,
                  int line) {
  return check_note(got == wanted, file, line, "%s returned %d, not %d: %s", call, (int)got,
                    (int)wanted, onebit_last_error());
}

bool check_message(const char *part, const char *file, int line) {
  return check_note(strstr(onebit_last_error(), part), file, line,
                    "the message \"%s\" does not contain \"%s\"", onebit_last_error(), part);
}

/* ---- Tests ---- */

static struct gpu_suite *suites;

/* Inserts the tests in order of their names, since the linker's order is arbitrary. */
void gpu_suite_add(struct gpu_suite *suite) {
  struct gpu_suite **at = &suites;
  while (*at && strcmp((*at)->name, suite->name) < 0)
    at = &(*at)->next;
  suite->next = *at;
  *at = suite;
}

void *gpu_allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) {
    fprintf(stderr, "no memory for %zu elements of %zu bytes\n", count, size);
    exit(2);
  }
  return memory;
}

bool gpu_copy(void *to, const void *from, size_t bytes) {
  return CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)) &&
         CHECK_CUDA(cudaStreamSynchronize(NULL));
}

struct options {
  const char *program, *filter, *rank, *size, *group, *test;
  bool list, device;
};

static struct tally { size_t passed, failed, skipped, left; } tally;

/* No test begins later than ONEBIT_TEST_SECONDS after the first test. Tests that have not begun by
 * that time are reported as not run. */
static bool is_too_late(void) {
  static double start;
  const char *text = getenv("ONEBIT_TEST_SECONDS");
  start = start > 0 ? start : ob_seconds();
  return text && ob_seconds() - start > strtod(text, NULL);
}

static bool is_wanted(const char *name, const struct options *options) {
  if (options->test)
    return strcmp(name, options->test) == 0;
  return !options->filter || strstr(name, options->filter) ||
         fnmatch(options->filter, name, 0) == 0;
}

static bool has_device(void) {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  return CHECK(error == cudaSuccess && devices > 0, "no CUDA device: %s",
               error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
}

static void run_test(const struct gpu_test *test, const char *name, const char *program) {
  double start = ob_seconds();
  reset_checks();
  gpu_begin_test(program, name);
  if (test->needs == EMULATED && !IS_EMULATED)
    check_skip("only the emulated device counts work and fails on demand");
  else if (test->needs == NO_DEVICE || has_device())
    test->run();
  gpu_end_test();
  const char *outcome = "passed";
  if (failure_count())
    tally.failed++, outcome = "FAILED";
  else if (skip_reason())
    tally.skipped++, outcome = "skipped";
  else
    tally.passed++;
  printf("%-8s %-50s %8.2f s%s%s\n", outcome, name, ob_seconds() - start, skip_reason() ? "  " : "",
         skip_reason() ? skip_reason() : "");
}

static void run_selected_tests(const struct options *options) {
  for (const struct gpu_suite *suite = suites; suite; suite = suite->next)
    for (size_t i = 0; i < suite->count; i++) {
      char name[128];
      snprintf(name, sizeof name, "%s/%s", suite->name, suite->tests[i].name);
      if (!is_wanted(name, options))
        continue;
      if (options->list)
        puts(name);
      else if (!options->test && is_too_late())
        tally.left++, printf("not run  %s\n", name);
      else
        run_test(&suite->tests[i], name, options->program);
    }
}

static bool read_options(int count, char **arguments, struct options *options) {
  const struct {
    const char *name, **value;
  } table[] = {{"--filter", &options->filter}, {"--rank", &options->rank},
               {"--size", &options->size},     {"--group", &options->group},
               {"--test", &options->test},     {NULL, NULL}};
  for (int i = 1; i < count; i++) {
    size_t k = 0;
    while (table[k].name && strcmp(table[k].name, arguments[i]) != 0)
      k++;
    if (strcmp(arguments[i], "--list") == 0)
      options->list = true;
    else if (strcmp(arguments[i], "--device") == 0)
      options->device = true;
    else if (table[k].name && i + 1 < count)
      *table[k].value = arguments[++i];
    else
      return false;
  }
  return true;
}

/* Prints the device as lines of "name: value". */
static int describe_device(void) {
  struct cudaDeviceProp device;
  int driver = 0, runtime = 0, count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess)
    error = cudaGetDeviceProperties(&device, 0);
  if (error != cudaSuccess) {
    fprintf(stderr, "no CUDA device: %s\n", cudaGetErrorString(error));
    return 1;
  }
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  printf("card: %s\ncards: %d\ncompute capability: %d.%d\nmemory: %zu MiB\n", device.name, count,
         device.major, device.minor, device.totalGlobalMem >> 20);
  printf("CUDA of the driver: %d.%d\nCUDA of the runtime: %d.%d\n", driver / 1000,
         driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  return 0;
}

static int print_summary(void) {
  size_t walked = tally.passed + tally.failed + tally.skipped + tally.left;
  if (!walked)
    puts("no test has such a name");
  printf("\n%zu passed, %zu failed", tally.passed, tally.failed);
  if (tally.skipped)
    printf(", %zu skipped", tally.skipped);
  if (tally.left)
    printf(", %zu not run", tally.left);
  puts("");
  return tally.failed || !walked;
}

int main(int count, char **arguments) {
  struct options options = {.program = arguments[0]};
  if (!read_options(count, arguments, &options)) {
    fprintf(stderr, "usage: gpu_tests [--list | --device] [--filter PATTERN]\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (options.device)
    return describe_device();
  if (options.rank && !gpu_parse_rank(options.rank, options.size, options.group))
    return 2;
  run_selected_tests(&options);
  if (gpu_rank_process.taken) {
    puts("the test has ended before the call that wants this rank");
    return 1;
  }
  return options.list ? 0 : print_summary();
}
