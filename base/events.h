/*
 * TensorBoard's event files: records of a length, its checksum, a message `Event` of protocol
 * buffers, and its checksum. As tensorflow/core/lib/io/record_writer.h and
 * tensorflow/core/util/event.proto describe them.
 */
#ifndef OB_BASE_EVENTS_H
#define OB_BASE_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { OB_EVENTS_VALUES = 24, OB_EVENTS_NAME = 48 /* bytes of a name, at most */ };

/* The record that a file begins with. `now`: seconds since 1970. False: it could not be written. */
bool ob_events_begin(FILE *file, double now);

/* The values of a step, at most OB_EVENTS_VALUES, with names of fewer than OB_EVENTS_NAME bytes. */
bool ob_events_write(FILE *file, double now, uint64_t step, const char *const *names,
                     const double *values, size_t count);

#endif
