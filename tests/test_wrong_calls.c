/* Wrong calls and wrong arguments, on one rank and on one of several. */
#include <glob.h>

#include "tests/support.h"
#include "tests/support_collectives.h"
#include "tests/support_errors.h"
#include "tests/support_wrong_calls.h"

/*
 * Wrong calls of every public function must give an error with a message that names the argument
 * and its value, and must not crash. The test fails if a function of include/onebit has no wrong
 * call.
 */

static void make_all_wrong_calls(void) {
  struct wrong_scene scene;
  cr_assert(wrong_scene_make(&scene));
  wrong_communicators(&scene);
  wrong_plans(&scene);
  wrong_collectives(&scene);
  wrong_creations(&scene);
  wrong_steps(&scene);
  wrong_queries(&scene);
  wrong_checkpoints(&scene);
  wrong_outers(&scene);
  wrong_scene_end(&scene);
}

/* mpi_wrong_calls.c tests the functions of mpi.h and mpi_calls.h, test_method.c those of method.h,
 * and tests/gpu those of cuda.h and nccl.h. */
Test(wrong_calls, are_made_of_every_function) {
#if defined(__SANITIZE_THREAD__)
  cr_skip_test("this allocator gives the address of a destroyed communicator to the next object");
#endif
  static const char elsewhere[] = " mpi mpi_calls method cuda nccl ";
  size_t found = 0;
  glob_t headers;
  make_all_wrong_calls();
  cr_assert_eq(glob("include/onebit/*.h", 0, NULL, &headers), 0);
  for (size_t k = 0; k < headers.gl_pathc; k++) {
    const char *name = strrchr(headers.gl_pathv[k], '/') + 1;
    char header[40], word[42];
    snprintf(header, sizeof header, "%.*s", (int)strcspn(name, "."), name);
    snprintf(word, sizeof word, " %s ", header);
    found += strstr(elsewhere, word) ? 0 : wrong_check_header(header);
  }
  globfree(&headers);
  cr_expect_geq(found, 49, "%zu functions were found", found);
  cr_expect_geq(wrong_calls_made(), 120);
  cr_expect_eq(wrong_calls_failed(), 0, "%zu of %zu", wrong_calls_failed(), wrong_calls_made());
}

/* ---- One rank of several ---- */

/* Makes wrong calls that the `disagreement` tests do not make: with a handle that is not valid, or
 * of another kind. Only the rank that makes such a call gets an error. The other ranks wait until
 * this rank makes the correct call. */
static void make_one_wrong_call(onebit_comm_t comm, void *context) {
  float send[WRONG_COUNT] = {1}, receive[WRONG_COUNT];
  const int rank = onebit_comm_rank(comm);
  onebit_plan_t plan = NULL;
  (void)context;
  CHECK_STATUS(onebit_plan_create(comm, WRONG_COUNT / 2, NULL, &plan), ONEBIT_OK);
  if (rank == 1)
    WRONG(onebit_iallreduce, (send, receive, plan, NULL), ONEBIT_ERROR_ARGUMENT, "request is NULL");
  else
    WRONG(onebit_allreduce, (send, receive, plan), ONEBIT_ERROR_PEER, "rank 1");
  if (rank == 1) {
    WRONG(onebit_allreduce, (send, receive, NULL), ONEBIT_ERROR_ARGUMENT, "plan is NULL");
    WRONG(onebit_allreduce, (send, receive, (onebit_plan_t)(void *)comm), ONEBIT_ERROR_ARGUMENT,
          "which is a communicator");
  }
  CHECK_STATUS(onebit_allreduce(send, receive, plan), ONEBIT_OK);
  CHECK(receive[0] > 0, "the call after the wrong ones gave %g", (double)receive[0]);
  onebit_plan_destroy(plan);
}

Test(wrong_calls, of_one_rank_are_told_to_the_others) {
  on_ranks(2, make_one_wrong_call, NULL);
  on_hosts(4, 2, make_one_wrong_call, NULL);
  cr_expect_eq(wrong_calls_failed(), 0, "%zu of %zu", wrong_calls_failed(), wrong_calls_made());
  fprintf(stderr, "%zu calls of which one rank's is wrong\n", wrong_calls_made());
}

/*
 * Tests wrong arguments that support_wrong_calls.c, which tests each argument of each public
 * function once, does not have: the environment, counts that exceed memory, and types of two bytes.
 * These tests use one rank. The `disagreement` tests check the errors on other ranks.
 */

/* A handle that a failing creation must overwrite. It is never dereferenced. */
#define STALE(type) ((type)(void *)&stale)
static char stale;
enum { TENSOR = 10 };

/* Lets malloc return NULL under sanitizers. Otherwise they end the program if so much memory is not
 * available. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
const char *__tsan_default_options(void) { return "allocator_may_return_null=1"; }

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

/* Without a list of scales the first large array is far too large. */
Test(arguments, counts_beyond_memory) {
  onebit_comm_t comm = self_comm();
  onebit_plan_t plan = STALE(onebit_plan_t);
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.block_size = ONEBIT_BLOCK_BUFFER;
  CHECK_STATUS(onebit_plan_create(comm, (size_t)1 << 46, &options, &plan), ONEBIT_ERROR_MEMORY);
  CHECK(plan == NULL, "a failed creation left a plan");
  onebit_comm_destroy(comm);
}

