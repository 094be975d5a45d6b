/* Tests requests in flight, and waits that would never end by themselves. */
#include "collectives/communicator.h"
#include "collectives/plan_private.h"
#include "collectives/steps.h"
#include "collectives/watch.h"
#include "tests/support_requests.h"

/* Tests nonblocking calls: any number of plans and requests in flight, completed in any order, on
 * ranks that are threads. */

static void run_on_groups(rank_body *scenario, int smallest) {
  static const int sizes[] = {1, 2, 3, 4, 8};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    if (sizes[p] < smallest)
      continue;
    struct flight *flight = flight_prepare(sizes[p]);
    on_ranks(sizes[p], scenario, flight);
    flight_release(flight);
  }
}

static void run_on_several_hosts(rank_body *scenario) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {6, 2}, {4, 1}, {3, 3}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++) {
    if (!test_wanted(k))
      continue;
    struct flight *flight = flight_prepare_hosts(splits[k][0], splits[k][1]);
    on_hosts(splits[k][0], splits[k][1], scenario, flight);
    flight_release(flight);
  }
}

Test(requests, schedules_waited_for_in_any_order) { run_on_several_hosts(waited_in_any_order); }
Test(requests, schedules_started_in_any_order) {
  run_on_several_hosts(started_in_any_order_and_tested);
}
Test(requests, schedules_moved_by_progress) { run_on_several_hosts(moved_by_progress); }
Test(requests, schedules_with_busy_plans) { run_on_several_hosts(busy_plans_refuse); }
Test(requests, schedules_with_a_late_rank) { run_on_several_hosts(late_rank_is_waited_for); }
Test(requests, schedules_in_several_threads) { run_on_several_hosts(threads_share_a_communicator); }

Test(requests, waited_for_in_any_order) { run_on_groups(waited_in_any_order, 1); }
Test(requests, started_in_any_order_and_tested) {
  run_on_groups(started_in_any_order_and_tested, 1);
}
Test(requests, moved_by_progress) { run_on_groups(moved_by_progress, 1); }
Test(requests, busy_plans_refuse) { run_on_groups(busy_plans_refuse, 1); }
Test(requests, late_rank_is_waited_for) { run_on_groups(late_rank_is_waited_for, 2); }
Test(requests, threads_share_a_communicator) { run_on_groups(threads_share_a_communicator, 1); }

#define GENERATIONS 33000 /* more than 32767, the number of tags that MPI guarantees */

/* Rank 0 starts the call of an old plan before the calls of new plans, and rank 1 starts it after
 * them, while all these calls are in flight. Inputs that are equal on all ranks must be returned
 * unchanged. */
static void create_many_plans(onebit_comm_t comm, void *context) {
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
  on_ranks(2, create_many_plans, NULL);
}

/* With ONEBIT_PROGRESS=thread a request completes without any further call. */
static void await_progress_thread(onebit_comm_t comm, void *context) {
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
  synchronize_ranks(comm); /* all ranks compare with rank 0's result */
  CHECK_BITS("the result", receive[rank], receive[0], COUNT, ONEBIT_FLOAT32);
  synchronize_ranks(comm);
}

Test(requests, a_thread_moves_them) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  for (int size = 1; size <= 4; size++)
    on_ranks(size, await_progress_thread, NULL);
}

Test(requests, everything_works_with_a_thread) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  run_on_groups(waited_in_any_order, 1);
  run_on_groups(started_in_any_order_and_tested, 1);
}

Test(requests, progress_is_calls_or_thread) {
  onebit_comm_t comm = NULL;
  setenv("ONEBIT_PROGRESS", "threads", 1);
  CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("ONEBIT_PROGRESS=threads");
  CHECK(comm == NULL, "a communicator all the same");
}

/*
 * Tests waits that would never end by themselves, because a rank leaves, never calls, or makes
 * another call. Every waiting rank must get an error that names this rank, in every schedule, and
 * whichever thread makes progress.
 */

static pthread_barrier_t barrier;

static void wait_for_all_ranks(void) { pthread_barrier_wait(&barrier); }

