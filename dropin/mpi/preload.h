/* libonebit-mpi.so is loaded before the MPI library of an unmodified program. It compresses those
 * collectives that the rules allow; all other calls go to MPI unchanged. */
#ifndef OB_DROPIN_MPI_PRELOAD_H
#define OB_DROPIN_MPI_PRELOAD_H

#include "base/bound_mpi.h"
#include "dropin/mpi/communicator.h"
#include "dropin/preload.h"

/* These functions run the program's calls. preload_entries.c defines MPI's names for the linker,
 * and calls these functions. */
#define MPI_Allreduce            ob_call_allreduce
#define MPI_Allgather            ob_call_allgather
#define MPI_Iallreduce           ob_call_iallreduce
#define MPI_Reduce_scatter_block ob_call_reduce_scatter_block
__typeof__(*PMPI_Allreduce) MPI_Allreduce;
__typeof__(*PMPI_Allgather) MPI_Allgather;
__typeof__(*PMPI_Iallreduce) MPI_Iallreduce;
__typeof__(*PMPI_Reduce_scatter_block) MPI_Reduce_scatter_block;

/* Make a call that is not small, blocking or nonblocking, with any count. Return an MPI error
 * code. */
int ob_preload_run_call(const struct ob_mpi_call *call);
int ob_preload_begin_call(const struct ob_mpi_call *call, MPI_Request *request);

/* The decision on a call: `exchange` compresses it; if that is NULL, it is passed on for
 * `reason`. */
struct ob_preload_decision {
  struct ob_exchange *exchange;
  enum ob_reason reason;
  struct ob_record *record; /* NULL: only the reason is counted */
  int tensor, max_bits;     /* the number of the compressed tensor; its largest bits an element */
  struct ob_shadow *shadow;
};
/* Decides on a call. Returns an MPI error code, since a rank may not arrive at an agreement within
 * ONEBIT_TIMEOUT. The call must then not be made, and the communicator's error handler has been
 * called. */
int ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision);

/* True if an argument is invalid: MPI gets the call then, and reports the error. */
bool ob_preload_has_invalid_argument(const struct ob_mpi_call *call);

/* Counts a call that is never compressed, such as MPI_Reduce, unless it is small. name: "reduce"
 * and the like, for the report. */
void ob_preload_count_uncompressed(const char *name, MPI_Count count, MPI_Datatype type,
                                   MPI_Comm comm, double seconds);

/* Notes a call that is passed on at once. If the ranks follow a loop of calls of the communicator,
 * it distinguishes the calls after it. */
void ob_preload_note(onebit_operation_t operation, size_t count, MPI_Comm comm);

/* Counts the bytes of a compressed call in the record; tally: as it was when the call began. */
void ob_preload_count_sent(struct ob_record *record, const struct ob_tally *tally);

/* ---- Nonblocking calls: a flight is one that has begun (preload_flights.c) ---- */

/* Waits until all flights have ended, and stops the thread that moves them. */
void ob_flights_finish(void);

/* Between ob_flights_pause and ob_flights_resume, MPI's calls of this thread advance no flights:
 * the caller advances them. */
void ob_flights_pause(void);
void ob_flights_resume(void);

#endif
