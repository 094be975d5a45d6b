/* A rank that is missed by the others. */
#include "tests/support_waits.h"

#include "collectives/communicator.h"

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

/* Waits until the others have their errors, which in other processes takes at most twice the
 * timeout. */
static void stay_away(const struct wait_run *run, int others) {
  for (int k = 0; k < (int)(2e3 * WAIT_TIMEOUT) && atomic_load(&run->done) < others; k++)
    nanosleep(&(struct timespec){0, 1000000}, NULL);
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

static void check_error(onebit_comm_t comm, const struct wait_run *run, onebit_status_t status) {
  int missed = onebit_comm_size(comm) - 1;
  char name[64];
  snprintf(name, sizeof name, run->fault == WAIT_ABORTS ? "rank %d called" : "rank %d", missed);
  CHECK(status == ONEBIT_ERROR_TRANSPORT, "%s", onebit_status_string(status));
  CHECK_WORDS(name);
}

static void miss_a_rank(onebit_comm_t comm, struct wait_run *run, const float *from, float *to,
                        onebit_plan_t plan, onebit_plan_t other) {
  comm->timeout = WAIT_TIMEOUT; /* what was before may take longer on a busy machine */
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
