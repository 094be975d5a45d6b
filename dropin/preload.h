/*
 * The common part of the libraries that stand before MPI or NCCL in a program that knows nothing of
 * onebit: the calls that may be compressed, as all ranks have settled it, and the end of the
 * program.
 */
#ifndef OB_DROPIN_PRELOAD_H
#define OB_DROPIN_PRELOAD_H

#include <stdatomic.h>
#include <stdbool.h>

#include "dropin/counters.h"
#include "dropin/rules.h"

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

/* A number that is equal where rules and version of the library are: ranks compare it. */
uint64_t ob_preload_hash(void);

/* Lets calls through to where they may be compressed (open), stops that (close), or refuses it for
 * a reason whose text stays. */
void ob_preload_open(void);
void ob_preload_close(void);
void ob_preload_refuse(const char *why);

/* Asks `went_well` at the end of this process, when all that the program does is done; false makes
 * an exit status of 0 a 1. Processes that are forked from it are left alone. */
void ob_preload_judge_exit(bool (*went_well)(void));

/* True if the call is too small to be looked at. Counting those costs a load and a store. A
 * negative count of MPI's, an error of the program's, is a very large one here, and found later. */
static inline bool ob_preload_small(onebit_operation_t operation, size_t count) {
  bool small = count < atomic_load_explicit(&ob_preload.min_count[operation], memory_order_relaxed);
  if (small && operation == ONEBIT_ALLREDUCE)
    ob_counters_pass((enum ob_reason)atomic_load_explicit(&ob_preload.below, memory_order_relaxed));
  return small;
}

#endif
