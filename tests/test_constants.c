/*
 * Tests learning-rate factors, weight decays and beta1 that change between steps. A tensor with a
 * factor must move as it does, to the bit, in an optimizer of its own whose learning rate is
 * multiplied by the factor. An optimizer whose beta1 was changed must make the steps of one that
 * was created with the new beta1.
 */
#include "tests/oracle.h"
#include "tests/support_checkpoint.h"
#include "tests/support_optimizers.h"

enum { COUNT = 700, STEPS = 12 };
static const float RATE = 0.01F;

static const struct any_case optimizers[] = {
    {ANY(adam, .freeze_step = 4)},
    {ANY(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_STEP)},
    {ANY(lamb, .freeze_step = 4)},
    {ANY(momentum, .warmup_steps = 4)},
    {ANY(zero_one_adam, .variance_freeze_step = 4)},
    {ANY(efficient_adam, .beta2 = 0.99, .warmup_steps = 4)},
    {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = ONEBIT_WARMUP_NONE)},
    {ANY(lion, .beta2 = 0.9)},
};
static const struct any_case rarely = {
    ANY(zero_one_adam, .variance_freeze_step = 2, .local_step_scaler = 2, .local_step_clipper = 4)};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

struct arrays {
  float parameter[COUNT], gradient[COUNT];
};

/* Two tensors in one optimizer, and a copy of the second tensor in an optimizer of its own. */
struct pair {
  struct arrays first, second, alone;
  onebit_optimizer_t both, one;
};

static void fill_values(float *values, int seed) {
  fill_input(values, ONEBIT_FLOAT32, COUNT, seed, 0);
}

static onebit_tensor_t make_tensor(struct arrays *arrays, float weight_decay, float factor) {
  return (onebit_tensor_t){.parameter = arrays->parameter,
                           .gradient = arrays->gradient,
                           .count = COUNT,
                           .weight_decay = weight_decay,
                           .learning_rate_factor = factor};
}

static struct pair *make_pair(onebit_comm_t comm, const struct any_case *what) {
  struct pair *pair = allocate(1, sizeof *pair);
  const struct any_options options = any_options_of(what->method, what->options);
  fill_values(pair->first.parameter, 1);
  fill_values(pair->second.parameter, 2);
  fill_values(pair->alone.parameter, 2);
  const onebit_tensor_t both[] = {make_tensor(&pair->first, 0, 1),
                                  make_tensor(&pair->second, 0, 1)};
  const onebit_tensor_t one = make_tensor(&pair->alone, 0.25F, 1);
  CHECK_STATUS(any_create(&options, comm, both, 2, &pair->both), ONEBIT_OK);
  CHECK_STATUS(any_create(&options, comm, &one, 1, &pair->one), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_set_weight_decay(pair->both, 1, 0.25F), ONEBIT_OK);
  return pair;
}

static void free_pair(struct pair *pair) {
  onebit_optimizer_destroy(pair->both);
  onebit_optimizer_destroy(pair->one);
  free(pair);
}

static void set_gradients(struct pair *pair, int rank, int step) {
  fill_values(pair->first.gradient, 100 * step + rank);
  fill_values(pair->second.gradient, 100 * step + 10 + rank);
  fill_values(pair->alone.gradient, 100 * step + 10 + rank);
}

static void check_changing_factors(onebit_comm_t comm, void *context) {
  static const float factors[STEPS] = {1, 1, 0.5F, 0.5F, 0.5F, 2, 2, 0, 0, 0.25F, 1, 1};
  struct pair *pair = make_pair(comm, context);
  for (int step = 0; step < STEPS; step++) {
    set_gradients(pair, onebit_comm_rank(comm), step);
    CHECK_STATUS(onebit_optimizer_set_learning_rate_factor(pair->both, 1, factors[step]),
                 ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->both, RATE), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->one, RATE * factors[step]), ONEBIT_OK);
    CHECK_BITS("a tensor with factors", pair->second.parameter, pair->alone.parameter, COUNT,
               ONEBIT_FLOAT32);
  }
  free_pair(pair);
}

Test(constants, as_an_optimizer_of_its_own) {
  for (size_t k = 0; k < OPTIMIZERS; k++)
    on_ranks(3, check_changing_factors, (void *)(uintptr_t)&optimizers[k]);
}

/* A factor that is set between two synchronisations of 0/1 Adam must take effect after the second
 * one. */
