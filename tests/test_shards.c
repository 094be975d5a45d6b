/*
 * 1-bit Adam whose state is sharded, beside what test_optimizers.c has of all: its warm-up is that
 * of an optimizer that is not sharded; steps are bounded. What it costs and refuses is in
 * test_shards_costs.c, that it converges in test_training.c.
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
    fill_input(gradients, ONEBIT_FLOAT32, PAIR_COUNT, 0, step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
    const onebit_optimizer_info_t info = optimizer_info(optimizer);
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

/* --- The warm-up is that of an optimizer that is not sharded: of the oracle, too */

Test(shards, warm_up_is_that_of_all) {
  for (int size = 1; size <= 4; size++) {
    struct adam_case what = case_of(&adam_tensors_odd, ONEBIT_FREEZE_NEVER);
    what.size = size;
    struct adam_run whole = adam_prepare(&what);
    for (size_t m = 0; m < 2; m++) {
      what.options.shards = modes[m];
      struct adam_run run = adam_prepare(&what);
      for (int step = 0; step < what.steps; step++)
        CHECK_BITS("parameters in the warm-up", run.moments[step].parameters,
                   whole.moments[step].parameters, run.total, ONEBIT_FLOAT32);
      on_ranks(size, adam_on_rank, &run);
      adam_release(&run);
    }
    adam_release(&whole);
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
