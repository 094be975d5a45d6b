/* Tests whose ranks are the processes of an MPI job, for tests/mpi_*.c, which mpirun starts. */
#ifndef ONEBIT_TESTS_SUPPORT_MPI_H
#define ONEBIT_TESTS_SUPPORT_MPI_H

#include <mpi.h>

#include "onebit/mpi_calls.h"
#include "tests/support.h"

/* A test on all ranks of MPI_COMM_WORLD. Its body has the variables `rank` and `size`.
 * SeveralRanksTest is skipped on one rank. Criterion runs each test in a process of its own, so
 * each start of mpirun runs one test. */
#define RankedTest(suite, name)       RANKED_TEST(suite, name, 1)
#define SeveralRanksTest(suite, name) RANKED_TEST(suite, name, 2)
#define RANKED_TEST(suite, name, min_size)                                                         \
  static void suite##_##name##_ranked(int rank, int size);                                         \
  Test(suite, name) { mpi_run(suite##_##name##_ranked, min_size); }                                \
  static void suite##_##name##_ranked(__attribute__((unused)) int rank,                            \
                                      __attribute__((unused)) int size)
void mpi_run(void (*body)(int rank, int size), int min_size);

/* Begin and end such a test. mpi_begin initialises MPI, with MPI_THREAD_MULTIPLE if the MPI library
 * has it, and returns this process's rank in MPI_COMM_WORLD. mpi_end finalises MPI. */
int mpi_begin(void);
void mpi_end(void);

/* Runs the body on the ranks of an MPI communicator, of which this process is one. */
void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context);

/* Functions for tests of MPI-shaped calls, tests/mpi_calls*.c: data that one bit represents
 * exactly, and access to the library's state of a communicator. */

/* Returns a value of magnitude (rank + 1) * 2^scale, with the same signs on all ranks. On up to
 * four ranks, one bit represents such elements without loss in the messages of workers and
 * servers. */
float exact_value(size_t i, int rank, int scale);
void fill_exact(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int scale);

/* Returns the sum, or the mean, of exact_value over `size` ranks. */
float exact_result(size_t i, int size, int scale, bool average);

/* Checks that all elements equal exact_result exactly. */
#define CHECK_EXACT(what, buffer, count, size, scale)                                              \
  check_exact((what), (buffer), (count), (size), (scale), __FILE__, __LINE__)
bool check_exact(const char *what, const float *buffer, size_t count, int size, int scale,
                 const char *file, int line);

/* Adds up the call counts of a communicator's tensors. Sets *tensors to the number of tensors. */
struct ob_tally tally_of(MPI_Comm comm, size_t *tensors);

/* Returns a communicator of all ranks whose error handler returns errors. */
MPI_Comm duplicate_world(void);

/* Returns MPI's class of an error code. */
int error_class_of(int code);

/* Tensors with arrays of their own, on a communicator of their own. Freeing the tensors frees the
 * communicator, unless it is MPI_COMM_NULL. */
enum { MPI_TENSORS = 4 };
struct mpi_tensors {
  MPI_Comm comm;
  float *send[MPI_TENSORS], *receive[MPI_TENSORS];
  int count[MPI_TENSORS];
  ONEBIT_Request request[MPI_TENSORS];
};
struct mpi_tensors mpi_tensors_make(size_t count);
void mpi_tensors_free(struct mpi_tensors *tensors);

int size_of(MPI_Comm comm);
int rank_of(MPI_Comm comm);

#endif
