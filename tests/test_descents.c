/*
 * Optimizers of one bit come as near to a minimum as their dense forms, which a control without
 * error feedback does not; and what has no gradients stays. That they equal their oracles is in
 * test_optimizers.c, descents by plans and regressions are in test_convergence.c.
 */
#include "tests/support.h"
#include "tests/support_descent.h"
#include "tests/support_optimizers.h"

struct problem {
  int steps;
  float (*slope)(float w, int rank, int step, size_t i);
  float (*rate)(int step);
  double (*left)(const float w[UNKNOWNS]); /* the loss, or a distance, above the best */
};

struct descent {
  const struct problem *problem;
  struct any_options options;
  double left[RANKS];
  uint64_t exchanges[3];
};

static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  const struct problem *problem = descent->problem;
  const int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  const onebit_tensor_t tensor = {w, gradient, UNKNOWNS, 0, 0, 0};
  onebit_optimizer_t optimizer;
  if (!CHECK_STATUS(any_create(&descent->options, comm, &tensor, 1, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < problem->steps; step++) {
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = problem->slope(w[i], rank, step, i);
    CHECK_STATUS(onebit_optimizer_step(optimizer, problem->rate(step)), ONEBIT_OK);
  }
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  CHECK(info.synchronized, "the last step is no synchronisation");
  descent->left[rank] = problem->left(w);
  if (rank == 0)
    memcpy(descent->exchanges, info.exchanges, sizeof descent->exchanges);
  onebit_optimizer_destroy(optimizer);
}

static struct descent descent_of(const struct problem *problem, struct any_case what) {
  struct descent descent = {.problem = problem,
                            .options = any_options_of(what.method, what.options)};
  on_ranks(RANKS, descend, &descent);
  descent_agreed(descent.left);
  return descent;
}

#define END_OF(problem, ...) descent_of(&problem, (struct any_case){ANY(__VA_ARGS__)}).left[0]

/* --- Momentum SGD ------------------------------------------------------------------------------*/

static float plain_slope(float w, int rank, int step, size_t i) {
  (void)step;
  return descent_slope(w, rank, i);
}
static float momentum_rate(int step) { return 0.05f / (1.0f + (float)step / 25.0f); }

static const struct problem plain = {900, plain_slope, momentum_rate, descent_excess};

Test(descents, momentum) {
  const float zero[UNKNOWNS] = {0};
  const double start = descent_excess(zero);
  const double dense = END_OF(plain, momentum, .warmup_steps = ONEBIT_FREEZE_NEVER);
  const double at_once = END_OF(plain, momentum, .warmup_steps = 0);
  const double warmed = END_OF(plain, momentum, .warmup_steps = 150);
  const double control = END_OF(plain, momentum, .common.no_error_feedback = 1);
  cr_log_info("excess loss: start %g, dense %g, one bit %g, after a warm-up %g, control %g", start,
              dense, at_once, warmed, control);
  cr_expect_lt(dense, 1e-4 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(at_once, 1e-3 * start, "one bit: %g of %g", at_once, start);
  cr_expect_lt(warmed, 1e-3 * start, "after a warm-up: %g of %g", warmed, start);
  cr_expect_gt(control, 20 * at_once, "the control is no worse: %g", control);
}

/* --- 0/1 Adam ----------------------------------------------------------------------------------*/

static float noisy_slope(float w, int rank, int step, size_t i) {
  return descent_slope(w, rank, i) + 0.3f * input_value(i, rank, step % 97);
}
static float zero_one_rate(int step) { return 0.02f / (1.0f + (float)step / 100.0f); }

static const struct problem noisy = {2000, noisy_slope, zero_one_rate, descent_excess};

#define ZERO_ONE(...)                                                                              \
  (struct any_case) { ANY(zero_one_adam, .local_step_scaler = 200, __VA_ARGS__) }

Test(descents, zero_one_adam) {
  const float zero[UNKNOWNS] = {0};
  const double start = descent_excess(zero);
  const double dense =
      descent_of(&noisy, ZERO_ONE(.variance_freeze_step = SIZE_MAX,
                                  .variance_update_scaler = SIZE_MAX, .local_step_clipper = 1))
          .left[0];
  const struct descent seldom =
      descent_of(&noisy, ZERO_ONE(.variance_freeze_step = 300, .variance_update_scaler = 16,
                                  .local_step_clipper = 4));
  const double control =
      descent_of(&noisy, ZERO_ONE(.variance_freeze_step = 300, .variance_update_scaler = 16,
                                  .local_step_clipper = 4, .common.no_error_feedback = 1))
          .left[0];
  cr_log_info("excess loss: start %g, dense %g, 0/1 Adam %g, control %g; %d steps dense, %d in "
              "bits, %d local",
              start, dense, seldom.left[0], control, (int)seldom.exchanges[0],
              (int)seldom.exchanges[1], (int)seldom.exchanges[2]);
  cr_expect_lt(dense, 1e-2 * start, "dense: %g of %g", dense, start);
  cr_expect_lt(seldom.left[0], 1e-2 * start, "0/1 Adam: %g of %g", seldom.left[0], start);
  cr_expect_gt(control, 5 * seldom.left[0], "the control is no worse: %g", control);
  cr_expect_gt(seldom.exchanges[2], (uint64_t)noisy.steps / 2);
  cr_expect_lt(seldom.exchanges[0], 100);
}

/* --- Lion --------------------------------------------------------------------------------------*/

/* To targets that all ranks have alike; each has noise of its own, which is as large at the end. */
static float scaled_slope(float w, int rank, int step, size_t i) {
  const uint64_t place = ((uint64_t)step * RANKS + (uint64_t)rank) * UNKNOWNS + i;
  return (0.1f + (float)(i % 97)) * (w - uniform_value(i) + 0.3f * uniform_value(100000 + place));
}

/* The rate falls to 0: a step of signs is as long as that. */
static float lion_rate(int step) { return 0.01f * (1.0f - (float)step / 900); }

/* The distance from the targets, as a root of a mean of squares. */
static double distance_of(const float w[UNKNOWNS]) {
  double sum = 0.0;
  for (size_t i = 0; i < UNKNOWNS; i++)
    sum += (double)(w[i] - uniform_value(i)) * (double)(w[i] - uniform_value(i));
  return sqrt(sum / UNKNOWNS);
}

static const struct problem scaled = {900, scaled_slope, lion_rate, distance_of};

Test(descents, lion) {
  const double one_bit = END_OF(scaled, lion, .beta1 = 0);
  const double one_scale = END_OF(scaled, lion, .common.block_size = ONEBIT_BLOCK_BUFFER);
  const double control = END_OF(scaled, lion, .common.no_error_feedback = 1);
  const double dense = END_OF(scaled, lion, .common.dense_below = SIZE_MAX);
  cr_log_info("distance: dense %g, one bit %g, one scale %g, control %g", dense, one_bit, one_scale,
              control);
  cr_expect_lt(dense, 0.05, "dense: %g", dense);
  cr_expect_lt(one_bit, 1.3 * dense, "one bit: %g, dense %g", one_bit, dense);
  cr_expect_lt(one_scale, 1.3 * dense, "one scale: %g, dense %g", one_scale, dense);
}

/* --- What has no gradients ---------------------------------------------------------------------*/

enum { COUNT = 4096 };

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

Test(descents, elements_without_variance_stay_and_begin_without_a_jump) {
  onebit_zero_one_adam_options_t options = {.size = sizeof options,
                                            .variance_freeze_step = 1000,
                                            .variance_update_scaler = 2,
                                            .local_step_scaler = 3,
                                            .local_step_clipper = 4};
  on_ranks(3, begin_late, &options); /* in the variance stage */
  options.variance_freeze_step = 20;
  on_ranks(3, begin_late, &options); /* frozen: they never begin */
}

enum { STILL = 2048 * 3 };

/* The first blocks have gradients, the last one none; nor has any for some steps. */
static void stay(onebit_comm_t comm, void *context) {
  static const size_t block_sizes[] = {0, 64};
  (void)context;
  for (size_t k = 0; k < 2; k++) {
    float *parameters = allocate(STILL, sizeof *parameters),
          *gradients = allocate(STILL, sizeof *gradients);
    onebit_tensor_t tensor = {parameters, gradients, STILL, 0, 0, 0};
    onebit_optimizer_t optimizer;
    onebit_lion_options_t options = {.size = sizeof options, .common.block_size = block_sizes[k]};
    if (!CHECK_STATUS(onebit_lion_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK))
      break;
    for (int step = 0; step < 20; step++) {
      for (size_t i = 0; i < STILL * 2 / 3 && step >= 5; i++)
        gradients[i] = input_value(i, onebit_comm_rank(comm), step);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
      bool moved = false, beyond = false;
      for (size_t i = 0; i < STILL; i++) {
        moved |= i < STILL * 2 / 3 && parameters[i] != 0;
        beyond |= i >= STILL * 2 / 3 && parameters[i] != 0;
      }
      CHECK(moved == (step >= 5), "step %d: blocks with gradients", step);
      CHECK(!beyond, "step %d: a block without gradients has moved", step);
    }
    onebit_optimizer_destroy(optimizer);
    free(parameters);
    free(gradients);
  }
}

Test(descents, blocks_without_gradients_stay) {
  on_ranks(1, stay, NULL);
  on_ranks(3, stay, NULL);
}
