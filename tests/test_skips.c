/*
 * A gradient that is not finite, on one rank, before any step of any optimizer: every rank skips
 * that step, and the steps after it are to the bit what they are in a run that never saw it.
 */
#include "base/error.h"
#include "base/hash.h"
#include "optimizers/optimizer.h"
#include "tests/oracle.h"
#include "tests/support.h"
#include "tests/support_optimizers.h"

enum { EACH = 700, TENSORS = 3, COUNT = EACH * TENSORS, STEPS = 10 };

/* --- The optimizers: each changes its stage within STEPS steps */

/* Not all of them know everything. */
static const struct {
  const char *name;
  bool deepspeed, types; /* the profile; parameters that are not float32 */
  struct any_case made;
} optimizers[] = {
    {"adam", true, true, {ANY(adam, .freeze_step = 5)}},
    {"adam that sends steps",
     true,
     true,
     {ANY(adam, .freeze_step = 5, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)}},
    /* The freeze is found from the variance: a skipped step is no step of it. */
    {"adam that freezes by itself",
     true,
     true,
     {ANY(adam, .beta2 = 0.75, .freeze_threshold = 0.1)}},
    {"adam in shards", false, false, {ANY(adam, .freeze_step = 5, .shards = ONEBIT_SHARDS_STEP)}},
    {"adam in shards that send parameters",
     false,
     true,
     {ANY(adam, .freeze_step = 5, .shards = ONEBIT_SHARDS_PARAMETERS)}},
    {"lamb", true, true, {ANY(lamb, .freeze_step = 5)}},
    {"momentum", false, true, {ANY(momentum, .warmup_steps = 5)}},
    {"momentum without warm-up", false, true, {ANY(momentum, .warmup_steps = 0)}},
    /* Dense, dense, bits, dense, bits; then it meets, is silent, meets, is silent twice or more. */
    {"0/1 adam",
     true,
     true,
     {ANY(zero_one_adam, .variance_freeze_step = 5, .variance_update_scaler = 2,
          .local_step_scaler = 2, .local_step_clipper = 4)}},
    {"efficient adam", false, true, {ANY(efficient_adam, .warmup_steps = 5)}},
    {"efficient adam without warm-up",
     false,
     true,
     {ANY(efficient_adam, .beta2 = 0.99, .warmup_steps = ONEBIT_WARMUP_NONE)}},
    {"efficient adam with trust ratios",
     false,
     true,
     {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = 5)}},
    {"lion", false, true, {ANY(lion, .beta2 = 0.9)}},
};
enum { OPTIMIZERS = sizeof optimizers / sizeof optimizers[0] };

/* --- A run that sees it beside one that does not */

struct skip {
  size_t optimizer;
  onebit_optimizer_options_t common;
  bool in_parts; /* the step with it: ready from the last tensor on */
  unsigned uncompressed;
  int step, rank; /* before which step, and on which rank */
  float poison;
};

struct run {
  char *parameters, *gradients;
  onebit_optimizer_t optimizer;
};

static struct run make_run(onebit_comm_t comm, const struct skip *skip) {
  onebit_dtype_t parameters = skip->common.parameter_dtype, gradients = skip->common.gradient_dtype;
  struct run run = {allocate(COUNT, dtype_size(parameters)), allocate(COUNT, dtype_size(gradients)),
                    NULL};
  onebit_tensor_t tensors[TENSORS];
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){run.parameters + t * EACH * dtype_size(parameters),
                                   run.gradients + t * EACH * dtype_size(gradients),
                                   EACH,
                                   0.01f,
                                   0,
                                   (int)(skip->uncompressed >> t & 1)};
  fill_input(run.parameters, parameters, COUNT, 99, 0);
  const struct any_case *made = &optimizers[skip->optimizer].made;
  struct any_options options = any_options_of(made->method, made->options);
  *any_common(&options) = skip->common;
  CHECK_STATUS(any_create(&options, comm, tensors, TENSORS, &run.optimizer), ONEBIT_OK);
  return run;
}

static void free_run(struct run *run) {
  onebit_optimizer_destroy(run->optimizer);
  free(run->parameters);
  free(run->gradients);
}

static void compute_gradient(struct run *run, const struct skip *skip, int rank, int step) {
  double scale = 0;
  CHECK_STATUS(onebit_optimizer_get_loss_scale(run->optimizer, &scale), ONEBIT_OK);
  for (size_t i = 0; i < COUNT; i++)
    oracle_store(run->gradients, i, skip->common.gradient_dtype,
                 input_value(i, rank, step) * (float)scale);
}

