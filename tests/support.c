/* Implements support.h: checks that any thread can make, ranks as threads and their data, and tests
 * of programs and of the JSON that they print. */
#include "tests/support.h"

#include <ctype.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/oracle.h"

const int test_sizes[] = {1, 2, 3, 4, 7, 8, 16};
const size_t test_sizes_count = sizeof test_sizes / sizeof test_sizes[0];
const size_t test_counts[] = {0, 1, 31, 32, 33, 2047, 2048, 2049, 4097, 100003};
const size_t test_counts_count = sizeof test_counts / sizeof test_counts[0];
const char *const test_codecs[] = {"scalar", "avx2", "avx512", "neon"};
const size_t test_codecs_count = sizeof test_codecs / sizeof test_codecs[0];

/* The number of failures that all threads together print. A broken kernel fails thousands of
 * times. */
#define FAILURES_TOLD 5
static pthread_mutex_t failures_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t failures;
static char failures_text[4096];

static _Thread_local char current_case[256];
static _Thread_local int current_rank = -1;

void check_case(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(current_case, sizeof current_case, format, arguments);
  va_end(arguments);
}

void check_rank(int rank) { current_rank = rank; }

static void append_failure(const char *file, int line, const char *text) {
  size_t used = strlen(failures_text);
  char rank[24] = "";
  if (current_rank >= 0)
    snprintf(rank, sizeof rank, "rank %d, ", current_rank);
  snprintf(failures_text + used, sizeof failures_text - used, "\n  %s:%d: %s%s: %s", file, line,
           rank, current_case, text);
}

static void note_failure(const char *file, int line, const char *format, va_list arguments) {
  char text[512];
  vsnprintf(text, sizeof text, format, arguments);
  pthread_mutex_lock(&failures_lock);
  if (failures++ < FAILURES_TOLD)
    append_failure(file, line, text);
  pthread_mutex_unlock(&failures_lock);
}

bool check_note(bool holds, const char *file, int line, const char *format, ...) {
  if (!holds) {
    va_list arguments;
    va_start(arguments, format);
    note_failure(file, line, format, arguments);
    va_end(arguments);
  }
  return holds;
}

bool check_status(onebit_status_t got, onebit_status_t wanted, const char *call, const char *file,
                  int line) {
  return check_note(got == wanted, file, line, "%s gave %s, not %s; message: %s", call,
                    onebit_status_string(got), onebit_status_string(wanted),
                    got < 0 ? onebit_last_error() : "none");
}

bool check_words(const char *part, const char *file, int line) {
  return check_note(strstr(onebit_last_error(), part) != NULL, file, line,
                    "the message \"%s\" does not contain \"%s\"", onebit_last_error(), part);
}

void checks_must_hold(void) {
  cr_assert(failures == 0, "%zu checks failed, the first:%s", failures, failures_text);
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

void synchronize_ranks(onebit_comm_t comm) {
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

/* ---- Data ---- */

void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  cr_assert(memory, "no memory for %zu elements of %zu bytes", count, size);
  return memory;
}

float uniform_value(uint64_t place) {
  uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (float)((x ^ x >> 31) >> 40) / 8388608.0f - 1.0f;
}

size_t dtype_size(onebit_dtype_t dtype) { return dtype == ONEBIT_FLOAT32 ? 4 : 2; }

const char *dtype_name(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32 ? "float32" : dtype == ONEBIT_BFLOAT16 ? "bfloat16" : "float16";
}

/* All periods are primes. Therefore none is aligned with words, blocks or runs, and ranks and steps
 * have different values in these tests. The divisors 504.7 and 9973 fill the mantissa, so that sums
 * are rounded and a wrong order of additions changes the result. */
float input_value(size_t i, int rank, int step) {
  size_t k = i + (size_t)rank * 7919 + (size_t)step * 104729;
  if (k % 53 == 0 || (k / 2503) % 11 == 10)
    return k % 2 ? -0.0f : 0.0f;
  float coarse = (float)(k * 31 % 1009) - 504.0f, fine = (float)(k * 17 % 97) - 48.0f;
  float region = (float)((k / 701) % 9) - 6.0f;
  float value = (coarse / 504.7f + fine / 9973.0f) * exp2f(region);
  return k % 211 == 0 ? value * 37.0f : value;
}

void fill_input(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int step) {
  for (size_t i = 0; i < count; i++)
    oracle_store(buffer, i, dtype, input_value(i, rank, step));
}

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

struct guarded guarded_create(size_t bytes, enum guard guard) {
  size_t page = page_size(), inside = (bytes + page - 1) / page * page;
  struct guarded buffer = {NULL, NULL, inside + 2 * page};
  buffer.mapping =
      mmap(NULL, buffer.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  cr_assert(buffer.mapping != MAP_FAILED, "no memory for a buffer of %zu bytes", bytes);
  char *first = (char *)buffer.mapping + page;
  if (inside)
    cr_assert_eq(mprotect(first, inside, PROT_READ | PROT_WRITE), 0);
  buffer.data = guard == GUARD_BELOW ? first : first + inside - bytes;
  return buffer;
}

void guarded_destroy(struct guarded *buffer) { munmap(buffer->mapping, buffer->mapped); }

static unsigned char pattern_byte(size_t i) { return (unsigned char)(0x5a + i % 13); }

void fill_pattern(void *buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    ((unsigned char *)buffer)[i] = pattern_byte(i);
}

bool pattern_holds(const void *buffer, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)buffer)[i] != pattern_byte(i))
      return false;
  return true;
}

