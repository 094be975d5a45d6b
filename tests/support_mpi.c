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

int mpi_begin_several(void) {
  int rank = mpi_begin(), size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size > 1)
    return rank;
  MPI_Finalize();
  cr_skip_test("one rank has nobody to disagree with, or to wait for");
}

void mpi_end(void) {
  MPI_Finalize();
  checks_must_hold();
}

void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context) {
  onebit_comm_t comm = NULL;
  if (!CHECK_STATUS(onebit_comm_create_mpi(mpi_comm, &comm), ONEBIT_OK))
    return;
  body(comm, context);
  onebit_comm_destroy(comm);
}
#endif
