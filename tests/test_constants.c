/*
 * Factors of the learning rate and weight decays that change between steps: a tensor makes the
 * steps, to the bit, that an optimizer of it alone makes with the rate times the factor.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle.h"
#include "tests/support.h"
#include "tests/support_optimizers.h"

TestSuite(constants, .timeout = 120);

enum { COUNT = 700, STEPS = 12 };
static const float RATE = 0.01F;

static const struct any_case optimizers[] = {
    {ANY(adam, .freeze_step = 4)},
    {ANY(adam, .freeze_step = 4, .shards = ONEBIT_SHARDS_STEP)},
    {ANY(lamb, .freeze_step = 4)},
    {ANY(momentum, .warmup_steps = 4)},
    {ANY(zero_one_adam, .variance_freeze_step = 4)},
    {ANY(efficient_adam, .beta2 = 0.99)},
    {ANY(efficient_adam, .trust_ratio = 1)},
    {ANY(lion, .beta2 = 0.9)},
};
static const struct any_case rarely = {
    ANY(zero_one_adam, .variance_freeze_step = 2, .local_step_scaler = 2, .local_step_clipper = 4)};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

struct arrays {
  float parameter[COUNT], gradient[COUNT];
};

/* Two tensors of one optimizer, and the second again in one of its own. */
struct pair {
  struct arrays first, second, alone;
  onebit_optimizer_t both, one;
};

static void fill(float *values, int seed) { fill_input(values, ONEBIT_FLOAT32, COUNT, seed, 0); }

static onebit_tensor_t tensor_of(struct arrays *arrays, float weight_decay, float factor) {
  return (onebit_tensor_t){.parameter = arrays->parameter,
                           .gradient = arrays->gradient,
                           .count = COUNT,
                           .weight_decay = weight_decay,
                           .learning_rate_factor = factor};
}

static struct pair *make_pair(onebit_comm_t comm, const struct any_case *what) {
  struct pair *pair = allocate(1, sizeof *pair);
  const struct any_options options = any_options_of(what->method, what->options);
  fill(pair->first.parameter, 1);
  fill(pair->second.parameter, 2);
  fill(pair->alone.parameter, 2);
  const onebit_tensor_t both[] = {tensor_of(&pair->first, 0, 1), tensor_of(&pair->second, 0, 1)};
  const onebit_tensor_t one = tensor_of(&pair->alone, 0.25F, 1);
  CHECK_STATUS(any_create(&options, comm, both, 2, &pair->both), ONEBIT_OK);
  CHECK_STATUS(any_create(&options, comm, &one, 1, &pair->one), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_set_weight_decay(pair->both, 1, 0.25F), ONEBIT_OK);
  return pair;
}

static void drop_pair(struct pair *pair) {
  onebit_optimizer_destroy(pair->both);
  onebit_optimizer_destroy(pair->one);
  free(pair);
}

static void set_gradients(struct pair *pair, int rank, int step) {
  fill(pair->first.gradient, 100 * step + rank);
  fill(pair->second.gradient, 100 * step + 10 + rank);
  fill(pair->alone.gradient, 100 * step + 10 + rank);
}

static void changes(onebit_comm_t comm, void *context) {
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
  drop_pair(pair);
}

Test(constants, as_an_optimizer_of_its_own) {
  for (size_t k = 0; k < OPTIMIZERS; k++)
    on_ranks(3, changes, (void *)(uintptr_t)&optimizers[k]);
}

/* 0/1 Adam: between two synchronisations a new factor waits for the next. */
static void waits(onebit_comm_t comm, void *context) {
  struct pair *pair = make_pair(comm, context);
  onebit_optimizer_info_t info = {.size = sizeof info};
  float rate = RATE;
  int late = 0;
  for (int step = 0; step < 24; step++) {
    set_gradients(pair, onebit_comm_rank(comm), step);
    if (step == 17)
      CHECK_STATUS(onebit_optimizer_set_learning_rate_factor(pair->both, 1, 0.5F), ONEBIT_OK);
    onebit_optimizer_get_info(pair->one, &info);
    if (step >= 17 && info.synchronized)
      rate = RATE * 0.5F;
    late += step >= 17 && !info.synchronized && rate == RATE;
    CHECK_STATUS(onebit_optimizer_step(pair->both, RATE), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->one, rate), ONEBIT_OK);
    CHECK_BITS("a tensor of 0/1 Adam", pair->second.parameter, pair->alone.parameter, COUNT,
               ONEBIT_FLOAT32);
  }
  CHECK(late > 0 && rate < RATE, "no step between two synchronisations was tried");
  drop_pair(pair);
}

Test(constants, wait_for_a_synchronisation) { on_ranks(3, waits, (void *)(uintptr_t)&rarely); }

/* One that differs between ranks is found by the next step, and changes nothing. */
static void differ(onebit_comm_t comm, void *context) {
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
  drop_pair(pair);
}

Test(constants, that_differ_are_found) { on_ranks(3, differ, (void *)(uintptr_t)&optimizers[5]); }
