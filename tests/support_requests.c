/* Scenarios with many requests in flight, and with a rank that the others wait for. */
#include "tests/support_requests.h"

#include <sched.h>

#include "collectives/communicator.h"

/* Returns the case of plan k. The plans differ, so that the results are wrong if a plan gets
 * another plan's message. */
static struct collective_case flight_case(int size, int k) {
  static const size_t counts[] = {1, 33, 4097, 0, 1000, 20011};
  struct collective_case what = {.size = size,
                                 .steps = FLIGHT_STEPS,
                                 .count = counts[k % 6],
                                 .options = EXCHANGE_OPTIONS_INIT};
  what.options.operation = (onebit_operation_t)(k % 3);
  what.options.dtype = (onebit_dtype_t)(k / 2 % 3);
  what.options.block_size = k % 4 == 3 ? ONEBIT_BLOCK_BUFFER : (size_t)32 << k % 4;
  if (k == 6)
    what.options.wire = ONEBIT_WIRE_DENSE;
  if (k == 9) {
    what.options.profile = ONEBIT_PROFILE_DEEPSPEED;
    what.options.block_size = 0;
    what.count = 1000;
  }
  return what;
}

/* Returns the case of plan k on several hosts. Messages are small, so that the shared memory for a
 * host's inputs is used several times in a call. */
static struct collective_case schedule_case(int size, int hosts, int k) {
  struct collective_case what = flight_case(size, k);
  what.hosts = hosts;
  what.options.operation = ONEBIT_ALLREDUCE;
  what.options.profile = ONEBIT_PROFILE_DEFAULT;
  what.options.schedule = (onebit_schedule_t)(ONEBIT_SCHEDULE_EXCHANGE + k % 3);
  what.options.block_size = (size_t)32 << k % 4;
  what.options.chunk_size = what.count < 20000 ? 128 : 1024;
  return what;
}

struct flight *flight_prepare_hosts(int size, int hosts) {
  struct flight *flight = allocate(1, sizeof *flight);
  flight->size = size;
  for (int k = 0; k < FLIGHT_PLANS; k++) {
    struct collective_case what = hosts ? schedule_case(size, hosts, k) : flight_case(size, k);
    flight->runs[k] = collective_prepare(&what);
  }
  return flight;
}

struct flight *flight_prepare(int size) {
  return flight_prepare_hosts(size, 0);
}

void flight_release(struct flight *flight) {
  for (int k = 0; k < FLIGHT_PLANS; k++)
    collective_release(&flight->runs[k]);
  free(flight);
}

static void start_request(struct rank_plan *rank_plan, int step) {
  rank_plan_fill(rank_plan, step);
  CHECK_STATUS(start_collective(rank_plan->run->what.options.operation, rank_plan->send,
                                rank_plan->receive, rank_plan->plan, &rank_plan->request),
               ONEBIT_OK);
  CHECK(rank_plan->request != NULL, "a request was started and is NULL");
}

static void check_result(const struct rank_plan *rank_plan, int step) {
  CHECK(rank_plan->request == NULL, "a finished request is not NULL");
  rank_plan_check(rank_plan, step);
}

static void create_plans(struct rank_plan *plans, const struct flight *flight, onebit_comm_t comm) {
  for (int k = 0; k < FLIGHT_PLANS; k++)
    rank_plan_create(&plans[k], comm, &flight->runs[k]);
}

static void finish_plans(struct rank_plan *plans) {
  for (int k = 0; k < FLIGHT_PLANS; k++)
    rank_plan_finish(&plans[k]);
}

/* Returns the i-th plan in a rank's order of plans at a step. Each order contains every plan, since
 * 5 and 7 have no common factor with FLIGHT_PLANS. */
static int plan_in_order(int i, int rank, int step) {
  return (i * (rank % 2 ? 5 : 7) + rank * 3 + step) % FLIGHT_PLANS;
}

void waited_in_any_order(onebit_comm_t comm, void *context) {
  struct rank_plan plans[FLIGHT_PLANS];
  check_case("waited for in any order");
  create_plans(plans, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    for (int k = 0; k < FLIGHT_PLANS; k++)
      start_request(&plans[k], step);
    for (int i = 0; i < FLIGHT_PLANS; i++) {
      struct rank_plan *rank_plan = &plans[plan_in_order(i, onebit_comm_rank(comm), step)];
      CHECK_STATUS(onebit_wait(&rank_plan->request), ONEBIT_OK);
      check_result(rank_plan, step);
    }
  }
  finish_plans(plans);
}

/* Tests each unfinished request once. Returns how many are left. */
static int test_requests(struct rank_plan *plans, bool *finished, int step) {
  int left = 0;
  for (int k = 0; k < FLIGHT_PLANS; k++) {
    if (finished[k])
      continue;
    onebit_status_t status = onebit_test(&plans[k].request);
    finished[k] = status != ONEBIT_IN_PROGRESS;
    left += !finished[k];
    if (!finished[k])
      CHECK(plans[k].request != NULL, "a request in progress became NULL");
    else if (CHECK_STATUS(status, ONEBIT_OK))
      check_result(&plans[k], step);
  }
  return left;
}

