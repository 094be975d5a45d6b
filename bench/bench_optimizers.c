/*
 * onebit-bench optimizers: what a compressed step of each optimizer costs without a network, beside
 * the dense step of the same optimizer.
 *
 * The work of a step is the sum of its passes, each timed alone over all elements, as they cannot
 * stay in a cache: compress and apply and what an optimizer has besides, and a P-th of the
 * reduction, since a rank among P serves a P-th. The dense step is the better one of two: a plain
 * fused loop for the widest vectors of this processor, and the library's own warm-up pass. Both and
 * all passes take turns, round by round.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "bench/bench_optimizers.h"

enum { DENSE = 2, MOST_PARTS = 3 };

struct step {
  const char *name;
  const struct bench_pass *dense[DENSE], *parts[MOST_PARTS + 1];
  const struct bench_pass *reduce; /* a P-th; NULL: none */
};

static const struct step steps[] = {
    {"Efficient-Adam",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_compress_normalized, &bench_apply_step},
     &bench_reduce},
    {"1-bit Adam",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_compress_momentum, &bench_apply},
     &bench_reduce},
    {"1-bit Adam, steps",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_compress_step, &bench_apply_step},
     &bench_reduce},
    {"1-bit LAMB",
     {&bench_fused_lamb_step, &bench_lamb},
     {&bench_compress_momentum, &bench_lamb_fresh, &bench_apply},
     &bench_reduce},
    {"0/1 Adam, bits",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_compress, &bench_zero_one},
     &bench_reduce},
    {"0/1 Adam, local step",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_zero_one_look, &bench_zero_one_local},
     NULL},
    {"0/1 Adam, synchronisation",
     {&bench_fused_adam_step, &bench_adam},
     {&bench_zero_one_meet, &bench_compress, &bench_zero_one_met},
     &bench_reduce},
    {"1-bit momentum SGD",
     {&bench_fused_momentum_step, &bench_momentum},
     {&bench_compress_momentum, &bench_apply_step},
     &bench_reduce},
    {"Lion",
     {&bench_fused_lion_step, &bench_lion},
     {&bench_compress_lion, &bench_apply_step},
     &bench_reduce_lion},
};

/* Times of one step: entries of its rounds are the dense ones, the parts, and from `reduce` on the
 * reductions, one a number of streams. */
struct timed {
  const struct step *step;
  struct bench_rounds rounds;
  size_t parts, reduce;
  double *sums;
};

static struct bench_statistics statistics_of(const struct timed *timed, const double *times) {
  memcpy(timed->rounds.scratch, times, timed->rounds.rounds * sizeof *times);
  return bench_statistics(timed->rounds.scratch, timed->rounds.rounds);
}

static size_t better_dense(const struct timed *timed) {
  const struct bench_entry *entries = timed->rounds.entries;
  return statistics_of(timed, entries[1].times).median <
                 statistics_of(timed, entries[0].times).median
             ? 1
             : 0;
}

/* The parts, and a P-th of the reduction where `reduce` is one of its entries. */
static double add_up(const struct timed *timed, const struct bench_passes *passes,
                     const struct bench_entry *reduce) {
  const struct bench_entry *parts = &timed->rounds.entries[DENSE];
  double bytes = 0, share = reduce ? 1 / (double)reduce->streams : 0;
  for (size_t r = 0; r < timed->rounds.rounds; r++)
    timed->sums[r] = reduce ? share * reduce->times[r] : 0;
  for (size_t k = 0; k < timed->parts; k++) {
    bytes += bench_pass_bytes(passes, &parts[k]);
    for (size_t r = 0; r < timed->rounds.rounds; r++)
      timed->sums[r] += parts[k].times[r];
  }
  return reduce ? bytes + share * bench_pass_bytes(passes, reduce) : bytes;
}