static void check_waiting_factor(onebit_comm_t comm, void *context) {
  struct pair *pair = make_pair(comm, context);
  float rate = RATE;
  int late = 0;
  for (int step = 0; step < 24; step++) {
    set_gradients(pair, onebit_comm_rank(comm), step);
    if (step == 17)
      CHECK_STATUS(onebit_optimizer_set_learning_rate_factor(pair->both, 1, 0.5F), ONEBIT_OK);
    const bool together = optimizer_info(pair->one).synchronized;
    if (step >= 17 && together)
      rate = RATE * 0.5F;
    late += step >= 17 && !together && rate == RATE;
    CHECK_STATUS(onebit_optimizer_step(pair->both, RATE), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->one, rate), ONEBIT_OK);
    CHECK_BITS("a tensor of 0/1 Adam", pair->second.parameter, pair->alone.parameter, COUNT,
               ONEBIT_FLOAT32);
  }
  CHECK(late > 0 && rate < RATE, "no step between two synchronisations was tried");
  free_pair(pair);
}

Test(constants, wait_for_a_synchronisation) {
  on_ranks(3, check_waiting_factor, (void *)(uintptr_t)&rarely);
}

/* If a factor differs between ranks, the next step fails and changes nothing. */
static void check_differing_factor(onebit_comm_t comm, void *context) {
  struct pair *pair = make_pair(comm, context);
  float before[COUNT];
  set_gradients(pair, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_optimizer_step(pair->both, RATE), ONEBIT_OK);
  memcpy(before, pair->second.parameter, sizeof before);
  const float factor = onebit_comm_rank(comm) == 2 ? 0.5F : 2;
  CHECK_STATUS(onebit_optimizer_set_learning_rate_factor(pair->both, 1, factor), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(pair->both, RATE), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("a factor of it");
  CHECK_BITS("parameters", pair->second.parameter, before, COUNT, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_optimizer_set_learning_rate_factor(pair->both, 1, 1), ONEBIT_OK);
  free_pair(pair);
}

Test(constants, that_differ_are_found) {
  on_ranks(3, check_differing_factor, (void *)(uintptr_t)&optimizers[5]);
}

/* --- beta1 -------------------------------------------------------------------------------------*/

/* One tensor, with its optimizer. */
struct one {
  struct arrays arrays;
  onebit_optimizer_t optimizer;
};

static struct one *make_one(onebit_comm_t comm, const struct any_case *what, double beta1) {
  struct one *one = allocate(1, sizeof *one);
  struct any_options options = any_options_of(what->method, what->options);
  any_set(&options, "beta1", beta1);
  any_set(&options, "momentum", beta1);
  fill_values(one->arrays.parameter, 1);
  const onebit_tensor_t tensor = make_tensor(&one->arrays, 0.25F, 1);
  CHECK_STATUS(any_create(&options, comm, &tensor, 1, &one->optimizer), ONEBIT_OK);
  return one;
}

static void free_one(struct one *one) {
  onebit_optimizer_destroy(one->optimizer);
  free(one);
}

static void step_one(struct one *one, int rank, int step) {
  fill_values(one->arrays.gradient, 100 * step + rank);
  CHECK_STATUS(onebit_optimizer_step(one->optimizer, RATE), ONEBIT_OK);
}

static void check_same(const char *what, const struct one *a, const struct one *b) {
  CHECK_BITS(what, a->arrays.parameter, b->arrays.parameter, COUNT, ONEBIT_FLOAT32);
}

static struct saved_parts parts;

/* Copies the state of the optimizer `from` to `to`. */
static void copy_state(onebit_comm_t comm, const struct one *from, struct one *to) {
  struct trainee trainee = {.rank = onebit_comm_rank(comm), .optimizer = from->optimizer};
  trainee_save(&trainee, comm, &parts);
  trainee.optimizer = to->optimizer;
  CHECK_STATUS(trainee_load(&trainee, &parts), ONEBIT_OK);
  synchronize_ranks(comm);
  if (trainee.rank == 0)
    free_parts(&parts);
  synchronize_ranks(comm);
}

/* Sets beta1 before the first step, and again after `steps` steps, and compares with optimizers
 * that were created with these values. */
static void check_beta1_after(onebit_comm_t comm, const struct any_case *what, int steps) {
  const int rank = onebit_comm_rank(comm);
  struct one *changed = make_one(comm, what, 0.9), *first = make_one(comm, what, 0.8),
             *second = make_one(comm, what, 0.7);
  CHECK_STATUS(onebit_optimizer_set_beta1(changed->optimizer, 0.8), ONEBIT_OK);
  for (int step = 0; step < steps; step++) {
    step_one(changed, rank, step);
    step_one(first, rank, step);
    check_same("before", changed, first);
  }
  copy_state(comm, first, second);
  CHECK_STATUS(onebit_optimizer_set_beta1(changed->optimizer, 0.7), ONEBIT_OK);
  for (int step = steps; step < STEPS; step++) {
    step_one(changed, rank, step);
    step_one(second, rank, step);
    check_same("after", changed, second);
  }
  if (steps < STEPS) { /* checks that beta1 has an effect */
    for (int step = steps; step < STEPS; step++)
      step_one(first, rank, step);
    CHECK(memcmp(first->arrays.parameter, changed->arrays.parameter, sizeof(float) * COUNT) != 0,
          "beta1 changes nothing");
  }
  free_one(changed);
  free_one(first);
  free_one(second);
}

static void check_beta1_in_warmup(onebit_comm_t comm, void *context) {
  check_beta1_after(comm, context, 2);
}

static void check_beta1_when_frozen(onebit_comm_t comm, void *context) {
  check_beta1_after(comm, context, 7);
}

/* The variance is frozen after step 4. A beta1 that is set right after this step must take effect
 * one step later. */
static void check_beta1_at_freeze(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm);
  struct one *early = make_one(comm, context, 0.9), *late = make_one(comm, context, 0.9);
  for (int step = 0; step < STEPS; step++) {
    if (step == 4)
      CHECK_STATUS(onebit_optimizer_set_beta1(early->optimizer, 0.5), ONEBIT_OK);
    if (step == 5)
      CHECK_STATUS(onebit_optimizer_set_beta1(late->optimizer, 0.5), ONEBIT_OK);
    step_one(early, rank, step);
    step_one(late, rank, step);
    check_same("at the freeze", early, late);
  }
  free_one(early);
  free_one(late);
}

