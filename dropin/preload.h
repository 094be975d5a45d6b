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
  /* Calls with fewer elements are passed on after one comparison. SIZE_MAX passes on all calls:
   * before the ranks have agreed, after the end, and where nothing may be compressed. */
  atomic_size_t min_count[3]; /* index: onebit_operation_t */
  struct ob_rules rules;
  const char *refused;  /* the reason why nothing is compressed, or NULL */
  atomic_int below;     /* the reason of those calls: enum ob_reason */
  atomic_bool required; /* ONEBIT_REQUIRE=1 */
  bool trusted;         /* every rank has the library, as ONEBIT_EVERY_RANK=1 says */
};
extern struct ob_preload ob_preload;

#define OB_PRELOAD_VISIBLE __attribute__((visibility("default")))

/* Reads the settings of the environment: required, rules, and bits an element. Local. Errors:
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE. */
onebit_status_t ob_preload_read_settings(void);

/* Returns a number that is equal where rules and library version are equal: ranks compare it. */
uint64_t ob_preload_hash(void);

/* ob_preload_open begins the compression of calls, ob_preload_close ends it. ob_preload_refuse
 * notes the reason why nothing is compressed, or NULL; it keeps the pointer. */
void ob_preload_open(void);
void ob_preload_close(void);
void ob_preload_refuse(const char *why);

/* Makes this process call has_succeeded at its end, after the handlers of the program; if that
 * returns false, the exit status 0 becomes 1. Forked processes are not affected. */
void ob_preload_judge_exit(bool (*has_succeeded)(void));

/* True if the call is too small to be considered; it is then counted, which costs a load and a
 * store. A negative count, an error of the program, is a very large one here; the caller finds it
 * later. */
static inline bool ob_preload_is_small(onebit_operation_t operation, size_t count) {
  bool small = count < atomic_load_explicit(&ob_preload.min_count[operation], memory_order_relaxed);
  if (small && operation == ONEBIT_ALLREDUCE)
    ob_counters_count_dense(
        (enum ob_reason)atomic_load_explicit(&ob_preload.below, memory_order_relaxed));
  return small;
}

/* ---- The report (report.c) ---- */

/* The sums over all ranks, and rank 0's own records. Ranks over NCCL report their own only. */
struct ob_report {
  int ranks;
  bool own_only;         /* the members below are those of this rank only */
  const char *calls;     /* which calls are timed */
  const char *span;      /* the beginning and the end of `seconds`, as text */
  onebit_counters_t own; /* rank 0's */
  uint64_t compressed, bytes_sent, bytes_dense;
  double seconds;            /* seconds of the slowest rank */
  double seconds_saved;      /* the mean over the ranks */
  double max_residual_ratio; /* the largest of all ranks */
  int hosts;                 /* 0: not known */
};

/* Prints the line at the start: why nothing is compressed, or what will be. On one rank.
 *   over   the library that carries the bytes, as text
 *   sums   the calls that are compressed without a rule: "MPI_Allreduce of float or double sums" */
void ob_report_start(int size, const char *over, const char *sums);

/* Prints why the library has seen no call, unless no report is wanted. */
void ob_report_print_unseen(const char *why);

/* Prints the report, and judges it where ONEBIT_REQUIRE asks for that. On one rank. */
void ob_report_print(const struct ob_report *report);

/* Returns the largest ratio of the residual's norm to that of the mean, in this rank's records. */
double ob_report_max_residual_ratio(void);

/* Return the names of a record's type and operation: "float" and the like. */
const char *ob_report_dtype(onebit_dtype_t dtype);
const char *ob_report_operation(onebit_operation_t operation);

#endif
