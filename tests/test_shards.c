/*
 * Tests 1-bit Adam whose state is sharded, in addition to test_optimizers.c. Its warm-up must equal
 * that of an optimizer without shards, and its steps must be bounded. test_training.c tests that it
 * converges.
 */
#include "tests/support_adam.h"
#include "tests/support_statistics.h"

static const onebit_shards_t modes[] = {ONEBIT_SHARDS_STEP, ONEBIT_SHARDS_PARAMETERS};

static struct adam_case sharded_case(const struct adam_tensors *tensors, size_t freeze_step) {
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

/* Records the variance ratio of each step, which decides the freeze. */
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
  options.common.block_size = 32; /* a block's sum fits into 24 bits, but the sum of all blocks does
                                   * not */
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

/* The ranks send the sums of their shares of the variance as floats, without loss. Except for the
 * order of double additions, the totals must equal those of an optimizer without shards. */
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

/* --- The warm-up equals that of an optimizer that is not sharded, and the oracle's */

Test(shards, warm_up_is_that_of_all) {
  for (int size = 1; size <= 4; size++) {
    struct adam_case what = sharded_case(&adam_tensors_odd, ONEBIT_FREEZE_NEVER);
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

/* --- Steps are bounded: gradients that double in every step become too large for a frozen
 * variance. */

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
      struct adam_case what = sharded_case(&adam_tensors_odd, 3);
      what.size = size;
      what.growth = 2.0f;
      what.still = false;
      what.options.shards = modes[m];
      what.options.common.bucket_size = size % 2 ? 1000 : 0;
      if (test_wanted((size_t)size - 1))
        check_bounded_case(what);
    }
}

/*
 * Tests that sharded 1-bit Adam sends and allocates as much as its info and statistics say, and
 * less than without shards. test_optimizers.c tests that replicas are equal.
 */

static onebit_adam_options_t sharded_options(onebit_shards_t shards) {
  onebit_adam_options_t options = {.size = sizeof options, .shards = shards};
  return options;
}

/* --- Bytes */

struct costs {
  onebit_adam_options_t options;
  size_t count;                    /* of elements */
  onebit_optimizer_info_t info[8]; /* one per rank */
};

/* Measures an optimizer of two tensors, one of them of odd size. Its steps must send as many bytes
 * as its info says. */
static void measure_costs(onebit_comm_t comm, void *context) {
  struct costs *costs = context;
  int rank = onebit_comm_rank(comm);
  size_t element = dtype_size(costs->options.common.parameter_dtype), count = costs->count;
  char *parameter = allocate(count, element);
  float *gradient = allocate(count, sizeof(float));
  onebit_tensor_t tensors[] = {
      {parameter, gradient, 1001, 0, 0, 0},
      {parameter + 1001 * element, gradient + 1001, count - 1001, 0, 0, 0}};
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_info_t info;
  check_case("shards %d on %d ranks", (int)costs->options.shards, onebit_comm_size(comm));
  fill_input(gradient, ONEBIT_FLOAT32, count, rank, 0);
  CHECK_STATUS(onebit_adam_create(comm, tensors, 2, &costs->options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 12; step++) {
    info = optimizer_info(optimizer);
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    uint64_t sent = onebit_comm_bytes_sent(comm) - before;
    uint64_t told = info.stage == ONEBIT_STAGE_WARMUP ? info.warmup_bytes : info.compressed_bytes;
    CHECK(sent == told, "step %d sent %llu bytes, info says %llu", step, (unsigned long long)sent,
          (unsigned long long)told);
  }
  CHECK(info.stage == ONEBIT_STAGE_COMPRESSED, "still in warm-up");
  costs->info[rank] = info;
  onebit_optimizer_destroy(optimizer);
  free(parameter);
  free(gradient);
}

static struct costs costs_on_ranks(int size, onebit_shards_t shards, onebit_dtype_t parameters,
                                   size_t freeze_step, size_t count) {
  struct costs costs = {.options = sharded_options(shards), .count = count};
  costs.options.freeze_step = freeze_step;
  costs.options.beta2 = 0.875; /* the automatic freeze comes at the ninth step */
  costs.options.common.parameter_dtype = parameters;
  costs.options.common.chunk_size = 4096; /* keeps the windows of dense plans small */
  on_ranks(size, measure_costs, &costs);
  return costs;
}

Test(shards_costs, steps_send_what_is_said) {
  const size_t count = 1 << 18;
  for (int size = 2; size <= 4; size++) {
    struct costs whole = costs_on_ranks(size, ONEBIT_SHARDS_NONE, ONEBIT_FLOAT32, 3, count);
    struct costs step = costs_on_ranks(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, 3, count);
    struct costs parameters =
        costs_on_ranks(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_BFLOAT16, 3, count);
    costs_on_ranks(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, ONEBIT_FREEZE_AUTOMATIC, count);
    for (int r = 0; r < size; r++) {
      double peers = (double)(size - 1) / size * (double)count;
      uint64_t bits = step.info[r].compressed_bytes, sum = parameters.info[r].compressed_bytes;
      CHECK(bits == whole.info[r].compressed_bytes, "%llu bytes a compressed step, unsharded %llu",
            (unsigned long long)bits, (unsigned long long)whole.info[r].compressed_bytes);
      CHECK(step.info[r].warmup_bytes == whole.info[r].warmup_bytes &&
                step.info[r].warmup_bytes >= 29 * bits,
            "%llu bytes in the warm-up", (unsigned long long)step.info[r].warmup_bytes);
      CHECK(fabs((double)sum - 2.0 * peers - (double)bits / 2.0) < 0.04 * (double)sum,
            "%llu bytes a step, parameters of 16 bits back", (unsigned long long)sum);
    }
  }
}

/* Checks the memory in bytes per parameter, up to half a byte for messages, and without the windows
 * of the dense plans. */
static void check_memory(int size, onebit_shards_t shards, onebit_dtype_t dtype, double whole,
                         double shared) {
  const size_t count = 1 << 20;
  struct costs costs = costs_on_ranks(size, shards, dtype, 3, count);
  for (int r = 0; r < size; r++) {
    double each = (double)costs.info[r].memory_bytes / (double)count,
           wanted = whole + shared / size;
    CHECK(each >= wanted && each <= wanted + 0.8 + 0.12 * size,
          "%d ranks, shards %d: %.2f bytes, not %.2f", size, (int)shards, each, wanted);
  }
}

Test(shards_costs, memory_is_what_the_header_says) {
  for (int size = 2; size <= 4; size *= 2) {
    check_memory(size, ONEBIT_SHARDS_NONE, ONEBIT_FLOAT32, 12, 8);
    check_memory(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, 8, 20);
    check_memory(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_FLOAT32, 8, 12);
    check_memory(size, ONEBIT_SHARDS_NONE, ONEBIT_BFLOAT16, 16, 8);
    check_memory(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_BFLOAT16, 8, 16);
  }
}

/* --- Statistics of master values: those of the ranks' shares add up to the total */

enum { TENSORS = 3, EACH = 2000 };

struct account {
  onebit_adam_options_t options;
  double all, parameters[4];
};

static void tell_statistics(onebit_comm_t comm, void *context) {
  struct account *account = context;
  int rank = onebit_comm_rank(comm);
  float gradients[TENSORS * EACH];
  uint16_t parameters[TENSORS * EACH] = {0};
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, t == 1};
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &account->options, &optimizer),
               ONEBIT_OK);
  for (int step = 0; step < 8; step++) {
    fill_input(gradients, ONEBIT_FLOAT32, TENSORS * EACH, rank, step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
  }
  CHECK(onebit_optimizer_check(optimizer, NULL) >= ONEBIT_OK, "%s", onebit_last_error());
  double momentum = 0.0;
  for (size_t t = 0; t < TENSORS; t++) {
    const onebit_tensor_statistics_t one = tensor_statistics(optimizer, t);
    account->parameters[rank] += one.parameter_norm * one.parameter_norm;
    CHECK((one.residual_norm > 0) == (t != 1), "tensor %zu keeps %g", t, one.residual_norm);
    momentum += one.momentum_norm;
  }
  CHECK(momentum > 0, "no momentum");
  for (size_t i = 0; rank == 0 && i < TENSORS * EACH; i++)
    account->all += pow((double)oracle_load(parameters, i, ONEBIT_BFLOAT16), 2);
  onebit_optimizer_destroy(optimizer);
}

Test(shards_costs, statistics_are_of_shares) {
  for (int size = 1; size <= 4; size++) {
    struct account account = {.options = sharded_options(ONEBIT_SHARDS_PARAMETERS)};
    account.options.freeze_step = 3;
    account.options.common.block_size = 128;
    account.options.common.parameter_dtype = ONEBIT_BFLOAT16;
    on_ranks(size, tell_statistics, &account);
    double parameters = 0.0;
    for (int r = 0; r < size; r++)
      parameters += account.parameters[r];
    CHECK(account.all > 0 && fabs(parameters - account.all) <= 0.01 * account.all,
          "masters %g, parameters %g", parameters, account.all);
  }
}
