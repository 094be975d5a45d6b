/*
 * Tests loss scaling. A loss scale that is a power of two changes no bit of float32. The loss scale
 * is halved with each skipped step and doubled after `interval` good steps, equally on all ranks,
 * within its bounds. If float16 gradients overflow, it falls until they do not. No loss scale
 * causes a skip that would not happen without it.
 */
#include "tests/support_adam.h"

static const int sizes[] = {1, 2, 3, 4, 7};
enum { SIZES = sizeof sizes / sizeof sizes[0], COUNT = 2500, FREEZE = 4, STEPS = 9 };

/* A rank's optimizer of two tensors, and its gradients. */
struct learner {
  float parameter[COUNT];
  void *gradient;
  onebit_dtype_t dtype;
  onebit_optimizer_t optimizer;
};

static struct learner *make_learner(onebit_comm_t comm, const onebit_adam_options_t *options) {
  struct learner *learner = allocate(1, sizeof *learner);
  learner->dtype = options->common.gradient_dtype;
  learner->gradient = allocate(COUNT, sizeof(float));
  fill_input(learner->parameter, ONEBIT_FLOAT32, COUNT, 99, 0);
  char *second = (char *)learner->gradient + 100 * dtype_size(learner->dtype);
  onebit_tensor_t tensors[] = {
      {learner->parameter, learner->gradient, 100, 0.01f, 0, 0},
      {learner->parameter + 100, second, COUNT - 100, 0, 0, 0},
  };
  CHECK_STATUS(onebit_adam_create(comm, tensors, 2, options, &learner->optimizer), ONEBIT_OK);
  return learner;
}

static void free_learner(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  free(learner->gradient);
  free(learner);
}

static double scale_of(const struct learner *learner) {
  double scale = 0;
  CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &scale), ONEBIT_OK);
  const onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
  CHECK(info.loss_scale == scale, "info says %g, the scale is %g", info.loss_scale, scale);
  return scale;
}

/* Computes the gradients of a loss that is multiplied by the loss scale. */
static void compute_gradient(struct learner *learner, int rank, int step) {
  float scale = (float)scale_of(learner);
  for (size_t i = 0; i < COUNT; i++)
    oracle_store(learner->gradient, i, learner->dtype, input_value(i, rank, step) * scale);
}

static onebit_status_t make_step(struct learner *learner) {
  return onebit_optimizer_step(learner->optimizer, 0.01f);
}

static void spoil_gradient(struct learner *learner, int step) {
  oracle_store(learner->gradient, (size_t)step * 977 % COUNT, learner->dtype,
               step % 2 ? NAN : INFINITY);
}

/* --- Comparison with a run without a loss scale */

static void compare_with_unscaled_on_rank(onebit_comm_t comm, void *context) {
  const onebit_adam_options_t *options = context;
  int rank = onebit_comm_rank(comm);
  onebit_adam_options_t without = *options;
  without.common.initial_loss_scale = 0;
  struct learner *scaled = make_learner(comm, options), *plain = make_learner(comm, &without);
  for (int step = 0; step < STEPS; step++) {
    check_case("step %d, scale %g, clip %g, profile %d, %s", step, scale_of(scaled),
               options->common.clip_norm, (int)options->common.profile,
               dtype_name(options->common.gradient_dtype));
    if (step % 4 == 2) { /* a bad step in between */
      compute_gradient(scaled, rank, step + 500);
      if (rank == step % onebit_comm_size(comm))
        spoil_gradient(scaled, step);
      CHECK_STATUS(make_step(scaled), ONEBIT_SKIPPED);
    }
    compute_gradient(scaled, rank, step);
    compute_gradient(plain, rank, step);
    CHECK_STATUS(make_step(scaled), ONEBIT_OK);
    CHECK_STATUS(make_step(plain), ONEBIT_OK);
    CHECK_BITS("parameters", scaled->parameter, plain->parameter, COUNT, ONEBIT_FLOAT32);
  }
  free_learner(scaled);
  free_learner(plain);
}

/* With a loss scale of 2^64 the squares of the scaled gradients are infinite. */
static void check_same(onebit_profile_t profile, double clip_norm, int hosts) {
  static const double scales[] = {1, 1024, 0x1p64};
  for (size_t p = 0; p < SIZES; p++)
    for (int k = 0; k < 6 && test_wanted(p); k++) {
      onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
      options.freeze_step = FREEZE;
      options.common.profile = profile;
      options.common.clip_norm = clip_norm;
      options.common.gradient_dtype = k / 3 ? ONEBIT_BFLOAT16 : ONEBIT_FLOAT32;
      options.common.initial_loss_scale = scales[k % 3];
      options.common.loss_scale_interval = 2;
      if (!hosts)
        on_ranks(sizes[p], compare_with_unscaled_on_rank, &options);
      options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
      if (hosts && sizes[p] % hosts == 0)
        on_hosts(sizes[p], hosts, compare_with_unscaled_on_rank, &options);
    }
}

