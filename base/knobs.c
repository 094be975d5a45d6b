/* The environment variables. */
#define _POSIX_C_SOURCE 200809L
#include "base/knobs.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

const struct ob_knob_row ob_knobs[OB_KNOB_COUNT] = {
    [OB_KNOB_CONFIG] = {"ONEBIT_CONFIG", "-",
                        "JSON file with values for variables that are not set; keys are their "
                        "names in lower case without ONEBIT_"},
    [OB_KNOB_CODEC] = {"ONEBIT_CODEC", "the fastest that this processor can run",
                       "codec of plans made from now on: scalar, avx2, avx512 or neon"},
    [OB_KNOB_THREADS] = {"ONEBIT_THREADS", "1",
                         "OpenMP threads that compress and reduce, unless the plan sets them"},
    [OB_KNOB_TUNING] = {"ONEBIT_TUNING", "onebit/tuning in $XDG_CONFIG_HOME or ~/.config, if any",
                        "file of costs that onebit-tune wrote, by which plans choose schedules; "
                        "none: no file is read"},
    [OB_KNOB_EXPLAIN] = {"ONEBIT_EXPLAIN", "0",
                         "1: rank 0 prints on standard error what each plan decides, and why"},
    [OB_KNOB_PROGRESS] = {"ONEBIT_PROGRESS", "calls",
                          "what advances requests in flight: calls (of the library), or thread (a "
                          "progress thread, which needs a free core)"},
    [OB_KNOB_TIMEOUT] = {"ONEBIT_TIMEOUT", "600",
                         "seconds that a rank waits for another one; then all ranks get an error; "
                         "never: no limit"},
    [OB_KNOB_JOB] = {"ONEBIT_JOB", "the launcher's job number, if it gives one",
                     "sockets: name of this job, the same on all its ranks; it keeps out ranks of "
                     "another job at the same port"},
    [OB_KNOB_GRADIENTS] =
        {"ONEBIT_GRADIENTS", "0",
         "preloaded: 1: sums of 64 KiB or more are gradients and are compressed; 0: only calls "
         "that a rule selects are compressed, others are only counted"},
    [OB_KNOB_RULES] =
        {"ONEBIT_RULES", "-",
         "preloaded: the rules that say which calls are compressed, or a file of them"},
    [OB_KNOB_REPORT] = {"ONEBIT_REPORT", "1",
                        "preloaded: 1: the report of what was compressed goes to standard error; "
                        "0: no report; or a file for the report as JSON"},
    [OB_KNOB_REQUIRE] = {"ONEBIT_REQUIRE", "0",
                         "preloaded: 1: the run fails if nothing has been compressed"},
    [OB_KNOB_EVERY_RANK] = {"ONEBIT_EVERY_RANK", "0",
                            "preloaded: 1: every rank has loaded libonebit-mpi.so; needed if the "
                            "launcher has no name service"},
    [OB_KNOB_COMMAND] = {"ONEBIT_COMMAND", "-",
                         "preloaded: command line that the report recommends"},
    [OB_KNOB_BITS] = {"ONEBIT_BITS", "8",
                      "preloaded, and ONEBIT_Allreduce: bits per element: 1, 2, 4 or 8, or a range "
                      "such as 1..8 (auto), from which each tensor gets as many as it needs; use 1 "
                      "if the optimizer is SGD with momentum. NCCL: always 1"},
    [OB_KNOB_BUDGET] =
        {"ONEBIT_BUDGET", "-",
         "preloaded: largest fraction of float32's bytes that the tensors of a communicator send, "
         "e.g. 1/20; tensors that gain most per byte get more bits"},
    [OB_KNOB_DEBUG] = {"ONEBIT_DEBUG", "WARN",
                       "messages while a program runs: WARN; INFO, with decisions; or TRACE, with "
                       "each call, its bytes and time"},
    [OB_KNOB_DEBUG_FILE] =
        {"ONEBIT_DEBUG_FILE", "standard error",
         "file to which these messages are appended; %h is the host's name, %r the rank"},
    [OB_KNOB_METRICS] = {"ONEBIT_METRICS", "-",
                         "file to which rank 0 writes rows of an optimizer's steps as CSV; with "
                         "%r in it, each rank; %h is the host's name"},
    [OB_KNOB_METRICS_EVERY] = {"ONEBIT_METRICS_EVERY", "10", "number of steps between two rows"},
};

/* --- The file that ONEBIT_CONFIG names ---------------------------------------------------------*/

/* The limits of the file, which are ample, since the library has some 20 variables. */
enum { MAX_BYTES = 1 << 16, MAX_VALUES = 64, PREFIX = sizeof "ONEBIT_" - 1 };

