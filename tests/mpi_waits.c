/*
 * Waits over MPI: a rank that the others miss, in each schedule; messages that come when the call
 * has failed; and communicators that are destroyed after MPI_Finalize.
 */
#include "collectives/communicator.h"
#include "collectives/watch.h"
#include "onebit/mpi.h"
#include "tests/support_mpi.h"
#include "tests/support_waits.h"

static void all_meet(void) { MPI_Barrier(MPI_COMM_WORLD); }

static void miss_a_rank(enum wait_fault fault) {
  for (size_t k = 0; k < wait_cases_count; k++) {
    if (wait_cases[k].hosts != wait_cases[k].size)
      continue; /* all ranks of the test are on one host */
    struct wait_run run = {
        .test = &wait_cases[k], .fault = fault, .blocking = k % 2 == 0, .meet = all_meet};
    on_mpi_ranks(MPI_COMM_WORLD, wait_on_rank, &run);
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

SeveralRanksTest(mpi_waits, a_missed_rank) {
  miss_a_rank(WAIT_IS_AWAY);
  miss_a_rank(WAIT_CALLS_ANOTHER);
  miss_a_rank(WAIT_ABORTS);
}

/* --- Late messages -----------------------------------------------------------------------------*/

#define TAG 7

static struct ob_batch *begin(onebit_comm_t comm, void *data, size_t bytes, bool sends) {
  struct ob_batch *batch = NULL;
  CHECK_STATUS(ob_batch_create(comm, 1, &batch), ONEBIT_OK);
  batch->sends = sends;
  batch->receives = !sends;
  *(sends ? batch->send : batch->receive) = (struct ob_endpoint){data, bytes, sends ? 0 : 1};
  CHECK_STATUS(comm->transport->begin(batch, TAG), ONEBIT_OK);
  return batch;
}

/* Rank 0 gives a receive up before rank 1 sends: the message goes to the next receive, and not to
 * memory that is the program's again. */
static void send_late(onebit_comm_t comm, void *context) {
  size_t bytes = *(const size_t *)context;
  bool sends = onebit_comm_rank(comm) == 1;
  unsigned char *given_up = allocate(1, bytes), *message = allocate(1, bytes);
  struct ob_batch *batch;
  comm->timeout = 10;
  if (!sends) {
    batch = begin(comm, given_up, bytes, false);
    CHECK_STATUS(comm->transport->test(batch, OB_WAIT_SLICE), ONEBIT_IN_PROGRESS);
    CHECK(comm->transport->peer_awaited(batch) == 1, "awaited: %d",
          comm->transport->peer_awaited(batch));
    CHECK(ob_batch_destroy(batch), "the receive is still open");
    fill_pattern(given_up, bytes);
  } else {
    memset(message, 5, bytes);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (onebit_comm_rank(comm) < 2) {
    batch = begin(comm, message, bytes, sends);
    CHECK_STATUS(ob_watch_batch(batch, "the next message"), ONEBIT_OK);
    CHECK(ob_batch_destroy(batch), "the batch is still open");
  }
  CHECK(sends || pattern_holds(given_up, bytes), "a late message came to memory given back");
  CHECK(onebit_comm_rank(comm) > 1 || message[bytes - 1] == 5, "the message is not there");
  MPI_Barrier(MPI_COMM_WORLD);
  free(given_up);
  free(message);
}

SeveralRanksTest(mpi_waits, a_late_message) {
  static const size_t sizes[] = {64, (size_t)1 << 20};
  for (size_t k = 0; k < 2; k++)
    on_mpi_ranks(MPI_COMM_WORLD, send_late, (void *)&sizes[k]);
}

/* --- After MPI_Finalize ------------------------------------------------------------------------*/

Test(mpi_waits, destroyed_after_finalize) {
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  float values[3] = {1, 2, 3};
  mpi_begin();
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_create(comm, 3, NULL, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(values, values, plan), ONEBIT_OK);
  MPI_Finalize();
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  onebit_comm_destroy(comm);
}
