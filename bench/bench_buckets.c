/*
 * onebit-bench buckets: how much of an optimizer's exchange a backward pass hides.
 *
 * The backward pass is one that takes as long as the exchange: some arithmetic for each of a few
 * tensors, the last first. It is timed followed by a step, and with the step in parts
 * (onebit_optimizer_begin), for several bucket sizes. The optimizer is in its compressed stage.
 * Overlap is OSU's: the part of the exchange that the sum of both does not show.
 */
#include "bench/bench_buckets.h"

#include <stdio.h>

#include "base/memory.h"

enum { TENSORS = 16, ROUNDS = 15, MOST_ROUNDS = 1000 };
enum { PURE, COMPUTE, APART, PARTS, TIMES }; /* what is timed */

struct buckets {
  struct bench_team *team;
  const struct bench_options *options;
  size_t count, bucket_size, rounds; /* count: elements of a tensor */
  size_t work;                       /* of the backward pass, for one tensor */
  float sum;                         /* of its results, so that it is not left out */
  float *parameters, *gradients;
  onebit_optimizer_t optimizer;
  onebit_status_t status;
  double *times[TIMES];
};

static const float learning_rate = 1e-4f;

/* Arithmetic in registers: it takes a core, and leaves the memory to the exchange. */
static float compute(size_t work) {
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (size_t i = 0; i < work; i++)
    for (int k = 0; k < 8; k++)
      x[k] = x[k] * 0.999f + 0.5f;
  return x[0] + x[7];
}

static void note(struct buckets *buckets, onebit_status_t status) {
  if (buckets->status == ONEBIT_OK)
    buckets->status = status;
}

static void run(struct buckets *buckets, int what) {
  if (what == PARTS)
    note(buckets, onebit_optimizer_begin(buckets->optimizer, learning_rate));
  for (size_t t = TENSORS; t-- > 0 && what != PURE;) {
    buckets->sum += compute(buckets->work);
    if (what == PARTS)
      note(buckets, onebit_optimizer_ready(buckets->optimizer, t));
  }
  if (what != COMPUTE)
    note(buckets, onebit_optimizer_step(buckets->optimizer, learning_rate));
}

/* Seconds that the slowest rank takes. */
static double timed(struct buckets *buckets, int what) {
  buckets->team->kind->barrier(buckets->team);
  double start = bench_now();
  run(buckets, what);
  double seconds = bench_now() - start;
  buckets->team->kind->combine(buckets->team, &seconds, 1, false);
  return seconds;
}

static double median(struct buckets *buckets, int what) {
  return bench_statistics(buckets->times[what], buckets->rounds).median;
}

/* Makes the backward pass as long as the exchange: all ranks come to the same work. */
static void calibrate(struct buckets *buckets) {
  for (size_t r = 0; r < buckets->rounds; r++)
    buckets->times[PURE][r] = timed(buckets, PURE);
  double wanted = median(buckets, PURE);
  buckets->work = 1000;
  for (int k = 0; k < 20; k++) {
    double seconds = timed(buckets, COMPUTE);
    if (seconds > wanted / 2) {
      buckets->work = (size_t)((double)buckets->work * wanted / seconds) + 1;
      return;
    }
    buckets->work *= 2;
  }
}

/* The four by turns, so that a slow moment of the machine is none of one alone. */
static void measure(struct buckets *buckets) {
  for (size_t r = 0; r < buckets->rounds; r++)
    for (int what = 0; what < TIMES; what++)
      buckets->times[what][r] = timed(buckets, what);
}

static double overlap(double overall, double computing, double pure) {
  double hidden = 100 * (1 - (overall - computing) / pure);
  return hidden < 0 ? 0 : hidden > 100 ? 100 : hidden;
}

static void print_row(struct buckets *buckets) {
  double pure = median(buckets, PURE), computing = median(buckets, COMPUTE);
  double apart = median(buckets, APART), parts = median(buckets, PARTS);
  printf("%-12zu%14.3f%14.3f%14.3f%16.3f%12.1f\n", buckets->bucket_size, 1e3 * apart, 1e3 * parts,
         1e3 * computing, 1e3 * pure, overlap(parts, computing, pure));
  fflush(stdout);
}

