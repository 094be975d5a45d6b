/*
 * 1-bit momentum SGD comes to the loss of the dense one, which the control without error feedback
 * does not; and refuses what it does not understand. That it equals the oracle is in
 * test_optimizers.c.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support.h"
#include "tests/support_descent.h"

TestSuite(momentum, .timeout = 120);

/* --- Convergence */

#define DESCENTS 900

struct descent {
  onebit_momentum_options_t options;
  double excess[RANKS];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_tensor_t tensor = {w, gradient, UNKNOWNS, 0, 0, 0};
  onebit_optimizer_t optimizer;
  if (!CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &descent->options, &optimizer),
                    ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = descent_slope(w[i], rank, i);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.05f / (1.0f + (float)step / 25.0f)), ONEBIT_OK);
  }
  descent->excess[rank] = descent_excess(w);
  onebit_optimizer_destroy(optimizer);
}

static double excess_after(size_t warmup_steps, int no_error_feedback) {
  struct descent descent = {.options = ONEBIT_MOMENTUM_OPTIONS_INIT};
  descent.options.warmup_steps = warmup_steps;
  descent.options.common.no_error_feedback = no_error_feedback;
  on_ranks(RANKS, descend, &descent);
  return descent_agreed(descent.excess);
}

Test(momentum, comes_to_the_dense_loss) {
  float zero[UNKNOWNS] = {0};
  double start = descent_excess(zero), dense = excess_after(ONEBIT_FREEZE_NEVER, 0);
  double at_once = excess_after(0, 0), warmed = excess_after(DESCENTS / 6, 0);
  double control = excess_after(0, 1);
  cr_log_info("excess loss: start %g, dense %g, one bit %g, after a warm-up %g, control %g", start,
              dense, at_once, warmed, control);
  cr_expect_lt(dense, 1e-4 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(at_once, 1e-3 * start, "one bit: %g of %g", at_once, start);
  cr_expect_lt(warmed, 1e-3 * start, "after a warm-up: %g of %g", warmed, start);
  cr_expect_gt(control, 20 * at_once, "the control is no worse: %g", control);
}

/* --- Wrong options */

#define MOMENTUM(...)                                                                              \
  { .size = sizeof(onebit_momentum_options_t), __VA_ARGS__ }
static const struct {
  const char *name, *value;
  onebit_momentum_options_t options;
  onebit_status_t status;
} wrong_options[] = {
    {"size", "7", {.size = 7}, ONEBIT_ERROR_ARGUMENT},
    {"momentum", "1", MOMENTUM(.momentum = 1), ONEBIT_ERROR_ARGUMENT},
    {"momentum", "-0.5", MOMENTUM(.momentum = -0.5), ONEBIT_ERROR_ARGUMENT},
    {"momentum", "nan", MOMENTUM(.momentum = NAN), ONEBIT_ERROR_ARGUMENT},
    {"profile", "DEEPSPEED", MOMENTUM(.common.profile = ONEBIT_PROFILE_DEEPSPEED),
     ONEBIT_ERROR_UNSUPPORTED},
    {"block_size", "40", MOMENTUM(.common.block_size = 40), ONEBIT_ERROR_ARGUMENT},
    {"gradient_factor", "-2", MOMENTUM(.common.gradient_factor = -2), ONEBIT_ERROR_ARGUMENT},
};

Test(momentum, wrong_options) {
  float parameter[10] = {0}, gradient[10] = {0};
  onebit_tensor_t tensor = {parameter, gradient, 10, 0, 0, 0};
  onebit_comm_t comm;
  cr_assert_eq(onebit_comm_create_self(&comm), ONEBIT_OK);
  for (size_t k = 0; k < sizeof wrong_options / sizeof wrong_options[0]; k++) {
    onebit_optimizer_t optimizer = (onebit_optimizer_t)(void *)parameter;
    check_case("wrong %s", wrong_options[k].name);
    CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &wrong_options[k].options, &optimizer),
                 wrong_options[k].status);
    CHECK_WORDS(wrong_options[k].name);
    CHECK_WORDS(wrong_options[k].value);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
  }
  CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("optimizer is NULL");
  CHECK_STATUS(onebit_momentum_create(NULL, &tensor, 1, NULL, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("comm is NULL");
  onebit_comm_destroy(comm);
  checks_must_hold();
}

/* One rank wants something else, or another optimizer: all learn of it, with its name. */
static void disagree(onebit_comm_t comm, void *context) {
  float parameter[10] = {0}, gradient[10] = {0};
  onebit_tensor_t tensor = {parameter, gradient, 10, 0, 0, 0};
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  onebit_optimizer_t optimizer;
  bool other = onebit_comm_rank(comm) == 1;
  (void)context;
  options.momentum = other ? 0.8 : 0.9;
  CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &options, &optimizer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("momentum");
  options.momentum = 0;
  options.warmup_steps = other;
  CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &options, &optimizer),
               ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("warmup_steps");
  options.warmup_steps = other ? ONEBIT_FREEZE_NEVER : 0;
  CHECK_STATUS(onebit_momentum_create(comm, &tensor, 1, &options, &optimizer),
               ONEBIT_ERROR_MISMATCH);
  onebit_status_t status = other ? onebit_adam_create(comm, &tensor, 1, NULL, &optimizer)
                                 : onebit_momentum_create(comm, &tensor, 1, NULL, &optimizer);
  CHECK_STATUS(status, ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("kind of optimizer");
}

Test(momentum, ranks_at_odds) { on_ranks(3, disagree, NULL); }
