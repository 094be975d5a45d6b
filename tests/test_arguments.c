/*
 * Each argument of each public function wrong once: the call says ONEBIT_ERROR_ARGUMENT, its words
 * name the argument and the value, outputs are NULL and nothing is changed. Here on one rank;
 * test_disagreement.c has what other ranks see.
 */
#include "tests/support_collectives.h"

/* A handle that must not survive a failing creation; never followed. */
#define STALE(type) ((type)(void *)&stale)
static char stale;

/* Where malloc says that there is not so much memory, sanitizers end the program, unless asked not
 * to. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
const char *__tsan_default_options(void) { return "allocator_may_return_null=1"; }

static onebit_comm_t self(void) {
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK, "%s", onebit_last_error());
  return comm;
}

static void check_wrong(onebit_status_t status, const char *name, const char *value) {
  CHECK_STATUS(status, ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS(name);
  CHECK_WORDS(value);
}

Test(arguments, statuses_have_names) {
  static const struct {
    onebit_status_t status;
    const char *name;
  } names[] = {
      {ONEBIT_OK, "ONEBIT_OK"},
      {ONEBIT_IN_PROGRESS, "ONEBIT_IN_PROGRESS"},
      {ONEBIT_SKIPPED, "ONEBIT_SKIPPED"},
      {ONEBIT_ERROR_ARGUMENT, "ONEBIT_ERROR_ARGUMENT"},
      {ONEBIT_ERROR_MISMATCH, "ONEBIT_ERROR_MISMATCH"},
      {ONEBIT_ERROR_MEMORY, "ONEBIT_ERROR_MEMORY"},
      {ONEBIT_ERROR_BUSY, "ONEBIT_ERROR_BUSY"},
      {ONEBIT_ERROR_MESSAGE, "ONEBIT_ERROR_MESSAGE"},
      {ONEBIT_ERROR_PEER, "ONEBIT_ERROR_PEER"},
      {ONEBIT_ERROR_TRANSPORT, "ONEBIT_ERROR_TRANSPORT"},
      {ONEBIT_ERROR_UNSUPPORTED, "ONEBIT_ERROR_UNSUPPORTED"},
      {ONEBIT_ERROR_DEVICE, "ONEBIT_ERROR_DEVICE"},
      {ONEBIT_ERROR_CHECKPOINT, "ONEBIT_ERROR_CHECKPOINT"},
      {ONEBIT_ERROR_FILE, "ONEBIT_ERROR_FILE"},
      {ONEBIT_WARNING, "ONEBIT_WARNING"},
      {(onebit_status_t)3, "unknown status"},
      {(onebit_status_t)-13, "unknown status"},
  };
  for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
    cr_expect_str_eq(onebit_status_string(names[k].status), names[k].name);
}

Test(arguments, no_words_before_the_first_error) { cr_expect_str_eq(onebit_last_error(), ""); }

Test(arguments, version_is_the_headers) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", ONEBIT_VERSION_MAJOR, ONEBIT_VERSION_MINOR,
           ONEBIT_VERSION_PATCH);
  cr_expect_str_eq(onebit_version(), version);
}

Test(arguments, comm_create) {
  onebit_comm_t comms[2] = {STALE(onebit_comm_t), STALE(onebit_comm_t)};
  check_wrong(onebit_comm_create_self(NULL), "comm", "NULL");
  check_wrong(onebit_comm_create_loopback(2, NULL), "comms", "NULL");
  check_wrong(onebit_comm_create_loopback(0, comms), "size", "0");
  check_wrong(onebit_comm_create_loopback(-3, comms), "size", "-3");
  check_wrong(onebit_comm_create_loopback(4097, comms), "size", "4097");
  onebit_comm_destroy(NULL);
}

/* Options that no plan can have. */
#define PLAN(...)                                                                                  \
  { .size = sizeof(onebit_plan_options_t), __VA_ARGS__ }
static const struct {
  const char *name, *value;
  onebit_plan_options_t options;
} wrong_plans[] = {
    {"size", "0", {.size = 0}},
    {"size", "4", {.size = 4}},
    {"operation", "3", PLAN(.operation = (onebit_operation_t)3)},
    {"operation", "-1", PLAN(.operation = (onebit_operation_t)-1)},
    {"dtype", "99", PLAN(.dtype = (onebit_dtype_t)99)},
    {"wire", "2", PLAN(.wire = (onebit_wire_t)2)},
    {"profile", "7", PLAN(.profile = (onebit_profile_t)7)},
    {"scale", "2", PLAN(.scale = (onebit_scale_t)2)},
    {"block_size", "33", PLAN(.block_size = 33)},
    {"block_size", "65568", PLAN(.block_size = 65536 + 32)},
    {"chunk_size", "31", PLAN(.chunk_size = 31)},
    {"chunk_size", "268435488", PLAN(.chunk_size = ((size_t)1 << 28) + 32)},
    {"threads", "-1", PLAN(.threads = -1)},
    {"profile", "1", PLAN(.profile = ONEBIT_PROFILE_DEEPSPEED, .operation = ONEBIT_ALLGATHER)},
    {"profile", "2", PLAN(.profile = ONEBIT_PROFILE_DEEPSPEED, .operation = ONEBIT_REDUCE_SCATTER)},
    {"profile", "scale",
     PLAN(.profile = ONEBIT_PROFILE_DEEPSPEED, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE)},
    {"profile", "block_size", PLAN(.profile = ONEBIT_PROFILE_DEEPSPEED, .block_size = 64)},
    {"residual_copies", "3", PLAN(.residual_copies = 3)},
    {"residual_copies", "-1", PLAN(.residual_copies = -1)},
    {"residual_copies", "max_bits is 4", PLAN(.residual_copies = 1, .bits = 4)},
};

