/* Checks that work on any thread, and ranks that are threads. */
#include "tests/support.h"

#include <stdarg.h>

const int test_sizes[] = {1, 2, 3, 4, 7, 8, 16};
const size_t test_sizes_count = sizeof test_sizes / sizeof test_sizes[0];
const size_t test_counts[] = {0, 1, 31, 32, 33, 2047, 2048, 2049, 4097, 100003};
const size_t test_counts_count = sizeof test_counts / sizeof test_counts[0];
const char *const test_codecs[] = {"scalar", "avx2", "avx512", "neon"};
const size_t test_codecs_count = sizeof test_codecs / sizeof test_codecs[0];

/* Failures of all threads. The first few are told; a broken kernel fails thousands. */
#define FAILURES_TOLD 5
static pthread_mutex_t failures_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t failures;
static char failures_words[4096];

static _Thread_local char current_case[256];
static _Thread_local int current_rank = -1;

void check_case(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(current_case, sizeof current_case, format, arguments);
  va_end(arguments);
}

void check_rank(int rank) { current_rank = rank; }

static void tell(const char *file, int line, const char *words) {
  size_t used = strlen(failures_words);
  char rank[24] = "";
  if (current_rank >= 0)
    snprintf(rank, sizeof rank, "rank %d, ", current_rank);
  snprintf(failures_words + used, sizeof failures_words - used, "\n  %s:%d: %s%s: %s", file, line,
           rank, current_case, words);
}

static void note(const char *file, int line, const char *format, va_list arguments) {
  char words[512];
  vsnprintf(words, sizeof words, format, arguments);
  pthread_mutex_lock(&failures_lock);
  if (failures++ < FAILURES_TOLD)
    tell(file, line, words);
  pthread_mutex_unlock(&failures_lock);
}

bool check_note(bool holds, const char *file, int line, const char *format, ...) {
  if (!holds) {
    va_list arguments;
    va_start(arguments, format);
    note(file, line, format, arguments);
    va_end(arguments);
  }
  return holds;
}

bool check_status(onebit_status_t got, onebit_status_t wanted, const char *call, const char *file,
                  int line) {
  return check_note(got == wanted, file, line, "%s gave %s, not %s; words: %s", call,
                    onebit_status_string(got), onebit_status_string(wanted),
                    got < 0 ? onebit_last_error() : "none");
}

bool check_words(const char *part, const char *file, int line) {
  return check_note(strstr(onebit_last_error(), part) != NULL, file, line,
                    "the words \"%s\" do not say \"%s\"", onebit_last_error(), part);
}

void checks_must_hold(void) {
  cr_assert(failures == 0, "%zu checks failed, the first:%s", failures, failures_words);
}

struct rank_thread {
  pthread_t thread;
  onebit_comm_t comm;
  rank_body *body;
  void *context;
};

static void *rank_main(void *argument) {
  struct rank_thread *self = argument;
  check_rank(onebit_comm_rank(self->comm));
  self->body(self->comm, self->context);
  onebit_comm_destroy(self->comm);
  return NULL;
}

void on_ranks(int size, rank_body *body, void *context) { on_hosts(size, 1, body, context); }

void on_hosts(int size, int hosts, rank_body *body, void *context) {
  onebit_comm_t *comms = allocate((size_t)size, sizeof *comms);
  struct rank_thread *ranks = allocate((size_t)size, sizeof *ranks);
  cr_assert_eq(onebit_comm_create_loopback_hosts(size, hosts, comms), ONEBIT_OK, "%s",
               onebit_last_error());
  for (int r = 0; r < size; r++) {
    ranks[r].comm = comms[r];
    ranks[r].body = body;
    ranks[r].context = context;
    cr_assert_eq(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
  }
  for (int r = 0; r < size; r++)
    pthread_join(ranks[r].thread, NULL);
  free(ranks);
  free(comms);
  checks_must_hold();
}

void meet(onebit_comm_t comm) {
  onebit_plan_options_t options = {.size = sizeof options, .wire = ONEBIT_WIRE_DENSE};
  onebit_plan_t plan;
  float mine = 1.0f, mean = 0.0f;
  if (!CHECK_STATUS(onebit_plan_create(comm, 1, &options, &plan), ONEBIT_OK))
    return;
  CHECK_STATUS(onebit_allreduce(&mine, &mean, plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

onebit_comm_t self_comm(void) {
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK, "%s", onebit_last_error());
  return comm;
}

#define INFO_OF(kind)                                                                              \
  onebit_##kind##_info_t kind##_info(onebit_##kind##_t kind) {                                     \
    onebit_##kind##_info_t info = {.size = sizeof info};                                           \
    CHECK_STATUS(onebit_##kind##_get_info(kind, &info), ONEBIT_OK);                                \
    return info;                                                                                   \
  }
INFO_OF(plan)
INFO_OF(optimizer)
INFO_OF(outer)

bool use_codec(const char *name) {
  onebit_plan_t plan = NULL;
  if (*name)
    setenv("ONEBIT_CODEC", name, 1);
  else
    unsetenv("ONEBIT_CODEC");
  onebit_comm_t comm = self_comm();
  onebit_status_t status = onebit_plan_create(comm, 1, NULL, &plan);
  cr_assert(status == ONEBIT_OK || status == ONEBIT_ERROR_ARGUMENT, "%s", onebit_last_error());
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  if (status != ONEBIT_OK)
    unsetenv("ONEBIT_CODEC");
  return status == ONEBIT_OK;
}
