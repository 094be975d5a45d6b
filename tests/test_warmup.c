/*
 * Tests compressed warm-ups: their loss compared with that of a dense warm-up, replicas that are
 * equal to the bit, bytes sent, element counts at edges, and checkpoints that are loaded with
 * another number of bits.
 */
#include "optimizers/optimizer.h"
#include "tests/support_collectives.h"
#include "tests/support_disk.h"
#include "tests/support_optimizers.h"

/* A sum of squares whose minima differ by rank, with the same curvature on all ranks. The minima
 * differ more than they have in common, so a rank's gradient does not vanish at the common
 * optimum. */
enum { RANKS = 4, UNKNOWNS = 1500 };

static float curvature(size_t i) { return 0.55f + 0.45f * uniform_value(i); }
static float target_of_rank(int rank, size_t i) {
  return uniform_value(10000 + i) + 3.0f * uniform_value(20000 + (size_t)rank * 10000 + i);
}

static float loss_slope(float w, int rank, size_t i) {
  return curvature(i) * (w - target_of_rank(rank, i));
}

/* The mean loss above its minimum: sum of curvature / 2 (w - mean target)^2. */
static double excess_at(const float w[UNKNOWNS]) {
  double sum = 0.0;
  for (size_t i = 0; i < UNKNOWNS; i++) {
    double best = 0.0;
    for (int r = 0; r < RANKS; r++)
      best += (double)target_of_rank(r, i) / RANKS;
    sum += 0.5 * (double)curvature(i) * ((double)w[i] - best) * ((double)w[i] - best);
  }
  return sum;
}

static const struct any_case methods[] = {
    {ANY(adam, .freeze_step = 60, .beta2 = 0.98)},
    {ANY(lamb, .freeze_step = 60, .beta2 = 0.98)},
    {ANY(momentum, .warmup_steps = 60)},
};
enum { METHODS = sizeof methods / sizeof methods[0], STEPS = 120 };

struct run {
  struct any_case made;
  onebit_optimizer_options_t common;
  size_t counts[2];
  int steps;
  bool skips;            /* each step is first tried with a gradient that is not finite */
  uint64_t bytes[RANKS]; /* bytes of a warm-up step */
  float *parameters[RANKS];
};

static void run_on_rank(onebit_comm_t comm, void *context) {
  struct run *run = context;
  const int rank = onebit_comm_rank(comm);
  const size_t count = run->counts[0] + run->counts[1];
  float *parameters = run->parameters[rank], *gradients = allocate(count + 1, sizeof(float));
  const onebit_tensor_t tensors[] = {
      {parameters, gradients, run->counts[0], 0, 0, 0},
      {parameters + run->counts[0], gradients + run->counts[0], run->counts[1], 0, 0, 0}};
  struct any_options options = any_options_of(run->made.method, run->made.options);
  *any_common(&options) = run->common;
  onebit_optimizer_t optimizer;
  CHECK_STATUS(any_create(&options, comm, tensors, 2, &optimizer), ONEBIT_OK);
  for (int step = 0; step < run->steps; step++) {
    for (size_t i = 0; i < count; i++)
      gradients[i] = loss_slope(parameters[i], rank, i);
    const size_t at = (size_t)step % (count + 1);
    const float sound = gradients[at];
    if (run->skips && rank == step % RANKS)
      gradients[at] = step % 3 ? NAN : 1e30f;
    if (run->skips)
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f), ONEBIT_SKIPPED);
    gradients[at] = sound;
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_optimizer_compare(optimizer), ONEBIT_OK);
  run->bytes[rank] = optimizer_info(optimizer).warmup_bytes;
  onebit_optimizer_destroy(optimizer);
  free(gradients);
}

/* Checks that all ranks get the same parameters, to the bit. Returns rank 0's, which the caller
 * frees. */
static float *run_on_all_ranks(struct run *run) {
  const size_t count = run->counts[0] + run->counts[1];
  for (int rank = 0; rank < RANKS; rank++)
    run->parameters[rank] = allocate(count + 1, sizeof(float));
  on_ranks(RANKS, run_on_rank, run);
  for (int rank = 1; rank < RANKS; rank++) {
    cr_expect_arr_eq(run->parameters[rank], run->parameters[0], count * sizeof(float),
                     "%s: rank %d differs", run->made.method->name, rank);
    free(run->parameters[rank]);
  }
  return run->parameters[0];
}