Test(arguments, plan_create) {
  onebit_comm_t comm = self();
  onebit_plan_t plan = STALE(onebit_plan_t);
  check_wrong(onebit_plan_create(NULL, 10, NULL, &plan), "comm", "NULL");
  CHECK(plan == NULL, "a failed creation left a plan");
  check_wrong(onebit_plan_create(comm, 10, NULL, NULL), "plan", "NULL");
  for (size_t k = 0; k < sizeof wrong_plans / sizeof wrong_plans[0]; k++) {
    check_case("options %zu, wrong %s", k, wrong_plans[k].name);
    plan = STALE(onebit_plan_t);
    check_wrong(onebit_plan_create(comm, 10, &wrong_plans[k].options, &plan), wrong_plans[k].name,
                wrong_plans[k].value);
    CHECK(plan == NULL, "a failed creation left a plan");
  }
  CHECK_STATUS(onebit_plan_destroy(NULL), ONEBIT_OK);
  onebit_comm_destroy(comm);
}

/* Counts whose buffers have more bytes than there are addresses. */
Test(arguments, counts_beyond_memory) {
  onebit_comm_t comm = self();
  static const size_t counts[] = {SIZE_MAX, SIZE_MAX - 31, SIZE_MAX / 4 + 1};
  for (size_t k = 0; k < 3; k++) {
    onebit_plan_t plan = STALE(onebit_plan_t);
    char value[32];
    snprintf(value, sizeof value, "%zu", counts[k]);
    check_wrong(onebit_plan_create(comm, counts[k], NULL, &plan), "count", value);
    CHECK(plan == NULL, "a failed creation left a plan");
  }
  onebit_plan_t plan = STALE(onebit_plan_t);
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.block_size =
      ONEBIT_BLOCK_BUFFER; /* no list of scales, so the first large array is far too large */
  CHECK_STATUS(onebit_plan_create(comm, (size_t)1 << 46, &options, &plan), ONEBIT_ERROR_MEMORY);
  CHECK(plan == NULL, "a failed creation left a plan");
  onebit_comm_destroy(comm);
}

static void check_environment(const char *name, const char *value) {
  onebit_comm_t comm = self();
  onebit_plan_t plan = STALE(onebit_plan_t);
  setenv(name, value, 1);
  check_wrong(onebit_plan_create(comm, 10, NULL, &plan), name, value);
  CHECK(plan == NULL, "a failed creation left a plan");
  unsetenv(name);
  onebit_comm_destroy(comm);
}

Test(arguments, environment) {
  check_environment("ONEBIT_CODEC", "fastest");
  check_environment("ONEBIT_CODEC", "AVX2");
  check_environment("ONEBIT_CODEC", "scala");
  check_environment("ONEBIT_THREADS", "0");
  check_environment("ONEBIT_THREADS", "-2");
  check_environment("ONEBIT_THREADS", "two");
  check_environment("ONEBIT_THREADS", "2x");
  check_environment("ONEBIT_THREADS", "99999999999999999999");
}