static onebit_status_t create(struct buckets *buckets) {
  onebit_tensor_t tensors[TENSORS];
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.freeze_step = 1;
  adam.common.scale = buckets->options->scale;
  adam.common.block_size = buckets->options->block_size;
  adam.common.chunk_size = buckets->options->chunk_size;
  adam.common.threads = buckets->options->threads;
  adam.common.bucket_size = buckets->bucket_size;
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = buckets->parameters + t * buckets->count,
                                   .gradient = buckets->gradients + t * buckets->count,
                                   .count = buckets->count};
  onebit_status_t status =
      onebit_adam_create(buckets->team->comm, tensors, TENSORS, &adam, &buckets->optimizer);
  for (int step = 0; step < 3 && status == ONEBIT_OK; step++)
    status = onebit_optimizer_step(buckets->optimizer, learning_rate);
  return status;
}

static int run_bucket_size(struct buckets *buckets) {
  int status = bench_status(create(buckets), "onebit_adam_create");
  if (status == BENCH_OK) {
    if (buckets->work == 0)
      calibrate(buckets);
    measure(buckets);
    status = bench_status(buckets->status, "onebit_optimizer_step");
  }
  if (status == BENCH_OK && buckets->team->rank == 0)
    print_row(buckets);
  onebit_optimizer_destroy(buckets->optimizer);
  buckets->optimizer = NULL;
  return status;
}

static bool allocate(struct buckets *buckets) {
  size_t count = TENSORS * buckets->count;
  bool well = true;
  buckets->parameters = ob_allocate(count, sizeof(float));
  buckets->gradients = ob_allocate(count, sizeof(float));
  for (int what = 0; what < TIMES; what++) {
    buckets->times[what] = ob_allocate(buckets->rounds, sizeof(double));
    well = well && buckets->times[what];
  }
  if (!bench_team_agree(buckets->team, well && buckets->parameters && buckets->gradients))
    return false;
  bench_fill(buckets->gradients, count, (uint64_t)buckets->team->rank + 1);
  return true;
}

static void release(struct buckets *buckets) {
  ob_release(buckets->parameters);
  ob_release(buckets->gradients);
  for (int what = 0; what < TIMES; what++)
    ob_release(buckets->times[what]);
}

static void print_head(const struct buckets *buckets) {
  printf("# %zu parameters in %d tensors, %zu rounds\n", TENSORS * buckets->count, (int)TENSORS,
         buckets->rounds);
  printf("%-12s%14s%14s%14s%16s%12s\n", "# Bucket", "Apart(ms)", "Overall(ms)", "Compute(ms)",
         "Pure Comm.(ms)", "Overlap(%)");
}

/* One bucket of everything, then halves of it down to a tensor a bucket. */
static int run_size(struct bench_team *team, const struct bench_options *options, size_t bytes) {
  size_t asked = options->iterations == BENCH_BY_SIZE ? ROUNDS : options->iterations;
  struct buckets buckets = {.team = team,
                            .options = options,
                            .count = bytes / sizeof(float) / TENSORS,
                            .rounds = asked < MOST_ROUNDS ? asked : MOST_ROUNDS};
  int status = BENCH_OK;
  if (!allocate(&buckets)) {
    bench_complain("no memory for %zu parameters", TENSORS * buckets.count);
    status = BENCH_FAILED;
  }
  if (status == BENCH_OK && team->rank == 0)
    print_head(&buckets);
  for (size_t parts = 1; parts <= TENSORS && status == BENCH_OK; parts *= 2) {
    buckets.bucket_size = parts == 1 ? 0 : TENSORS / parts * buckets.count;
    status = run_bucket_size(&buckets);
  }
  release(&buckets);
  return status;
}

int bench_run_buckets(const struct bench_benchmark *benchmark, const struct bench_options *options,
                      struct bench_team *team) {
  int status = BENCH_OK;
  if (team->rank == 0) {
    printf("# onebit-bench %s, version %s: %d ranks\n", benchmark->name, onebit_version(),
           team->size);
    printf("# Apart: backward pass, then a step. Overall: the step in parts\n");
  }
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2)
    status = run_size(team, options, bytes);
  return status;
}
