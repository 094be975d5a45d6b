/* Ranks that are processes of an MPI job: for tests/mpi_*.c, which mpirun starts. */
#ifndef ONEBIT_TESTS_SUPPORT_MPI_H
#define ONEBIT_TESTS_SUPPORT_MPI_H

#include <mpi.h>

#include "tests/support.h"

/* Initialises MPI with MPI_THREAD_MULTIPLE where the library has it, and gives this process's rank
 * in MPI_COMM_WORLD. Criterion runs each test in a process of its own: call it in the test, run one
 * test a launch. */
int mpi_begin(void);

/* The same of a test that is about several ranks: one alone ends MPI, and the test is skipped. */
int mpi_begin_several(void);

/* Finalises MPI and then checks_must_hold(). */
void mpi_end(void);

/* Runs the body over the ranks of an MPI communicator, this process being one of them. */
void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context);

#endif
