/* Tests plans over MPI: the scenarios of the loopback tests, and features that only MPI has. */
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"
#include "onebit/mpi.h"
#include "tests/support_collectives.h"
#include "tests/support_errors.h"
#include "tests/support_mpi.h"
#include "tests/support_requests.h"

/* Some of the collectives' cases, with the table and the code of test_collectives.c. */

/* Sets a cost of one second per message, so that small allgathers on one host also use rounds. */
static void run_in_rounds(onebit_comm_t comm, void *context) {
  comm->costs.inside.message = 1;
  collective_on_rank(comm, context);
}

static void check_results(struct collective_run *run, size_t number) {
  (void)number;
  on_mpi_ranks(MPI_COMM_WORLD, collective_on_rank, run);
}

static void check_schedule(struct collective_run *run, size_t number) {
  check_results(run, number);
  on_mpi_ranks(MPI_COMM_WORLD, run_in_rounds, run);
}

RankedTest(mpi_collectives, equal_the_oracle) {
  size_t count;
  struct collective_case *cases = collective_cases(size, FEW, &count);
  collective_check_sample("mpi_collectives", 1, cases, count, check_results);
  cases = schedule_cases(size, 1, FEW, &count); /* all ranks of a test are on one host */
  collective_check_sample("mpi_schedules", 1, cases, count, check_schedule);
}

RankedTest(mpi_collectives, climb_and_descend) {
  static const onebit_schedule_t schedules[] = {ONEBIT_SCHEDULE_EXCHANGE,
                                                ONEBIT_SCHEDULE_ALLGATHER};
  for (size_t k = 0; k < sizeof schedules / sizeof schedules[0]; k++) {
    struct climb climb = {.schedule = schedules[k]};
    check_case("schedule %d", (int)schedules[k]);
    on_mpi_ranks(MPI_COMM_WORLD, climb_on_rank, &climb);
  }
}

/*
 * Tests nonblocking calls over MPI: the scenarios of test_requests.c on MPI_COMM_WORLD and on
 * subsets of its ranks, and requests on several communicators that ranks wait for in different
 * orders.
 */

static void run_scenarios(MPI_Comm comm) {
  int size, threads;
  MPI_Comm_size(comm, &size);
  MPI_Query_thread(&threads);
  struct flight *flight = flight_prepare(size);
  on_mpi_ranks(comm, waited_in_any_order, flight);
  on_mpi_ranks(comm, started_in_any_order_and_tested, flight);
  on_mpi_ranks(comm, moved_by_progress, flight);
  on_mpi_ranks(comm, busy_plans_refuse, flight);
  if (size > 1)
    on_mpi_ranks(comm, late_rank_is_waited_for, flight);
  if (threads == MPI_THREAD_MULTIPLE)
    on_mpi_ranks(comm, threads_share_a_communicator, flight);
  else
    cr_log_warn("this MPI has no MPI_THREAD_MULTIPLE: threads are not tested");
  flight_release(flight);
}

/* Creates a communicator of half of the ranks, in reverse order. The library keeps a duplicate, so
 * the MPI communicator may be freed at once. */
static onebit_comm_t make_half_comm(int world_rank) {
  MPI_Comm half;
  onebit_comm_t comm = NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, -world_rank, &half);
  CHECK_STATUS(onebit_comm_create_mpi(half, &comm), ONEBIT_OK);
  MPI_Comm_free(&half);
  return comm;
}

/* Starts a request on each of two communicators. The order of the waits differs between ranks. A
 * rank must not block on one communicator while another rank needs progress on the other
 * communicator. */
