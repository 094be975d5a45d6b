/* The interface between communicator.c, which knows tensors, and attributes.c, which knows how MPI
 * attaches objects to communicators. */
#ifndef OB_DROPIN_MPI_ATTACHED_H
#define OB_DROPIN_MPI_ATTACHED_H

#include "dropin/mpi/communicator.h"

/* Creates the state of a communicator. Collective: all ranks fail, or none. */
onebit_status_t ob_attached_create(MPI_Comm comm, unsigned repeats, struct ob_attached **attached);

/* Destroys it after the calls in flight. Collective. */
void ob_attached_destroy(struct ob_attached *attached);

/* The communicator's state, or NULL where there is none yet or can be none. Local. */
struct ob_attached *ob_attached_known(MPI_Comm comm);

/* The status with which making one has failed, so that there can be none; ONEBIT_OK where nobody
 * has tried. Local. */
onebit_status_t ob_attached_failure(MPI_Comm comm);

/* Registers a call by MPI_Finalize that frees everything. Local. */
void ob_attached_watch_finalize(void);

#endif