/* An empty variable is as good as none; options stand above the environment. */
Test(arguments, environment_that_is_sound) {
  static const char *const sound[][2] = {{"ONEBIT_CODEC", ""},
                                         {"ONEBIT_CODEC", "scalar"},
                                         {"ONEBIT_THREADS", ""},
                                         {"ONEBIT_THREADS", "2"}};
  onebit_comm_t comm = self();
  for (size_t k = 0; k < 4; k++) {
    onebit_plan_t plan = NULL;
    onebit_plan_info_t info = {.size = sizeof info};
    setenv(sound[k][0], sound[k][1], 1);
    CHECK_STATUS(onebit_plan_create(comm, 10, NULL, &plan), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
    CHECK(k != 1 || strcmp(info.codec, "scalar") == 0, "the codec is %s", info.codec);
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
    unsetenv(sound[k][0]);
  }
  onebit_comm_destroy(comm);
}

Test(arguments, plan_info_and_errors) {
  onebit_comm_t comm = self();
  onebit_plan_t plan = NULL;
  onebit_plan_info_t info = {.size = sizeof info};
  float error[10] = {0};
  CHECK_STATUS(onebit_plan_create(comm, 10, NULL, &plan), ONEBIT_OK);
  check_wrong(onebit_plan_get_info(NULL, &info), "plan", "NULL");
  check_wrong(onebit_plan_get_info(plan, NULL), "info", "NULL");
  info.size = 3;
  check_wrong(onebit_plan_get_info(plan, &info), "size", "3");
  check_wrong(onebit_plan_export_residual(NULL, error, error), "plan", "NULL");
  check_wrong(onebit_plan_import_residual(NULL, error, error), "plan", "NULL");
  check_wrong(onebit_plan_reset_residual(NULL), "plan", "NULL");
  check_wrong(onebit_plan_reset(NULL), "plan", "NULL");
  error[3] = NAN;
  check_wrong(onebit_plan_import_residual(plan, error, NULL), "worker[3]", "nan");
  error[3] = -INFINITY;
  check_wrong(onebit_plan_import_residual(plan, NULL, error), "server[3]", "inf");
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  onebit_comm_destroy(comm);
}

/* Blocking or not, what is wrong with the buffers is told at the end of the request. */
static onebit_status_t call_either_way(onebit_operation_t operation, const void *send,
                                       void *receive, onebit_plan_t plan, bool nonblocking) {
  if (!nonblocking)
    return call_collective(operation, send, receive, plan);
  onebit_request_t request = NULL;
  CHECK_STATUS(start_collective(operation, send, receive, plan, &request), ONEBIT_OK);
  onebit_status_t status = onebit_wait(&request);
  CHECK(request == NULL, "a finished request is not NULL");
  return status;
}

static void check_buffers(onebit_operation_t operation, onebit_dtype_t dtype, bool nonblocking) {
  enum { COUNT = 100 };
  onebit_comm_t comm = self();
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  size_t element = dtype_size(dtype);
  char *memory = allocate(3 * COUNT, sizeof(float)), *send = memory;
  char *receive = memory + 2 * COUNT * element;
  options.operation = operation;
  options.dtype = dtype;
  check_case("%s of %s", operation_name(operation), dtype_name(dtype));
  CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
  fill_pattern(receive, COUNT * element);
  check_wrong(call_either_way(operation, NULL, receive, plan, nonblocking), "sendbuf", "NULL");
  check_wrong(call_either_way(operation, send, NULL, plan, nonblocking), "recvbuf", "NULL");
  check_wrong(call_either_way(operation, send + 1, receive, plan, nonblocking), "sendbuf", "align");
  check_wrong(call_either_way(operation, send, receive + 1, plan, nonblocking), "recvbuf", "align");
  check_wrong(call_either_way(operation, receive - element, receive, plan, nonblocking), "overlap",
              "sendbuf");
  check_wrong(
      call_either_way(operation, receive + (COUNT - 1) * element, receive, plan, nonblocking),
      "overlap", "recvbuf");
  CHECK(pattern_holds(receive, COUNT * element), "a failed call changed recvbuf");
  fill_input(send, dtype, COUNT, 0, 0);
  CHECK_STATUS(call_either_way(operation, send, receive, plan, nonblocking), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  onebit_comm_destroy(comm);
  free(memory);
}

Test(arguments, buffers) {
  for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++)
    for (int dtype = ONEBIT_FLOAT32; dtype <= ONEBIT_FLOAT16; dtype++)
      for (int nonblocking = 0; nonblocking < 2; nonblocking++)
        check_buffers((onebit_operation_t)operation, (onebit_dtype_t)dtype, nonblocking);
}

Test(arguments, no_buffers_are_needed_for_no_elements) {
  onebit_comm_t comm = self();
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, 0, NULL, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(NULL, NULL, plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  onebit_comm_destroy(comm);
}

/* A NULL plan, a plan of another operation, and requests, for each function. */
Test(arguments, plans_and_requests) {
  onebit_comm_t comm = self();
  float send[10] = {1}, receive[10];
  for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++) {
    onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
    onebit_plan_t plan = NULL;
    onebit_request_t request = STALE(onebit_request_t);
    onebit_operation_t right = (onebit_operation_t)operation;
    onebit_operation_t wrong = (onebit_operation_t)((operation + 1) % 3);
    options.operation = right;
    CHECK_STATUS(onebit_plan_create(comm, 10, &options, &plan), ONEBIT_OK);
    check_wrong(call_collective(right, send, receive, NULL), "plan", "NULL");
    check_wrong(start_collective(right, send, receive, NULL, &request), "plan", "NULL");
    CHECK(request == NULL, "a call that failed left a request");
    CHECK_STATUS(start_collective(wrong, send, receive, plan, &request), ONEBIT_OK);
    check_wrong(onebit_wait(&request), operation_name(right), operation_name(wrong));
    CHECK(request == NULL, "a finished request is not NULL");
    check_wrong(call_collective(wrong, send, receive, plan), operation_name(right),
                operation_name(wrong));
    check_wrong(start_collective(right, send, receive, plan, NULL), "request", "NULL");
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  }
  check_wrong(onebit_test(NULL), "request", "NULL");
  check_wrong(onebit_wait(NULL), "request", "NULL");
  check_wrong(onebit_progress(NULL), "comm", "NULL");
  onebit_comm_destroy(comm);
}