static double excess_after_run(struct any_case made, int bits, size_t bucket_size, int steps) {
  struct run run = {.made = made,
                    .common = ONEBIT_OPTIMIZER_OPTIONS_INIT,
                    .counts = {UNKNOWNS / 3, UNKNOWNS - UNKNOWNS / 3},
                    .steps = steps};
  run.common.warmup_bits = bits;
  run.common.bucket_size = bucket_size;
  float *end = run_on_all_ranks(&run);
  double excess = excess_at(end);
  free(end);
  return excess;
}

/* Compares losses just before the freeze, where only the warm-up differs. With 4 bits, and without
 * noise in the gradients, the effect of the values that the residual holds back is visible. */
Test(warmup, comes_to_what_a_dense_one_does) {
  const double start = excess_after_run(methods[0], 0, 0, 0);
  for (size_t k = 0; k < METHODS; k++) {
    const double dense = excess_after_run(methods[k], 0, 0, 60);
    for (int bits = 4; bits <= 8; bits += 4)
      for (size_t bucket_size = 0; bucket_size < 2; bucket_size++) {
        const double excess = excess_after_run(methods[k], bits, bucket_size, 60);
        cr_log_info("%s, %d bits: from %g to %g, dense %g", methods[k].method->name, bits, start,
                    excess, dense);
        cr_expect_leq(fabs(excess - dense), bits == 8 ? 0.005 * dense : 0.01 * start,
                      "%s, %d bits: %g, dense %g", methods[k].method->name, bits, excess, dense);
        cr_expect_neq(excess, dense, "%s, %d bits: it was dense", methods[k].method->name, bits);
      }
  }
}

/* By default the warm-up of momentum SGD has 40 steps in 8 bits. */
Test(warmup, of_momentum_is_forty_steps_in_eight_bits) {
  const struct any_case given = {ANY(momentum, .warmup_steps = ONEBIT_WARMUP_STEPS)};
  const struct any_case own = {ANY(momentum, .warmup_steps = 0)},
                        none = {ANY(momentum, .warmup_steps = ONEBIT_WARMUP_NONE)};
  const double wanted = excess_after_run(given, 8, 0, 60);
  cr_expect_eq(excess_after_run(own, 0, 0, 60), wanted);
  cr_expect_neq(excess_after_run(own, 4, 0, 60), wanted, "4 bits are not heard");
  cr_expect_neq(excess_after_run(none, 0, 0, 60), wanted, "there is a warm-up without one");
}

/* Returns the largest residual of the warm-up's exchange. */
static float warmup_residual(onebit_optimizer_t optimizer) {
  struct kept_errors errors = export_errors(optimizer->buckets[0].dense);
  float largest = 0;
  for (size_t i = 0; i < errors.worker_count; i++)
    largest = fmaxf(largest, fabsf(errors.worker[i]));
  free_errors(&errors);
  return largest;
}

/* The residual of the warm-up's exchange is not used after the warm-up, whose last step must free
 * it. */
static void freeze_on_rank(onebit_comm_t comm, void *context) {
  const struct any_case *what = context;
  float parameters[100] = {0}, gradients[100];
  const onebit_tensor_t tensor = {parameters, gradients, 100, 0, 0, 0};
  struct any_options options = any_options_of(what->method, what->options);
  onebit_optimizer_t optimizer;
  any_common(&options)->warmup_bits = 4;
  CHECK_STATUS(any_create(&options, comm, &tensor, 1, &optimizer), ONEBIT_OK);
  for (int step = 1; step <= 5; step++) {
    for (size_t i = 0; i < 100; i++)
      gradients[i] = loss_slope(parameters[i], onebit_comm_rank(comm), i);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f), ONEBIT_OK);
    const float residual = warmup_residual(optimizer);
    CHECK((residual > 0) == (step < 5), "%s, step %d: %g", what->method->name, step,
          (double)residual);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(warmup, residuals_go_with_its_end) {
  struct any_case cases[] = {{ANY(adam, .freeze_step = 5)},
                             {ANY(lamb, .freeze_step = 5)},
                             {ANY(momentum, .warmup_steps = 5)}};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
    on_ranks(RANKS, freeze_on_rank, &cases[k]);
}

/* A compressed warm-up has a residual of its own in every bucket. A skipped step must not change
 * this residual. */
Test(warmup, skips_leave_no_trace) {
  const struct any_case cases[] = {{ANY(adam, .freeze_step = 5)},
                                   {ANY(adam, .beta2 = 0.75, .freeze_threshold = 0.1)},
                                   {ANY(lamb, .freeze_step = 5)},
                                   {ANY(momentum, .warmup_steps = 5)}};
  for (size_t k = 0; k < 4; k++)
    for (size_t bucket_size = 0; bucket_size < 2; bucket_size++) {
      struct run run = {.made = cases[k],
                        .common = ONEBIT_OPTIMIZER_OPTIONS_INIT,
                        .counts = {700, 1400},
                        .steps = 12};
      run.common.warmup_bits = k % 2 ? 8 : 4;
      run.common.bucket_size = bucket_size;
      float *without = run_on_all_ranks(&run);
      run.skips = true;
      float *with = run_on_all_ranks(&run);
      CHECK_BITS(cases[k].method->name, with, without, 2100, ONEBIT_FLOAT32);
      free(without);
      free(with);
    }
}