Test(loss_scale, changes_no_bit) { check_same(ONEBIT_PROFILE_DEFAULT, 0, 0); }
Test(loss_scale, changes_no_bit_in_profile_deepspeed) {
  check_same(ONEBIT_PROFILE_DEEPSPEED, 0, 0);
}
Test(loss_scale, changes_no_bit_with_clipping) { check_same(ONEBIT_PROFILE_DEFAULT, 190, 0); }
Test(loss_scale, changes_no_bit_on_several_hosts) { check_same(ONEBIT_PROFILE_DEFAULT, 0, 2); }

/* --- Increase and decrease of the loss scale */

/* A test case: the initial and smallest loss scale, the interval, steps ('+' is a good one, '-' a
 * skipped one), and the loss scale after these steps. */
struct story {
  double first, least;
  size_t interval;
  const char *steps;
  double last;
};

static const struct story stories[] = {
    {64, 0, 3, "+++", 128},
    {64, 0, 3, "++-++", 32},      /* the count of good steps begins again */
    {64, 0, 3, "++-+++", 64},     /* there are now enough good steps */
    {64, 0, 3, "+++++++++", 512}, /* several doublings in a row */
    {64, 0, 3, "--------", 1},    /* the default lower bound */
    {64, 16, 3, "---", 16},       /* another lower bound */
    {64, 0.25, 1, "-----------", 0.25},
    {64, 24, 2, "--++-++", 48},      /* a lower bound that is no power of two */
    {0x1p62, 0, 1, "+++++", 0x1p64}, /* the largest loss scale */
    {1, 1, 1, "+-+-+-+-", 1},
    {64, 0, 0, "+++++++++++-", 32}, /* the default interval is longer than this */
};

static void run_story_on_rank(onebit_comm_t comm, void *context) {
  const struct story *story = context;
  int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  uint64_t skipped = 0;
  options.freeze_step = FREEZE;
  options.common.initial_loss_scale = story->first;
  options.common.min_loss_scale = story->least;
  options.common.loss_scale_interval = story->interval;
  struct oracle_weigher oracle = oracle_weigher_of(&options.common, size);
  struct learner *learner = make_learner(comm, &options);
  for (int step = 0; story->steps[step]; step++) {
    bool bad = story->steps[step] == '-';
    check_case("%s from %g, step %d", story->steps, story->first, step);
    compute_gradient(learner, rank, step);
    if (bad && rank == step % size)
      spoil_gradient(learner, step);
    CHECK_STATUS(make_step(learner), bad ? ONEBIT_SKIPPED : ONEBIT_OK);
    oracle_rescale(&oracle, bad);
    CHECK(scale_of(learner) == oracle.loss_scale, "the scale is %g, not %g", scale_of(learner),
          oracle.loss_scale);
    skipped += bad;
    const onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
    CHECK(info.skipped == skipped && info.steps == (uint64_t)step + 1 - skipped,
          "%llu steps, %llu skipped", (unsigned long long)info.steps,
          (unsigned long long)info.skipped);
  }
  CHECK(scale_of(learner) == story->last, "the last scale is %g, not %g", scale_of(learner),
        story->last);
  free_learner(learner);
}

Test(loss_scale, falls_and_recovers) {
  for (size_t p = 0; p < SIZES; p++)
    for (size_t k = 0; k < sizeof stories / sizeof stories[0] && test_wanted(p); k++)
      on_ranks(sizes[p], run_story_on_rank, (void *)&stories[k]);
}

/* --- Gradients of float16 */

static float largest_input(int ranks, int step) {
  float largest = 0.0f;
  for (int r = 0; r < ranks; r++)
    for (size_t i = 0; i < COUNT; i++)
      largest = fmaxf(largest, fabsf(input_value(i, r, step)));
  return largest;
}

/* Repeats the same gradients until a step with them succeeds. */
static void float16_on_rank(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm), skipped = 0;
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  (void)context;
  options.freeze_step = FREEZE;
  options.common.gradient_dtype = ONEBIT_FLOAT16;
  options.common.initial_loss_scale = 65536;
  struct learner *learner = make_learner(comm, &options), *knowing = NULL;
  for (int step = 0; step < STEPS; step++) {
    onebit_status_t status = ONEBIT_SKIPPED;
    check_case("step %d of float16", step);
    for (; status == ONEBIT_SKIPPED && skipped < 30; skipped += status == ONEBIT_SKIPPED) {
      compute_gradient(learner, rank, 0);
      status = make_step(learner);
    }
    CHECK_STATUS(status, ONEBIT_OK);
    options.common.initial_loss_scale = scale_of(learner);
    if (step == 0) /* an optimizer that begins with the scale that was found */
      knowing = make_learner(comm, &options);
    compute_gradient(knowing, rank, 0);
    CHECK_STATUS(make_step(knowing), ONEBIT_OK);
    CHECK_BITS("parameters", learner->parameter, knowing->parameter, COUNT, ONEBIT_FLOAT32);
  }
  double largest = (double)largest_input(size, 0), scale = scale_of(learner);
  CHECK(skipped > 1 && largest * scale < 65520 && largest * scale * 2 >= 65520,
        "after %d skipped steps the scale is %g, the largest gradient %g", skipped, scale, largest);
  free_learner(learner);
  free_learner(knowing);
}

