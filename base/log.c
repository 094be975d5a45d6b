/* The library's messages while it runs. */
#define _POSIX_C_SOURCE 200809L
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/knobs.h"
#include "base/lock.h"

static const char *const names[] = {"WARN", "INFO", "TRACE"};
static atomic_int level = OB_LOG_WARN;
static _Atomic(FILE *) output; /* NULL: standard error */

static const char *host_name(void) {
  static _Thread_local char name[256]; /* a pod's name in Kubernetes has up to 63 characters */
  if (!*name && gethostname(name, sizeof name - 1) != 0)
    strcpy(name, "?");
  return name;
}

bool ob_expand_path(const char *pattern, int rank, char *path, size_t bytes) {
  size_t length = 0;
  for (; *pattern && length < bytes; pattern++) {
    bool host = strncmp(pattern, "%h", 2) == 0;
    if (host || strncmp(pattern, "%r", 2) == 0) {
      int more = host ? snprintf(path + length, bytes - length, "%s", host_name())
                      : snprintf(path + length, bytes - length, "%d", rank);
      length += (size_t)more;
      pattern++;
    } else {
      path[length++] = *pattern;
    }
  }
  if (length < bytes)
    path[length] = '\0';
  return length < bytes;
}

onebit_status_t ob_log_read_level(enum ob_log_level *asked) {
  const char *text = ob_knob_text(OB_KNOB_DEBUG);
  for (*asked = OB_LOG_WARN; text && *asked <= OB_LOG_TRACE; ++*asked)
    if (strcmp(text, names[*asked]) == 0)
      return ONEBIT_OK;
  return text ? ob_error(ONEBIT_ERROR_ARGUMENT, "%s=%s: neither WARN, INFO nor TRACE",
                         ob_knob_label(OB_KNOB_DEBUG), text)
              : ONEBIT_OK;
}

/* Opens the file for appending. Ranks may share the file, since each line is one write. */
static onebit_status_t log_open_file(int rank) {
  const char *pattern = ob_knob_text(OB_KNOB_DEBUG_FILE);
  char path[1024];
  if (!pattern || output)
    return ONEBIT_OK;
  char reason[OB_INPUT_REASON];
  FILE *file = NULL;
  int code = ob_expand_path(pattern, rank, path, sizeof path) ? ob_output_open(&file, path, true)
                                                              : ENAMETOOLONG;
  if (code != 0)
    return ob_error(ONEBIT_ERROR_FILE, "%s=%.200s: %s", ob_knob_label(OB_KNOB_DEBUG_FILE), pattern,
                    ob_input_reason(code, reason));
  setvbuf(file, NULL, _IOLBF, BUFSIZ);
  output = file;
  return ONEBIT_OK;
}

onebit_status_t ob_log_open(int rank) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  enum ob_log_level asked;
  OB_TRY(ob_log_read_level(&asked));
  OB_LOCKED(&lock);
  level = (int)asked;
  return log_open_file(rank);
}

bool ob_log_wants(enum ob_log_level wanted) {
  return (int)wanted <= atomic_load_explicit(&level, memory_order_relaxed);
}

void ob_log(enum ob_log_level wanted, int rank, const char *format, ...) {
  char text[1024], of[24] = "";
  va_list arguments;
  if (!ob_log_wants(wanted))
    return;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (rank >= 0)
    snprintf(of, sizeof of, " rank %d", rank);
  FILE *file = output;
  fprintf(file ? file : stderr, "onebit %s %s%s: %s\n", names[wanted], host_name(), of, text);
}