static void check_waits_across_comms(int world_rank) {
  enum { TURNS = 10 };
  onebit_comm_t comms[2] = {NULL, make_half_comm(world_rank)};
  struct collective_run runs[2];
  struct rank_plan plans[2];
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comms[0]), ONEBIT_OK);
  check_case("across communicators");
  for (int k = 0; k < 2; k++) {
    struct collective_case what = {.size = onebit_comm_size(comms[k]),
                                   .steps = TURNS,
                                   .count = 3000,
                                   .options = EXCHANGE_OPTIONS_INIT};
    what.options.chunk_size = 512;
    runs[k] = collective_prepare(&what);
    rank_plan_create(&plans[k], comms[k], &runs[k]);
  }
  for (int turn = 0; turn < TURNS; turn++) {
    for (int i = 0; i < 2; i++) {
      struct rank_plan *one = &plans[(i + world_rank / 2) % 2];
      rank_plan_fill(one, turn);
      CHECK_STATUS(onebit_iallreduce(one->send, one->receive, one->plan, &one->request), ONEBIT_OK);
    }
    for (int i = 0; i < 2; i++)
      CHECK_STATUS(onebit_wait(&plans[(i + world_rank) % 2].request), ONEBIT_OK);
    for (int k = 0; k < 2; k++)
      rank_plan_check(&plans[k], turn);
  }
  for (int k = 0; k < 2; k++) {
    rank_plan_finish(&plans[k]);
    collective_release(&runs[k]);
    onebit_comm_destroy(comms[k]);
  }
}

RankedTest(mpi_requests, in_flight_on_any_communicator) {
  run_scenarios(MPI_COMM_WORLD);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  run_scenarios(half);
  MPI_Comm_free(&half);
  check_waits_across_comms(rank);
}

/* Tests wrong arguments, and arguments that differ between ranks, over MPI: the scenarios of
 * test_wrong_calls.c, and errors that only MPI has. */

/* A handle with a nonzero value, which creation functions must overwrite if they fail. It is never
 * dereferenced. */
static char stale;
static onebit_comm_t stale_comm(void) { return (onebit_comm_t)(void *)&stale; }

static void check_wrong(onebit_status_t status, onebit_comm_t comm, const char *word) {
  CHECK_STATUS(status, ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS(word);
  CHECK(comm == NULL, "a failed creation left a communicator");
}

static void check_not_initialised(void) {
  onebit_comm_t comm = stale_comm();
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  check_wrong(status, comm, "MPI");
}

/* Checks that an inter-communicator between two halves of the ranks is refused. */
static void check_inter_communicator(int rank, int size) {
  MPI_Comm half, between;
  onebit_comm_t comm = stale_comm();
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  if (size > 1) {
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between);
    onebit_status_t status = onebit_comm_create_mpi(between, &comm);
    check_wrong(status, comm, "inter");
    MPI_Comm_free(&between);
  }
  MPI_Comm_free(&half);
}

/* Makes the first, the second, ... allocation of a rank fail while a communicator is created. The
 * other ranks must get an error. */