Test(loss_scale, comes_down_to_where_float16_does_not_overflow) {
  for (size_t p = 0; p < SIZES; p++)
    if (test_wanted(p))
      on_ranks(sizes[p], float16_on_rank, NULL);
}

/* --- A loss scale that differs by rank */

static struct learner *make_zero_one(onebit_comm_t comm, double loss_scale, double clip_norm) {
  struct learner *learner = allocate(1, sizeof *learner);
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.variance_freeze_step = 2;
  options.local_step_scaler = 2;
  options.local_step_clipper = 3;
  options.common.initial_loss_scale = loss_scale;
  options.common.clip_norm = clip_norm;
  learner->gradient = allocate(COUNT, sizeof(float));
  fill_input(learner->parameter, ONEBIT_FLOAT32, COUNT, 99, 0);
  onebit_tensor_t tensor = {learner->parameter, learner->gradient, COUNT, 0, 0, 0};
  CHECK_STATUS(onebit_zero_one_adam_create(comm, &tensor, 1, &options, &learner->optimizer),
               ONEBIT_OK);
  return learner;
}

/* In a step that sends nothing, only rank 0 notices that its gradient is not finite, so only rank 0
 * lowers its loss scale. The values that are exchanged later do not depend on the loss scales. */
static void own_scale_on_rank(onebit_comm_t comm, void *context) {
  const double *clip_norm = context;
  int rank = onebit_comm_rank(comm), fallen = 0;
  struct learner *scaled = make_zero_one(comm, 1024, *clip_norm);
  struct learner *plain = make_zero_one(comm, 0, *clip_norm);
  for (int step = 0; step < 24; step++) {
    bool bad = step % 2 && rank == 0;
    check_case("step %d of 0/1 Adam, clip %g", step, *clip_norm);
    const uint64_t before = optimizer_info(plain->optimizer).exchanges[2];
    compute_gradient(plain, rank, step);
    compute_gradient(scaled, rank, step);
    if (bad) {
      spoil_gradient(plain, step);
      spoil_gradient(scaled, step);
    }
    onebit_status_t status = make_step(plain);
    CHECK_STATUS(make_step(scaled), status);
    CHECK_BITS("parameters", scaled->parameter, plain->parameter, COUNT, ONEBIT_FLOAT32);
    bool local = optimizer_info(plain->optimizer).exchanges[2] > before;
    if (step % 2) /* a step that exchanges is skipped by all ranks */
      CHECK_STATUS(status, local && rank ? ONEBIT_OK : ONEBIT_SKIPPED);
    fallen += status == ONEBIT_SKIPPED;
    CHECK(scale_of(scaled) == fmax(1024.0 / (double)(1 << fallen), 1), "the scale is %g after %d",
          scale_of(scaled), fallen);
  }
  CHECK(rank ? fallen > 0 && fallen < 12 : fallen == 12, "%d of 12 steps were skipped", fallen);
  free_learner(scaled);
  free_learner(plain);
}

Test(loss_scale, is_a_ranks_own_where_a_step_sends_nothing) {
  for (int size = 1; size <= 4; size++)
    for (int clips = 0; clips <= 1; clips++)
      on_ranks(size, own_scale_on_rank, &(double){clips * 100.0});
}

/* --- Steps in parts: while a step is open, onebit_optimizer_get_loss_scale returns its loss
 * scale. */

static void open_on_rank(onebit_comm_t comm, void *context) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  int rank = onebit_comm_rank(comm);
  (void)context;
  options.freeze_step = FREEZE;
  options.common.bucket_size = 1;
  options.common.initial_loss_scale = 16;
  options.common.loss_scale_interval = 2;
  struct oracle_weigher oracle = oracle_weigher_of(&options.common, onebit_comm_size(comm));
  struct learner *learner = make_learner(comm, &options);
  for (int step = 0; step < STEPS; step++) {
    bool bad = step % 3 == 1;
    double scale = 0;
    check_case("step %d in parts", step);
    CHECK_STATUS(onebit_optimizer_begin(learner->optimizer, 0.01f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &scale), ONEBIT_OK);
    CHECK(scale == oracle.loss_scale, "the scale is %g, not %g", scale, oracle.loss_scale);
    for (size_t i = 0; i < COUNT; i++)
      oracle_store(learner->gradient, i, ONEBIT_FLOAT32, input_value(i, rank, step) * (float)scale);
    if (bad && rank == 0)
      spoil_gradient(learner, step);
    for (size_t t = 2; t-- > 0;) {
      CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, t), ONEBIT_OK);
      CHECK_STATUS(onebit_optimizer_get_loss_scale(learner->optimizer, &scale), ONEBIT_OK);
      CHECK(scale == oracle.loss_scale, "the scale is %g, not %g", scale, oracle.loss_scale);
    }
    CHECK_STATUS(make_step(learner), bad ? ONEBIT_SKIPPED : ONEBIT_OK);
    oracle_rescale(&oracle, bad);
  }
  free_learner(learner);
}

Test(loss_scale, of_a_step_in_parts) {
  for (int size = 1; size <= 4; size++)
    on_ranks(size, open_on_rank, NULL);
}
