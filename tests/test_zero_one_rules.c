/*
 * 0/1 Adam: elements that never have a gradient, and convergence.
 */
#include "tests/support_descent.h"
#include "tests/support_zero_one.h"

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
  if (!CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, &descent->options, &optimizer),
                    ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = descent_slope(w[i], rank, i) + 0.3f * input_value(i, rank, step % 97);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f / (1.0f + (float)step / 100.0f)),
                 ONEBIT_OK);
  }
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
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
