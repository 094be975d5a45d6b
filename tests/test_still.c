/* A parameter without gradients stays where it is, and begins without a jump. */
#include "tests/support.h"
#include "tests/support_optimizers.h"

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

Test(still, elements_without_variance_stay_and_begin_without_a_jump) {
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

Test(still, blocks_without_gradients_stay) {
  on_ranks(1, stay, NULL);
  on_ranks(3, stay, NULL);
}
