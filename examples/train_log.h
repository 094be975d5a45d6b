/*
 * The log of a training: a line of JSON for each report. A training that continues from a
 * checkpoint continues its log.
 */
#ifndef EXAMPLES_TRAIN_LOG_H
#define EXAMPLES_TRAIN_LOG_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct train_log {
  FILE *file; /* NULL: none is asked for */
  /* Totals of the steps before the training was resumed, when the log has them. */
  double seconds;
  uint64_t bytes;
} train_log_t;

/* The contents of a line. Seconds and bytes are those since the training was begun or resumed. */
typedef struct train_log_line {
  size_t step;
  double seconds;
  uint64_t bytes; /* that this rank's optimizer handed to the transport */
  double training_loss;
  const double *loss; /* of the held-out data; NULL: they were not looked at */
} train_log_line_t;

/* Opens the log of a training that has made its first `made` steps. Lines of later steps, which
 * will be made again, are removed; for a training from the start, all lines. Returns 0, or -1 when
 * the file cannot be written. */
int train_log_open(train_log_t *log, const char *path, size_t made);
void train_log_add(train_log_t *log, const train_log_line_t *line);
void train_log_close(train_log_t *log);

/* Prints ,"name":number - or null for a number that is not finite, which JSON does not have. */
void print_json_number(FILE *file, const char *name, double number);

#endif