static void check_memory(int rank, int size) {
  for (int culprit = 0; culprit < size; culprit++)
    for (long n = 1, done = 0; !done; n++) {
      onebit_comm_t comm = stale_comm();
      check_case("allocation %ld of rank %d fails", n, culprit);
      ob_memory_fail_at(rank == culprit ? n : 0);
      onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
      ob_memory_fail_at(0);
      done = status == ONEBIT_OK;
      if (!done)
        CHECK_STATUS(status, ONEBIT_ERROR_MEMORY);
      CHECK((comm == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
      onebit_comm_destroy(comm);
    }
}

Test(mpi_errors, reach_all_ranks) {
  static rank_body *const scenarios[] = {
      wrong_learning_rate_on_one_rank, mistakes_in_an_open_step,    destroyed_in_an_open_step,
      wrong_buffers_on_one_rank,       wrong_operation_on_one_rank, wrong_plan_on_one_rank,
      wrong_tensors_on_one_rank,       other_plan_on_one_rank,      other_adam_on_one_rank,
      plan_here_and_optimizer_there,   other_threads_on_one_rank};
  check_not_initialised();
  int rank = mpi_begin(), size;
  onebit_comm_t comm = stale_comm();
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_NULL, &comm);
  check_wrong(status, comm, "MPI_COMM_NULL");
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  check_inter_communicator(rank, size);
  check_memory(rank, size);
  for (size_t k = 0; size > 1 && k < sizeof scenarios / sizeof scenarios[0]; k++)
    for (int guilty = 0; guilty < size; guilty++) {
      struct culprit culprit = {.rank = guilty};
      on_mpi_ranks(MPI_COMM_WORLD, scenarios[k], &culprit);
      culprit.clip_norm = 1.5; /* clipping adds an exchange */
      if (k < 3)
        on_mpi_ranks(MPI_COMM_WORLD, scenarios[k], &culprit);
    }
  mpi_end();
}

/* --- ONEBIT_CONFIG */

RankedTest(mpi_errors, a_file_that_one_rank_cannot_read) {
  onebit_comm_t comm = stale_comm();
  if (rank == size - 1)
    setenv("ONEBIT_CONFIG", "/nowhere/at.all", 1);
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comm), ONEBIT_ERROR_FILE);
  CHECK_WORDS(rank == size - 1 ? "ONEBIT_CONFIG=/nowhere/at.all: No such file" : "another rank");
  CHECK(comm == NULL, "a failed creation left a communicator");
}

/*
 * Tests waiting over MPI for a rank that does not call, in each schedule; messages that arrive
 * after the call has failed; and communicators that are destroyed after MPI_Finalize.
 */

static void wait_for_all_ranks(void) { MPI_Barrier(MPI_COMM_WORLD); }

static void check_missing_rank(enum wait_fault fault) {
  for (size_t k = 0; k < wait_cases_count; k++) {
    if (wait_cases[k].hosts != wait_cases[k].size)
      continue; /* all ranks of the test are on one host */
    struct wait_run run = {.test = &wait_cases[k],
                           .fault = fault,
                           .blocking = k % 2 == 0,
                           .wait_for_all = wait_for_all_ranks};
    on_mpi_ranks(MPI_COMM_WORLD, wait_on_rank, &run);
    int named = run.named;
    MPI_Allreduce(MPI_IN_PLACE, &named, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(named > 0, "%s, fault %d: nobody names the missing rank", run.test->name, (int)fault);
  }
}

SeveralRanksTest(mpi_waits, a_missed_rank) {
  check_missing_rank(WAIT_IS_AWAY);
  check_missing_rank(WAIT_CALLS_ANOTHER);
  check_missing_rank(WAIT_ABORTS);
}

/* --- Late messages -----------------------------------------------------------------------------*/

#define TAG 7

static struct ob_batch *begin_batch(onebit_comm_t comm, void *data, size_t bytes, bool sends) {
  struct ob_batch *batch = NULL;
  CHECK_STATUS(ob_batch_create(comm, 1, &batch), ONEBIT_OK);
  batch->sends = sends;
  batch->receives = !sends;
  *(sends ? batch->send : batch->receive) = (struct ob_endpoint){data, bytes, sends ? 0 : 1};
  CHECK_STATUS(comm->transport->begin(batch, TAG), ONEBIT_OK);
  return batch;
}

/* Cancels a receive on rank 0 before rank 1 sends. The message must go to the next receive, not to
 * the cancelled receive's buffer, which the program may already use for something else. */
static void check_late_message(onebit_comm_t comm, void *context) {
  size_t bytes = *(const size_t *)context;
  bool sends = onebit_comm_rank(comm) == 1;
  unsigned char *given_up = allocate(1, bytes), *message = allocate(1, bytes);
  struct ob_batch *batch;
  comm->timeout = 10;
  if (!sends) {
    batch = begin_batch(comm, given_up, bytes, false);
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
    batch = begin_batch(comm, message, bytes, sends);
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
    on_mpi_ranks(MPI_COMM_WORLD, check_late_message, (void *)&sizes[k]);
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
