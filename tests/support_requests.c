/* The scenarios of requests in flight, and of a rank that the others miss. */
#include "tests/support_requests.h"

#include <sched.h>

#include "collectives/communicator.h"

/* Different in kind, so that a message that strays into another plan is noticed. */
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

/* Small messages, so that windows of a host's inputs wrap. */
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

static void start(struct seat *seat, int step) {
  seat_fill(seat, step);
  CHECK_STATUS(start_collective(seat->run->what.options.operation, seat->send, seat->receive,
                                seat->plan, &seat->request),
               ONEBIT_OK);
  CHECK(seat->request != NULL, "a request was started and is NULL");
}

static void check_result(const struct seat *seat, int step) {
  CHECK(seat->request == NULL, "a finished request is not NULL");
  seat_check(seat, step);
}

static void take_seats(struct seat *seats, const struct flight *flight, onebit_comm_t comm) {
  for (int k = 0; k < FLIGHT_PLANS; k++)
    seat_take(&seats[k], comm, &flight->runs[k]);
}

static void leave_seats(struct seat *seats) {
  for (int k = 0; k < FLIGHT_PLANS; k++)
    seat_leave(&seats[k]);
}

/* The i-th plan in the order of a rank at a step. 5 and 7 share no factor with FLIGHT_PLANS: each
 * order is a full one. */
static int in_order(int i, int rank, int step) {
  return (i * (rank % 2 ? 5 : 7) + rank * 3 + step) % FLIGHT_PLANS;
}

void waited_in_any_order(onebit_comm_t comm, void *context) {
  struct seat seats[FLIGHT_PLANS];
  check_case("waited for in any order");
  take_seats(seats, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    for (int k = 0; k < FLIGHT_PLANS; k++)
      start(&seats[k], step);
    for (int i = 0; i < FLIGHT_PLANS; i++) {
      struct seat *seat = &seats[in_order(i, onebit_comm_rank(comm), step)];
      CHECK_STATUS(onebit_wait(&seat->request), ONEBIT_OK);
      check_result(seat, step);
    }
  }
  leave_seats(seats);
}

/* Tests all requests that are not finished once; how many are left. */
static int test_all(struct seat *seats, bool *finished, int step) {
  int left = 0;
  for (int k = 0; k < FLIGHT_PLANS; k++) {
    if (finished[k])
      continue;
    onebit_status_t status = onebit_test(&seats[k].request);
    finished[k] = status != ONEBIT_IN_PROGRESS;
    left += !finished[k];
    if (!finished[k])
      CHECK(seats[k].request != NULL, "a request in progress became NULL");
    else if (CHECK_STATUS(status, ONEBIT_OK))
      check_result(&seats[k], step);
  }
  return left;
}

void started_in_any_order_and_tested(onebit_comm_t comm, void *context) {
  struct seat seats[FLIGHT_PLANS];
  check_case("started in any order");
  take_seats(seats, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    bool finished[FLIGHT_PLANS] = {false};
    for (int i = 0; i < FLIGHT_PLANS; i++)
      start(&seats[in_order(i, onebit_comm_rank(comm), step)], step);
    while (test_all(seats, finished, step) > 0)
      sched_yield();
  }
  leave_seats(seats);
}

void moved_by_progress(onebit_comm_t comm, void *context) {
  struct seat seats[FLIGHT_PLANS];
  check_case("moved by progress");
  take_seats(seats, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    for (int k = 0; k < FLIGHT_PLANS; k++)
      start(&seats[k], step);
    for (int turn = 0; turn < 50; turn++) {
      CHECK_STATUS(onebit_progress(comm), ONEBIT_OK);
      sched_yield();
    }
    for (int k = FLIGHT_PLANS - 1; k >= 0; k--) {
      CHECK_STATUS(onebit_wait(&seats[k].request), ONEBIT_OK);
      check_result(&seats[k], step);
    }
  }
  leave_seats(seats);
}

