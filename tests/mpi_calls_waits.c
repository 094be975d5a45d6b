/* Calls of onebit/mpi_calls.h on which one rank never comes: the others get an error that names it,
 * after ONEBIT_TIMEOUT. */
#include "dropin/mpi/queue.h"
#include "tests/support_calls.h"

enum { COUNT = 3000 };

static int sum(MPI_Comm comm, const float *from, float *to, int count) {
  return ONEBIT_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm);
}

/* Waits as dense calls do. */
static int wait_dense(MPI_Comm comm, const float *from, float *to, int count) {
  MPI_Request request;
  MPI_Iallreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm, &request);
  return ob_wait_moving(comm, &request, "a dense call");
}

typedef int calling(MPI_Comm comm, const float *from, float *to, int count);

/* The last rank comes when the others have their errors: it gets one as well. */
static void miss_the_last(calling *call, bool late_fails) {
  int rank = rank_of(MPI_COMM_WORLD), last = size_of(MPI_COMM_WORLD) - 1;
  MPI_Comm comm = duplicate();
  float *from = allocate(2 * COUNT, sizeof *from), *to = allocate(2 * COUNT, sizeof *to);
  char name[48];
  snprintf(name, sizeof name, "waited 0.3 s for rank %d", last);
  for (int k = 0; k < 2; k++) {
    fill_exact(from, ONEBIT_FLOAT32, COUNT, rank, k);
    CHECK(sum(comm, from, to, COUNT) == MPI_SUCCESS, "%s", onebit_last_error());
    CHECK_EXACT("before", to, COUNT, last + 1, k);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  for (int other = 0; rank == last && other < last; other++)
    MPI_Recv(NULL, 0, MPI_BYTE, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  const int code = call(comm, from, to, COUNT + 1);
  if (rank != last) {
    CHECK(code == MPI_ERR_OTHER, "code %d", code);
    CHECK_WORDS(rank == 0 || last < 2 ? name : "rank");
    MPI_Send(NULL, 0, MPI_BYTE, last, 0, MPI_COMM_WORLD);
  }
  CHECK(rank != last || !late_fails || code != MPI_SUCCESS, "it finds all well");
  MPI_Barrier(MPI_COMM_WORLD); /* so that the last rank has heard of it */
  CHECK(sum(comm, from, to, COUNT + 2) != MPI_SUCCESS, "the communicator works again");
  MPI_Barrier(MPI_COMM_WORLD);
  /* The buffers and the communicator are MPI's until it ends. */
}

RankedTest(mpi_calls_waits, an_agreement_on_which_a_rank_never_comes) {
  setenv("ONEBIT_TIMEOUT", "0.3", 1);
  if (size_of(MPI_COMM_WORLD) > 1)
    miss_the_last(sum, true);
}

RankedTest(mpi_calls_waits, a_dense_call_on_which_a_rank_never_comes) {
  setenv("ONEBIT_TIMEOUT", "0.3", 1);
  if (size_of(MPI_COMM_WORLD) > 1)
    miss_the_last(wait_dense, false);
}
