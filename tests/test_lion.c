/*
 * Lion in one bit equals the oracle's in every bit of every parameter after every step, for groups
 * of 1 to 7 ranks, on hosts, in buckets, with steps that are skipped and with tensors that stay
 * uncompressed.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle_lion.h"
#include "tests/support_adam.h"

TestSuite(lion, .timeout = 180);

enum { MOST_TENSORS = 10, STEPS = 12 };

struct lion_case {
  int size, hosts;
  onebit_lion_options_t options;
  const struct adam_tensors *tensors;
  unsigned uncompressed; /* tensors, as bits */
  bool parts;            /* tensors are ready one after the other */
  bool still;            /* every 13th element never gets a gradient */
  float
      poison; /* when not 0: before each step comes one where a gradient of poisoned_rank has it */
  int poisoned_rank;
};

struct lion_run {
  const struct lion_case *what;
  size_t total;
  float *start, *parameters[STEPS];
  double momentum_norm[STEPS], residual_norm[STEPS][16];
};

static struct lion_case case_of(const struct adam_tensors *tensors) {
  return (struct lion_case){
      .size = 3, .hosts = 1, .options = ONEBIT_LION_OPTIONS_INIT, .tensors = tensors};
}

static void describe(const struct lion_case *what, float *parameters, float *gradients,
                     onebit_tensor_t *tensors) {
  size_t first = 0;
  for (size_t k = 0; k < what->tensors->count; k++) {
    const struct adam_tensor *one = &what->tensors->list[k];
    tensors[k] = (onebit_tensor_t){one->count ? parameters + first : NULL,
                                   one->count ? gradients + first : NULL,
                                   one->count,
                                   one->weight_decay,
                                   one->factor,
                                   (what->uncompressed >> k & 1) != 0};
    first += one->count;
  }
}

static void fill_gradient(const struct lion_run *run, float *gradient, int rank, int step) {
  for (size_t i = 0; i < run->total; i++)
    gradient[i] = run->what->still && i % 13 == 5 ? 0.0f : input_value(i, rank, step);
}

static bool on_hosts_of(const struct lion_case *what) {
  return what->options.common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
}

/* --- The oracle's run */

static void run_oracle(struct lion_run *run) {
  const struct lion_case *what = run->what;
  onebit_tensor_t tensors[MOST_TENSORS];
  float *gradients[16];
  describe(what, run->start, run->start, tensors);
  struct oracle_lion *oracle = oracle_lion_create(what->size, what->hosts, tensors,
                                                  what->tensors->count, &what->options, run->start);
  for (int r = 0; r < what->size; r++)
    gradients[r] = allocate(run->total + 1, sizeof(float));
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < what->size; r++)
      fill_gradient(run, gradients[r], r, step);
    oracle_lion_step(oracle, (const float *const *)gradients, adam_learning_rate(step));
    run->parameters[step] = allocate(run->total + 1, sizeof(float));
    memcpy(run->parameters[step], oracle_lion_parameters(oracle), run->total * sizeof(float));
    run->momentum_norm[step] = oracle_lion_momentum_norm(oracle);
    for (int r = 0; r < what->size && !on_hosts_of(what); r++)
      run->residual_norm[step][r] = oracle_lion_residual_norm(oracle, r);
  }
  for (int r = 0; r < what->size; r++)
    free(gradients[r]);
  oracle_lion_destroy(oracle);
}

/* --- The library's */

static void poisoned_step(const struct lion_run *run, onebit_optimizer_t optimizer, int rank,
                          int step, float *parameters, float *gradients) {
  const float *before = step ? run->parameters[step - 1] : run->start;
  fill_gradient(run, gradients, rank, step + 500);
  if (rank == run->what->poisoned_rank)
    gradients[(size_t)step * 977 % run->total] = run->what->poison;
  CHECK_STATUS(adam_step_in_parts(optimizer, run->what->tensors->count, run->what->parts, step),
               ONEBIT_SKIPPED);
  CHECK_BITS("parameters after a skipped step", parameters, before, run->total, ONEBIT_FLOAT32);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

/* A server tells of the momentum of its share only: the squares of all ranks' add up. */
static void check_info(const struct lion_run *run, onebit_optimizer_t optimizer, int rank,
                       int step) {
  const uint64_t made = (uint64_t)step + 1;
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  CHECK(strcmp(info.name, "lion") == 0, "the name is %s", info.name);
  CHECK(info.steps == made && info.exchanges[1] == made && info.exchanges[0] == 0,
        "step %d: %llu steps, %llu of bits", step, (unsigned long long)info.steps,
        (unsigned long long)info.exchanges[1]);
  CHECK(info.stage == ONEBIT_STAGE_COMPRESSED, "step %d: stage %d", step, (int)info.stage);
  if (run->what->size == 1)
    CHECK(near(info.momentum_norm, run->momentum_norm[step]), "step %d: momentum norm %g, not %g",
          step, info.momentum_norm, run->momentum_norm[step]);
  if (!on_hosts_of(run->what) && !run->what->uncompressed)
    CHECK(near(info.residual_norm, run->residual_norm[step][rank]),
          "step %d: error norm %g, not %g", step, info.residual_norm,
          run->residual_norm[step][rank]);
}

static void tell_case(const struct lion_case *what) {
  const onebit_optimizer_options_t *common = &what->options.common;
  check_case("lion of %zu tensors on %d ranks, %d hosts, block %zd, scale %d, threads %d, buckets "
             "of %zu%s%s",
             what->tensors->count, what->size, what->hosts, (ptrdiff_t)common->block_size,
             (int)common->scale, common->threads, common->bucket_size,
             what->parts ? ", in parts" : "", what->poison != 0.0f ? ", poisoned" : "");
}

static void run_on_rank(onebit_comm_t comm, void *context) {
  const struct lion_run *run = context;
  const struct lion_case *what = run->what;
  const int rank = onebit_comm_rank(comm);
  float *parameters = allocate(run->total + 1, sizeof(float));
  float *gradients = allocate(run->total + 1, sizeof(float));
  onebit_tensor_t tensors[MOST_TENSORS];
  onebit_optimizer_t optimizer;
  memcpy(parameters, run->start, run->total * sizeof(float));
  describe(what, parameters, gradients, tensors);
  tell_case(what);
  if (CHECK_STATUS(
          onebit_lion_create(comm, tensors, what->tensors->count, &what->options, &optimizer),
          ONEBIT_OK)) {
    for (int step = 0; step < STEPS; step++) {
      if (what->poison != 0.0f)
        poisoned_step(run, optimizer, rank, step, parameters, gradients);
      fill_gradient(run, gradients, rank, step);
      CHECK_STATUS(adam_step_in_parts(optimizer, what->tensors->count, what->parts, step),
                   ONEBIT_OK);
      CHECK_BITS("parameters", parameters, run->parameters[step], run->total, ONEBIT_FLOAT32);
      check_info(run, optimizer, rank, step);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradients);
}

static void check_one(const struct lion_case *what) {
  struct lion_run *run = allocate(1, sizeof *run);
  run->what = what;
  for (size_t k = 0; k < what->tensors->count; k++)
    run->total += what->tensors->list[k].count;
  run->start = allocate(run->total + 1, sizeof(float));
  for (size_t i = 0; i < run->total; i++)
    run->start[i] = input_value(i, 50, 7);
  run_oracle(run);
  on_hosts(what->size, what->hosts, run_on_rank, run);
  for (int step = 0; step < STEPS; step++)
    free(run->parameters[step]);
  free(run->start);
  free(run);
}

static void check_on_groups(struct lion_case what) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      check_one(&what);
  }
}