/* With 2^20 elements the scales add a 64th of a bit per element, and headers add less. */
Test(warmup, sends_bits) {
  for (size_t k = 0; k < METHODS; k++) {
    struct run run = {
        .made = methods[k], .common = ONEBIT_OPTIMIZER_OPTIONS_INIT, .counts = {1 << 20, 0}};
    free(run_on_all_ranks(&run));
    const double dense = (double)run.bytes[0];
    for (int bits = 4; bits <= 8; bits += 4) {
      run.common.warmup_bits = bits;
      free(run_on_all_ranks(&run));
      cr_expect_float_eq((double)run.bytes[0] / dense, (bits + 1.0 / 64) / 32, 0.01 * bits / 32,
                         "%d bits: %llu bytes of %g", bits, (unsigned long long)run.bytes[0],
                         dense);
    }
  }
}

/* Trains until steps are compressed, with each count at an edge of a word or a block. */
Test(warmup, any_count) {
  static const size_t counts[][2] = {{0, 0}, {0, 1}, {1, 0}, {3, 31}, {32, 33}, {100, 65}};
  for (size_t k = 0; k < METHODS; k++)
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
      for (size_t bucket_size = 0; bucket_size < 2; bucket_size++) {
        struct run run = {.made = methods[k],
                          .common = ONEBIT_OPTIMIZER_OPTIONS_INIT,
                          .counts = {counts[c][0], counts[c][1]},
                          .steps = 70};
        run.common.warmup_bits = c % 2 ? 8 : 4;
        run.common.bucket_size = bucket_size;
        run.common.block_size = 32;
        run.common.dense_below = c == 4 ? 33 : 0;
        float *end = run_on_all_ranks(&run);
        for (size_t i = 0; i < counts[c][0] + counts[c][1]; i++)
          cr_expect(isfinite(end[i]) && end[i] != 0, "element %zu of %zu is %g", i,
                    counts[c][0] + counts[c][1], (double)end[i]);
        free(end);
      }
}

/* --- Checkpoints -------------------------------------------------------------------------------*/

enum { COUNT = 777 };

static void make_twenty_steps(onebit_optimizer_t optimizer, const float *parameters,
                              float *gradients, int rank) {
  for (int step = 0; step < 20; step++) {
    for (size_t i = 0; i < COUNT; i++)
      gradients[i] = loss_slope(parameters[i], rank, i);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f), ONEBIT_OK);
  }
}

/* A state that was saved with 4 bits continues in a dense warm-up, and a dense state with 8 bits,
 * equally on every rank. */
static void load_on_rank(onebit_comm_t comm, void *context) {
  static const int bits[] = {4, 0, 8};
  float parameters[3][COUNT] = {{0}}, gradients[COUNT];
  onebit_optimizer_t optimizers[3];
  for (int k = 0; k < 3; k++) {
    const onebit_tensor_t tensor = {parameters[k], gradients, COUNT, 0, 0, 0};
    onebit_adam_options_t options = {
        .size = sizeof options, .freeze_step = 90, .common.warmup_bits = bits[k]};
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizers[k]), ONEBIT_OK);
  }
  make_twenty_steps(optimizers[0], parameters[0], gradients, onebit_comm_rank(comm));
  for (int k = 1; k < 3; k++) {
    CHECK_STATUS(onebit_optimizer_save_files(optimizers[k - 1], context), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_load_files(optimizers[k], context), ONEBIT_OK);
    CHECK_BITS("parameters", parameters[k - 1], parameters[k], COUNT, ONEBIT_FLOAT32);
    make_twenty_steps(optimizers[k], parameters[k], gradients, onebit_comm_rank(comm));
    CHECK_STATUS(onebit_optimizer_compare(optimizers[k]), ONEBIT_OK);
  }
  for (int k = 0; k < 3; k++)
    onebit_optimizer_destroy(optimizers[k]);
}

Test(warmup, loads_with_other_bits) {
  struct directories directories = directories_create();
  on_ranks(RANKS, load_on_rank, directories.saved);
  directory_empty(directories.saved);
  directories_remove(&directories);
}

/* A state that was saved by a run without a warm-up must continue with compressed steps, although
 * the optimizer that loads it has a warm-up by default. */