static onebit_status_t make_step(struct run *run, bool in_parts) {
  if (in_parts)
    CHECK_STATUS(onebit_optimizer_begin(run->optimizer, 0.01f), ONEBIT_OK);
  for (size_t t = TENSORS; in_parts && t-- > 0;)
    CHECK_STATUS(onebit_optimizer_ready(run->optimizer, t), ONEBIT_OK);
  return onebit_optimizer_step(run->optimizer, 0.01f);
}

/* Makes a step with a bad value at any place in any tensor. */
static void poisoned_step(struct run *run, const struct skip *skip, int rank) {
  onebit_dtype_t dtype = skip->common.parameter_dtype;
  char *before = allocate(COUNT, dtype_size(dtype));
  memcpy(before, run->parameters, COUNT * dtype_size(dtype));
  compute_gradient(run, skip, rank, skip->step + 500);
  if (rank == skip->rank)
    oracle_store(run->gradients, (size_t)skip->step * 977 % COUNT, skip->common.gradient_dtype,
                 skip->poison);
  CHECK_STATUS(make_step(run, skip->in_parts), ONEBIT_SKIPPED);
  CHECK_BITS("parameters after a skipped step", run->parameters, before, COUNT, dtype);
  const onebit_optimizer_info_t info = optimizer_info(run->optimizer);
  CHECK(info.skipped == 1 && info.steps == (uint64_t)skip->step, "%llu steps, %llu skipped",
        (unsigned long long)info.steps, (unsigned long long)info.skipped);
  free(before);
}

/* Makes a step, and says whether it sent nothing: in one of those a rank is alone with what it
 * sees, which is for the optimizer's own tests. */
static bool is_silent(struct run *run) {
  onebit_optimizer_info_t before = {.size = sizeof before}, after = {.size = sizeof after};
  CHECK_STATUS(onebit_optimizer_get_info(run->optimizer, &before), ONEBIT_OK);
  CHECK_STATUS(make_step(run, false), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_get_info(run->optimizer, &after), ONEBIT_OK);
  return after.exchanges[2] > before.exchanges[2];
}

static void skip_on_rank(onebit_comm_t comm, void *context) {
  const struct skip *skip = context;
  int rank = onebit_comm_rank(comm);
  struct run seen = make_run(comm, skip), unseen = make_run(comm, skip);
  for (int step = 0; step < STEPS; step++) {
    check_case("%s, profile %d, gradients %s, parameters %s, clip %g, %g on rank %d before step "
               "%d: step %d",
               optimizers[skip->optimizer].name, (int)skip->common.profile,
               dtype_name(skip->common.gradient_dtype), dtype_name(skip->common.parameter_dtype),
               skip->common.clip_norm, (double)skip->poison, skip->rank, skip->step, step);
    compute_gradient(&unseen, skip, rank, step);
    bool told = !is_silent(&unseen);
    if (step == skip->step && told)
      poisoned_step(&seen, skip, rank);
    compute_gradient(&seen, skip, rank, step);
    CHECK_STATUS(make_step(&seen, false), ONEBIT_OK);
    CHECK_BITS("parameters", seen.parameters, unseen.parameters, COUNT,
               skip->common.parameter_dtype);
  }
  onebit_optimizer_info_t infos[2] = {{.size = sizeof infos[0]}, {.size = sizeof infos[0]}};
  CHECK_STATUS(onebit_optimizer_get_info(seen.optimizer, &infos[0]), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_get_info(unseen.optimizer, &infos[1]), ONEBIT_OK);
  CHECK(infos[0].freeze_step == infos[1].freeze_step, "it froze at %llu, not %llu",
        (unsigned long long)infos[0].freeze_step, (unsigned long long)infos[1].freeze_step);
  CHECK(infos[0].residual_norm == infos[1].residual_norm, "the residual is %g, not %g",
        infos[0].residual_norm, infos[1].residual_norm);
  free_run(&seen);
  free_run(&unseen);
}

/* --- Every optimizer, every step, every rank in turn; numbers of ranks in turn too */

static void check_optimizer(size_t optimizer, const onebit_optimizer_options_t *common,
                            unsigned uncompressed) {
  static const float poisons[] = {NAN, INFINITY, -INFINITY, 1e30f};
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++)
    for (int step = 0; step < STEPS; step++) {
      if (!test_wanted_of(optimizer + (size_t)step, p))
        continue;
      struct skip skip = {.optimizer = optimizer,
                          .common = *common,
                          .in_parts = step % 2,
                          .uncompressed = uncompressed,
                          .step = step,
                          .rank = (step + 1) % sizes[p],
                          .poison = poisons[step % 4]};
      on_ranks(sizes[p], skip_on_rank, &skip);
    }
}

