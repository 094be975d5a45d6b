/* Ranks that are processes of an MPI job. Nothing in a build without MPI. */

#ifdef ONEBIT_HAVE_MPI
#include "tests/support_mpi.h"
#include "onebit/mpi.h"

/* Sums by the drop-in calls have one bit, where a test does not say otherwise: it is exact of
 * values of one magnitude. */
int mpi_begin(void) {
  int provided, rank;
  setenv("ONEBIT_BITS", "1", 0);
  cr_assert_eq(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided), MPI_SUCCESS);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  check_rank(rank);
  return rank;
}

void mpi_end(void) { MPI_Finalize(); }

void mpi_run(void (*body)(int rank, int size), int least) {
  const int rank = mpi_begin();
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size >= least)
    body(rank, size);
  mpi_end();
  if (size < least)
    cr_skip_test("one rank has nobody to disagree with, or to wait for");
}

void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context) {
  onebit_comm_t comm = NULL;
  if (!CHECK_STATUS(onebit_comm_create_mpi(mpi_comm, &comm), ONEBIT_OK))
    return;
  body(comm, context);
  onebit_comm_destroy(comm);
}
#endif
