/*
 * libonebit-mpi.so: stands before the MPI library of a program that knows nothing of onebit, and
 * compresses those of its collectives that rules allow. All else goes on to MPI as it came.
 */
#ifndef OB_DROPIN_PRELOAD_MPI_H
#define OB_DROPIN_PRELOAD_MPI_H

#include <mpi.h>
#include <stdatomic.h>

#include "dropin/communicator.h"
#include "dropin/counters.h"
#include "dropin/rules.h"

/* What MPI_Init has settled, the same on all ranks. */
struct ob_preload {
  /* Calls with fewer elements are passed on after one comparison; all of them before MPI_Init,
   * after MPI_Finalize, and where nothing may be compressed. */
  atomic_size_t least_count[3]; /* by onebit_operation_t */
  struct ob_rules rules;
  const char *refused; /* why nothing is compressed; NULL where something may be */
  bool required;       /* ONEBIT_REQUIRE=1 */
  double started;
};
extern struct ob_preload ob_preload;

#define OB_PRELOAD_VISIBLE __attribute__((visibility("default")))

/* Handles of one MPI library are nothing to another: a program that runs with another one than this
 * was built for gets its calls as they are. May be called at any time. */
bool ob_preload_is_foreign(void);

/* Settles all of it. Collective over MPI_COMM_WORLD, once, from MPI_Init. */
void ob_preload_start(void);
/* The report. Collective over MPI_COMM_WORLD, from MPI_Finalize. */
void ob_preload_end(void);

/* Is the call too small to be looked at? Counting those costs a load and a store. */
static inline bool ob_preload_small(onebit_operation_t operation, int count) {
  /* A negative count, an error of the program's, is a very large one here, and found later. */
  bool small = (size_t)count <
               atomic_load_explicit(&ob_preload.least_count[operation], memory_order_relaxed);
  if (small && operation == ONEBIT_ALLREDUCE)
    ob_counters_pass(OB_REASON_SMALL);
  return small;
}

/* A decided call. Where exchange is NULL it is passed on, for `reason`. */
struct ob_preload_decision {
  struct ob_exchange *exchange;
  bool withdraw;
  enum ob_reason reason;
  struct ob_record *record; /* NULL: only counted by its reason */
};
void ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision);

/* A blocking call that is not small. An MPI error code. */
int ob_preload_call(const struct ob_mpi_call *call);

/* Have all ranks of an intra-communicator settled on the same rules? All of them find the same. */
bool ob_preload_settled(MPI_Comm comm, int size);

#endif
