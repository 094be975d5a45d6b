/* The state of a communicator over MPI, between what makes it (comm_mpi.c) and what uses it. */
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

/* The transport's `shrink` and `destroy`. */
onebit_status_t ob_mpi_shrink(onebit_comm_t comm, onebit_comm_t *survivors);
void ob_mpi_state_destroy(onebit_comm_t comm);

/* True if MPI has user-level failure mitigation. */
bool ob_mpi_has_ulfm(void);

/* True if all messages about the end have left, for which they have a moment. */
bool ob_mpi_has_told(const struct ob_mpi_state *state, int size);

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
