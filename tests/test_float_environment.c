/*
 * Tests that results have the same bits in any floating-point environment of a rank's program, with
 * every codec, width and type, and for every optimizer. After a call the program has its own
 * environment again, including its flags. Numbers in environment variables and in JSON have a
 * decimal point, whatever the locale is. All other suites run in these environments alternately,
 * and in a locale with a decimal comma (support_floats.h).
 */

#ifdef _OPENMP
#include <omp.h>
#endif

#include "tests/support.h"
#include "tests/support_floats.h"
#include "tests/support_optimizers.h"

enum { RANKS = 2, COUNT = 3 * 2048 + 777, STEPS = 4 };

struct modes {
  unsigned mode; /* the environment of rank 1 */
  onebit_plan_options_t plan;
  const struct any_case *optimizer;
  void *result[RANKS];
};

/* Returns normal numbers, and some that are subnormal or become subnormal when they are scaled. */
static float input_or_subnormal(size_t i, int rank, int step) {
  static const float magnitudes[] = {1, 1e-37f, 1e-39f, 1e-5f};
  return magnitudes[i / 2048 % 4] * input_value(i, rank, step);
}

static void fill_values(void *buffer, onebit_dtype_t dtype, int rank, int step) {
  if (dtype != ONEBIT_FLOAT32)
    fill_input(buffer, dtype, COUNT, rank, step);
  for (size_t i = 0; dtype == ONEBIT_FLOAT32 && i < COUNT; i++)
    ((float *)buffer)[i] = input_or_subnormal(i, rank, step);
}

/* Sets rank 1's environment for a call. leave_environment checks that it is unchanged
 * afterwards. */
static struct ob_float_environment enter_environment(const struct modes *modes, int rank) {
  const struct ob_float_environment own = float_environment();
  if (rank == 1)
    ob_float_leave(&float_modes[modes->mode].environment);
  return own;
}

static void leave_environment(const struct modes *modes, int rank,
                              const struct ob_float_environment *own) {
  const struct ob_float_environment after = float_environment();
  ob_float_leave(own);
  if (rank == 1)
    CHECK(float_environments_equal(&after, &float_modes[modes->mode].environment),
          "the environment %s is another afterwards", float_modes[modes->mode].name);
}

/* Starts this rank's OpenMP threads before the library is called, as a program may do. */
static void start_openmp_team(const struct modes *modes, int rank) {
#ifdef _OPENMP
#pragma omp parallel num_threads(modes->plan.threads)
  if (rank == 1 && omp_get_thread_num() > 0)
    ob_float_leave(&float_modes[modes->mode].environment);
#else
  (void)modes, (void)rank;
#endif
}

static void reduce_on_rank(onebit_comm_t comm, void *context) {
  const struct modes *modes = context;
  const int rank = onebit_comm_rank(comm);
  void *input = allocate(COUNT, dtype_size(modes->plan.dtype));
  onebit_plan_t plan = NULL;
  onebit_request_t request;
  start_openmp_team(modes, rank);
  struct ob_float_environment own = enter_environment(modes, rank);
  onebit_status_t status = onebit_plan_create(comm, COUNT, &modes->plan, &plan);
  leave_environment(modes, rank, &own);
  CHECK_STATUS(status, ONEBIT_OK);
  for (int step = 0; step < STEPS && status == ONEBIT_OK; step++) {
    fill_values(input, modes->plan.dtype, rank, step);
    own = enter_environment(modes, rank);
    status = step % 2 ? onebit_iallreduce(input, modes->result[rank], plan, &request)
                      : onebit_allreduce(input, modes->result[rank], plan);
    if (step % 2 && status == ONEBIT_OK)
      status = onebit_wait(&request);
    leave_environment(modes, rank, &own);
    CHECK_STATUS(status, ONEBIT_OK);
  }
  onebit_plan_destroy(plan);
  free(input);
}

