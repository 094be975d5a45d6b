/* The results of checks while a test runs. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#include "tests/gpu/harness_inside.h"

/* After so many failures of a test only their number grows. */
#define FAILURES_TOLD 10

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t failed;
static bool skipped;
static char skip_words[256];
static _Thread_local char case_words[256];

void checks_begin(void) {
  failed = 0;
  skipped = false;
  case_words[0] = 0;
}

size_t checks_failed(void) { return failed; }

const char *checks_skipped(void) { return skipped ? skip_words : NULL; }

void check_case(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(case_words, sizeof case_words, format, arguments);
  va_end(arguments);
}

void check_skip(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  vsnprintf(skip_words, sizeof skip_words, format, arguments);
  skipped = true;
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

bool check_note(bool holds, const char *file, int line, const char *format, ...) {
  char words[1024];
  if (holds)
    return true;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&lock);
  if (failed++ < FAILURES_TOLD)
    printf("%s:%d: %s%s%s\n", file, line, case_words, *case_words ? ": " : "", words);
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
