/* libonebit-mpi.so is loaded before the MPI library of an unmodified program. It compresses those
 * collectives that the rules allow; all other calls go to MPI unchanged. */
#ifndef OB_DROPIN_MPI_PRELOAD_H
#define OB_DROPIN_MPI_PRELOAD_H

#include "base/bound_mpi.h"
#include "dropin/mpi/communicator.h"
#include "dropin/preload.h"

/* These functions run the program's calls. preload_entries.c defines the functions that carry MPI's
 * names for the linker, and calls these. */
#define MPI_Allreduce            ob_call_allreduce
#define MPI_Allgather            ob_call_allgather
#define MPI_Iallreduce           ob_call_iallreduce
#define MPI_Reduce_scatter_block ob_call_reduce_scatter_block
__typeof__(*PMPI_Allreduce) MPI_Allreduce;
__typeof__(*PMPI_Allgather) MPI_Allgather;
__typeof__(*PMPI_Iallreduce) MPI_Iallreduce;
__typeof__(*PMPI_Reduce_scatter_block) MPI_Reduce_scatter_block;

/* Make a call that is not below the minimum size, blocking or nonblocking, with any count. Return
 * an MPI error code. */
int ob_preload_run_call(const struct ob_mpi_call *call);
int ob_preload_begin_call(const struct ob_mpi_call *call, MPI_Request *request);

/* The decision on a call: `exchange` compresses the call. If `exchange` is NULL, the call is passed
 * on to MPI, and `reason` says why. */
struct ob_preload_decision {
  struct ob_exchange *exchange;
  enum ob_reason reason;
  struct ob_record *record; /* NULL: only the reason is counted */
  int tensor, max_bits;     /* number of the compressed tensor; its largest bits per element */
  struct ob_shadow *shadow;
};
/* Decides on a call. Returns an MPI error code, since the ranks may have to agree, and a rank may
 * not arrive within ONEBIT_TIMEOUT. In this case the caller must not make the call; the
 * communicator's error handler has been called. */
int ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision);

/* Returns true if an argument is invalid: the call is then passed to MPI, which reports the
 * error. */
bool ob_preload_has_invalid_argument(const struct ob_mpi_call *call);

/* Counts a call that is never compressed, such as MPI_Reduce, unless it is small. name: its name in
 * the report, "reduce" and the like. */
void ob_preload_count_uncompressed(const char *name, MPI_Count count, MPI_Datatype type,
                                   MPI_Comm comm, double seconds);

/* Notes a call that is passed on to MPI at once. If the ranks follow a loop of calls on the
 * communicator, this call distinguishes the calls after it from otherwise equal calls. */
void ob_preload_note(onebit_operation_t operation, size_t count, MPI_Comm comm);

/* Counts the bytes of a compressed call in the record. tally: the counts before the call began. */
void ob_preload_count_sent(struct ob_record *record, const struct ob_tally *tally);

/* ---- Nonblocking calls: a flight is a call that has begun (preload_flights.c) ---- */

/* Waits until all flights have ended, and stops the thread that advances them. */
void ob_flights_finish(void);

/* Between ob_flights_pause and ob_flights_resume, this thread's calls of MPI advance no flights:
 * the caller advances them itself. */
void ob_flights_pause(void);
void ob_flights_resume(void);

#endif
