/* Ranks that are processes of an MPI job: for tests/mpi_*.c, which mpirun starts. */
#ifndef ONEBIT_TESTS_SUPPORT_MPI_H
#define ONEBIT_TESTS_SUPPORT_MPI_H

#include <mpi.h>

#include "tests/support.h"

/* A test on all ranks of MPI_COMM_WORLD, whose body has `rank` and `size`; SeveralRanksTest is
 * skipped on one rank. Criterion runs each test in a process of its own: one test a launch. */
#define RankedTest(suite, name)       RANKED_TEST(suite, name, 1)
#define SeveralRanksTest(suite, name) RANKED_TEST(suite, name, 2)
#define RANKED_TEST(suite, name, least)                                                            \
  static void suite##_##name##_ranked(int rank, int size);                                         \
  Test(suite, name) { mpi_run(suite##_##name##_ranked, least); }                                   \
  static void suite##_##name##_ranked(__attribute__((unused)) int rank,                            \
                                      __attribute__((unused)) int size)
void mpi_run(void (*body)(int rank, int size), int least);

/* Begin and end such a test: mpi_begin initialises MPI, with MPI_THREAD_MULTIPLE where the library
 * has it, and returns this process's rank in MPI_COMM_WORLD; mpi_end finalises MPI. */
int mpi_begin(void);
void mpi_end(void);

/* Runs the body over the ranks of an MPI communicator, this process being one of them. */
void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context);

#endif
