/*
 * onebit-bench buckets: how much of an optimizer's exchange a backward pass hides.
 *
 * The backward pass is one that takes as long as the exchange: some arithmetic for each of a few
 * tensors, the last first. It is timed followed by a step, and with the step in parts
 * (onebit_optimizer_begin), for several bucket sizes. The optimizer is in its compressed stage.
 * Overlap is OSU's: the part of the exchange that the sum of both does not show.
 */
#include <math.h>

#include "bench/bench_overlap.h"

enum { TENSORS = 16, ROUNDS = 15, MAX_ROUNDS = 1000 };

static const float learning_rate = 1e-4f;

struct buckets {
  struct bench_job *job;
  size_t count, bucket_size; /* count: elements of a tensor */
  size_t units;              /* of the backward pass; 0: it was not measured yet */
  float *parameters, *gradients;
  onebit_optimizer_t optimizer;
};

static onebit_status_t start(void *context) {
  return onebit_optimizer_begin(((struct buckets *)context)->optimizer, learning_rate);
}

static onebit_status_t look(void *context, size_t which) {
  return onebit_optimizer_ready(((struct buckets *)context)->optimizer, TENSORS - 1 - which);
}

static onebit_status_t finish(void *context) {
  return onebit_optimizer_step(((struct buckets *)context)->optimizer, learning_rate);
}

struct row {
  const struct buckets *buckets;
  const struct bench_entry *times;
};

static void fields(struct bench_table *table, const void *context) {
  const struct row *row = context;
  double pure = row->times[BENCH_PURE].time.median, compute = row->times[BENCH_COMPUTE].time.median,
         overall = row->times[BENCH_OVERALL].time.median;
  bench_number(table, "bucket", "Bucket", -12, 0, (double)row->buckets->bucket_size);
  bench_number(table, "parameters", NULL, 0, 0, (double)(TENSORS * row->buckets->count));
  bench_number(table, "ranks", NULL, 0, 0, row->buckets->job->team->size);
  bench_time(table, "apart_us", "Apart(ms)", 14, 3, row->times[BENCH_APART].time.median);
  bench_time(table, "overall_us", "Overall(ms)", 14, 3, overall);
  bench_time(table, "compute_us", "Compute(ms)", 14, 3, compute);
  bench_time(table, "pure_us", "Pure Comm.(ms)", 16, 3, pure);
  bench_number(table, "overlap", "Overlap(%)", 12, 1,
               fmin(100, bench_overlap_percent(overall, compute, pure)));
}

static onebit_status_t create(struct buckets *buckets) {
  onebit_tensor_t tensors[TENSORS];
  onebit_adam_options_t adam = bench_adam_options(buckets->job->options);
  adam.common.bucket_size = buckets->bucket_size;
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = buckets->parameters + t * buckets->count,
                                   .gradient = buckets->gradients + t * buckets->count,
                                   .count = buckets->count};
  onebit_status_t status =
      onebit_adam_create(buckets->job->team->comm, tensors, TENSORS, &adam, &buckets->optimizer);
  for (int step = 0; step < 3 && status == ONEBIT_OK; step++)
    status = onebit_optimizer_step(buckets->optimizer, learning_rate);
  return status;
}

/* All bucket sizes have the same backward pass. */
static int measure(struct buckets *buckets, struct bench_rounds *rounds) {
  struct bench_side side = {.context = buckets,
                            .start = start,
                            .look = look,
                            .finish = finish,
                            .slices = TENSORS,
                            .looks = TENSORS,
                            .units = buckets->units};
  BENCH_TRY(bench_status(create(buckets), "onebit_adam_create"));
  bench_side_add(rounds, &side, true);
  if (buckets->units == 0)
    BENCH_TRY(bench_sides_calibrate(rounds, &side, 1, 0, 1));
  buckets->units = side.units;
  BENCH_TRY(bench_rounds_measure(rounds));
  return bench_status(side.status, "onebit_optimizer_step");
}

static int run_bucket_size(struct buckets *buckets, size_t rounds_asked) {
  struct bench_rounds rounds = {.rounds = rounds_asked, .repeats = 1, .team = buckets->job->team};
  struct row row = {buckets, rounds.entries};
  int status = measure(buckets, &rounds);
  if (status == BENCH_OK && buckets->job->team->rank == 0)
    bench_print_row(buckets->job->table, fields, &row);
  onebit_optimizer_destroy(buckets->optimizer);
  buckets->optimizer = NULL;
  bench_rounds_destroy(&rounds);
  return status;
}

static void note(struct bench_job *job, size_t count, size_t rounds) {
  if (job->team->rank != 0)
    return;
  if (job->first) {
    bench_note(job->table, "onebit-bench %s, version %s: %d ranks", job->benchmark->name,
               onebit_version(), job->team->size);
    bench_note(job->table, "Apart: backward pass, then a step. Overall: the step in parts");
    job->first = false;
  }
  bench_note(job->table, "%zu parameters in %d tensors, %zu rounds", TENSORS * count, (int)TENSORS,
             rounds);
}

/* One bucket of everything, then halves of it down to a tensor a bucket. */
static int run_size(struct bench_job *job, size_t bytes, void *context) {
  size_t asked = job->options->iterations, count = bytes / sizeof(float) / TENSORS;
  size_t rounds = asked == BENCH_BY_SIZE ? ROUNDS : asked < MAX_ROUNDS ? asked : MAX_ROUNDS;
  struct buckets buckets = {.job = job,
                            .count = count,
                            .parameters = ob_allocate(TENSORS * count, sizeof(float)),
                            .gradients = ob_allocate(TENSORS * count, sizeof(float))};
  int status = BENCH_OK;
  (void)context;
  if (!bench_team_agree(job->team, buckets.parameters && buckets.gradients))
    status = bench_no_memory("parameters", TENSORS * count);
  else {
    bench_fill(buckets.gradients, TENSORS * count, (uint64_t)job->team->rank + 1);
    note(job, count, rounds);
  }
  for (size_t parts = 1; parts <= TENSORS && status == BENCH_OK; parts *= 2) {
    buckets.bucket_size = parts == 1 ? 0 : TENSORS / parts * count;
    status = run_bucket_size(&buckets, rounds);
  }
  ob_release(buckets.parameters);
  ob_release(buckets.gradients);
  return status;
}

int bench_run_buckets(struct bench_job *job) { return bench_each_size(job, run_size, NULL); }