/* Everything that a plan with a request in flight must refuse. */
static void check_refusals(struct seat *seat) {
  onebit_operation_t operation = seat->run->what.options.operation;
  onebit_request_t second = seat->request;
  float *errors = allocate(seat->run->oracle->elements, sizeof *errors);
  CHECK_STATUS(start_collective(operation, seat->send, seat->receive, seat->plan, &second),
               ONEBIT_ERROR_BUSY);
  CHECK(second == NULL, "a call that failed left a request");
  CHECK_STATUS(call_collective(operation, seat->send, seat->receive, seat->plan),
               ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_destroy(seat->plan), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_export_residual(seat->plan, errors, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_import_residual(seat->plan, errors, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_reset_residual(seat->plan), ONEBIT_ERROR_BUSY);
  free(errors);
}

void busy_plans_refuse(onebit_comm_t comm, void *context) {
  struct seat seats[FLIGHT_PLANS];
  check_case("busy plans");
  take_seats(seats, context, comm);
  for (int step = 0; step < FLIGHT_STEPS; step++)
    for (int k = 0; k < FLIGHT_PLANS; k++) {
      start(&seats[k], step);
      check_refusals(&seats[k]);
      CHECK_STATUS(onebit_wait(&seats[k].request), ONEBIT_OK);
      check_result(&seats[k], step);
    }
  leave_seats(seats);
}

void late_rank_is_waited_for(onebit_comm_t comm, void *context) {
  struct flight *flight = context;
  struct seat seat;
  int rank = onebit_comm_rank(comm), late = flight->size - 1;
  check_case("rank %d is late", late);
  seat_take(&seat, comm, &flight->runs[5]);
  for (int step = 0; step < FLIGHT_STEPS; step++) {
    if (rank != late) {
      start(&seat, step);
      for (int turn = 0; turn < 10; turn++)
        CHECK_STATUS(onebit_test(&seat.request), ONEBIT_IN_PROGRESS);
    }
    meet(comm); /* makes, uses and destroys another plan */
    if (rank == late)
      start(&seat, step);
    CHECK_STATUS(onebit_wait(&seat.request), ONEBIT_OK);
    check_result(&seat, step);
  }
  CHECK_STATUS(onebit_wait(&seat.request), ONEBIT_OK); /* NULL: nothing to wait for */
  CHECK_STATUS(onebit_test(&seat.request), ONEBIT_OK);
  seat_leave(&seat);
}

static void *run_alone(void *argument) {
  struct seat *seat = argument;
  check_rank(seat->rank);
  check_case("threads share a communicator, plan of %zu elements", seat->run->what.count);
  for (int step = 0; step < FLIGHT_STEPS; step++)
    if (step % 2) {
      start(seat, step);
      CHECK_STATUS(onebit_wait(&seat->request), ONEBIT_OK);
      check_result(seat, step);
    } else {
      seat_call(seat, step);
    }
  return NULL;
}

#define PASSENGERS 3
void threads_share_a_communicator(onebit_comm_t comm, void *context) {
  struct flight *flight = context;
  struct seat seats[PASSENGERS];
  pthread_t threads[PASSENGERS];
  for (int k = 0; k < PASSENGERS; k++)
    seat_take(&seats[k], comm, &flight->runs[2 * k + 1]);
  for (int k = 0; k < PASSENGERS; k++)
    if (!CHECK(pthread_create(&threads[k], NULL, run_alone, &seats[k]) == 0, "no thread"))
      abort(); /* the other ranks would wait for ever */
  for (int k = 0; k < PASSENGERS; k++)
    pthread_join(threads[k], NULL);
  for (int k = 0; k < PASSENGERS; k++)
    seat_leave(&seats[k]);
}

void flights_over(on_transport *on, rank_body *scenario) {
  struct flight *flight = flight_prepare(3);
  on(3, 1, scenario, flight);
  flight_release(flight);
  flight = flight_prepare_hosts(4, 2);
  on(4, 2, scenario, flight);
  flight_release(flight);
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

static bool make(onebit_comm_t comm, const struct wait_case *test, onebit_plan_t *plan) {
  onebit_plan_options_t options = {
      .size = sizeof options, .schedule = test->schedule, .wire = test->wire, .chunk_size = 2048};
  return CHECK_STATUS(onebit_plan_create(comm, test->count, &options, plan), ONEBIT_OK);
}

static onebit_status_t call(const struct wait_run *run, const float *from, float *to,
                            onebit_plan_t plan) {
  onebit_request_t request;
  if (run->blocking)
    return onebit_allreduce(from, to, plan);
  onebit_status_t status = onebit_iallreduce(from, to, plan, &request);
  return status == ONEBIT_OK ? onebit_wait(&request) : status;
}

/* Waits until the others have their errors. Of those in other processes nothing is known: they have
 * twice the timeout, and an error too where that is not enough. */
static void stay_away(const struct wait_run *run, int others) {
  for (int k = 0; atomic_load(&run->done) < others; k++) {
    if (!run->one_process && k >= (int)(2e3 * WAIT_TIMEOUT))
      return;
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
}

/* Acts as the missing rank. */
static void misbehave(onebit_comm_t comm, const struct wait_run *run, const float *from, float *to,
                      onebit_plan_t other) {
  if (run->fault == WAIT_ABORTS)
    CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  if (run->fault == WAIT_IS_AWAY)
    stay_away(run, onebit_comm_size(comm) - 1);
  if (run->fault != WAIT_LEAVES)
    CHECK_STATUS(call(run, from, to, other), ONEBIT_ERROR_TRANSPORT);
}

/* On a busy machine a rank may time out before the one that it waits for does: then its message
 * names that rank, and only ranks that wait for the missing rank itself name the missing one. */
static void check_error(onebit_comm_t comm, struct wait_run *run, onebit_status_t status) {
  int missed = onebit_comm_size(comm) - 1;
  char name[64];
  snprintf(name, sizeof name, run->fault == WAIT_ABORTS ? "rank %d called" : "rank %d", missed);
  CHECK(status == ONEBIT_ERROR_TRANSPORT, "%s", onebit_status_string(status));
  CHECK_WORDS(run->fault == WAIT_ABORTS ? name : "rank ");
  if (strstr(onebit_last_error(), name))
    atomic_fetch_add(&run->named, 1);
}

static void miss_a_rank(onebit_comm_t comm, struct wait_run *run, const float *from, float *to,
                        onebit_plan_t plan, onebit_plan_t other) {
  comm->timeout = WAIT_TIMEOUT; /* earlier calls may take longer on a busy machine */
  if (onebit_comm_rank(comm) == onebit_comm_size(comm) - 1) {
    misbehave(comm, run, from, to, other);
    return;
  }
  check_error(comm, run, call(run, from, to, plan));
  atomic_fetch_add(&run->done, 1);
  CHECK_STATUS(call(run, from, to, plan), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(call(run, from, to, other), ONEBIT_ERROR_TRANSPORT);
}

void wait_on_rank(onebit_comm_t comm, void *context) {
  struct wait_run *run = context;
  float *from = allocate(run->test->count, sizeof *from);
  float *to = allocate(run->test->count, sizeof *to);
  onebit_plan_t plan = NULL, other = NULL;
  check_case("%s, fault %d, blocking %d", run->test->name, (int)run->fault, run->blocking);
  fill_input(from, ONEBIT_FLOAT32, run->test->count, onebit_comm_rank(comm), 0);
  if (make(comm, run->test, &plan) && make(comm, run->test, &other)) {
    for (int k = 0; k < 2; k++)
      CHECK_STATUS(call(run, from, to, plan), ONEBIT_OK);
    run->meet();
    miss_a_rank(comm, run, from, to, plan, other);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(other), ONEBIT_OK);
  free(from);
  free(to);
}