Test(lion, equals_the_oracle) { check_on_groups(case_of(&adam_tensors_odd)); }
Test(lion, one_tensor) { check_on_groups(case_of(&adam_tensors_one)); }
Test(lion, fewer_elements_than_ranks) { check_on_groups(case_of(&adam_tensors_tiny)); }
Test(lion, no_tensors) { check_on_groups(case_of(&adam_tensors_none)); }

Test(lion, counts_on_the_edges) {
  for (size_t k = 0; k < test_counts_count; k++) {
    if (!test_counts[k] || test_counts[k] > 10000 || k % test_stride())
      continue;
    const struct adam_tensors tensors = {1, {{test_counts[k], 0.01f, 0}}};
    struct lion_case what = case_of(&tensors);
    what.still = true;
    check_one(&what);
  }
}

Test(lion, elements_without_gradients) {
  struct lion_case what = case_of(&adam_tensors_odd);
  what.still = true;
  check_on_groups(what);
}

Test(lion, options_are_heeded) {
  struct lion_case what = case_of(&adam_tensors_odd);
  what.options.beta1 = 0.8;
  what.options.beta2 = 0.95;
  what.options.beta3 = 0.97;
  what.options.epsilon = 1e-3;
  what.options.common.gradient_factor = 0.3;
  what.options.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  check_on_groups(what);
  what.options.common.no_error_feedback = 1;
  what.size = 3;
  check_one(&what);
}

Test(lion, buckets) {
  static const size_t sizes[] = {1, 1000, 5200};
  for (size_t b = 0; b < 3; b++) {
    struct lion_case what = case_of(&adam_tensors_odd);
    what.options.common.bucket_size = sizes[b];
    what.parts = b % 2 == 0;
    what.size = 3 + (int)b % 2;
    check_one(&what);
  }
}

Test(lion, on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 4}, {4, 1}};
  for (size_t k = 0; k < 4; k++) {
    struct lion_case what = case_of(&adam_tensors_odd);
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.common.bucket_size = k % 2 ? 1000 : 0;
    what.size = splits[k][0];
    what.hosts = splits[k][1];
    check_one(&what);
  }
}

Test(lion, every_codec_and_any_number_of_threads) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int threads = 1; threads <= 3; threads++) {
      struct lion_case what = case_of(&adam_tensors_odd);
      what.still = true;
      what.options.common.threads = threads;
      check_one(&what);
    }
  }
}

/* They take dense Lion's steps: some of them, and all, which is the dense form. */
Test(lion, uncompressed_tensors) {
  static const unsigned which[] = {1u << 4 | 1u << 8, (1u << 9) - 1};
  for (size_t k = 0; k < 2; k++)
    for (int size = 1; size <= 3; size++) {
      struct lion_case what = case_of(&adam_tensors_odd);
      what.uncompressed = which[k];
      what.still = true;
      what.size = size;
      check_one(&what);
    }
}

/* The poison is on each rank once, and in all steps from the first on. */
Test(lion, skipped_steps_change_nothing) {
  static const float poisons[] = {1.0f / 0.0f, NAN, -1.0f / 0.0f};
  for (int rank = 0; rank < 3; rank++) {
    struct lion_case what = case_of(&adam_tensors_odd);
    what.poison = poisons[rank];
    what.poisoned_rank = rank;
    what.options.common.bucket_size = rank == 1 ? 1000 : 0;
    what.uncompressed = rank == 2 ? 1u << 5 : 0;
    what.parts = rank == 2;
    check_one(&what);
  }
}
