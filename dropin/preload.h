/*
 * The common part of the libraries that stand before MPI or NCCL in a program that knows nothing of
 * onebit: the calls that may be compressed, as all ranks have settled it, and the end of the
 * program.
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
  /* Calls with fewer elements are passed on after one comparison; all of them before the ranks have
   * settled, after their end, and where nothing may be compressed. */
  atomic_size_t min_count[3]; /* by onebit_operation_t */
  struct ob_rules rules;
  const char *refused;  /* why nothing is compressed; NULL where something may be */
  atomic_int below;     /* why those are passed on: enum ob_reason */
  atomic_bool required; /* ONEBIT_REQUIRE=1 */
  bool trusted;         /* every rank has the library, as ONEBIT_EVERY_RANK=1 says */
};
extern struct ob_preload ob_preload;

#define OB_PRELOAD_VISIBLE __attribute__((visibility("default")))

/* Reads what the environment asks for: required, rules, and bits of an element. Local. Errors:
 * ONEBIT_ERROR_ARGUMENT, ONEBIT_ERROR_FILE. */
onebit_status_t ob_preload_read_settings(void);

/* Returns a number that is equal where rules and library version are equal: ranks compare it. */
uint64_t ob_preload_hash(void);

/* Lets calls through to where they may be compressed (open), stops that (close), or refuses it for
 * a reason whose text stays. */
void ob_preload_open(void);
void ob_preload_close(void);
void ob_preload_refuse(const char *why);

/* Asks `went_well` at the end of this process, when all that the program does is done; false makes
 * an exit status of 0 a 1. Processes that are forked from it are left alone. */
void ob_preload_judge_exit(bool (*went_well)(void));

/* True if the call is too small to be considered. Counting those costs a load and a store. A
 * negative count, an error of the program, is a very large one here, and found later. */
static inline bool ob_preload_small(onebit_operation_t operation, size_t count) {
  bool small = count < atomic_load_explicit(&ob_preload.min_count[operation], memory_order_relaxed);
  if (small && operation == ONEBIT_ALLREDUCE)
    ob_counters_pass((enum ob_reason)atomic_load_explicit(&ob_preload.below, memory_order_relaxed));
  return small;
}

/* ---- The report (report.c) ---- */

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

/* Prints the line at the start: why nothing is compressed, or what will be. On one rank.
 *   over   what carries the bytes, as text
 *   sums   what is compressed without a rule, as "MPI_Allreduce of float or double sums" */
void ob_report_start(int size, const char *over, const char *sums);

/* Prints why nothing was seen, unless no report is wanted. */
void ob_report_print_unseen(const char *why);

/* Prints the report, and judges it where ONEBIT_REQUIRE asks for that. On one rank. */
void ob_report_print(const struct ob_report *report);

/* The largest residual relative to the signal that was seen, of this rank's records. */
double ob_report_max_residual_ratio(void);

/* The names of a record's type and operation: "float" and the like. */
const char *ob_report_dtype(onebit_dtype_t dtype);
const char *ob_report_operation(onebit_operation_t operation);

#endif
