/*
 * Nonblocking calls over MPI: the scenarios of test_requests.c on MPI_COMM_WORLD and on parts of
 * it, and requests on several communicators that ranks wait for in different order.
 */
#include "onebit/mpi.h"
#include "tests/support_mpi.h"
#include "tests/support_requests.h"

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

/* Half of the ranks, in the opposite order. The library keeps a duplicate: ours may go at once. */
static onebit_comm_t make_half(int world_rank) {
  MPI_Comm half;
  onebit_comm_t comm = NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, -world_rank, &half);
  CHECK_STATUS(onebit_comm_create_mpi(half, &comm), ONEBIT_OK);
  MPI_Comm_free(&half);
  return comm;
}

#define COUNT 3000
#define TURNS 10

/* One request on each of two communicators, waited for in the order that suits the rank: nobody may
 * block on the one while another rank needs the other to move. */
static void wait_across_communicators(int world_rank) {
  onebit_comm_t comms[2] = {NULL, make_half(world_rank)};
  onebit_plan_t plans[2];
  float send[2][COUNT], receive[2][COUNT], wanted[COUNT];
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comms[0]), ONEBIT_OK);
  check_case("across communicators");
  for (int k = 0; k < 2; k++) {
    onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
    options.chunk_size = 512;
    CHECK_STATUS(onebit_plan_create(comms[k], COUNT, &options, &plans[k]), ONEBIT_OK);
  }
  for (int turn = 0; turn < TURNS; turn++) {
    onebit_request_t requests[2] = {NULL, NULL};
    for (int k = 0; k < 2; k++)
      fill_input(send[k], ONEBIT_FLOAT32, COUNT, onebit_comm_rank(comms[k]), turn);
    for (int i = 0; i < 2; i++) {
      int k = (i + world_rank / 2) % 2;
      CHECK_STATUS(onebit_iallreduce(send[k], receive[k], plans[k], &requests[k]), ONEBIT_OK);
    }
    for (int i = 0; i < 2; i++)
      CHECK_STATUS(onebit_wait(&requests[(i + world_rank) % 2]), ONEBIT_OK);
  }
  for (int k = 0; k < 2; k++) {
    onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
    struct oracle *oracle = oracle_create(onebit_comm_size(comms[k]), COUNT, &options);
    for (int turn = 0; turn < TURNS; turn++) {
      const void **inputs = all_inputs(oracle->size, COUNT, ONEBIT_FLOAT32, turn);
      oracle_call(oracle, inputs, wanted);
      free_inputs(inputs, oracle->size);
    }
    CHECK_BITS("recvbuf", receive[k], wanted, COUNT, ONEBIT_FLOAT32);
    check_errors(plans[k], oracle, onebit_comm_rank(comms[k]));
    oracle_destroy(oracle);
    CHECK_STATUS(onebit_plan_destroy(plans[k]), ONEBIT_OK);
    onebit_comm_destroy(comms[k]);
  }
}

RankedTest(mpi_requests, in_flight_on_any_communicator) {
  run_scenarios(MPI_COMM_WORLD);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  run_scenarios(half);
  MPI_Comm_free(&half);
  wait_across_communicators(rank);
}
