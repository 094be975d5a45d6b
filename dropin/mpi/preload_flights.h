/*
 * Nonblocking calls of a preloaded program. MPI promises that they move whenever the program is in
 * any call of MPI, also one that has nothing to do with them; a program may count on it (one rank
 * receives what another sends only after its MPI_Wait). So it would not do to move them in
 * MPI_Wait and MPI_Test only:
 *
 *  - Open MPI lets those who know it take part in its progress (opal_progress_register, which its
 *    own nonblocking collectives use): every call of MPI that waits moves ours.
 *  - Elsewhere a thread moves them, which needs MPI_THREAD_MULTIPLE.
 *  - Without either, nonblocking calls are passed on.
 *
 * What the program holds is a request of MPI's own, so that no wait and no test needs a wrapper.
 */
#ifndef OB_DROPIN_MPI_PRELOAD_FLIGHTS_H
#define OB_DROPIN_MPI_PRELOAD_FLIGHTS_H

#include "dropin/mpi/preload.h"

/* An exchange in flight, and what the record will learn of it. */
struct ob_flight {
  struct ob_flight *next;
  MPI_Request request; /* the program's */
  struct ob_operation *operation;
  struct ob_record *record;
  struct ob_tally tally;
  int code;
};

/* Moves a flight; true when it is done, with the MPI error code in code. Not blocking. */
bool ob_flight_test(struct ob_flight *flight);

/* True if flights can be moved. Local; the same on all ranks of a job. Begins what it needs when
 * first asked. */
bool ob_flights_move(void);

/* Adds a flight, which is moved from now on until it has ended. */
void ob_flights_add(struct ob_flight *flight);

/* Waits until all have ended, and stops moving. */
void ob_flights_finish(void);

/* Keeps flights from being moved under this thread, which moves them itself, until the release. */
void ob_flights_hold(void);
void ob_flights_release(void);

#endif