static void check_all(const onebit_optimizer_options_t *common, unsigned uncompressed) {
  for (size_t k = 0; k < OPTIMIZERS; k++)
    if ((common->profile == ONEBIT_PROFILE_DEFAULT || optimizers[k].deepspeed) &&
        (common->parameter_dtype == ONEBIT_FLOAT32 || optimizers[k].types))
      check_optimizer(k, common, uncompressed);
}

Test(skips, leave_no_trace) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  check_all(&common, 0);
}

Test(skips, leave_no_trace_in_profile_deepspeed) {
  onebit_optimizer_options_t common = {.profile = ONEBIT_PROFILE_DEEPSPEED};
  check_all(&common, 0);
}

Test(skips, leave_no_trace_in_buckets) {
  onebit_optimizer_options_t common = {.bucket_size = 1};
  check_all(&common, 2);
}

Test(skips, leave_no_trace_in_mixed_precision) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  common.gradient_dtype = ONEBIT_FLOAT16; /* where 1e30 is infinite */
  common.parameter_dtype = ONEBIT_BFLOAT16;
  check_all(&common, 4);
}

/* The scale falls, and with it what the arrays hold, but not what that counts as. */
Test(skips, leave_no_trace_but_the_loss_scale) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  common.gradient_dtype = ONEBIT_BFLOAT16;
  common.initial_loss_scale = 1024;
  common.loss_scale_interval = 3;
  check_all(&common, 0);
}

Test(skips, leave_no_trace_with_clipping) {
  onebit_optimizer_options_t common = {.clip_norm = 10, .bucket_size = 1};
  check_all(&common, 1);
}

/* Nothing has been compressed when the norm is known: one copy of the residuals is enough. */
Test(skips, leave_no_trace_with_clipping_and_one_copy) {
  onebit_optimizer_options_t common = {.clip_norm = 10, .residual_copies = 1};
  for (size_t k = 0; k < OPTIMIZERS; k++)
    if (!strstr(optimizers[k].name, "shards") && strcmp(optimizers[k].name, "lamb") != 0)
      check_optimizer(k, &common, 0);
}

/* A compressed warm-up has a residual of its own, in every bucket. */
Test(skips, leave_no_trace_in_a_compressed_warm_up) {
  static const char *const names[] = {"adam", "adam that freezes by itself", "lamb", "momentum"};
  for (size_t k = 0; k < OPTIMIZERS; k++)
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
      onebit_optimizer_options_t common = {.warmup_bits = n % 2 ? 8 : 4, .bucket_size = n < 2};
      if (!strcmp(optimizers[k].name, names[n]))
        check_optimizer(k, &common, n == 1 ? 2 : 0);
    }
}

/* --- Replicas */

enum { REPLICAS = 4, LONG = 2000 };

struct replicas {
  struct skip what;
  int steps;
  uint64_t hashes[REPLICAS][LONG]; /* of the parameters; 0 where ranks may differ */
};

static void replica_on_rank(onebit_comm_t comm, void *context) {
  struct replicas *replicas = context;
  int rank = onebit_comm_rank(comm);
  struct run run = make_run(comm, &replicas->what);
  onebit_optimizer_info_t info = {.size = sizeof info};
  for (int step = 0; step < replicas->steps; step++) {
    compute_gradient(&run, &replicas->what, rank, step);
    CHECK_STATUS(onebit_optimizer_step(run.optimizer, 0.01f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_info(run.optimizer, &info), ONEBIT_OK);
    if (info.synchronized)
      replicas->hashes[rank][step] = ob_hash(OB_HASH_START, run.parameters, COUNT * sizeof(float));
  }
  free_run(&run);
}

/* Ranks whose gradients all differ have the same parameters whenever they are said to, over many
 * steps; and parameters that change. */
Test(skips, replicas_stay_identical) {
  static struct replicas replicas;
  for (size_t k = 0; k < OPTIMIZERS; k++) {
    int equal = 0, steps = LONG / (int)test_share();
    replicas = (struct replicas){.what = {.optimizer = k}, .steps = steps};
    on_ranks(REPLICAS, replica_on_rank, &replicas);
    for (int step = 0; step < steps; step++) {
      uint64_t first = replicas.hashes[0][step];
      for (int rank = 1; rank < REPLICAS; rank++)
        cr_assert_eq(replicas.hashes[rank][step], first, "%s: rank %d differs after step %d",
                     optimizers[k].name, rank, step);
      equal += first != 0;
      cr_assert(!first || !step || first != replicas.hashes[0][step - 1], "%s: step %d is none",
                optimizers[k].name, step);
    }
    cr_expect_gt(equal, steps / 5, "%s: equal after %d of %d steps only", optimizers[k].name, equal,
                 steps);
  }
}

/* An error of some bucket, or step, counts more than skips, and the first error counts, on all
 * ranks alike. */
Test(skips, an_error_counts_more_than_a_skip) {
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
