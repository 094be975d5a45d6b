/*
 * Lion in one bit, without an oracle: it comes as near to a minimum as the dense one, and
 * leaves alone what has no gradients.
 */
#include "tests/support.h"

/* --- Convergence, and what does not move */

enum { RANKS = 4, UNKNOWNS = 1500, DESCENTS = 900 };

static float target(size_t i) { return uniform_value(i); }

/* To targets that all ranks have alike; each has noise of its own, which is as large at the end. */
static float slope(float w, int rank, int step, size_t i) {
  const uint64_t place = ((uint64_t)step * RANKS + (uint64_t)rank) * UNKNOWNS + i;
  return (0.1f + (float)(i % 97)) * (w - target(i) + 0.3f * uniform_value(100000 + place));
}

struct descent {
  onebit_lion_options_t options;
  double distance[RANKS]; /* from the targets, as a root of a mean of squares */
};

static double distance_of(const float w[UNKNOWNS]) {
  double sum = 0.0;
  for (size_t i = 0; i < UNKNOWNS; i++)
    sum += (double)(w[i] - target(i)) * (double)(w[i] - target(i));
  return sqrt(sum / UNKNOWNS);
}

/* The rate falls to 0: a step of signs is as long as that. */
static void descend(onebit_comm_t comm, void *context) {
  struct descent *descent = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_tensor_t tensor = {w, gradient, UNKNOWNS, 0, 0, 0};
  onebit_optimizer_t optimizer;
  if (!CHECK_STATUS(onebit_lion_create(comm, &tensor, 1, &descent->options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < DESCENTS; step++) {
    const float left = 1.0f - (float)step / (float)DESCENTS;
    for (size_t i = 0; i < UNKNOWNS; i++)
      gradient[i] = slope(w[i], rank, step, i);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f * left), ONEBIT_OK);
  }
  descent->distance[rank] = distance_of(w);
  onebit_optimizer_destroy(optimizer);
}

static double distance_after(onebit_optimizer_options_t common) {
  struct descent descent = {.options = ONEBIT_LION_OPTIONS_INIT};
  descent.options.common = common;
  on_ranks(RANKS, descend, &descent);
  for (int r = 1; r < RANKS; r++)
    cr_assert(memcmp(&descent.distance[r], &descent.distance[0], sizeof(double)) == 0,
              "ranks have come to different places");
  return descent.distance[0];
}

Test(lion_alone, comes_as_near_as_the_dense_form) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  double one_bit = distance_after(common);
  common.block_size = ONEBIT_BLOCK_BUFFER;
  double one_scale = distance_after(common);
  common.block_size = 0;
  common.no_error_feedback = 1;
  double control = distance_after(common);
  common.no_error_feedback = 0;
  common.dense_below = SIZE_MAX;
  double dense = distance_after(common);
  cr_log_info("distance: dense %g, one bit %g, one scale %g, control %g", dense, one_bit, one_scale,
              control);
  cr_expect_lt(dense, 0.05, "dense: %g", dense);
  cr_expect_lt(one_bit, 1.3 * dense, "one bit: %g, dense %g", one_bit, dense);
  cr_expect_lt(one_scale, 1.3 * dense, "one scale: %g, dense %g", one_scale, dense);
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

Test(lion_alone, blocks_without_gradients_stay) {
  on_ranks(1, stay, NULL);
  on_ranks(3, stay, NULL);
}
