/*
 * The common part of the libraries that are loaded before MPI or NCCL in an unmodified program: the
 * settings on which all ranks have agreed, the report, and the exit status of the program.
 */
#ifndef OB_DROPIN_PRELOAD_H
#define OB_DROPIN_PRELOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

#include "dropin/counters.h"
#include "dropin/rules.h"
#include "onebit/counters.h"

/* The settings, the same on all ranks. */
struct ob_preload {
  /* Calls with fewer elements are passed on to MPI or NCCL after one comparison. SIZE_MAX passes on
   * all calls: before the ranks have agreed, after the library has ended, and if nothing may be
   * compressed. */
  atomic_size_t min_count[3]; /* index: onebit_operation_t */
  struct ob_rules rules;
  const char *refused;  /* the reason why nothing is compressed, or NULL */
  atomic_int below;     /* the reason why calls with fewer elements are dense: enum ob_reason */
  atomic_bool required; /* ONEBIT_REQUIRE=1 */
  bool trusted;         /* every rank is known to have the library, e.g. by ONEBIT_EVERY_RANK=1 */
};
extern struct ob_preload ob_preload;

#define OB_PRELOAD_VISIBLE __attribute__((visibility("default")))

/* Reads from the environment whether compression is required, the rules, and the bits per element.
 * Local. Errors: ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE. */
onebit_status_t ob_preload_read_settings(void);

/* Returns a number that is equal on two ranks if their rules and library versions are equal. */
uint64_t ob_preload_hash(void);

/* ob_preload_open begins the compression of calls, ob_preload_close ends it. ob_preload_refuse
 * stores the reason why nothing is compressed, or NULL, without copying the text. */
void ob_preload_open(void);
void ob_preload_close(void);
void ob_preload_refuse(const char *why);

/* Makes this process call has_succeeded when it exits, after the program's own exit handlers. If
 * has_succeeded returns false, an exit status 0 becomes 1. Forked processes are not affected. */
void ob_preload_judge_exit(bool (*has_succeeded)(void));

/* Returns true if the call is too small to be compressed. The call is then counted, which costs a
 * load and a store. A negative count, which is an error of the program, becomes a very large one
 * here; the caller rejects it later. */
static inline bool ob_preload_is_small(onebit_operation_t operation, size_t count) {
  bool small = count < atomic_load_explicit(&ob_preload.min_count[operation], memory_order_relaxed);
  if (small && operation == ONEBIT_ALLREDUCE)
    ob_counters_count_dense(
        (enum ob_reason)atomic_load_explicit(&ob_preload.below, memory_order_relaxed));
  return small;
}

/* ---- The report (report.c, report_json.c) ---- */

/* The sums over all ranks, and rank 0's own records. With NCCL each rank reports only its own
 * values. */
struct ob_report {
  int ranks;
  bool own_only;         /* the values below are of this rank alone */
  const char *calls;     /* names the calls that are timed */
  const char *span;      /* names the beginning and the end of `seconds` */
  onebit_counters_t own; /* counters of the rank that reports */
  uint64_t compressed, bytes_sent, bytes_dense;
  double seconds;            /* seconds of the slowest rank */
  double seconds_saved;      /* the mean of all ranks */
  double max_residual_ratio; /* the largest of all ranks */
  int hosts;                 /* 0: not known */
};

/* Prints the line at the start: why nothing is compressed, or which calls will be. On one rank.
 *   over   the library that carries the bytes, as text
 *   sums   the calls that are compressed without a rule: "MPI_Allreduce of float or double sums" */
void ob_report_start(int size, const char *over, const char *sums);

/* Prints the reason why the library has seen no call, unless the report is turned off. */
void ob_report_print_unseen(const char *why);

/* Prints the report. With ONEBIT_REQUIRE=1 also judges it. Called on one rank. */
void ob_report_print(const struct ob_report *report);

/* Returns the largest ratio of a residual's norm to the mean's norm in this rank's records. */
double ob_report_max_residual_ratio(void);

/* ob_report_speedup returns the estimated speed-up: (elapsed + saved) / elapsed.
 * ob_report_read_passed reads how many of a record's calls were passed on to MPI or NCCL for each
 * reason. ob_report_write_json writes the report as one JSON object. */
double ob_report_speedup(const struct ob_report *report);
void ob_report_read_passed(const struct ob_record *record, uint64_t passed[OB_REASON_COUNT]);
void ob_report_write_json(FILE *file, const struct ob_report *report);

/* Return the names of a record's type and operation: "float" and the like. */
const char *ob_report_dtype(onebit_dtype_t dtype);
const char *ob_report_operation(onebit_operation_t operation);

#endif