Test(constants, beta1_changes) {
  for (int k = 0; k < OPTIMIZERS; k++) {
    on_ranks(3, check_beta1_in_warmup, (void *)(uintptr_t)&optimizers[k]);
    on_ranks(3, check_beta1_when_frozen, (void *)(uintptr_t)&optimizers[k]);
  }
  on_ranks(1, check_beta1_when_frozen, (void *)(uintptr_t)&optimizers[0]);
}

Test(constants, beta1_waits_for_the_second_compressed_step) {
  static const int with_momentum[] = {0, 2, 3};
  for (int k = 0; k < 3; k++)
    on_ranks(3, check_beta1_at_freeze, (void *)(uintptr_t)&optimizers[with_momentum[k]]);
}

static void check_differing_beta1(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm);
  struct one *one = make_one(comm, context, 0.9);
  step_one(one, rank, 0);
  CHECK_STATUS(onebit_optimizer_set_beta1(one->optimizer, rank == 1 ? 0.8 : 0.7), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(one->optimizer, RATE), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("beta1 or the tag (shown as a hash)");
  CHECK_STATUS(onebit_optimizer_set_beta1(one->optimizer, 0.9), ONEBIT_OK);
  step_one(one, rank, 1);
  free_one(one);
}

Test(constants, beta1_that_differs_is_found) {
  on_ranks(3, check_differing_beta1, (void *)(uintptr_t)&optimizers[0]);
}

/* The tags differ because one rank's program is a step ahead of the others. */
static void check_differing_tag(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm);
  struct one *one = make_one(comm, context, 0.9);
  CHECK_STATUS(onebit_optimizer_set_tag(one->optimizer, 7), ONEBIT_OK);
  step_one(one, rank, 0);
  CHECK_STATUS(onebit_optimizer_set_tag(one->optimizer, rank == 1 ? 9 : 8), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(one->optimizer, RATE), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("or the tag (shown as a hash)");
  CHECK_STATUS(onebit_optimizer_set_tag(one->optimizer, 9), ONEBIT_OK);
  step_one(one, rank, 1);
  free_one(one);
}

Test(constants, a_tag_that_differs_is_found) {
  for (int k = 0; k < OPTIMIZERS; k++)
    on_ranks(3, check_differing_tag, (void *)(uintptr_t)&optimizers[k]);
}