static void run_wait_cases(enum wait_fault fault) {
  for (size_t k = 0; k < wait_cases_count; k++) {
    struct wait_run run = {.test = &wait_cases[k],
                           .fault = fault,
                           .blocking = k % 2 == 0,
                           .wait_for_all = wait_for_all_ranks,
                           .one_process = true};
    pthread_barrier_init(&barrier, NULL, (unsigned)run.test->size);
    on_hosts(run.test->size, run.test->hosts, wait_on_rank, &run);
    CHECK(run.named > 0, "%s, fault %d: nobody names the missing rank", run.test->name, (int)fault);
  }
}

Test(waits, a_rank_that_leaves) { run_wait_cases(WAIT_LEAVES); }
Test(waits, a_rank_that_never_calls) { run_wait_cases(WAIT_IS_AWAY); }
Test(waits, a_rank_that_calls_another_plan) { run_wait_cases(WAIT_CALLS_ANOTHER); }
Test(waits, a_rank_that_aborts) { run_wait_cases(WAIT_ABORTS); }

Test(waits, moved_by_a_thread) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  run_wait_cases(WAIT_IS_AWAY);
  run_wait_cases(WAIT_ABORTS);
}

/* --- Creation ----------------------------------------------------------------------------------*/

static void make_plan_except_rank_1(onebit_comm_t comm, void *context) {
  onebit_plan_t plan = NULL;
  (void)context;
  if (onebit_comm_rank(comm) == 1)
    return;
  CHECK_STATUS(onebit_plan_create(comm, 5, NULL, &plan), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("rank 1");
  CHECK_STATUS(onebit_plan_create(comm, 5, NULL, &plan), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("the communicator has failed before: rank ");
}

Test(waits, a_plan_that_one_rank_does_not_make) { on_ranks(3, make_plan_except_rank_1, NULL); }

/* --- Another thread ----------------------------------------------------------------------------*/

static void *abort_soon(void *comm) {
  nanosleep(&(struct timespec){0, 50000000}, NULL);
  CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  return NULL;
}

/* Ranks 0 and 1 wait for rank 2 until a thread of rank 0 aborts the communicator. */
static void aborted_by_a_thread(onebit_comm_t comm, void *context) {
  float buffer[3] = {1, 2, 3};
  onebit_plan_t plan = NULL;
  pthread_t thread;
  CHECK_STATUS(onebit_plan_create(comm, 3, NULL, &plan), ONEBIT_OK);
  pthread_barrier_wait(context);
  if (onebit_comm_rank(comm) == 0)
    pthread_create(&thread, NULL, abort_soon, comm);
  if (onebit_comm_rank(comm) < 2) {
    CHECK_STATUS(onebit_allreduce(buffer, buffer, plan), ONEBIT_ERROR_TRANSPORT);
    CHECK_WORDS("rank 0 called onebit_comm_abort");
  }
  if (onebit_comm_rank(comm) == 0)
    pthread_join(thread, NULL);
  pthread_barrier_wait(context);
  CHECK_STATUS(onebit_allreduce(buffer, buffer, plan), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(waits, aborted_by_another_thread) {
  pthread_barrier_init(&barrier, NULL, 3);
  on_ranks(3, aborted_by_a_thread, &barrier);
}

/* --- The notice --------------------------------------------------------------------------------*/

static void late_by_a_notice(onebit_comm_t comm, void *context) {
  onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
  float buffer[3] = {1, 2, 3};
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, 3, &options, &plan), ONEBIT_OK);
  pthread_barrier_wait(context); /* earlier calls may take longer on a busy machine */
  if (onebit_comm_rank(comm) == 0)
    ob_watch_notice = 0.1;
  if (onebit_comm_rank(comm) == 1)
    pthread_barrier_wait(context);
  onebit_request_t request;
  CHECK_STATUS(onebit_iallreduce(buffer, buffer, plan, &request), ONEBIT_OK);
  while (onebit_comm_rank(comm) == 0 && comm->noticed == 0) {
    CHECK_STATUS(onebit_test(&request), ONEBIT_IN_PROGRESS);
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  if (onebit_comm_rank(comm) == 0)
    pthread_barrier_wait(context);
  CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(waits, a_notice) {
  char text[512] = "", path[] = "/tmp/onebit-notice-XXXXXX";
  int file = mkstemp(path), before = dup(2);
  pthread_barrier_init(&barrier, NULL, 2);
  dup2(file, 2);
  on_hosts(2, 2, late_by_a_notice, &barrier);
  dup2(before, 2);
  cr_assert(pread(file, text, sizeof text - 1, 0) > 0);
  unlink(path);
  const char *said = " rank 0: allreduce call 1 of plan 1 (12 bytes): waiting ";
  cr_assert(strstr(text, said), "%s", text);
  cr_assert(strstr(text, " s for rank 1 on host h1 (receive, chunk 0)\n"), "%s", text);
}

static void describe_nothing(const void *waiter, struct ob_wait *wait) { (void)waiter, (void)wait; }

/* Simulates a wait and looks at it after given times. Returns the number of lines that the wait
 * prints. */
static int lines_of_a_wait(onebit_comm_t comm, char text[512]) {
  static const double waited[] = {999, 1000, 1001, 5999, 6000, 29999, 30000, 90000};
  struct ob_watch watch = {0};
  char path[] = "/tmp/onebit-notice-XXXXXX";
  int file = mkstemp(path), before = dup(2), lines = 0;
  ob_watch_notice = 1000;
  dup2(file, 2);
  for (size_t k = 0; k < sizeof waited / sizeof *waited; k++) {
    watch.waited = waited[k];
    watch.seen = 0; /* no time has passed */
    CHECK_STATUS(comm ? ob_watch_look(&watch, comm, 0, describe_nothing, NULL)
                      : ob_watch_for(&watch, 1e5, "a wait", "rank 7 to come"),
                 ONEBIT_OK);
  }
  dup2(before, 2);
  cr_assert(pread(file, text, 511, 0) > 0);
  unlink(path);
  for (const char *at = text; (at = strchr(at, '\n')); at++)
    lines++;
  return lines;
}

/* A wait prints three notices: after 1, 6 and 30 times the time of the first notice. The calls of a
 * communicator print at most one notice in 10 s. */
Test(waits, notices_become_rarer) {
  static const char *const said[] = {"a wait: waiting 1e+03 s for rank 7 to come\n",
                                     "a wait: waiting 6e+03 s for rank 7 to come\n",
                                     "a wait: waiting 3e+04 s for rank 7 to come\n"};
  char text[512] = "";
  cr_expect_eq(lines_of_a_wait(NULL, text), 3, "%s", text);
  for (size_t k = 0; k < 3; k++)
    cr_expect(strstr(text, said[k]), "%s", text);
  onebit_comm_t comm = self_comm();
  comm->timeout = 1e5;
  memset(text, 0, sizeof text);
  cr_expect_eq(lines_of_a_wait(comm, text), 1, "%s", text);
  onebit_comm_destroy(comm);
  struct ob_watch late = {.waited = 0.5};
  CHECK_STATUS(ob_watch_for(&late, 0.5, "a wait", "rank 7 to come"), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("a wait: waited 0.5 s for rank 7 to come");
}

/* --- The knob ----------------------------------------------------------------------------------*/

static void check_timeout_value(const char *text, onebit_status_t wanted) {
  onebit_comm_t comm = NULL;
  setenv("ONEBIT_TIMEOUT", text, 1);
  CHECK_STATUS(onebit_comm_create_self(&comm), wanted);
  if (wanted != ONEBIT_OK)
    CHECK_WORDS("neither a number of seconds nor never");
  onebit_comm_destroy(comm);
}

Test(waits, the_timeout_is_read) {
  check_timeout_value("0.25", ONEBIT_OK);
  check_timeout_value("0", ONEBIT_OK);
  check_timeout_value("never", ONEBIT_OK);
  check_timeout_value("-1", ONEBIT_ERROR_ARGUMENT);
  check_timeout_value("nan", ONEBIT_ERROR_ARGUMENT);
  check_timeout_value("5 minutes", ONEBIT_ERROR_ARGUMENT);
}

/* The time during which this process was stopped counts as one second of waiting. */
Test(waits, absence_counts_as_a_second) {
  struct ob_watch watch = {0};
  cr_assert(ob_watch_count(&watch));
  watch.seen /= 2; /* moves the last look, counted from the machine's start, far into the past */
  cr_assert(ob_watch_count(&watch));
  cr_assert(watch.waited >= 1 && watch.waited <= 1.01, "%g", watch.waited);
}

Test(waits, late_is_after_the_timeout_and_the_grace) {
  static const double waited[] = {9.9, 10.1};
  ob_watch_notice = 1000;
  for (int k = 0; k < 2; k++) {
    struct ob_watch watch = {.waited = waited[k]};
    onebit_comm_t comm = self_comm();
    comm->timeout = 8;
    check_case("%g s", waited[k]);
    CHECK_STATUS(ob_watch_look(&watch, comm, 2, describe_nothing, NULL),
                 k ? ONEBIT_ERROR_TRANSPORT : ONEBIT_OK);
    onebit_comm_destroy(comm);
  }
}

/* A rank that waits for a lost rank is at an earlier step than the ranks that wait for this rank.
 * It must therefore time out first. */
Test(waits, the_grace_grows_with_the_step) {
  onebit_comm_t comm = self_comm();
  onebit_plan_t plan = NULL;
  cr_assert_eq(onebit_plan_create(comm, 100, NULL, &plan), ONEBIT_OK);
  const double timeouts[] = {0.5, 1, 8};
  for (size_t k = 0; k < 3; k++) {
    comm->timeout = timeouts[k];
    const double longest = timeouts[k] / 2 < 1 ? timeouts[k] / 2 : 1;
    double before = -1;
    for (plan->flight->step = 0; plan->flight->step <= plan->step_count; plan->flight->step++) {
      const double grace = ob_steps_grace(plan);
      cr_assert(grace > before && grace < longest, "%g s after %g s", grace, before);
      before = grace;
    }
  }
  plan->flight->step = 0;
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
}

/* --- Survivors ---------------------------------------------------------------------------------*/

static void go_on_without_lost_rank(onebit_comm_t comm, void *context) {
  int lost = *(const int *)context, rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  onebit_comm_t survivors = NULL;
  float mine = (float)rank, mean = 0;
  if (rank == lost)
    return;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_ERROR_TRANSPORT);
  if (!CHECK_STATUS(onebit_comm_shrink(comm, &survivors), ONEBIT_OK))
    return;
  CHECK(onebit_comm_size(survivors) == size - 1, "%d ranks", onebit_comm_size(survivors));
  CHECK(onebit_comm_rank(survivors) == rank - (rank > lost), "rank %d",
        onebit_comm_rank(survivors));
  CHECK(onebit_comm_hosts(survivors) == 2, "%d hosts", onebit_comm_hosts(survivors));
  options.wire = ONEBIT_WIRE_DENSE;
  CHECK_STATUS(onebit_plan_create(survivors, 1, &options, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(&mine, &mean, plan), ONEBIT_OK);
  float sum = (float)(size * (size - 1) / 2 - lost);
  CHECK(mean > sum / (float)(size - 1) - 1e-3f && mean < sum / (float)(size - 1) + 1e-3f,
        "the mean is %g", (double)mean);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  onebit_comm_destroy(survivors);
}

Test(waits, survivors_go_on) {
  for (int lost = 0; lost < 4; lost++)
    on_hosts(4, 2, go_on_without_lost_rank, &lost);
}

/* One rank is alive but calls onebit_comm_shrink too late. */
static void shrink_with_late_rank(onebit_comm_t comm, void *context) {
  onebit_comm_t survivors = NULL;
  if (onebit_comm_rank(comm) == 2)
    pthread_barrier_wait(context);
  onebit_status_t status = onebit_comm_shrink(comm, &survivors);
  if (onebit_comm_rank(comm) == 2) {
    CHECK(status == ONEBIT_ERROR_TRANSPORT && !survivors, "%s", onebit_status_string(status));
    CHECK_WORDS("have already continued without it");
  } else {
    CHECK(status == ONEBIT_OK && onebit_comm_size(survivors) == 2, "%s",
          onebit_status_string(status));
    pthread_barrier_wait(context);
  }
  onebit_comm_destroy(survivors);
}

Test(waits, a_survivor_that_comes_late_is_left_out) {
  setenv("ONEBIT_TIMEOUT", "2", 1); /* the time within which the other rank must arrive */
  pthread_barrier_init(&barrier, NULL, 3);
  on_ranks(3, shrink_with_late_rank, &barrier);
}