/* Returns the bits of an element, for a failure's message. */
static unsigned bits_of(const void *array, size_t i, size_t size) {
  uint32_t word = 0;
  memcpy(&word, (const char *)array + i * size, size); /* little-endian, like the wire format */
  return word;
}

bool check_bits(const char *what, const void *actual, const void *wanted, size_t count,
                onebit_dtype_t dtype, const char *file, int line) {
  size_t size = dtype_size(dtype), first = count, differing = 0;
  if (count == 0 || memcmp(actual, wanted, count * size) == 0)
    return true;
  for (size_t i = count; i-- > 0;)
    if (bits_of(actual, i, size) != bits_of(wanted, i, size)) {
      first = i;
      differing++;
    }
  return check_note(
      false, file, line, "%s[%zu] is %.9g (0x%x) and should be %.9g (0x%x); %zu of %zu differ",
      what, first, (double)oracle_load(actual, first, dtype), bits_of(actual, first, size),
      (double)oracle_load(wanted, first, dtype), bits_of(wanted, first, size), differing, count);
}

/* ---- Programs ---- */

const char *program(int wanted, const char *format, ...) {
  static char output[1 << 15];
  char command[4096];
  const char *build = getenv("BUILD");
  size_t used = (size_t)snprintf(command, 1024, "exec 2>&1; %s/", build ? build : "build");
  cr_assert(used < 1024, "BUILD is too long");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(command + used, sizeof command - used, format, arguments);
  va_end(arguments);
  FILE *pipe = popen(command, "r");
  cr_assert(pipe);
  output[fread(output, 1, sizeof output - 1, pipe)] = '\0';
  int status = pclose(pipe);
  cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == wanted, "%s: status %#x, not %d: %s",
            command, (unsigned)status, wanted, output);
  return output;
}

int split_line(char *argv[], const char *format, ...) {
  static char text[2048];
  int argc = 0;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
    argv[argc++] = word;
  argv[argc] = NULL;
  return argc;
}

void expect_output(const char *output, const char *part) {
  cr_expect(strstr(output, part), "\"%s\" does not contain \"%s\"", output, part);
}

/* ---- JSON by the grammar of RFC 8259: each function returns the end of the text that it has read,
 * or NULL if the text is invalid ---- */

static const char *json_value(const char *at);

static const char *json_word(const char *at, const char *wanted) {
  size_t length = strlen(wanted);
  return at && strncmp(at, wanted, length) == 0 ? at + length : NULL;
}

static const char *json_string(const char *at) {
  at = json_word(at, "\"");
  while (at && *at && *at != '"') {
    if ((unsigned char)*at < ' ')
      return NULL;
    at += *at == '\\' ? 2 : 1; /* skips the character after a backslash */
  }
  return json_word(at, "\"");
}

static const char *json_digits(const char *at) {
  if (!at || !isdigit((unsigned char)*at))
    return NULL;
  while (isdigit((unsigned char)*at))
    at++;
  return at;
}

static const char *json_number(const char *at) {
  at += *at == '-';
  at = *at == '0' ? at + 1 : json_digits(at);
  if (at && *at == '.')
    at = json_digits(at + 1);
  if (at && (*at == 'e' || *at == 'E')) {
    at++;
    at = json_digits(at + (*at == '-' || *at == '+'));
  }
  return at;
}

/* Reads elements between brackets. In an object each element has a name. */
static const char *json_list(const char *at, bool named, char end) {
  at++;
  if (*at == end)
    return at + 1;
  for (;;) {
    if (named)
      at = json_word(json_string(at), ":");
    at = at ? json_value(at) : NULL;
    if (!at || *at == end)
      return at ? at + 1 : NULL;
    if (*at++ != ',')
      return NULL;
  }
}

static const char *json_value(const char *at) {
  switch (*at) {
  case '{':
    return json_list(at, true, '}');
  case '[':
    return json_list(at, false, ']');
  case '"':
    return json_string(at);
  case 't':
    return json_word(at, "true");
  case 'f':
    return json_word(at, "false");
  case 'n':
    return json_word(at, "null");
  default:
    return json_number(at);
  }
}

bool json_is_valid(const char *text) {
  const char *end = *text == '{' ? json_value(text) : NULL;
  return end && *end == 0;
}
