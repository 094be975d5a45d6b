/*
 * Replicas: ranks whose gradients all differ have the same parameters, to the bit, whenever the
 * optimizer says so, and differ otherwise, over many steps. Of several outcomes of a step one
 * counts, the same on all ranks.
 */
#include "base/error.h"
#include "base/hash.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"
#include "tests/support_optimizers.h"

enum { RANKS = 4, TENSORS = 3, EACH = 700, COUNT = TENSORS * EACH, STEPS = 2000 };

/* Not all of them have other types. */
static const struct row {
  const char *name;
  struct any_case made;
  bool apart; /* in more than half of the steps, of which it takes all */
} rows[] = {
    {"adam", {ANY(adam, .freeze_step = 5)}, false},
    {"adam that sends steps",
     {ANY(adam, .freeze_step = 5, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)},
     false},
    {"adam that freezes by itself", {ANY(adam, .beta2 = 0.75, .freeze_threshold = 0.1)}, false},
    {"adam in shards", {ANY(adam, .freeze_step = 50, .shards = ONEBIT_SHARDS_STEP)}, false},
    {"adam in shards that send parameters",
     {ANY(adam, .freeze_step = 50, .shards = ONEBIT_SHARDS_PARAMETERS)},
     false},
    {"adam in shards that send parameters of 16 bits",
     {ANY(adam, .freeze_step = 50, .shards = ONEBIT_SHARDS_PARAMETERS,
          .common.parameter_dtype = ONEBIT_BFLOAT16, .common.block_size = 256)},
     false},
    {"lamb", {ANY(lamb, .freeze_step = 5)}, false},
    {"momentum", {ANY(momentum, .warmup_steps = 5)}, false},
    {"momentum without warm-up", {ANY(momentum, .warmup_steps = 0)}, false},
    /* Dense, dense, bits, dense, bits; then a synchronisation step, a local one, a synchronisation
     * step, two or more local ones. */
    {"0/1 adam",
     {ANY(zero_one_adam, .variance_freeze_step = 5, .variance_update_scaler = 2,
          .local_step_scaler = 2, .local_step_clipper = 4)},
     false},
    {"0/1 adam that is often apart",
     {ANY(zero_one_adam, .variance_freeze_step = 100, .variance_update_scaler = 2,
          .local_step_scaler = 200, .local_step_clipper = 6)},
     true},
    {"0/1 adam, deepspeed",
     {ANY(zero_one_adam, .variance_freeze_step = 100, .variance_update_scaler = 2,
          .local_step_scaler = 200, .local_step_clipper = 6,
          .common.profile = ONEBIT_PROFILE_DEEPSPEED)},
     true},
    {"efficient adam", {ANY(efficient_adam, .warmup_steps = 5)}, false},
    {"efficient adam without warm-up",
     {ANY(efficient_adam, .beta2 = 0.99, .warmup_steps = ONEBIT_WARMUP_NONE)},
     false},
    {"efficient adam with trust ratios",
     {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = 5)},
     false},
    {"lion", {ANY(lion, .beta2 = 0.9)}, false},
};

struct replicas {
  const struct any_case *made;
  int steps;
  uint64_t hash[RANKS][STEPS];
  bool together[RANKS][STEPS];
};

static void train(onebit_comm_t comm, void *context) {
  struct replicas *replicas = context;
  struct any_options options = any_options_of(replicas->made->method, replicas->made->options);
  const onebit_dtype_t dtype = any_common(&options)->parameter_dtype;
  const size_t bytes = dtype_size(dtype);
  const int rank = onebit_comm_rank(comm);
  char *parameters = allocate(COUNT, bytes);
  float gradients[COUNT];
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer;
  fill_input(parameters, dtype, COUNT, 99, 0);
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){
        parameters + t * EACH * bytes, gradients + t * EACH, EACH, t == 1 ? 0.01f : 0, 0, 0};
  CHECK_STATUS(any_create(&options, comm, tensors, TENSORS, &optimizer), ONEBIT_OK);
  for (int step = 0; step < replicas->steps; step++) {
    fill_input(gradients, ONEBIT_FLOAT32, COUNT, rank, step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f * (float)(1 + step % 3)), ONEBIT_OK);
    replicas->hash[rank][step] = ob_hash(OB_HASH_START, parameters, COUNT * bytes);
    replicas->together[rank][step] = optimizer_info(optimizer).synchronized;
  }
  onebit_optimizer_destroy(optimizer);
  free(parameters);
}

static void check_replicas(const struct row *row, const struct replicas *replicas, int ranks) {
  int equal = 0;
  for (int step = 0; step < replicas->steps; step++) {
    const uint64_t first = replicas->hash[0][step];
    bool same = true;
    for (int r = 1; r < ranks; r++)
      same = same && replicas->hash[r][step] == first;
    for (int r = 0; r < ranks; r++)
      cr_assert_eq(replicas->together[r][step], same, "%s, step %d, rank %d: %s", row->name, step,
                   r, same ? "equal, and info denies it" : "info says they are equal");
    cr_assert(!step || first != replicas->hash[0][step - 1], "%s: step %d is none", row->name,
              step);
    equal += same;
  }
  cr_log_info("%s: equal after %d of %d steps", row->name, equal, replicas->steps);
  cr_expect_gt(equal, replicas->steps / 8, "%s: equal after %d steps", row->name, equal);
  cr_expect(!row->apart || equal < replicas->steps / 2, "%s: equal after %d", row->name, equal);
}

Test(replicas, are_equal_whenever_they_are_said_to) {
  static struct replicas replicas;
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    const int ranks = RANKS - (int)k % 2;
    replicas = (struct replicas){.made = &rows[k].made};
    replicas.steps = rows[k].apart ? STEPS : STEPS / (int)test_share();
    on_ranks(ranks, train, &replicas);
    check_replicas(&rows[k], &replicas, ranks);
  }
}

/* An error of some bucket, or step, counts more than skips, and the first error counts, on all
 * ranks alike. */
Test(replicas, an_error_counts_more_than_a_skip) {
  static const onebit_status_t came[][2] = {
      {ONEBIT_SKIPPED, ONEBIT_ERROR_TRANSPORT},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_SKIPPED},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_PEER},
  };
  float parameter = 0, gradient = 0;
  const onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_optimizer_t optimizer = NULL;
  onebit_comm_t comm = self_comm();
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_OK);
  for (size_t k = 0; k < 3; k++) {
    for (size_t i = 0; i < 2; i++)
      ob_optimizer_note(optimizer, ob_error(came[k][i], "number %zu", i));
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_ERROR_TRANSPORT);
    CHECK_WORDS(k ? "number 0" : "number 1");
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}
