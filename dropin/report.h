/*
 * What a preloaded program is told on standard error: a line at its start, and a report at its end,
 * or the report as JSON in a file. ONEBIT_REPORT says which.
 */
#ifndef OB_DROPIN_REPORT_H
#define OB_DROPIN_REPORT_H

#include <stdbool.h>
#include <stdio.h>

#include "dropin/counters.h"
#include "onebit/counters.h"

/* The sums over all ranks, and rank 0's own records. */
struct ob_report {
  int ranks;
  onebit_counters_t own; /* rank 0's */
  uint64_t compressed, bytes_sent, bytes_dense;
  double seconds;          /* of the slowest rank, from MPI_Init to MPI_Finalize */
  double seconds_saved;    /* the mean over the ranks */
  double error_ratio_most; /* of any rank */
};

/* (elapsed + saved) / elapsed */
double ob_report_factor(const struct ob_report *report);

/* The line at the start: why nothing is compressed, or what will be. Printed by rank 0. */
void ob_report_start(int rank, int size);

/* Gathers, prints, and says whether any rank has compressed anything. Collective over
 * MPI_COMM_WORLD. */
bool ob_report_end(void);

/* Of records: "float" and the like. */
const char *ob_report_dtype(onebit_dtype_t dtype);
const char *ob_report_operation(onebit_operation_t operation);

void ob_report_text(FILE *file, const struct ob_report *report);
void ob_report_json(FILE *file, const struct ob_report *report);

#endif
