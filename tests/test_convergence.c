/*
 * Error feedback has its effect: with it, gradient descent on one-bit exchanges comes to the same
 * loss as on dense ones; the control without it does not. That optimizers learn is in
 * test_training.c.
 */
#include "tests/support.h"
#include "tests/support_descent.h"

#define DESCENTS 800

struct descent {
  onebit_plan_options_t options;
  double excess[RANKS];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_plan_t plan;
  if (!CHECK_STATUS(onebit_plan_create(comm, UNKNOWNS, &descent->options, &plan), ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    float rate = 0.5f / (1.0f + (float)step / 25.0f);
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = descent_slope(w[i], rank, i);
    CHECK_STATUS(onebit_allreduce(gradient, gradient, plan), ONEBIT_OK);
    for (size_t i = 0; i < UNKNOWNS; i++)
      w[i] -= rate * gradient[i];
  }
  descent->excess[rank] = descent_excess(w);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static double excess_after(onebit_wire_t wire, onebit_profile_t profile, int no_error_feedback) {
  struct descent descent = {.options = ONEBIT_PLAN_OPTIONS_INIT};
  descent.options.wire = wire;
  descent.options.profile = profile;
  descent.options.no_error_feedback = no_error_feedback;
  on_ranks(RANKS, descend, &descent);
  return descent_agreed(descent.excess);
}

Test(convergence, gradient_descent_needs_the_error_fed_back) {
  float zero[UNKNOWNS] = {0};
  double start = descent_excess(zero);
  double dense = excess_after(ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT, 0);
  double fed_back = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 0);
  double deepspeed = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEEPSPEED, 0);
  double control = excess_after(ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 1);
  cr_log_info("excess loss: start %g, dense %g, one bit %g, deepspeed %g, control %g", start, dense,
              fed_back, deepspeed, control);
  cr_expect_lt(dense, 1e-4 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(fed_back, 1e-3 * start, "one bit: %g of %g", fed_back, start);
  cr_expect_lt(deepspeed, 1e-3 * start, "deepspeed: %g of %g", deepspeed, start);
  cr_expect_gt(control, 20 * fed_back, "the control is no worse: %g", control);
}