static void check_environment(const char *name, const char *value) {
  onebit_comm_t comm = self_comm();
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

/* An empty variable counts as unset. Options have priority over the environment. */
Test(arguments, environment_that_is_sound) {
  static const char *const sound[][2] = {{"ONEBIT_CODEC", ""},
                                         {"ONEBIT_CODEC", "scalar"},
                                         {"ONEBIT_THREADS", ""},
                                         {"ONEBIT_THREADS", "2"}};
  onebit_comm_t comm = self_comm();
  for (size_t k = 0; k < 4; k++) {
    onebit_plan_t plan = NULL;
    setenv(sound[k][0], sound[k][1], 1);
    CHECK_STATUS(onebit_plan_create(comm, 10, NULL, &plan), ONEBIT_OK);
    const onebit_plan_info_t info = plan_info(plan);
    CHECK(k != 1 || strcmp(info.codec, "scalar") == 0, "the codec is %s", info.codec);
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
    unsetenv(sound[k][0]);
  }
  onebit_comm_destroy(comm);
}

/* ---- Optimizers ---- */

/* Elements of two bytes may begin at any even address, and at no odd address. Overlaps are computed
 * with the size of these elements. */
Test(arguments, tensors_of_two_bytes) {
  static float parameter[2 * TENSOR + 1], gradient[2 * TENSOR + 1];
  static const struct {
    size_t parameter, gradient; /* offsets in bytes in the arrays */
    const char *name, *value;
  } places[] = {{2, 6, NULL, NULL},
                {3, 6, "tensors[0].parameter", "align"},
                {2, 5, "tensors[0].gradient", "align"}};
  onebit_comm_t comm = self_comm();
  for (size_t k = 0; k < sizeof places / sizeof places[0]; k++) {
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer = NULL;
    char *half = (char *)parameter + places[k].parameter, *from = (char *)gradient;
    onebit_tensor_t tensors[] = {{half, from + places[k].gradient, TENSOR, 0, 0, 0},
                                 {half + 2 * TENSOR, NULL, TENSOR, 0, 0, 0}};
    options.common.parameter_dtype = ONEBIT_FLOAT16;
    options.common.gradient_dtype = ONEBIT_BFLOAT16;
    check_case("places %zu", k);
    onebit_status_t status = onebit_adam_create(comm, tensors, 2, &options, &optimizer);
    if (places[k].name)
      check_wrong(status, places[k].name, places[k].value);
    else
      CHECK_STATUS(status, ONEBIT_OK);
    onebit_optimizer_destroy(optimizer);
  }
  onebit_comm_destroy(comm);
}

/* Tests that all ranks get an error if one rank makes an error, or requests something else than the
 * others. Ranks are threads. */

/* Runs the scenario in groups of `smallest` to 4 ranks. Every rank is the culprit once. */
static void try_each_culprit(rank_body *scenario, struct culprit culprit, int smallest) {
  for (int size = smallest; size <= 4; size++)
    for (culprit.rank = 0; culprit.rank < size; culprit.rank++)
      if (!culprit.shards || test_wanted((size_t)size - 1))
        on_ranks(size, scenario, &culprit);
}

/* Runs the scenario with other schedules, on several hosts. Every rank is the culprit once. */
static void try_each_culprit_on_hosts(rank_body *scenario, struct culprit culprit) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {2, 1}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++)
    for (culprit.rank = 0; culprit.rank < splits[k][0]; culprit.rank++)
      on_hosts(splits[k][0], splits[k][1], scenario, &culprit);
}

#define EVERYONE_ONCE(scenario)                                                                    \
  Test(disagreement, scenario) { try_each_culprit(scenario, (struct culprit){0}, 2); }
EVERYONE_ONCE(wrong_buffers_on_one_rank)
EVERYONE_ONCE(wrong_operation_on_one_rank)
EVERYONE_ONCE(wrong_plan_on_one_rank)
EVERYONE_ONCE(wrong_tensors_on_one_rank)
EVERYONE_ONCE(other_plan_on_one_rank)
EVERYONE_ONCE(other_adam_on_one_rank)
EVERYONE_ONCE(plan_here_and_optimizer_there)
EVERYONE_ONCE(other_threads_on_one_rank)

Test(disagreement, wrong_buffers_in_other_schedules) {
  try_each_culprit_on_hosts(wrong_buffers_on_one_rank,
                            (struct culprit){.schedule = ONEBIT_SCHEDULE_ALLGATHER});
  try_each_culprit_on_hosts(wrong_buffers_on_one_rank,
                            (struct culprit){.schedule = ONEBIT_SCHEDULE_HIERARCHICAL});
}

/* --- Steps of an optimizer: also with clipping, which adds an exchange, and with shards. */

static const struct culprit steps[] = {{.rank = 0},
                                       {.clip_norm = 1.5},
                                       {.shards = ONEBIT_SHARDS_STEP},
                                       {.shards = ONEBIT_SHARDS_PARAMETERS}};

static void run_in_all_steps(rank_body *scenario, int smallest) {
  for (size_t k = 0; k < sizeof steps / sizeof steps[0]; k++)
    try_each_culprit(scenario, steps[k], smallest);
  for (size_t k = 0; k < 2; k++) {
    struct culprit culprit = steps[k];
    culprit.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    try_each_culprit_on_hosts(scenario, culprit);
  }
}

Test(disagreement, wrong_learning_rate_on_one_rank) {
  run_in_all_steps(wrong_learning_rate_on_one_rank, 2);
}
Test(disagreement, mistakes_in_an_open_step) { run_in_all_steps(mistakes_in_an_open_step, 1); }
Test(disagreement, destroyed_in_an_open_step) { run_in_all_steps(destroyed_in_an_open_step, 1); }
