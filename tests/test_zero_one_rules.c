/*
 * 0/1 Adam: elements that never have a gradient, convergence, what is wrong with its options, and
 * memory.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/support_descent.h"
#include "tests/support_zero_one.h"

TestSuite(zero_one_rules, .timeout = 120);

/* --- Elements without variance */

#define COUNT 4096

/* Every eighth element has no gradient in the first 40 steps, whatever the bits of its neighbours
 * say; then it gets one. Its steps are not larger than anyone's, since no momentum has waited. */
static void begin_late(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  float *parameters = allocate(COUNT, 4), *gradients = allocate(COUNT, 4), *start;
  onebit_tensor_t tensor = {parameters, gradients, COUNT, 0, 0, 0};
  onebit_optimizer_t optimizer;
  start = allocate(COUNT, sizeof *start);
  fill_input(parameters, ONEBIT_FLOAT32, COUNT, 50, 0);
  memcpy(start, parameters, COUNT * sizeof *start);
  if (!CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, context, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < 60; step++) {
    for (size_t i = 0; i < COUNT; i++)
      gradients[i] = i % 8 == 3 && step < 40 ? 0.0f : 1.0f + input_value(i, rank, step) / 16;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    for (size_t i = 3; i < COUNT && step < 40; i += 8)
      CHECK(parameters[i] == start[i], "step %d: element %zu moves", step, i);
  }
  for (size_t i = 3; i < COUNT; i += 8)
    CHECK(fabsf(parameters[i] - start[i]) < 0.1f, "element %zu moves by %g", i,
          (double)(parameters[i] - start[i]));
  CHECK(parameters[0] != start[0], "nothing moves");
  onebit_optimizer_destroy(optimizer);
  free(start);
  free(parameters);
  free(gradients);
}

Test(zero_one_rules, elements_without_variance_stay_and_begin_without_a_jump) {
  onebit_zero_one_adam_options_t options = zero_one_options(1000);
  on_ranks(3, begin_late, &options); /* in the variance stage */
  options.variance_freeze_step = 20;
  on_ranks(3, begin_late, &options); /* frozen: they never begin */
}

/* --- Convergence */

#define DESCENTS 2000

struct descent {
  onebit_zero_one_adam_options_t options;
  double excess[RANKS];
  uint64_t exchanges[3];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_tensor_t tensor = {w, gradient, UNKNOWNS, 0, 0, 0};
  onebit_optimizer_t optimizer;
  onebit_optimizer_info_t info = {.size = sizeof info};
  if (!CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, &descent->options, &optimizer),
                    ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = descent_slope(w[i], rank, i) + 0.3f * input_value(i, rank, step % 97);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f / (1.0f + (float)step / 100.0f)),
                 ONEBIT_OK);
  }
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(info.synchronized, "the last step is no synchronisation");
  descent->excess[rank] = descent_excess(w);
  if (rank == 0)
    memcpy(descent->exchanges, info.exchanges, sizeof descent->exchanges);
  onebit_optimizer_destroy(optimizer);
}

static double excess_after(size_t freeze_step, size_t clipper, int no_error_feedback,
                           uint64_t exchanges[3]) {
  struct descent descent = {.options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT};
  descent.options.variance_freeze_step = freeze_step;
  descent.options.local_step_scaler = 200;
  descent.options.local_step_clipper = clipper;
  descent.options.variance_update_scaler = freeze_step == (size_t)-1 ? (size_t)-1 : 16;
  descent.options.common.no_error_feedback = no_error_feedback;
  on_ranks(RANKS, descend, &descent);
  for (int k = 0; exchanges && k < 3; k++)
    exchanges[k] = descent.exchanges[k];
  return descent_agreed(descent.excess);
}