static void train_on_rank(onebit_comm_t comm, void *context) {
  const struct modes *modes = context;
  const int rank = onebit_comm_rank(comm);
  float *gradient = allocate(COUNT, sizeof *gradient);
  onebit_tensor_t tensor = {modes->result[rank], gradient, COUNT, 0.01f, 0, 0};
  const struct any_options options =
      any_options_of(modes->optimizer->method, modes->optimizer->options);
  onebit_optimizer_t optimizer = NULL;
  for (size_t i = 0; i < COUNT; i++)
    ((float *)modes->result[rank])[i] = input_or_subnormal(i, 0, 99);
  onebit_status_t status = any_create(&options, comm, &tensor, 1, &optimizer);
  CHECK_STATUS(status, ONEBIT_OK);
  for (int step = 0; step < 3 * STEPS && status == ONEBIT_OK; step++) {
    fill_values(gradient, ONEBIT_FLOAT32, rank, step);
    const struct ob_float_environment own = enter_environment(modes, rank);
    status = onebit_optimizer_step(optimizer, 0.01f);
    leave_environment(modes, rank, &own);
    CHECK_STATUS(status, ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  free(gradient);
}

/* Checks that both ranks' results equal those of the default environment. */
static void check_every_mode(struct modes *modes, rank_body *body, const char *what) {
  const onebit_dtype_t dtype = modes->plan.dtype;
  void *wanted = NULL;
  for (modes->mode = 0; modes->mode < float_modes_count; modes->mode++) {
    for (int rank = 0; rank < RANKS; rank++)
      modes->result[rank] = allocate(COUNT, dtype_size(dtype));
    check_case("%s, %d bits, %s, rank 1 %s", what, modes->plan.bits, dtype_name(dtype),
               float_modes[modes->mode].name);
    on_ranks(RANKS, body, modes);
    wanted = wanted ? wanted : modes->result[0];
    for (int rank = RANKS; rank-- > 0;) {
      CHECK_BITS("result", modes->result[rank], wanted, COUNT, dtype);
      if (modes->result[rank] != wanted)
        free(modes->result[rank]);
    }
  }
  free(wanted);
  checks_must_hold();
}

Test(float_environment, collectives_of_every_codec_width_and_type) {
  static const onebit_dtype_t dtypes[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
  for (size_t c = 0; c < test_codecs_count; c++)
    for (int bits = 0; bits <= 8 && use_codec(test_codecs[c]); bits += bits ? bits : 1)
      for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        struct modes modes = {.plan = ONEBIT_PLAN_OPTIONS_INIT};
        modes.plan.dtype = dtypes[d];
        modes.plan.bits = bits;
        modes.plan.wire = bits ? ONEBIT_WIRE_BITS : ONEBIT_WIRE_DENSE;
        modes.plan.threads = d == 0 ? 2 : 1;
        check_every_mode(&modes, reduce_on_rank, test_codecs[c]);
      }
}

static const struct any_case optimizers[] = {
    {ANY(adam, .freeze_step = 5)},
    {ANY(lamb, .freeze_step = 5)},
    {ANY(momentum, .warmup_steps = 5)},
    {ANY(zero_one_adam, .variance_freeze_step = 5, .variance_update_scaler = 2,
         .local_step_scaler = 2, .local_step_clipper = 4)},
    {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = 5)},
    {ANY(lion, .beta2 = 0.9)},
};

Test(float_environment, every_optimizer) {
  for (size_t k = 0; k < sizeof optimizers / sizeof optimizers[0]; k++) {
    struct modes modes = {.optimizer = &optimizers[k]};
    check_every_mode(&modes, train_on_rank, optimizers[k].method->name);
  }
}

/* A progress thread inherits the floating-point environment of the thread that starts it. */
Test(float_environment, progress_thread) {
  struct modes modes = {.plan = ONEBIT_PLAN_OPTIONS_INIT};
  modes.plan.bits = 8;
  modes.plan.threads = 1;
  cr_assert_eq(setenv("ONEBIT_PROGRESS", "thread", 1), 0);
  check_every_mode(&modes, reduce_on_rank, "with a thread of its own");
}

Test(float_environment, numbers_have_a_point_in_a_locale_with_a_comma) {
  static char config[] = "/tmp/onebit-XXXXXX", text[4096];
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  float parameters[4] = {0.5f}, gradients[4] = {0.25f};
  const onebit_tensor_t tensor = {parameters, gradients, 4, 0, 0, 0};
  onebit_optimizer_t optimizer;
  size_t length;
  if (!has_comma_locale())
    cr_skip_test("no localedef here, which makes the locale");
  FILE *file = fdopen(mkstemp(config), "w");
  fputs("{\"timeout\": 2.5}", file);
  fclose(file);
  cr_assert_eq(setenv("ONEBIT_CONFIG", config, 1) | setenv("ONEBIT_TIMEOUT", "0.5", 1), 0);
  options.common.initial_loss_scale = 1.5;
  onebit_comm_t comm = self_comm();
  cr_assert_eq(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK, "%s",
               onebit_last_error());
  cr_expect_eq(onebit_optimizer_step(optimizer, 0.125f), ONEBIT_OK);
  cr_expect_eq(onebit_optimizer_describe(optimizer, ONEBIT_FORMAT_JSON, text, sizeof text, &length),
               ONEBIT_OK);
  cr_expect(json_is_valid(text), "%s", text);
  cr_expect_eq(onebit_optimizer_set_beta1(optimizer, -0.5), ONEBIT_ERROR_ARGUMENT);
  cr_expect(strstr(onebit_last_error(), "-0.5"), "%s", onebit_last_error());
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  unlink(config);
}
