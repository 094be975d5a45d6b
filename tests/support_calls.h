/* The common part of tests of MPI-shaped calls: data that one bit represents exactly, and the
 * library's state of a communicator. For tests/mpi_calls*.c. */
#ifndef ONEBIT_TESTS_SUPPORT_CALLS_H
#define ONEBIT_TESTS_SUPPORT_CALLS_H

#include <mpi.h>

#include "dropin/mpi/communicator.h"
#include "onebit/mpi_calls.h"
#include "tests/support_mpi.h"

/* All elements of a rank have the magnitude (rank + 1) * 2^scale, and the same signs on all ranks:
 * one bit loses nothing of them, in a worker's message or a server's, on up to four ranks. */
float exact_value(size_t i, int rank, int scale);
void fill_exact(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int scale);

/* The sum, or the mean, over `size` ranks. */
float exact_result(size_t i, int size, int scale, bool average);

/* Checks that all elements equal exact_result, exactly. */
#define CHECK_EXACT(what, buffer, count, size, scale)                                              \
  check_exact((what), (buffer), (count), (size), (scale), __FILE__, __LINE__)
bool check_exact(const char *what, const float *buffer, size_t count, int size, int scale,
                 const char *file, int line);

float element(const void *buffer, onebit_dtype_t dtype, size_t i);

/* The counts of a communicator's tensors, added up; and the number of tensors. */
struct ob_tally tally_of(MPI_Comm comm, size_t *tensors);

/* Returns a communicator of all ranks that returns errors. */
MPI_Comm duplicate(void);

int size_of(MPI_Comm comm);
int rank_of(MPI_Comm comm);

#endif
