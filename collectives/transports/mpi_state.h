/* The state of a communicator over MPI: comm_mpi.c creates it, transport_mpi.c uses it. */
#ifndef OB_COLLECTIVES_MPI_STATE_H
#define OB_COLLECTIVES_MPI_STATE_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "collectives/communicator.h"

struct ob_mpi_state {
  MPI_Comm comm;
  int end_tag;          /* the tag of messages about the communicator's end; no batch uses it */
  bool multiple;        /* several threads may call MPI at once */
  atomic_bool inside;   /* a thread is inside MPI; used only if `multiple` is false */
  atomic_bool to_tell;  /* the message about the end has still to be sent */
  pthread_mutex_t lock; /* protects the fields below */
  MPI_Request *told;    /* sends of the message about the end, one for each rank */
  char out[OB_END_BYTES], in[OB_END_BYTES];
};

/* The transport's `shrink` and `destroy`. */
onebit_status_t ob_mpi_shrink(onebit_comm_t comm, onebit_comm_t *survivors);
void ob_mpi_state_destroy(onebit_comm_t comm);

/* True if the MPI library has user-level failure mitigation (ULFM). */
bool ob_mpi_has_ulfm(void);

/* Waits a moment until the messages about the communicator's end are sent. Returns true if all have
 * been sent. */
bool ob_mpi_end_is_sent(const struct ob_mpi_state *state, int size);

onebit_status_t ob_mpi_error(const char *call, int code);
bool ob_mpi_is_finalized(void);

#define MPI_CHECK(name, call)                                                                      \
  do {                                                                                             \
    int mpi_check_code = (call);                                                                   \
    if (mpi_check_code != MPI_SUCCESS)                                                             \
      return ob_mpi_error(name, mpi_check_code);                                                   \
  } while (0)
#define MPI_TRY(call, arguments) MPI_CHECK(#call, call arguments)

#endif
