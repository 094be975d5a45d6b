/*
 * Communicators over MPI (MPI-3 or newer). The header is separate so that code without MPI can
 * include the others. A library built with MPI=0 does not have these functions.
 */
#ifndef ONEBIT_MPI_H
#define ONEBIT_MPI_H

#include <mpi.h>

#include "onebit/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a communicator of the ranks of any MPI intra-communicator: MPI_COMM_WORLD or a part of it.
 * Collective over mpi_comm.
 *   mpi_comm   the ranks. The library duplicates it, so that its messages never match messages of
 *              the program; the caller keeps it and may free it
 *   comm       out: the communicator; NULL when the call fails
 * The library is not linked to an MPI library. It uses the one that the process has loaded, which
 * must be a shared library of a kind that onebit was built for: Open MPI, MPICH and its
 * derivatives, or the ABI of MPI 5. If onebit was built for several kinds, this function accepts
 * the handle as the mpi.h of each kind passes it (an int or a pointer): the MPI library of the
 * process determines the kind.
 * MPI must be initialised, with MPI_THREAD_MULTIPLE for use from several threads at once.
 * Errors, the same on all ranks: ONEBIT_ERROR_ARGUMENT (mpi_comm is MPI_COMM_NULL or an
 * inter-communicator, MPI is not initialised or already finalised, comm is NULL),
 * ONEBIT_ERROR_UNSUPPORTED (the process has no MPI library, or one of another kind; or it was
 * started by the launcher of another MPI, so that each rank is alone in its MPI_COMM_WORLD),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_TRANSPORT (MPI's own error). */
onebit_status_t onebit_comm_create_mpi(MPI_Comm mpi_comm, onebit_comm_t *comm);

#ifdef __cplusplus
}
#endif
#endif