Test(zero_one_rules, comes_to_the_dense_loss) {
  float zero[UNKNOWNS] = {0};
  uint64_t exchanges[3];
  double start = descent_excess(zero), dense = excess_after((size_t)-1, 1, 0, NULL);
  double seldom = excess_after(300, 4, 0, exchanges), control = excess_after(300, 4, 1, NULL);
  cr_log_info("excess loss: start %g, dense %g, 0/1 Adam %g, control %g; %d steps dense, %d in "
              "bits, %d local",
              start, dense, seldom, control, (int)exchanges[0], (int)exchanges[1],
              (int)exchanges[2]);
  cr_expect_lt(dense, 1e-2 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(seldom, 1e-2 * start, "0/1 Adam: %g of %g", seldom, start);
  cr_expect_gt(control, 5 * seldom, "the control is no worse: %g", control);
  cr_expect_gt(exchanges[2], DESCENTS / 2);
  cr_expect_lt(exchanges[0], 100);
}

/* --- Options */

#define ZERO_ONE(...)                                                                              \
  { .size = sizeof(onebit_zero_one_adam_options_t), __VA_ARGS__ }
static const struct {
  const char *name, *value;
  onebit_zero_one_adam_options_t options;
} wrong_options[] = {
    {"size", "7", {.size = 7}},
    {"beta1", "1", ZERO_ONE(.beta1 = 1)},
    {"beta1", "nan", ZERO_ONE(.beta1 = NAN)},
    {"beta2", "-1", ZERO_ONE(.beta2 = -1)},
    {"epsilon", "inf", ZERO_ONE(.epsilon = INFINITY)},
    {"block_size", "40", ZERO_ONE(.common.block_size = 40)},
    {"bucket_size", "7",
     ZERO_ONE(.common.profile = ONEBIT_PROFILE_DEEPSPEED, .common.bucket_size = 7)},
    {"schedule", "ALLGATHER", ZERO_ONE(.common.schedule = ONEBIT_SCHEDULE_ALLGATHER)},
    {"gradient_factor", "-2", ZERO_ONE(.common.gradient_factor = -2)},
};

Test(zero_one_rules, wrong_options) {
  float parameter[10] = {0}, gradient[10] = {0};
  onebit_tensor_t tensor = {parameter, gradient, 10, 0, 0, 0};
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  for (size_t k = 0; k < sizeof wrong_options / sizeof wrong_options[0]; k++) {
    onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
    check_case("wrong %s", wrong_options[k].name);
    CHECK_STATUS(
        onebit_zero_one_adam_create(comm, &tensor, 1, &wrong_options[k].options, &optimizer),
        ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS(wrong_options[k].name);
    CHECK_WORDS(wrong_options[k].value);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
  CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("optimizer is NULL");
  CHECK_STATUS(onebit_zero_one_adam_create(NULL, &tensor, 1, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("comm is NULL");
  onebit_comm_destroy(comm);
  checks_must_hold();
}

/* One rank wants something else: all learn of it, with its name. */
static void disagree(onebit_comm_t comm, void *context) {
  const bool other = onebit_comm_rank(comm) == 1;
  const struct {
    const char *name;
    onebit_zero_one_adam_options_t options;
  } differing[] = {
      {"beta1", ZERO_ONE(.beta1 = other ? 0.8 : 0.9)},
      {"beta2", ZERO_ONE(.beta2 = other ? 0.8 : 0.9)},
      {"epsilon", ZERO_ONE(.epsilon = other ? 1e-6 : 1e-8)},
      {"no_bias_correction", ZERO_ONE(.no_bias_correction = other)},
      {"variance_freeze_step", ZERO_ONE(.variance_freeze_step = 10 + other)},
      {"variance_update_scaler", ZERO_ONE(.variance_update_scaler = 10 + other)},
      {"local_step_scaler", ZERO_ONE(.local_step_scaler = 10 + other)},
      {"local_step_clipper", ZERO_ONE(.local_step_clipper = 10 + other)},
      {"profile", ZERO_ONE(.common.profile = other ? ONEBIT_PROFILE_DEEPSPEED : 0)},
  };
  float parameter[10] = {0}, gradient[10] = {0};
  onebit_tensor_t tensor = {parameter, gradient, 10, 0, 0, 0};
  onebit_optimizer_t optimizer;
  (void)context;
  for (size_t k = 0; k < sizeof differing / sizeof differing[0]; k++) {
    check_case("another %s", differing[k].name);
    CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, &differing[k].options, &optimizer),
                 ONEBIT_ERROR_MISMATCH);
    CHECK_WORDS(differing[k].name);
  }
  onebit_status_t status = other ? onebit_adam_create(comm, &tensor, 1, NULL, &optimizer)
                                 : onebit_zero_one_adam_create(comm, &tensor, 1, NULL, &optimizer);
  CHECK_STATUS(status, ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("kind of optimizer");
}

Test(zero_one_rules, ranks_at_odds) { on_ranks(3, disagree, NULL); }

/* --- Memory */

/* For every n, the n-th allocation of a creation fails. */
Test(zero_one_rules, out_of_memory) {
  float parameters[100] = {0}, gradients[100] = {0};
  onebit_tensor_t tensors[] = {{parameters, gradients, 60, 0, 0, 0},
                               {parameters + 60, gradients + 60, 40, 0, 0, 1}};
  for (int deepspeed = 0; deepspeed < 2; deepspeed++) {
    onebit_zero_one_adam_options_t options = zero_one_options(10);
    options.common.profile = deepspeed ? ONEBIT_PROFILE_DEEPSPEED : ONEBIT_PROFILE_DEFAULT;
    onebit_status_t status = ONEBIT_ERROR_MEMORY;
    onebit_comm_t comm;
    long n = 0;
    cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
    while (status == ONEBIT_ERROR_MEMORY && n < 1000) {
      onebit_optimizer_t optimizer = NULL;
      ob_memory_fail_at(++n);
      status = onebit_zero_one_adam_create(comm, tensors, 2, &options, &optimizer);
      ob_memory_fail_at(0);
      CHECK((optimizer == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
      onebit_optimizer_destroy(optimizer);
    }
    CHECK_STATUS(status, ONEBIT_OK);
    CHECK(n > 30, "only %ld allocations failed", n - 1);
    onebit_comm_destroy(comm);
  }
  checks_must_hold();
}

/* Steps of all kinds allocate nothing. */
static void step_without_memory(onebit_comm_t comm, void *context) {
  float *parameters = allocate(COUNT, 4), *gradients = allocate(COUNT, 4);
  onebit_tensor_t tensor = {parameters, gradients, COUNT, 0, 0, 0};
  onebit_optimizer_t optimizer;
  fill_input(gradients, ONEBIT_FLOAT32, COUNT, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, context, &optimizer), ONEBIT_OK);
  ob_memory_fail_at(1);
  for (int step = 0; step < 40; step++)
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
  ob_memory_fail_at(0);
  onebit_optimizer_destroy(optimizer);
  free(parameters);
  free(gradients);
}

Test(zero_one_rules, steps_allocate_nothing) {
  onebit_zero_one_adam_options_t options = zero_one_options(10);
  on_ranks(1, step_without_memory, &options);
}