/* The file's contents. It is static, since it is read once and kept until the process ends. */
static struct {
  onebit_status_t status;
  char path[1024], error[512], text[MAX_BYTES + 1];
  struct ob_json_value values[MAX_VALUES];
  size_t count;
} config;

/* --- The value of a variable */

/* Returns the next member of the outermost object after `value` (NULL: the first one), or NULL at
 * the end. */
static const struct ob_json_value *config_next_value(const struct ob_json_value *value) {
  size_t k = value ? (size_t)(value - config.values) : 0;
  while (++k < config.count)
    if (config.values[k].parent == 0)
      return &config.values[k];
  return NULL;
}

/* Returns "FILE:LINE: KEY", or "FILE:LINE" without a key. The thread's next call overwrites the
 * text. */
static const char *config_origin_of(const struct ob_json_value *value, const char *key) {
  static _Thread_local char text[256];
  snprintf(text, sizeof text, "%.160s:%d%s%.60s", config.path, value->line, key ? ": " : "",
           key ? key : "");
  return text;
}

static const char *config_origin(const struct ob_json_value *value) {
  return config_origin_of(value, value->key);
}

/* Fails with the message "FILE:LINE: KEY is VALUE, " followed by the reason. */
static onebit_status_t make_config_error(const struct ob_json_value *value, const char *why) {
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %.80s, %s", config_origin(value),
                  value->text ? value->text : ob_json_kind_name(value->kind), why);
}

static bool is_name_of_knob(const char *key, enum ob_knob knob) {
  return knob != OB_KNOB_CONFIG && strcasecmp(ob_knobs[knob].name + PREFIX, key) == 0 &&
         strpbrk(key, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == NULL;
}

static const char *config_text_of(const struct ob_json_value *value) {
  return value->kind == OB_JSON_TRUE ? "1" : value->kind == OB_JSON_FALSE ? "0" : value->text;
}

/* Returns a knob's value from the file, as the environment variable would have it; NULL: the file
 * does not set the knob. */
static const char *config_find_knob(enum ob_knob knob, const struct ob_json_value **found) {
  const struct ob_json_value *value = NULL;
  if (ob_config_check() != ONEBIT_OK)
    return NULL;
  while ((value = config_next_value(value)))
    if (is_name_of_knob(value->key, knob) && config_text_of(value)) {
      *found = value;
      return config_text_of(value);
    }
  return NULL;
}

/* --- Reading */

static onebit_status_t config_check_key(const struct ob_json_value *value) {
  for (enum ob_knob knob = 0; knob < OB_KNOB_COUNT; knob++)
    if (is_name_of_knob(value->key, knob))
      return value->kind < OB_JSON_ARRAY
                 ? ONEBIT_OK
                 : make_config_error(value, "not a string, a number, true or false");
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "%s: unknown key; keys are names of ONEBIT_ variables in lower case without "
                  "ONEBIT_, e.g. \"threads\"",
                  config_origin(value));
}

static onebit_status_t config_load(void) {
  char why[OB_INPUT_REASON];
  struct ob_input input;
  int code = ob_input_open(&input, AT_FDCWD, config.path);
  if (code == 0 && input.bytes <= MAX_BYTES)
    code = ob_input_read(&input, 0, config.text, (size_t)input.bytes);
  ob_input_close(&input);
  if (code != 0)
    return ob_error(ONEBIT_ERROR_FILE, "ONEBIT_CONFIG=%.200s: %s", config.path,
                    ob_input_reason(code, why));
  if (input.bytes > MAX_BYTES || memchr(config.text, 0, (size_t)input.bytes))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "ONEBIT_CONFIG=%.200s: %s", config.path,
                    input.bytes > MAX_BYTES ? "the file is larger than 64 KiB"
                                            : "the file is not a text file");
  OB_TRY(ob_json_read(config.path, config.text, config.values, MAX_VALUES, &config.count));
  for (const struct ob_json_value *value = NULL; (value = config_next_value(value));)
    OB_TRY(config_check_key(value));
  return ONEBIT_OK;
}

static void config_read_once(void) {
  const char *path = ob_knob_text(OB_KNOB_CONFIG);
  if (!path)
    return;
  bool fits = snprintf(config.path, sizeof config.path, "%s", path) < (int)sizeof config.path;
  config.status =
      fits ? config_load() : ob_error(ONEBIT_ERROR_FILE, "ONEBIT_CONFIG: its path is too long");
  if (config.status == ONEBIT_OK)
    return;
  config.count = 0;
  snprintf(config.error, sizeof config.error, "%s", onebit_last_error());
}

