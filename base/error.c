/* Statuses, their names and their messages. */
#include "base/error.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[512];

onebit_status_t ob_error(onebit_status_t status, const char *format, ...) {
  char fresh[sizeof message]; /* the old message may be among the arguments */
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fresh, sizeof fresh, format, arguments);
  va_end(arguments);
  memcpy(message, fresh, sizeof message);
  return status;
}

const char *onebit_last_error(void) { return message; }

onebit_status_t ob_outcome_add(struct ob_outcome *outcome, onebit_status_t status) {
  bool worse = outcome->status == ONEBIT_OK || outcome->status == ONEBIT_SKIPPED;
  if (status != ONEBIT_OK && worse && status != outcome->status) {
    outcome->status = status;
    snprintf(outcome->error, sizeof outcome->error, "%.255s", message);
  }
  return status;
}

const char *onebit_status_string(onebit_status_t status) {
  static const struct {
    onebit_status_t status;
    const char *name;
  } names[] = {
      {ONEBIT_OK, "ONEBIT_OK"},
      {ONEBIT_IN_PROGRESS, "ONEBIT_IN_PROGRESS"},
      {ONEBIT_WARNING, "ONEBIT_WARNING"},
      {ONEBIT_SKIPPED, "ONEBIT_SKIPPED"},
      {ONEBIT_ERROR_ARGUMENT, "ONEBIT_ERROR_ARGUMENT"},
      {ONEBIT_ERROR_MISMATCH, "ONEBIT_ERROR_MISMATCH"},
      {ONEBIT_ERROR_MEMORY, "ONEBIT_ERROR_MEMORY"},
      {ONEBIT_ERROR_BUSY, "ONEBIT_ERROR_BUSY"},
      {ONEBIT_ERROR_MESSAGE, "ONEBIT_ERROR_MESSAGE"},
      {ONEBIT_ERROR_PEER, "ONEBIT_ERROR_PEER"},
      {ONEBIT_ERROR_TRANSPORT, "ONEBIT_ERROR_TRANSPORT"},
      {ONEBIT_ERROR_UNSUPPORTED, "ONEBIT_ERROR_UNSUPPORTED"},
      {ONEBIT_ERROR_DEVICE, "ONEBIT_ERROR_DEVICE"},
      {ONEBIT_ERROR_CHECKPOINT, "ONEBIT_ERROR_CHECKPOINT"},
      {ONEBIT_ERROR_FILE, "ONEBIT_ERROR_FILE"},
  };
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (names[i].status == status)
      return names[i].name;
  return "unknown status";
}

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)

const char *onebit_version(void) {
  return TEXT(ONEBIT_VERSION_MAJOR) "." TEXT(ONEBIT_VERSION_MINOR) "." TEXT(ONEBIT_VERSION_PATCH);
}

onebit_status_t ob_size_check(const char *name, const void *structure, size_t size) {
  size_t own;
  if (!structure)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", name);
  memcpy(&own, structure, sizeof own);
  return own == size ? ONEBIT_OK
                     : ob_error(ONEBIT_ERROR_ARGUMENT, "%s->size is %zu, not %zu", name, own, size);
}
