/*
 * 1-bit momentum SGD equals the oracle's in every bit of every parameter after every step, with a
 * warm-up and without, for groups of 1 to 7 ranks; comes to the loss of the dense one, which the
 * control without error feedback does not; and refuses what it does not understand.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support_descent.h"
#include "tests/support_momentum.h"

TestSuite(momentum, .timeout = 120);

static struct momentum_case case_of(const struct adam_tensors *tensors, size_t warmup_steps) {
  struct momentum_case what = {
      .steps = 16, .options = ONEBIT_MOMENTUM_OPTIONS_INIT, .tensors = tensors};
  what.options.warmup_steps = warmup_steps;
  return what;
}

static void check_one(const struct momentum_case *what) {
  struct momentum_run run = momentum_prepare(what);
  if (what->hosts)
    on_hosts(what->size, what->hosts, momentum_on_rank, &run);
  else
    on_ranks(what->size, momentum_on_rank, &run);
  momentum_release(&run);
}

static void check_on_groups(struct momentum_case what) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      check_one(&what);
  }
}

Test(momentum, compressed_from_the_first_step) { check_on_groups(case_of(&adam_tensors_odd, 0)); }
Test(momentum, after_a_warmup) { check_on_groups(case_of(&adam_tensors_odd, 5)); }
Test(momentum, after_one_step) { check_on_groups(case_of(&adam_tensors_one, 1)); }
Test(momentum, never_compressed) {
  check_on_groups(case_of(&adam_tensors_odd, ONEBIT_FREEZE_NEVER));
}
Test(momentum, fewer_elements_than_ranks) { check_on_groups(case_of(&adam_tensors_tiny, 0)); }
Test(momentum, no_tensors) { check_on_groups(case_of(&adam_tensors_none, 2)); }

Test(momentum, options_are_heeded) {
  struct momentum_case what = case_of(&adam_tensors_odd, 3);
  what.options.momentum = 0.7;
  what.options.common.gradient_factor = 0.3;
  what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  check_on_groups(what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check_on_groups(what);
  what.options.common.no_error_feedback = 1;
  check_on_groups(what);
}

Test(momentum, buckets) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (size_t b = 0; b < 3; b++)
    for (size_t warmup = 0; warmup <= 4; warmup += 4) {
      struct momentum_case what = case_of(&adam_tensors_odd, warmup);
      what.options.common.bucket_size = sizes[b];
      what.parts = b % 2 == 0;
      what.size = 3 + (int)b % 2;
      check_one(&what);
    }
}

Test(momentum, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < 4; k++)
    for (size_t warmup = 0; warmup <= 4; warmup += 4) {
      struct momentum_case what = case_of(&adam_tensors_odd, warmup);
      what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
      what.options.common.bucket_size = k % 2 ? 1000 : 0;
      what.size = splits[k][0];
      what.hosts = splits[k][1];
      check_one(&what);
    }
}

Test(momentum, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct momentum_case what = case_of(&adam_tensors_odd, 3);
      what.size = 3;
      what.options.common.threads = threads;
      check_one(&what);
    }
  }
}

/* The poison is on each rank once, and in all steps from the first on. */
Test(momentum, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, NAN, -1.0f / 0.0f};
  for (int rank = 0; rank < 3; rank++)
    for (size_t warmup = 0; warmup <= 4; warmup += 4) {
      struct momentum_case what = case_of(&adam_tensors_odd, warmup);
      what.size = 3;
      what.poison = poisons[rank];
      what.poisoned_rank = rank;
      what.options.common.bucket_size = rank == 1 ? 1000 : 0;
      what.parts = rank == 2;
      check_one(&what);
    }
}

/* --- Tensors that stay uncompressed: they take dense steps, the others what they would take
 * alone. */

enum { FIRST = 700, PLAIN = 300, LAST = 900, ALL = FIRST + PLAIN + LAST, STEPS = 10 };

/* Parameters after STEPS, of the tensors whose bit is set; `plain`: the second is uncompressed. */
static void learn(onebit_comm_t comm, float *parameters, unsigned which, bool plain,
                  size_t warmup_steps) {
  static const size_t begin[] = {0, FIRST, FIRST + PLAIN, ALL};
  float *gradients = allocate(ALL, sizeof *gradients);
  onebit_tensor_t tensors[3];
  size_t count = 0;
  for (size_t t = 0; t < 3; t++)
    if (which >> t & 1)
      tensors[count++] = (onebit_tensor_t){
          parameters + begin[t], gradients + begin[t], begin[t + 1] - begin[t], 0.1f, 0,
          t == 1 && plain};
  fill_input(parameters, ONEBIT_FLOAT32, ALL, 90, 0);
  onebit_momentum_options_t options = ONEBIT_MOMENTUM_OPTIONS_INIT;
  options.warmup_steps = warmup_steps;
  onebit_optimizer_t optimizer;
  if (CHECK_STATUS(onebit_momentum_create(comm, tensors, count, &options, &optimizer), ONEBIT_OK)) {
    for (int step = 0; step < STEPS; step++) {
      fill_input(gradients, ONEBIT_FLOAT32, ALL, onebit_comm_rank(comm), step);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-2f), ONEBIT_OK);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free(gradients);
}

static void leave_one_uncompressed(onebit_comm_t comm, void *context) {
  float mixed[ALL], dense[ALL], others[ALL];
  size_t warmup_steps = *(size_t *)context;
  learn(comm, mixed, 7, true, warmup_steps);
  learn(comm, dense, 7, false, ONEBIT_FREEZE_NEVER);
  learn(comm, others, 5, false, warmup_steps);
  CHECK_BITS("the uncompressed tensor", mixed + FIRST, dense + FIRST, PLAIN, ONEBIT_FLOAT32);
  CHECK_BITS("the tensor before it", mixed, others, FIRST, ONEBIT_FLOAT32);
  CHECK_BITS("the tensor behind it", mixed + FIRST + PLAIN, others + FIRST + PLAIN, LAST,
             ONEBIT_FLOAT32);
  CHECK(memcmp(mixed, dense, FIRST * sizeof(float)) != 0, "nothing was compressed");
}

Test(momentum, uncompressed_tensors) {
  for (size_t warmup = 0; warmup <= 3; warmup += 3)
    for (int size = 1; size <= 3; size++)
      on_ranks(size, leave_one_uncompressed, &warmup);
}

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