static void load_compressed(onebit_comm_t comm, void *context) {
  float parameters[2][COUNT] = {{0}}, gradients[COUNT];
  const int rank = onebit_comm_rank(comm);
  onebit_optimizer_t optimizers[2];
  for (int k = 0; k < 2; k++) {
    const onebit_tensor_t tensor = {parameters[k], gradients, COUNT, 0, 0, 0};
    onebit_efficient_adam_options_t options = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
    options.warmup_steps = k ? 0 : ONEBIT_WARMUP_NONE;
    CHECK_STATUS(onebit_efficient_adam_create(comm, &tensor, 1, &options, &optimizers[k]),
                 ONEBIT_OK);
  }
  make_twenty_steps(optimizers[0], parameters[0], gradients, rank);
  CHECK_STATUS(onebit_optimizer_save_files(optimizers[0], context), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_load_files(optimizers[1], context), ONEBIT_OK);
  for (int k = 0; k < 2; k++) {
    make_twenty_steps(optimizers[k], parameters[k], gradients, rank);
    const onebit_optimizer_info_t info = optimizer_info(optimizers[k]);
    CHECK(info.stage == ONEBIT_STAGE_COMPRESSED && info.exchanges[0] == 0, "optimizer %d: %llu", k,
          (unsigned long long)info.exchanges[0]);
    onebit_optimizer_destroy(optimizers[k]);
  }
  CHECK_BITS("parameters", parameters[1], parameters[0], COUNT, ONEBIT_FLOAT32);
}

Test(warmup, goes_on_from_none) {
  struct directories directories = directories_create();
  on_ranks(RANKS, load_compressed, directories.saved);
  directory_empty(directories.saved);
  directories_remove(&directories);
}

/* --- Divided gradients -------------------------------------------------------------------------*/

enum { QUIET = 7, DIVIDED = 60, SIZES = 3 };

/* Efficient-Adam on three tensors. One tensor has its first gradient late, and one is uncompressed.
 * The first steps have no gradient at all. */
struct quiet_run {
  size_t quiet;
  int trust_ratio;
  float parameters[RANKS][3 * COUNT];
};

static void run_quiet(onebit_comm_t comm, void *context) {
  struct quiet_run *run = context;
  const int rank = onebit_comm_rank(comm);
  float *const parameters = run->parameters[rank], *const gradients = allocate(3 * COUNT, 4);
  onebit_tensor_t tensors[SIZES];
  for (size_t k = 0; k < SIZES; k++)
    tensors[k] =
        (onebit_tensor_t){parameters + k * COUNT, gradients + k * COUNT, COUNT, 0, 0, k == 2};
  for (size_t i = 0; i < 3 * COUNT; i++)
    parameters[i] = 1 + (float)(i % 5);
  onebit_efficient_adam_options_t options = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  options.trust_ratio = run->trust_ratio;
  onebit_optimizer_t optimizer;
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_efficient_adam_create(comm, tensors, SIZES, &options, &optimizer), ONEBIT_OK);
  for (size_t step = 0; step < run->quiet + DIVIDED; step++) {
    const bool quiet = step < run->quiet, late = step < run->quiet + 9;
    for (size_t i = 0; i < 3 * COUNT; i++)
      gradients[i] =
          quiet || (late && i < COUNT) ? 0 : loss_slope(parameters[i], rank, i % UNKNOWNS);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.02f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
    CHECK((info.stage == ONEBIT_STAGE_WARMUP) == (step + 1 < run->quiet + ONEBIT_WARMUP_STEPS),
          "stage %d after step %zu", info.stage, step);
  }
  CHECK(info.freeze_step == run->quiet + ONEBIT_WARMUP_STEPS, "it ended with step %llu",
        (unsigned long long)info.freeze_step);
  onebit_optimizer_destroy(optimizer);
  free(gradients);
}

/* Steps before the first gradient change nothing, and do not count as warm-up steps. */
Test(warmup, begins_with_the_first_gradient) {
  for (int trust_ratio = 0; trust_ratio < 2; trust_ratio++) {
    struct quiet_run *at_once = allocate(1, sizeof *at_once), *later = allocate(1, sizeof *later);
    at_once->trust_ratio = later->trust_ratio = trust_ratio;
    later->quiet = QUIET;
    on_ranks(RANKS, run_quiet, at_once);
    on_ranks(RANKS, run_quiet, later);
    for (int rank = 0; rank < RANKS; rank++)
      cr_expect_arr_eq(later->parameters[rank], at_once->parameters[0],
                       sizeof at_once->parameters[0], "rank %d differs", rank);
    free(at_once);
    free(later);
  }
}
