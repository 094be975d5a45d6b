/* libonebit-mpi.so: is loaded before the MPI library of an unmodified program, and compresses those
 * of its collectives that rules allow. All other calls go to MPI unchanged. */
#ifndef OB_DROPIN_MPI_PRELOAD_H
#define OB_DROPIN_MPI_PRELOAD_H

#include "base/bound_mpi.h"
#include "dropin/mpi/communicator.h"
#include "dropin/preload.h"

/* A call of these names is the program's: preload_entries.c has them as the linker knows them. */
#define MPI_Allreduce            ob_call_allreduce
#define MPI_Allgather            ob_call_allgather
#define MPI_Iallreduce           ob_call_iallreduce
#define MPI_Reduce_scatter_block ob_call_reduce_scatter_block
__typeof__(*PMPI_Allreduce) MPI_Allreduce;
__typeof__(*PMPI_Allgather) MPI_Allgather;
__typeof__(*PMPI_Iallreduce) MPI_Iallreduce;
__typeof__(*PMPI_Reduce_scatter_block) MPI_Reduce_scatter_block;

/* Makes a call with any count that is not small. Returns an MPI error code. */
int ob_preload_call(const struct ob_mpi_call *call);
int ob_preload_begin(const struct ob_mpi_call *call, MPI_Request *request);

/* A decided call. Where exchange is NULL it is passed on, for `reason`. */
struct ob_preload_decision {
  struct ob_exchange *exchange;
  enum ob_reason reason;
  struct ob_record *record; /* NULL: only counted by its reason */
  int tensor, max_bits;     /* of it */
  struct ob_shadow *shadow;
};
/* Decides a call. Returns an MPI error code: in an agreement a rank may not arrive within
 * ONEBIT_TIMEOUT. The call must then not be made, and the communicator's error handler has been
 * called. */
int ob_preload_decide(const struct ob_mpi_call *call, struct ob_preload_decision *decision);

/* True if MPI would reject an argument that a compressed call would not; asks MPI. */
bool ob_preload_is_wrong(const struct ob_mpi_call *call);

/* Counts a call of a kind that is never compressed, as "reduce", unless it is small. */
void ob_preload_watch(const char *name, MPI_Count count, MPI_Datatype type, MPI_Comm comm,
                      double seconds);

/* Notes a call that is passed on at once: where others of its communicator are followed, it
 * distinguishes the calls behind it. */
void ob_preload_note(onebit_operation_t operation, size_t count, MPI_Comm comm);

/* Notes a compressed call in the record, from its exchange as it was then. */
void ob_preload_sent(struct ob_record *record, const struct ob_tally *tally);

/* ---- Nonblocking calls (preload_flights.c) ---- */

/* Waits until all flights have ended, and stops the thread that moves them. */
void ob_flights_finish(void);

/* Keeps flights from being moved under this thread, which moves them itself, until the release. */
void ob_flights_hold(void);
void ob_flights_release(void);

#endif
