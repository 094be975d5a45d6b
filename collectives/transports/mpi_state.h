/* The state of a communicator over MPI, and its end (end_mpi.c). */
#ifndef OB_COLLECTIVES_MPI_STATE_H
#define OB_COLLECTIVES_MPI_STATE_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "collectives/communicator.h"

struct ob_mpi_state {
  MPI_Comm comm;
  int end_tag;          /* of messages about the end; no batch uses it */
  bool multiple;        /* several threads may call MPI at once */
  atomic_bool inside;   /* a thread is in MPI; means nothing if several may be */
  atomic_bool to_tell;  /* the others are still to be told of the end */
  pthread_mutex_t lock; /* of what follows */
  MPI_Request *told;    /* one a rank */
  char out[OB_END_BYTES], in[OB_END_BYTES];
};

/* Create and destroy the state; on failure *state is NULL, and the MPI communicator is still the
 * caller's. */
onebit_status_t ob_mpi_state_create(MPI_Comm mpi, int size, struct ob_mpi_state **state);
void ob_mpi_state_destroy(onebit_comm_t comm);

/* The transport's `health`, `abort` and `shrink`. */
onebit_status_t ob_mpi_health(onebit_comm_t comm);
void ob_mpi_abort(onebit_comm_t comm, const char *text);
onebit_status_t ob_mpi_shrink(onebit_comm_t comm, onebit_comm_t *survivors);

/* Returns the lowest rank that MPI knows to have failed; -1: none, or MPI does not find out. */
int ob_mpi_failed_rank(onebit_comm_t comm);

/* Waits for a request for the timeout of the environment at most, and then leaves it as it is.
 * `call` names it. */
onebit_status_t ob_mpi_wait(MPI_Request *request, const char *call);

onebit_status_t ob_mpi_error(const char *call, int code);
bool ob_mpi_is_finalized(void);

#endif