onebit_status_t ob_config_check(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, config_read_once);
  return config.status == ONEBIT_OK ? ONEBIT_OK : ob_error(config.status, "%s", config.error);
}

/* --- Values of knobs ---------------------------------------------------------------------------*/

/* Returns the value of a knob from the environment, or from the file if the environment does not
 * set it. */
static const char *knobs_find(enum ob_knob knob, const struct ob_json_value **in_file) {
  const char *text = getenv(ob_knobs[knob].name);
  *in_file = NULL;
  if (!text || !*text)
    text = knob == OB_KNOB_CONFIG ? NULL : config_find_knob(knob, in_file);
  return text && *text ? text : NULL;
}

const char *ob_knob_text(enum ob_knob knob) {
  const struct ob_json_value *in_file;
  return knobs_find(knob, &in_file);
}

const char *ob_knob_label(enum ob_knob knob) {
  const struct ob_json_value *in_file;
  knobs_find(knob, &in_file);
  return in_file ? config_origin(in_file) : ob_knobs[knob].name;
}

const char *ob_knob_origin(enum ob_knob knob) {
  const struct ob_json_value *in_file;
  bool given = knobs_find(knob, &in_file);
  return in_file ? config_origin_of(in_file, NULL) : given ? "environment" : "default";
}

onebit_status_t ob_knob_number(enum ob_knob knob, int low, int high, int fallback, int *value) {
  const char *text = ob_knob_text(knob);
  *value = fallback;
  if (!text)
    return ONEBIT_OK;
  char *end;
  errno = 0;
  long number = strtol(text, &end, 10);
  if (*end || errno || number < low || number > high)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s=%s: not a whole number from %d to %d",
                    ob_knob_label(knob), text, low, high);
  *value = (int)number;
  return ONEBIT_OK;
}

/* Returns the bits per element that the digit stands for; 0: no valid number. */
static int parse_digit(char digit) {
  return digit == '1' || digit == '2' || digit == '4' || digit == '8' ? digit - '0' : 0;
}

bool ob_bits_parse(const char *text, size_t length, struct ob_bits *bits) {
  *bits = (struct ob_bits){0, 0};
  if (length == 4 && !memcmp(text, "auto", 4))
    *bits = (struct ob_bits){1, 8};
  else if (length == 1)
    *bits = (struct ob_bits){parse_digit(text[0]), parse_digit(text[0])};
  else if (length == 4 && text[1] == '.' && text[2] == '.')
    *bits = (struct ob_bits){parse_digit(text[0]), parse_digit(text[3])};
  return bits->min > 0 && bits->max >= bits->min;
}

onebit_status_t ob_knob_bits(int fallback, struct ob_bits *bits) {
  const char *text = ob_knob_text(OB_KNOB_BITS);
  *bits = (struct ob_bits){fallback, fallback};
  if (!text || ob_bits_parse(text, strlen(text), bits))
    return ONEBIT_OK;
  *bits = (struct ob_bits){-1, -1};
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "%s=%s: not 1, 2, 4 or 8, nor a range such as 1..8, nor auto",
                  ob_knob_label(OB_KNOB_BITS), text);
}

/* The smallest budget: the bytes of one bit per element and of the scales, divided by the bytes of
 * float32 values. */
#define MIN_BUDGET (1.0 / 32 + 1.0 / OB_DEFAULT_BLOCK)

onebit_status_t ob_knob_budget(double *budget) {
  const char *text = ob_knob_text(OB_KNOB_BUDGET);
  *budget = 0;
  if (!text)
    return ONEBIT_OK;
  char *end;
  double part = strtod(text, &end);
  if (end != text && *end == '/' && end[1])
    part /= strtod(end + 1, &end);
  if (end == text || *end || !(part >= MIN_BUDGET && part <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "%s=%s: expected a fraction of float32's bytes from %.4f (one bit per element, "
                    "and the scales) to 1, e.g. 1/20",
                    ob_knob_label(OB_KNOB_BUDGET), text, MIN_BUDGET);
  *budget = part;
  return ONEBIT_OK;
}

onebit_status_t ob_knob_seconds(enum ob_knob knob, double fallback, double *value) {
  const char *text = ob_knob_text(knob);
  char *end;
  *value = fallback;
  if (!text)
    return ONEBIT_OK;
  double seconds = strcmp(text, "never") == 0 ? 0 : strtod(text, &end);
  if ((strcmp(text, "never") != 0 && (*end || end == text)) || !(seconds >= 0))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s=%s: neither a number of seconds nor never",
                    ob_knob_label(knob), text);
  *value = seconds > 0 ? seconds : (double)INFINITY;
  return ONEBIT_OK;
}