void started_in_any_order_and_tested(onebit_comm_t comm, void *context) {
  struct rank_plan plans[FLIGHT_PLANS];
  check_case("started in any order");
  create_plans(plans, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    bool finished[FLIGHT_PLANS] = {false};
    for (int i = 0; i < FLIGHT_PLANS; i++)
      start_request(&plans[plan_in_order(i, onebit_comm_rank(comm), step)], step);
    while (test_requests(plans, finished, step) > 0)
      sched_yield();
  }
  finish_plans(plans);
}

void moved_by_progress(onebit_comm_t comm, void *context) {
  struct rank_plan plans[FLIGHT_PLANS];
  check_case("moved by progress");
  create_plans(plans, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    for (int k = 0; k < FLIGHT_PLANS; k++)
      start_request(&plans[k], step);
    for (int turn = 0; turn < 50; turn++) {
      CHECK_STATUS(onebit_progress(comm), ONEBIT_OK);
      sched_yield();
    }
    for (int k = FLIGHT_PLANS - 1; k >= 0; k--) {
      CHECK_STATUS(onebit_wait(&plans[k].request), ONEBIT_OK);
      check_result(&plans[k], step);
    }
  }
  finish_plans(plans);
}

/* Checks all calls that a plan with a request in flight must refuse. */
static void check_refusals(struct rank_plan *rank_plan) {
  onebit_operation_t operation = rank_plan->run->what.options.operation;
  onebit_request_t second = rank_plan->request;
  float *errors = allocate(rank_plan->run->oracle->elements, sizeof *errors);
  CHECK_STATUS(
      start_collective(operation, rank_plan->send, rank_plan->receive, rank_plan->plan, &second),
      ONEBIT_ERROR_BUSY);
  CHECK(second == NULL, "a call that failed left a request");
  CHECK_STATUS(call_collective(operation, rank_plan->send, rank_plan->receive, rank_plan->plan),
               ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_destroy(rank_plan->plan), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_export_residual(rank_plan->plan, errors, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_import_residual(rank_plan->plan, errors, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_reset_residual(rank_plan->plan), ONEBIT_ERROR_BUSY);
  free(errors);
}

void busy_plans_refuse(onebit_comm_t comm, void *context) {
  struct rank_plan plans[FLIGHT_PLANS];
  check_case("busy plans");
  create_plans(plans, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++)
    for (int k = 0; k < FLIGHT_PLANS; k++) {
      start_request(&plans[k], step);
      check_refusals(&plans[k]);
      CHECK_STATUS(onebit_wait(&plans[k].request), ONEBIT_OK);
      check_result(&plans[k], step);
    }
  finish_plans(plans);
}

void late_rank_is_waited_for(onebit_comm_t comm, void *context) {
  struct flight *flight = context;
  struct rank_plan rank_plan;
  int rank = onebit_comm_rank(comm), late = flight->size - 1;
  check_case("rank %d is late", late);
  rank_plan_create(&rank_plan, comm, &flight->runs[5]);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    if (rank != late) {
      start_request(&rank_plan, step);
      for (int turn = 0; turn < 10; turn++)
        CHECK_STATUS(onebit_test(&rank_plan.request), ONEBIT_IN_PROGRESS);
    }
    synchronize_ranks(comm); /* creates, uses and destroys another plan */
    if (rank == late)
      start_request(&rank_plan, step);
    CHECK_STATUS(onebit_wait(&rank_plan.request), ONEBIT_OK);
    check_result(&rank_plan, step);
  }
  CHECK_STATUS(onebit_wait(&rank_plan.request), ONEBIT_OK); /* the request is NULL: returns at
                                                             * once */
  CHECK_STATUS(onebit_test(&rank_plan.request), ONEBIT_OK);
  rank_plan_finish(&rank_plan);
}

static void *call_in_thread(void *argument) {
  struct rank_plan *rank_plan = argument;
  check_rank(rank_plan->rank);
  check_case("threads share a communicator, plan of %zu elements", rank_plan->run->what.count);
  for (int step = 0; step < FLIGHT_STEPS; step++)
    if (step % 2) {
      start_request(rank_plan, step);
      CHECK_STATUS(onebit_wait(&rank_plan->request), ONEBIT_OK);
      check_result(rank_plan, step);
    } else {
      rank_plan_call(rank_plan, step);
    }
  return NULL;
}

#define THREADS 3
void threads_share_a_communicator(onebit_comm_t comm, void *context) {
  struct flight *flight = context;
  struct rank_plan plans[THREADS];
  pthread_t threads[THREADS];
  for (int k = 0; k < THREADS; k++)
    rank_plan_create(&plans[k], comm, &flight->runs[2 * k + 1]);
  for (int k = 0; k < THREADS; k++)
    if (!CHECK(pthread_create(&threads[k], NULL, call_in_thread, &plans[k]) == 0, "no thread"))
      abort(); /* ends the process, since the other ranks would wait for ever */
  for (int k = 0; k < THREADS; k++)
    pthread_join(threads[k], NULL);
  for (int k = 0; k < THREADS; k++)
    rank_plan_finish(&plans[k]);
}

void flights_over(on_transport *on) {
  static rank_body *const scenarios[] = {waited_in_any_order, started_in_any_order_and_tested,
                                         moved_by_progress, late_rank_is_waited_for,
                                         threads_share_a_communicator};
  struct flight *plain = flight_prepare(3), *hosts = flight_prepare_hosts(4, 2);
  for (size_t k = 0; k < sizeof scenarios / sizeof scenarios[0]; k++) {
    on(3, 1, scenarios[k], plain);
    on(4, 2, scenarios[k], hosts);
  }
  flight_release(plain);
  flight_release(hosts);
}

/* ---- A missing rank ---- */

#define WAIT_TIMEOUT 0.5

const struct wait_case wait_cases[] = {
    {"exchange", 3, 3, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 5000},
    {"allgather", 3, 3, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 5000},
    {"doubling", 8, 8, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 300},
    {"hierarchical", 4, 2, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS, 5000},
    {"dense", 3, 3, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_DENSE, 5000},
};
const size_t wait_cases_count = sizeof wait_cases / sizeof wait_cases[0];

static bool make_plan(onebit_comm_t comm, const struct wait_case *test, onebit_plan_t *plan) {
  onebit_plan_options_t options = {
      .size = sizeof options, .schedule = test->schedule, .wire = test->wire, .chunk_size = 2048};
  return CHECK_STATUS(onebit_plan_create(comm, test->count, &options, plan), ONEBIT_OK);
}

static onebit_status_t call_allreduce(const struct wait_run *run, const float *from, float *to,
                                      onebit_plan_t plan) {
  onebit_request_t request;
  if (run->blocking)
    return onebit_allreduce(from, to, plan);
  onebit_status_t status = onebit_iallreduce(from, to, plan, &request);
  return status == ONEBIT_OK ? onebit_wait(&request) : status;
}

/* Waits until the other ranks have got their errors. If ranks are processes, their state cannot be
 * read, so the function sleeps for twice the timeout. */
static void wait_for_errors(const struct wait_run *run, int others) {
  for (int k = 0; atomic_load(&run->done) < others; k++) {
    if (!run->one_process && k >= (int)(2e3 * WAIT_TIMEOUT))
      return;
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
}

/* Does what run->fault says on the missing rank. */
static void act_as_missing_rank(onebit_comm_t comm, const struct wait_run *run, const float *from,
                                float *to, onebit_plan_t other) {
  if (run->fault == WAIT_ABORTS)
    CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  if (run->fault == WAIT_IS_AWAY)
    wait_for_errors(run, onebit_comm_size(comm) - 1);
  if (run->fault != WAIT_LEAVES)
    CHECK_STATUS(call_allreduce(run, from, to, other), ONEBIT_ERROR_TRANSPORT);
}

/* Checks a rank's error. On a busy machine a rank may time out while it waits for a rank that
 * itself waits for the missing one. Its message then names the rank that it waits for, not the
 * missing rank. */
static void check_error(onebit_comm_t comm, struct wait_run *run, onebit_status_t status) {
  int missed = onebit_comm_size(comm) - 1;
  char name[64];
  snprintf(name, sizeof name, run->fault == WAIT_ABORTS ? "rank %d called" : "rank %d", missed);
  CHECK(status == ONEBIT_ERROR_TRANSPORT, "%s", onebit_status_string(status));
  CHECK_WORDS(run->fault == WAIT_ABORTS ? name : "rank ");
  if (strstr(onebit_last_error(), name))
    atomic_fetch_add(&run->named, 1);
}

static void call_without_rank(onebit_comm_t comm, struct wait_run *run, const float *from,
                              float *to, onebit_plan_t plan, onebit_plan_t other) {
  comm->timeout = WAIT_TIMEOUT; /* earlier calls may take longer on a busy machine */
  if (onebit_comm_rank(comm) == onebit_comm_size(comm) - 1) {
    act_as_missing_rank(comm, run, from, to, other);
    return;
  }
  check_error(comm, run, call_allreduce(run, from, to, plan));
  atomic_fetch_add(&run->done, 1);
  CHECK_STATUS(call_allreduce(run, from, to, plan), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(call_allreduce(run, from, to, other), ONEBIT_ERROR_TRANSPORT);
}

void wait_on_rank(onebit_comm_t comm, void *context) {
  struct wait_run *run = context;
  float *from = allocate(run->test->count, sizeof *from);
  float *to = allocate(run->test->count, sizeof *to);
  onebit_plan_t plan = NULL, other = NULL;
  check_case("%s, fault %d, blocking %d", run->test->name, (int)run->fault, run->blocking);
  fill_input(from, ONEBIT_FLOAT32, run->test->count, onebit_comm_rank(comm), 0);
  if (make_plan(comm, run->test, &plan) && make_plan(comm, run->test, &other)) {
    for (int k = 0; k < 2; k++)
      CHECK_STATUS(call_allreduce(run, from, to, plan), ONEBIT_OK);
    run->wait_for_all();
    call_without_rank(comm, run, from, to, plan, other);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(other), ONEBIT_OK);
  free(from);
  free(to);
}
