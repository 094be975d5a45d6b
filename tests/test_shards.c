/*
 * 1-bit Adam whose state is sharded, beside what test_optimizers.c has of all: its warm-up is that
 * of an optimizer that is not sharded; skipped steps change nothing; steps are bounded. What it
 * costs and refuses is in test_shards_costs.c, that it converges in test_convergence.c.
 */
#include "tests/support_adam.h"

static const onebit_shards_t modes[] = {ONEBIT_SHARDS_STEP, ONEBIT_SHARDS_PARAMETERS};

static struct adam_case case_of(const struct adam_tensors *tensors, size_t freeze_step) {
  struct adam_case what = {
      .steps = 14, .options = ONEBIT_ADAM_OPTIONS_INIT, .tensors = tensors, .still = true};
  what.options.freeze_step = freeze_step;
  return what;
}

enum { PAIR_COUNT = 600, PAIR_STEPS = 12 };

struct ratios {
  onebit_shards_t shards;
  double of_step[PAIR_STEPS];
};

/* Finds the ratios that decide the freeze. */
static void find_ratios(onebit_comm_t comm, void *context) {
  struct ratios *ratios = context;
  float parameters[PAIR_COUNT] = {0}, gradients[PAIR_COUNT];
  const onebit_tensor_t tensor = {
      .parameter = parameters, .gradient = gradients, .count = PAIR_COUNT};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer = NULL;
  options.beta2 = 0.875;
  options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  options.shards = ratios->shards;
  options.common.block_size = 32; /* each of which has a sum of 24 bits, and all together more */
  if (!CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK))
    return;
  for (int step = 0; step < PAIR_STEPS; step++) {
    onebit_optimizer_info_t info = {.size = sizeof info};
    fill_input(gradients, ONEBIT_FLOAT32, PAIR_COUNT, 0, step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
    if (onebit_comm_rank(comm) == 0)
      ratios->of_step[step] = info.variance_ratio;
  }
  onebit_optimizer_destroy(optimizer);
}

/* The sums of the shares travel as floats, and lose nothing: but for the order of doubles they are
 * those of an optimizer that is whole. */
Test(shards, sums_of_the_variance_are_doubles) {
  struct ratios whole = {0}, shared = {0};
  on_ranks(2, find_ratios, &whole);
  cr_expect_gt(whole.of_step[PAIR_STEPS - 1], 0);
  for (int m = 0; m < 2; m++) {
    shared.shards = modes[m];
    on_ranks(2, find_ratios, &shared);
    for (int step = 0; step < PAIR_STEPS; step++)
      cr_expect_float_eq(shared.of_step[step], whole.of_step[step], 1e-13,
                         "step %d: %.17g, not %.17g", step, shared.of_step[step],
                         whole.of_step[step]);
  }
}

/* --- The warm-up, beside an optimizer that is not sharded */

enum { TOTAL = 30011, WARM_UP = 8 };

static float *parameters_after(onebit_comm_t comm, onebit_shards_t shards) {
  float *parameters = allocate(TOTAL, sizeof(float)), *gradients = allocate(TOTAL, sizeof(float));
  onebit_tensor_t tensors[] = {{parameters, gradients, 20000, 0.01f, 0, 0},
                               {parameters + 20000, gradients + 20000, TOTAL - 20000, 0, 0, 0}};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_optimizer_t optimizer = NULL;
  options.freeze_step = ONEBIT_FREEZE_NEVER;
  options.shards = shards;
  for (size_t i = 0; i < TOTAL; i++)
    parameters[i] = input_value(i, 50, 7);
  CHECK_STATUS(onebit_adam_create(comm, tensors, 2, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < WARM_UP; step++) {
    fill_input(gradients, ONEBIT_FLOAT32, TOTAL, onebit_comm_rank(comm), step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-2f), ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  free(gradients);
  return parameters;
}

static void compare_warm_ups(onebit_comm_t comm, void *context) {
  (void)context;
  float *whole = parameters_after(comm, ONEBIT_SHARDS_NONE);
  for (size_t m = 0; m < 2; m++) {
    float *sharded = parameters_after(comm, modes[m]);
    CHECK_BITS("parameters after the warm-up", sharded, whole, TOTAL, ONEBIT_FLOAT32);
    free(sharded);
  }
  free(whole);
}

Test(shards, warm_up_is_that_of_all) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++)
    on_ranks(sizes[p], compare_warm_ups, NULL);
}

/* --- Skipped steps */

Test(shards, skipped_steps_change_nothing) {
  static const float poisons[] = {INFINITY, NAN, -3e38f, 1e22f};
  for (int k = 0; k < 4; k++)
    for (int from = 0; from <= 6; from += 6) { /* in the warm-up too, or only behind it */
      struct adam_case what = case_of(&adam_tensors_odd, 4);
      what.poison = poisons[k];
      what.poisoned_from = from;
      what.options.common.bucket_size = k % 2 ? 1000 : 0;
      for (int size = 1; size <= 4; size++)
        for (int m = 0; m < 2; m++) {
          what.size = size;
          what.poisoned_rank = (k + m) % size;
          what.options.shards = modes[m];
          if (test_wanted_of((size_t)(k + from / 6 + 2 * m), (size_t)size - 1))
            adam_check(&what);
        }
    }
}

/* --- Steps are bounded: gradients that double from step to step leave a frozen variance behind. */

static void check_bound(const struct adam_run *run) {
  const struct adam_tensors *tensors = run->what->tensors;
  size_t bounded = 0;
  for (int step = run->what->steps - 4; step < run->what->steps; step++)
    for (size_t k = 0, i = 0; k < tensors->count; k++)
      for (size_t end = i + tensors->list[k].count; i < end; i++) {
        float factor = tensors->list[k].factor != 0.0f ? tensors->list[k].factor : 1.0f;
        double before = (double)run->moments[step - 1].parameters[i];
        double moved = fabs((double)run->moments[step].parameters[i] - before);
        double most = (double)(adam_learning_rate(step) * factor) *
                      (1.0 + (double)tensors->list[k].weight_decay * fabs(before));
        CHECK(moved <= 1.0001 * most + 1.2e-7 * fabs(before),
              "step %d moves parameter %zu by %g, not %g", step, i, moved, most);
        bounded += moved >= 0.9 * most;
      }
  CHECK(bounded > 1000, "only %zu steps are as large as they may", bounded);
}

static void check_bounded_case(struct adam_case what) {
  struct adam_run run = adam_prepare(&what);
  if (what.options.shards == ONEBIT_SHARDS_PARAMETERS)
    check_bound(&run);
  on_ranks(what.size, adam_on_rank, &run);
  adam_release(&run);
}

Test(shards, steps_are_bounded) {
  for (int size = 1; size <= 4; size++)
    for (size_t m = 0; m < 2; m++) {
      struct adam_case what = case_of(&adam_tensors_odd, 3);
      what.size = size;
      what.growth = 2.0f;
      what.still = false;
      what.options.shards = modes[m];
      what.options.common.bucket_size = size % 2 ? 1000 : 0;
      if (test_wanted((size_t)size - 1))
        check_bounded_case(what);
    }
}
