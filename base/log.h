/*
 * Writes the library's messages while it runs, as ONEBIT_DEBUG asks: one line each, after rank and
 * host, to standard error or the file that ONEBIT_DEBUG_FILE names. A message whose level is
 * switched off costs one read of an int.
 */
#ifndef OB_BASE_LOG_H
#define OB_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/status.h"

enum ob_log_level { OB_LOG_WARN, OB_LOG_INFO, OB_LOG_TRACE };

/* Reads the variables and opens the file, when the first communicator is created. Errors:
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE. */
onebit_status_t ob_log_open(int rank);

/* Reads the level that ONEBIT_DEBUG asks for. */
onebit_status_t ob_log_read_level(enum ob_log_level *level);

bool ob_log_wants(enum ob_log_level level);

/* Writes a message about a rank of a communicator. `rank` is -1 if the message is about no
 * communicator. */
void ob_log(enum ob_log_level level, int rank, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Replaces %h by the host's name and %r by the rank. Returns false if `path` is too short. */
bool ob_expand_path(const char *pattern, int rank, char *path, size_t bytes);

#endif