static void print_line(const struct timed *timed, const struct bench_passes *passes,
                       const char *name, const double *times, double bytes) {
  struct bench_statistics time = statistics_of(timed, times);
  const double *dense = timed->rounds.entries[better_dense(timed)].times;
  struct bench_statistics ratio =
      bench_ratio(times, dense, timed->rounds.rounds, timed->rounds.scratch);
  printf("%-30s%11.2f%10.2f%11.3f%11.3f%11.3f%10.3f%9.3f%9.3f\n", name,
         bytes / (double)passes->count, 1e-9 * bytes / time.median, 1e3 * time.median,
         1e3 * time.minimum, 1e3 * time.maximum, ratio.median, ratio.minimum, ratio.maximum);
}

static void print_entry(const struct timed *timed, const struct bench_passes *passes,
                        const struct bench_entry *entry, const char *mark) {
  char name[64];
  snprintf(name, sizeof name, entry->streams ? "  %s%s, %zu streams" : "  %s%s", entry->pass->name,
           mark, entry->streams);
  print_line(timed, passes, name, entry->times, bench_pass_bytes(passes, entry));
}

static void print_step(const struct timed *timed, const struct bench_passes *passes, bool full) {
  const struct bench_entry *entries = timed->rounds.entries;
  size_t better = better_dense(timed);
  char name[64];
  double bytes = add_up(timed, passes, NULL);
  print_line(timed, passes, timed->step->name, timed->sums, bytes);
  for (size_t e = timed->reduce; e < timed->rounds.count; e++) {
    snprintf(name, sizeof name, "  a rank among %zu", entries[e].streams);
    bytes = add_up(timed, passes, &entries[e]);
    print_line(timed, passes, name, timed->sums, bytes);
  }
  for (size_t e = 0; e < DENSE; e++)
    if (full || e == better)
      print_entry(timed, passes, &entries[e], e == better ? " (the dense)" : "");
  for (size_t e = DENSE; full && e < timed->rounds.count; e++)
    print_entry(timed, passes, &entries[e], "");
}

static void plan_rounds(const struct bench_options *options, struct timed *timed) {
  const struct step *step = timed->step;
  for (size_t k = 0; k < DENSE; k++)
    bench_rounds_add(&timed->rounds, step->dense[k], 0);
  for (; step->parts[timed->parts]; timed->parts++)
    bench_rounds_add(&timed->rounds, step->parts[timed->parts], 0);
  timed->reduce = timed->rounds.count;
  for (size_t k = 0; step->reduce && k < options->stream_count; k++)
    bench_rounds_add(&timed->rounds, step->reduce, options->streams[k]);
}

static void print_head(const struct bench_options *options, const struct bench_passes *passes,
                       const struct bench_rounds *rounds) {
  bench_print_plan(options, passes, rounds);
  printf("%-30s%11s%10s%11s%11s%11s%10s%9s%9s\n", "# Step", "B/param.", "GB/s", "Median(ms)",
         "Min(ms)", "Max(ms)", "of dense", "Min", "Max");
}

static int run_step(const struct bench_options *options, struct bench_passes *passes,
                    const struct step *step) {
  struct timed timed = {.step = step};
  plan_rounds(options, &timed);
  int status = bench_rounds_run(&timed.rounds, options, passes);
  timed.sums = ob_allocate(timed.rounds.rounds, sizeof *timed.sums);
  if (status == BENCH_OK && !timed.sums) {
    bench_complain("no memory for %zu sums", timed.rounds.rounds);
    status = BENCH_FAILED;
  }
  if (status == BENCH_OK && step == steps)
    print_head(options, passes, &timed.rounds);
  if (status == BENCH_OK)
    print_step(&timed, passes, options->full);
  fflush(stdout);
  ob_release(timed.sums);
  bench_rounds_destroy(&timed.rounds);
  return status;
}

static int run_size(const struct bench_options *options, size_t bytes) {
  struct bench_passes passes;
  struct bench_optimizer_arrays arrays = {0};
  size_t streams = bench_most_streams(options);
  int status =
      bench_passes_create(options, bytes / sizeof(float), streams < 2 ? 2 : streams, &passes);
  if (status == BENCH_OK && !bench_optimizer_arrays_create(&passes, &arrays)) {
    bench_complain("no memory for %zu elements", passes.count);
    status = BENCH_FAILED;
  }
  for (size_t k = 0; status == BENCH_OK && k < sizeof steps / sizeof steps[0]; k++)
    status = run_step(options, &passes, &steps[k]);
  bench_optimizer_arrays_destroy(&arrays);
  bench_passes_destroy(&passes);
  return status;
}

