/*
 * Errors: a function that fails returns ob_error(status, "message"), and its callers forward the
 * status with OB_TRY. The message stays with the thread until its next error.
 */
#ifndef OB_BASE_ERROR_H
#define OB_BASE_ERROR_H

#include <stddef.h>

#include "onebit/status.h"

/* Stores the message for onebit_last_error, and returns the status. To extend the last message,
 * pass onebit_last_error() as an argument. */
onebit_status_t ob_error(onebit_status_t status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#define OB_TRY(call)                                                                               \
  do {                                                                                             \
    onebit_status_t ob_try_status = (call);                                                        \
    if (ob_try_status != ONEBIT_OK)                                                                \
      return ob_try_status;                                                                        \
  } while (0)

/* Fails unless `structure` is not NULL and its first member is `size`, its size in bytes. `name` is
 * the argument's name in the error message. */
onebit_status_t ob_size_check(const char *name, const void *structure, size_t size);

/* The outcome of one call or of several: a status, with its error message. */
struct ob_outcome {
  onebit_status_t status;
  char error[256];
};

/* Adds the status of one call and the latest error message to the outcome, and returns the status.
 * An error takes precedence over a skip, and otherwise an earlier status over a later one. So ranks
 * that add the same statuses in the same order get the same outcome. */
onebit_status_t ob_outcome_add(struct ob_outcome *outcome, onebit_status_t status);

/* Returns the outcome's status; the outcome's error message becomes the latest one. */
static inline onebit_status_t ob_outcome_status(const struct ob_outcome *outcome) {
  return outcome->status == ONEBIT_OK ? ONEBIT_OK : ob_error(outcome->status, "%s", outcome->error);
}

#endif
