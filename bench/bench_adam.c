/*
 * onebit-bench adam: what a step of 1-bit Adam costs without a network, beside a fused Adam step:
 * the better one of a plain loop for the widest vectors and the library's own pass.
 *
 * Two readings. The step as it is on one rank: compress, reduce, apply, each of the whole buffer,
 * since one rank alone serves all of it. And what the step of a rank among P costs: compress and
 * apply of the whole buffer, and the reduction of the share that the rank serves, with P streams;
 * that is the sum of passes timed one by one.
 */
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_optimizers.h"

static void run_step(struct bench_passes *passes, size_t streams) {
  (void)streams;
  onebit_status_t status = onebit_optimizer_step(passes->optimizer, passes->learning_rate);
  if (passes->status == ONEBIT_OK)
    passes->status = status;
}

/* The bytes of its three passes, with one stream. */
static const struct bench_pass step_pass = {"1-bit step, one rank", run_step, .floats = 8,
                                            .bits = 6};

/* Entries; from REDUCE on, one a stream count. */
enum { FUSED, DENSE, STEP, COMPRESS, APPLY, REDUCE };

/* An optimizer in its compressed stage: the warm-up is one step. */
static onebit_status_t create_optimizer(const struct bench_options *options,
                                        struct bench_passes *passes, float *parameters) {
  onebit_tensor_t tensor = {
      .parameter = parameters, .gradient = passes->gradient, .count = passes->count};
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.freeze_step = 1;
  adam.common.scale = options->scale;
  adam.common.block_size = options->block_size;
  adam.common.chunk_size = options->chunk_size;
  adam.common.threads = options->threads;
  onebit_status_t status = onebit_adam_create(passes->comm, &tensor, 1, &adam, &passes->optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_step(passes->optimizer, passes->learning_rate);
  return status;
}

static double median_of(const struct bench_rounds *rounds, const struct bench_entry *entry) {
  memcpy(rounds->scratch, entry->times, rounds->rounds * sizeof *entry->times);
  return bench_statistics(rounds->scratch, rounds->rounds).median;
}

/* The times of the better dense step. */
static const double *dense_times(const struct bench_rounds *rounds) {
  const struct bench_entry *fused = &rounds->entries[FUSED], *own = &rounds->entries[DENSE];
  return median_of(rounds, fused) < median_of(rounds, own) ? fused->times : own->times;
}

static void print_entry(const struct bench_rounds *rounds, const struct bench_passes *passes,
                        const struct bench_entry *entry, bool full) {
  double ratio =
      bench_ratio(entry->times, dense_times(rounds), rounds->rounds, rounds->scratch).median;
  memcpy(rounds->scratch, entry->times, rounds->rounds * sizeof *entry->times);
  struct bench_statistics time = bench_statistics(rounds->scratch, rounds->rounds);
  double bytes = bench_pass_bytes(passes, entry);
  char name[64];
  snprintf(name, sizeof name, entry->streams ? "%s, %zu streams" : "%s", entry->pass->name,
           entry->streams);
  printf("%-28s%12.3f%10.2f%12.2f%12.3f", name, 1e3 * time.median, 1e-9 * bytes / time.median,
         bytes / (double)passes->count, ratio);
  if (full)
    printf("%10.3f%10.3f", 1e3 * time.minimum, 1e3 * time.maximum);
  printf("\n");
}

/* Compress, apply and a P-th of the reduction, round by round, against the dense step. */
static void print_sum(const struct bench_rounds *rounds, const struct bench_passes *passes,
                      const struct bench_entry *reduce, double *sums, bool full) {
  const struct bench_entry *compress = &rounds->entries[COMPRESS], *apply = &rounds->entries[APPLY];
  double share = 1 / (double)reduce->streams;
  for (size_t r = 0; r < rounds->rounds; r++)
    sums[r] = compress->times[r] + share * reduce->times[r] + apply->times[r];
  double ratio = bench_ratio(sums, dense_times(rounds), rounds->rounds, rounds->scratch).median;
  double bytes = bench_pass_bytes(passes, compress) + bench_pass_bytes(passes, apply) +
                 share * bench_pass_bytes(passes, reduce);
  struct bench_statistics time = bench_statistics(sums, rounds->rounds);
  char name[64];
  snprintf(name, sizeof name, "sum, a rank among %zu", reduce->streams);
  printf("%-28s%12.3f%10.2f%12.2f%12.3f", name, 1e3 * time.median, 1e-9 * bytes / time.median,
         bytes / (double)passes->count, ratio);
  if (full)
    printf("%10.3f%10.3f", 1e3 * time.minimum, 1e3 * time.maximum);
  printf("\n");
}

static void print_head(const struct bench_options *options, const struct bench_passes *passes,
                       const struct bench_rounds *rounds) {
  bench_print_plan(options, passes, rounds);
  printf("%-28s%12s%10s%12s%12s", "# Pass", "Median(ms)", "GB/s", "B/parameter", "of dense");
  printf("%s\n", options->full ? "   Min(ms)   Max(ms)" : "");
}

static int report(const struct bench_options *options, const struct bench_passes *passes,
                  struct bench_rounds *rounds) {
  double *sums = ob_allocate(rounds->rounds, sizeof *sums);
  if (!sums) {
    bench_complain("no memory for %zu sums", rounds->rounds);
    return BENCH_FAILED;
  }
  print_head(options, passes, rounds);
  for (size_t e = 0; e < rounds->count; e++)
    print_entry(rounds, passes, &rounds->entries[e], options->full);
  for (size_t e = REDUCE; e < rounds->count; e++)
    print_sum(rounds, passes, &rounds->entries[e], sums, options->full);
  fflush(stdout);
  ob_release(sums);
  return BENCH_OK;
}

static int measure(const struct bench_options *options, struct bench_passes *passes) {
  struct bench_rounds rounds = {.count = 0};
  bench_rounds_add(&rounds, &bench_fused_adam_step, 0);
  bench_rounds_add(&rounds, &bench_adam, 0);
  bench_rounds_add(&rounds, &step_pass, 0);
  bench_rounds_add(&rounds, &bench_compress_momentum, 0);
  bench_rounds_add(&rounds, &bench_apply, 0);
  for (size_t k = 0; k < options->stream_count; k++)
    bench_rounds_add(&rounds, &bench_reduce, options->streams[k]);
  int status = bench_rounds_run(&rounds, options, passes);
  if (status == BENCH_OK)
    status = report(options, passes, &rounds);
  bench_rounds_destroy(&rounds);
  return status;
}

static int run_size(const struct bench_options *options, size_t bytes) {
  struct bench_passes passes;
  size_t count = bytes / sizeof(float);
  int status = bench_passes_create(options, count, bench_most_streams(options), &passes);
  float *parameters = ob_allocate(count, sizeof *parameters);
  if (status == BENCH_OK && !parameters) {
    bench_complain("no memory for %zu parameters", count);
    status = BENCH_FAILED;
  }
  if (status == BENCH_OK)
    status = bench_status(create_optimizer(options, &passes, parameters), "onebit_adam_create");
  if (status == BENCH_OK)
    status = measure(options, &passes);
  onebit_optimizer_destroy(passes.optimizer);
  bench_passes_destroy(&passes);
  ob_release(parameters);
  return status;
}

int bench_run_adam(const struct bench_benchmark *benchmark, const struct bench_options *options,
                   struct bench_team *team) {
  (void)team;
  int status = BENCH_OK;
  printf("# onebit-bench %s, version %s: no network\n", benchmark->name, onebit_version());
  printf("# of dense: time against the better one of the first two, of the same round, median\n");
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2)
    status = run_size(options, bytes);
  return status;
}
