/*
 * The output of a preloaded program on standard error: a line at its start, and a report at its
 * end, or the report as JSON in a file. ONEBIT_REPORT chooses.
 */
#ifndef OB_DROPIN_REPORT_H
#define OB_DROPIN_REPORT_H

#include <stdbool.h>
#include <stdio.h>

#include "dropin/counters.h"
#include "onebit/counters.h"

/* The sums over all ranks, and rank 0's own records. Ranks over NCCL report their own only. */
struct ob_report {
  int ranks;
  bool own_only;         /* what follows is of this rank only */
  const char *calls;     /* which calls are timed */
  const char *span;      /* from when to when the seconds are */
  onebit_counters_t own; /* rank 0's */
  uint64_t compressed, bytes_sent, bytes_dense;
  double seconds;            /* of the slowest rank */
  double seconds_saved;      /* the mean over the ranks */
  double max_residual_ratio; /* of any rank */
  int hosts;                 /* 0: not known */
};

/* (elapsed + saved) / elapsed */
double ob_report_factor(const struct ob_report *report);

/* Prints the line at the start: why nothing is compressed, or what will be. On one rank.
 *   over   what carries the bytes, as text
 *   sums   what is compressed without a rule, as "MPI_Allreduce of float or double sums" */
void ob_report_start(int size, const char *over, const char *sums);

/* Prints why nothing was seen, unless no report is wanted. */
void ob_report_unseen(const char *why);

/* Prints the report, and judges it where ONEBIT_REQUIRE asks for that. On one rank. */
void ob_report_print(const struct ob_report *report);

/* The largest residual relative to the signal that was seen, of this rank's records. */
double ob_report_max_residual_ratio(void);

/* Counts a record's calls that were passed on, by reason. */
void ob_report_passed(const struct ob_record *record, uint64_t passed[OB_REASON_COUNT]);

/* "one bit", "8 bits"; for 32, "float32". */
const char *ob_report_bits(int bits);

/* The names of a record's type and operation: "float" and the like. */
const char *ob_report_dtype(onebit_dtype_t dtype);
const char *ob_report_operation(onebit_operation_t operation);

void ob_report_text(FILE *file, const struct ob_report *report);
void ob_report_json(FILE *file, const struct ob_report *report);

#endif
