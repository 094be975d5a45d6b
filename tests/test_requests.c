/* Nonblocking calls: any number of plans and requests in flight, finished in any order, on ranks
 * that are threads. */
#include "collectives/communicator.h"
#include "tests/support_requests.h"

static void on_groups(rank_body *scenario, int smallest) {
  static const int sizes[] = {1, 2, 3, 4, 8};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    if (sizes[p] < smallest)
      continue;
    struct flight *flight = flight_prepare(sizes[p]);
    on_ranks(sizes[p], scenario, flight);
    flight_release(flight);
  }
}

static void on_several_hosts(rank_body *scenario) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {6, 2}, {4, 1}, {3, 3}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++) {
    if (!test_wanted(k))
      continue;
    struct flight *flight = flight_prepare_hosts(splits[k][0], splits[k][1]);
    on_hosts(splits[k][0], splits[k][1], scenario, flight);
    flight_release(flight);
  }
}

Test(requests, schedules_waited_for_in_any_order) { on_several_hosts(waited_in_any_order); }
Test(requests, schedules_started_in_any_order) {
  on_several_hosts(started_in_any_order_and_tested);
}
Test(requests, schedules_moved_by_progress) { on_several_hosts(moved_by_progress); }
Test(requests, schedules_with_busy_plans) { on_several_hosts(busy_plans_refuse); }
Test(requests, schedules_with_a_late_rank) { on_several_hosts(late_rank_is_waited_for); }
Test(requests, schedules_in_several_threads) { on_several_hosts(threads_share_a_communicator); }

Test(requests, waited_for_in_any_order) { on_groups(waited_in_any_order, 1); }
Test(requests, started_in_any_order_and_tested) { on_groups(started_in_any_order_and_tested, 1); }
Test(requests, moved_by_progress) { on_groups(moved_by_progress, 1); }
Test(requests, busy_plans_refuse) { on_groups(busy_plans_refuse, 1); }
Test(requests, late_rank_is_waited_for) { on_groups(late_rank_is_waited_for, 2); }
Test(requests, threads_share_a_communicator) { on_groups(threads_share_a_communicator, 1); }

#define GENERATIONS 33000 /* more than MPI guarantees tags, 32767 */

/* An old plan, and ever new ones that are in flight at the same time and are started before it by
 * one rank, after it by the other. Equal input everywhere comes back as it is. */
static void meet_many_plans(onebit_comm_t comm, void *context) {
  onebit_plan_t plans[2] = {NULL, NULL};
  float send[2][40], receive[2][40];
  (void)context;
  onebit_plan_options_t options = {.size = sizeof options, .no_error_feedback = 1};
  for (size_t i = 0; i < 40; i++) {
    send[0][i] = 1.0f;
    send[1][i] = 2.0f;
  }
  CHECK_STATUS(onebit_plan_create(comm, 40, &options, &plans[0]), ONEBIT_OK);
  for (int generation = 0; generation < GENERATIONS; generation++) {
    onebit_request_t requests[2] = {NULL, NULL};
    onebit_status_t made = onebit_plan_create(comm, 33, &options, &plans[1]);
    for (int i = 0; i < 2; i++) {
      int k = (i + onebit_comm_rank(comm)) % 2;
      made |= onebit_iallreduce(send[k], receive[k], plans[k], &requests[k]);
    }
    made |= onebit_wait(&requests[0]) | onebit_wait(&requests[1]) | onebit_plan_destroy(plans[1]);
    if (!CHECK(made == ONEBIT_OK && receive[0][7] == 1.0f && receive[1][7] == 2.0f,
               "plan %d: %s, results %g and %g", generation, onebit_last_error(),
               (double)receive[0][7], (double)receive[1][7]))
      break;
  }
  CHECK_STATUS(onebit_plan_destroy(plans[0]), ONEBIT_OK);
}

Test(requests, old_plans_work_beside_any_number_of_new_ones) {
  if (test_thins())
    cr_skip_test("takes too long for a run of a small share, as with a sanitizer");
  on_ranks(2, meet_many_plans, NULL);
}

/* ONEBIT_PROGRESS=thread: a request comes to its end without any call. */
static void leave_it_to_the_thread(onebit_comm_t comm, void *context) {
  enum { COUNT = 5000 };
  const struct timespec moment = {.tv_nsec = 1000000};
  static float send[4][COUNT], receive[4][COUNT];
  int rank = onebit_comm_rank(comm);
  onebit_request_t request = NULL;
  onebit_plan_t plan;
  (void)context;
  for (size_t i = 0; i < COUNT; i++)
    send[rank][i] = input_value(i, rank, 0);
  if (!CHECK_STATUS(onebit_plan_create(comm, COUNT, NULL, &plan), ONEBIT_OK))
    return;
  for (int call = 0; call < 5; call++) {
    CHECK_STATUS(onebit_iallreduce(send[rank], receive[rank], plan, &request), ONEBIT_OK);
    for (int waited = 0; waited < 60000 && ob_engine_busy(comm->engine); waited++)
      nanosleep(&moment, NULL);
    CHECK(!ob_engine_busy(comm->engine), "the request has not come to its end in a minute");
    CHECK_STATUS(onebit_test(&request), ONEBIT_OK);
    CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  meet(comm); /* rank 0's result is compared with */
  CHECK_BITS("the result", receive[rank], receive[0], COUNT, ONEBIT_FLOAT32);
  meet(comm);
}

Test(requests, a_thread_moves_them) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  for (int size = 1; size <= 4; size++)
    on_ranks(size, leave_it_to_the_thread, NULL);
}

Test(requests, everything_works_with_a_thread) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  on_groups(waited_in_any_order, 1);
  on_groups(started_in_any_order_and_tested, 1);
}

Test(requests, progress_is_calls_or_thread) {
  onebit_comm_t comm = NULL;
  setenv("ONEBIT_PROGRESS", "threads", 1);
  CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("ONEBIT_PROGRESS=threads");
  CHECK(comm == NULL, "a communicator all the same");
}
