/*
 * 1-bit momentum SGD comes to the loss of the dense one, which the control without error feedback
 * does not. That it equals the oracle is in test_optimizers.c.
 */
#include "tests/support.h"
#include "tests/support_descent.h"

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
