/*
 * Tests communicators over the caller's callbacks. Results have the bits of loopback communicators.
 * Whatever the callbacks do, each rank gets a status, no rank hangs, and each operation is
 * completed or cancelled.
 */
#include "base/memory.h"
#include "base/process.h"
#include "tests/support_errors.h"
#include "tests/support_requests.h"
#include "tests/support_transports.h"

/* The largest number of elements. The callbacks' mailbox is a list, which is slow with thousands of
 * messages. */
#define MOST_ELEMENTS 5000

Test(custom, collectives_equal_the_oracle) { collectives_over("custom", on_custom, MOST_ELEMENTS); }

Test(custom, requests_in_flight) { flights_over(on_custom); }

Test(custom, mistakes_are_told_to_all) {
  for (int rank = 0; rank < 3; rank += 2) {
    struct culprit culprit = {.rank = rank};
    on_custom(3, 1, wrong_buffers_on_one_rank, &culprit);
    on_custom(3, 1, wrong_plan_on_one_rank, &culprit);
    on_custom(3, 1, wrong_learning_rate_on_one_rank, &culprit);
    on_custom(3, 1, other_plan_on_one_rank, &culprit);
  }
}

static void check_description(onebit_comm_t comm, void *context) {
  onebit_plan_t plan = NULL;
  (void)context;
  CHECK(onebit_comm_size(comm) == 4 && onebit_comm_hosts(comm) == 2, "%d ranks on %d hosts",
        onebit_comm_size(comm), onebit_comm_hosts(comm));
  CHECK_STATUS(onebit_plan_create(comm, 5, NULL, &plan), ONEBIT_OK);
  const onebit_plan_info_t info = plan_info(plan);
  CHECK(strcmp(info.transport, "custom") == 0, "transport \"%s\"", info.transport);
  CHECK(!ob_machine_number() || strstr(onebit_plan_explain(plan), "; all hosts share "), "%s",
        onebit_plan_explain(plan));
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static void check_one_host(onebit_comm_t comm, void *context) {
  onebit_plan_t plan = NULL;
  (void)context;
  CHECK_STATUS(onebit_plan_create(comm, 5, NULL, &plan), ONEBIT_OK);
  CHECK(!strstr(onebit_plan_explain(plan), "share"), "%s", onebit_plan_explain(plan));
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(custom, says_who_is_there) {
  setenv("ONEBIT_TUNING", "none", 1);
  on_custom(4, 2, check_description, NULL);
  on_custom(4, 1, check_one_host, NULL);
}

/* --- Mistakes of one rank ----------------------------------------------------------------------*/

/* Makes a mistake on one rank. That rank must get an error message about it, and the others an
 * error. */
static void make_mistake_on_one(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                                void *context) {
  onebit_comm_t comm = NULL;
  onebit_transport_callbacks_t mine = *callbacks;
  const char *what = context;
  onebit_status_t wanted = ONEBIT_ERROR_MISMATCH;
  if (rank == 1 && strcmp(what, "largest_tag") == 0)
    mine.largest_tag = 5;
  if (strcmp(what, "timeout") == 0) {
    wanted = rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER;
    mine.timeout = rank == 1 ? -1 : 0;
  }
  CHECK_STATUS(onebit_comm_create_custom(&mine, rank, size, &comm), wanted);
  CHECK_WORDS(wanted == ONEBIT_ERROR_PEER ? "rank 1" : what);
  CHECK(!comm, "a communicator came of it");
}

Test(custom, a_mistake_on_one_rank) {
  static char tag[] = "largest_tag", timeout[] = "timeout";
  try_on_custom(3, 1, (struct custom_fault){0}, make_mistake_on_one, tag);
  try_on_custom(3, 1, (struct custom_fault){0}, make_mistake_on_one, timeout);
}

/* A rank whose callbacks do not work cannot notify the others, which wait until their timeout. */
static void break_callbacks_on_one(const onebit_transport_callbacks_t *callbacks, int rank,
                                   int size, void *context) {
  onebit_comm_t comm = NULL;
  onebit_transport_callbacks_t mine = *callbacks;
  (void)context;
  if (rank == 1)
    mine.test = NULL;
  CHECK_STATUS(onebit_comm_create_custom(&mine, rank, size, &comm),
               rank == 1 ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS(rank == 1 ? "test is NULL" : "waited 1 s for rank 1");
}

Test(custom, useless_callbacks_on_one_rank) {
  try_on_custom(3, 1, (struct custom_fault){.quiet = true}, break_callbacks_on_one, NULL);
}

/* --- Failures ----------------------------------------------------------------------------------*/

#define COUNT 9000

/* A rank's first failure, if any. */
struct outcome {
  onebit_status_t status;
  bool made;
  char words[256];
};

/* Records a rank's first failure and its error message. Messages of later failures depend on the
 * messages that other ranks sent, and so on the order of threads. */
static void note_outcome(struct outcome *outcome, onebit_status_t status) {
  if (outcome->status != ONEBIT_OK || status == ONEBIT_OK)
    return;
  outcome->status = status;
  strncpy(outcome->words, onebit_last_error(), sizeof outcome->words - 1);
}

/* Creates two plans, and makes two calls on each of them at the same time. */
static void use_plans(onebit_comm_t comm, struct outcome *outcome) {
  static const float input[COUNT] = {1.0f, -2.0f};
  onebit_plan_options_t options = {
      .size = sizeof options, .schedule = ONEBIT_SCHEDULE_EXCHANGE, .chunk_size = 2048};
  float *result = allocate(2 * COUNT, sizeof *result);
  onebit_plan_t plans[2] = {NULL, NULL};
  for (int k = 0; k < 2 && outcome->status == ONEBIT_OK; k++)
    note_outcome(outcome, onebit_plan_create(comm, COUNT, &options, &plans[k]));
  for (int step = 0; step < 2 && outcome->status == ONEBIT_OK; step++) {
    onebit_request_t requests[2] = {NULL, NULL};
    for (int k = 0; k < 2; k++)
      onebit_iallreduce(input, result + k * COUNT, plans[k], &requests[k]);
    for (int k = 0; k < 2; k++)
      note_outcome(outcome, onebit_wait(&requests[k]));
  }
  CHECK_STATUS(onebit_plan_destroy(plans[0]), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plans[1]), ONEBIT_OK);
  free(result);
}

static void create_and_use(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                           void *context) {
  struct outcome *outcome = (struct outcome *)context + rank;
  onebit_comm_t comm = NULL;
  note_outcome(outcome, onebit_comm_create_custom(callbacks, rank, size, &comm));
  outcome->made = comm != NULL;
  CHECK(outcome->made == (outcome->status == ONEBIT_OK), "status and handle do not agree");
  if (comm)
    use_plans(comm, outcome);
  /* A communicator that has failed once must refuse all calls. */
  if (comm && outcome->status != ONEBIT_OK) {
    onebit_plan_t plan;
    CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_ERROR_TRANSPORT);
    CHECK_WORDS("has failed before");
  }
  onebit_comm_destroy(comm);
}

static long run_with_fault(struct custom_fault fault) {
  struct outcome outcomes[3] = {{0}};
  check_case("call %ld of kind %d on rank %d fails%s", fault.at, (int)fault.call, fault.rank,
             fault.quiet ? ", quietly" : "");
  long calls = try_on_custom(3, 1, fault, create_and_use, outcomes);
  bool struck = fault.at > 0 && calls >= fault.at;
  for (int rank = 0; rank < 3; rank++) {
    onebit_status_t status = outcomes[rank].status;
    if (!struck)
      CHECK(status == ONEBIT_OK, "rank %d: %s", rank, outcomes[rank].words);
    else /* the other ranks may have completed the last call */
      CHECK(status == ONEBIT_ERROR_TRANSPORT || (status == ONEBIT_OK && rank != fault.rank),
            "rank %d: %s: %s", rank, onebit_status_string(status), outcomes[rank].words);
  }
  if (struck)
    CHECK(strstr(outcomes[fault.rank].words, fault.quiet ? "returned -77" : "the wire was cut") ||
              strstr(outcomes[fault.rank].words, "the other end has gone"),
          "the message is \"%s\"", outcomes[fault.rank].words);
  return calls;
}

static void fail_at_every_call(enum custom_call call, long limit) {
  struct custom_fault fault = {.call = call, .rank = 1};
  long calls = run_with_fault(fault);
  if (calls > limit)
    calls = limit;
  for (fault.at = 1; fault.at <= calls; fault.at++)
    if (sample_has((size_t)fault.at - 1, (size_t)calls))
      run_with_fault(fault);
  checks_must_hold();
}

Test(custom, any_send_fails) { fail_at_every_call(CUSTOM_SEND, 1000); }
Test(custom, any_receive_fails) { fail_at_every_call(CUSTOM_RECEIVE, 1000); }
/* The number of calls of the callback `test` depends on the speed of other ranks, but always
 * reaches 40. */
Test(custom, any_test_fails) { fail_at_every_call(CUSTOM_TEST, 40); }

/* Checks that a failure of the first call of a callback gives an error on all ranks. */
static void check_all_fail(struct custom_fault fault) {
  struct outcome outcomes[3] = {{0}};
  try_on_custom(3, 1, fault, create_and_use, outcomes);
  for (int rank = 0; rank < 3; rank++)
    CHECK(outcomes[rank].status == ONEBIT_ERROR_TRANSPORT, "rank %d: %s", rank,
          onebit_status_string(outcomes[rank].status));
  CHECK(strstr(outcomes[fault.rank].words, fault.quiet ? "returned -77" : "the wire was cut"),
        "the message is \"%s\"", outcomes[fault.rank].words);
}

Test(custom, a_failure_reaches_all) {
  for (int quiet = 0; quiet < 2; quiet++)
    for (int rank = 0; rank < 3; rank++) {
      check_all_fail(
          (struct custom_fault){.call = CUSTOM_SEND, .rank = rank, .at = 1, .quiet = quiet});
      check_all_fail(
          (struct custom_fault){.call = CUSTOM_RECEIVE, .rank = rank, .at = 1, .quiet = quiet});
    }
}

Test(custom, a_message_that_is_too_long) {
  struct outcome outcomes[2] = {{0}};
  try_on_custom(2, 1, (struct custom_fault){CUSTOM_SEND, 0, 1, false, true}, create_and_use,
                outcomes);
  CHECK(outcomes[1].status == ONEBIT_ERROR_TRANSPORT &&
            strstr(outcomes[1].words, "longer than expected"),
        "%s: %s", onebit_status_string(outcomes[1].status), outcomes[1].words);
  CHECK(outcomes[0].status == ONEBIT_ERROR_TRANSPORT, "rank 0: %s",
        onebit_status_string(outcomes[0].status));
}

static int receive_nothing(void *context, void *data, size_t bytes, int peer, int tag,
                           void **operation) {
  (void)context, (void)data, (void)bytes, (void)peer, (void)tag, (void)operation;
  return 0;
}

/* A callback reports success without an operation, as if the message had already arrived. */
static void receive_without_operation(const onebit_transport_callbacks_t *callbacks, int rank,
                                      int size, void *context) {
  onebit_comm_t comm = NULL;
  onebit_transport_callbacks_t mine = *callbacks;
  (void)context;
  if (rank == 1)
    mine.receive = receive_nothing;
  CHECK_STATUS(onebit_comm_create_custom(&mine, rank, size, &comm), ONEBIT_ERROR_TRANSPORT);
  if (rank == 1)
    CHECK_WORDS("receive callback for rank 0 has not set *operation");
}

Test(custom, a_receive_without_an_operation) {
  try_on_custom(2, 1, (struct custom_fault){0}, receive_without_operation, NULL);
}

/* --- Memory ------------------------------------------------------------------------------------*/

static void create_only(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                        void *context) {
  onebit_status_t *statuses = context;
  onebit_comm_t comm = NULL;
  statuses[rank] = onebit_comm_create_custom(callbacks, rank, size, &comm);
  onebit_comm_destroy(comm);
}

Test(custom, any_allocation_fails) {
  onebit_status_t statuses[2] = {ONEBIT_ERROR_MEMORY, ONEBIT_OK};
  long n = 0;
  while (statuses[0] != ONEBIT_OK || statuses[1] != ONEBIT_OK) {
    ob_memory_fail_at(++n);
    try_on_custom(2, 1, (struct custom_fault){0}, create_only, statuses);
    ob_memory_fail_at(0);
    check_case("allocation %ld", n);
    CHECK((statuses[0] == ONEBIT_OK) == (statuses[1] == ONEBIT_OK), "%s and %s",
          onebit_status_string(statuses[0]), onebit_status_string(statuses[1]));
  }
  CHECK(n > 10, "only %ld allocations", n);
}
