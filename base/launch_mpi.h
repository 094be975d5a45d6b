/* Checks that the launcher and the program's MPI library belong together. */
#ifndef OB_BASE_LAUNCH_MPI_H
#define OB_BASE_LAUNCH_MPI_H

#include <stddef.h>

#include "base/bound_mpi.h"

/* This process's rank by its launcher's variables; 0 without such variables. */
int ob_launch_rank(void);

/* True if another MPI's launcher has started several ranks; then `text` says so. May be called
 * before MPI_Init, in which MPICH 5 ends such a program. */
bool ob_launch_is_foreign(char *text, size_t bytes);

/* Called while MPI runs, with a communicator of the program's. The launcher of one MPI starts a
 * program of another as so many jobs of one rank each, all of which compute something and succeed.
 * Where the launcher says that there are several ranks, and MPI_COMM_WORLD has one, this is
 * ONEBIT_ERROR_UNSUPPORTED if the launcher is another MPI's; if it may be meant (srun, mpirun of
 * the same MPI), ONEBIT_OK and, once, a line on standard error. Started by a program of MPI's
 * (MPI_Comm_spawn), or on MPI_COMM_SELF, one rank is as it should be. */
onebit_status_t ob_launch_check(MPI_Comm comm);

#endif