/* --- Memory */

typedef onebit_status_t create_optimizer(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                         onebit_optimizer_t *optimizer);

static onebit_status_t create_efficient_adam(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                             onebit_optimizer_t *optimizer) {
  return onebit_efficient_adam_create(comm, tensor, 1, NULL, optimizer);
}

static onebit_status_t create_adam(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                   onebit_optimizer_t *optimizer) {
  return onebit_adam_create(comm, tensor, 1, NULL, optimizer);
}

static onebit_status_t create_lamb(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                   onebit_optimizer_t *optimizer) {
  return onebit_lamb_create(comm, tensor, 1, NULL, optimizer);
}

static onebit_status_t create_zero_one(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                       onebit_optimizer_t *optimizer) {
  return onebit_zero_one_adam_create(comm, tensor, 1, NULL, optimizer);
}

static onebit_status_t create_momentum(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                       onebit_optimizer_t *optimizer) {
  return onebit_momentum_create(comm, tensor, 1, NULL, optimizer);
}

static onebit_status_t create_lion(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                   onebit_optimizer_t *optimizer) {
  return onebit_lion_create(comm, tensor, 1, NULL, optimizer);
}

/* Dense: moments, and a buffer for the mean gradient. */
static const struct {
  const char *name;
  create_optimizer *create;
  int dense;
} memories[] = {{"Efficient-Adam", create_efficient_adam, 12},
                {"1-bit Adam", create_adam, 12},
                {"1-bit LAMB", create_lamb, 12},
                {"0/1 Adam", create_zero_one, 12},
                {"1-bit momentum SGD", create_momentum, 8},
                {"Lion", create_lion, 8}};

static onebit_status_t count_memory(onebit_comm_t comm, float *arrays, size_t count,
                                    create_optimizer *create, double *bytes) {
  onebit_tensor_t tensor = {.parameter = arrays, .gradient = arrays + count, .count = count};
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_info_t info = {.size = sizeof info};
  onebit_status_t status = create(comm, &tensor, &optimizer);
  if (status == ONEBIT_OK)
    status = onebit_optimizer_get_info(optimizer, &info);
  *bytes = (double)info.memory_bytes / (double)count;
  onebit_optimizer_destroy(optimizer);
  return status;
}

/* Of as many parameters as in the last table. */
static int print_memory(size_t count) {
  onebit_comm_t comm = NULL;
  float *arrays = ob_allocate(2 * count, sizeof *arrays);
  onebit_status_t status =
      arrays ? onebit_comm_create_self(&comm)
             : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu parameters", count);
  printf("# Memory, bytes a parameter: what one rank alone takes, of it what all P ranks share "
         "between them,\n# and a dense step with a buffer for the mean gradient\n");
  for (size_t k = 0; status == ONEBIT_OK && k < sizeof memories / sizeof memories[0]; k++) {
    double bytes;
    status = count_memory(comm, arrays, count, memories[k].create, &bytes);
    if (status == ONEBIT_OK)
      printf("%-30s%11.2f%10d%11d\n", memories[k].name, bytes, 8, memories[k].dense);
  }
  onebit_comm_destroy(comm);
  ob_release(arrays);
  return bench_status(status, "creating an optimizer");
}

int bench_run_optimizers(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team) {
  (void)team;
  struct bench_options one_core = *options;
  one_core.threads = 1;
  int status = BENCH_OK;
  size_t last = 0;
  printf("# onebit-bench %s, version %s: one core, no network; plain loops use %s\n",
         benchmark->name, onebit_version(), bench_triad_width());
  printf("# of dense: time against the better dense step, of the same round\n");
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2) {
    status = run_size(&one_core, bytes);
    last = bytes;
  }
  return status == BENCH_OK ? print_memory(last / sizeof(float)) : status;
}
