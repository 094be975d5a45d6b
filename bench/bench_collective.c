/* The collectives beside MPI's: buffers, timed iterations, one row a size. */
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
#include "compression/numerics.h"

const struct bench_collective bench_collectives[] = {
    [ONEBIT_ALLREDUCE] = {"allreduce", "MPI_Allreduce", ONEBIT_ALLREDUCE, onebit_allreduce, false,
                          false},
    [ONEBIT_ALLGATHER] = {"allgather", "MPI_Allgather", ONEBIT_ALLGATHER, onebit_allgather, true,
                          false},
    [ONEBIT_REDUCE_SCATTER] = {"reduce-scatter", "MPI_Reduce_scatter_block", ONEBIT_REDUCE_SCATTER,
                               onebit_reduce_scatter, false, true},
};

static const struct bench_collective *find_collective(const char *name) {
  size_t k = 0;
  while (strcmp(bench_collectives[k].name, name) != 0)
    k++;
  return &bench_collectives[k];
}

static bool has_dense(const struct bench_team *team, const struct bench_options *options) {
  return team->kind->dense && !options->no_dense;
}

static bool allocate(struct bench_case *test) {
  size_t size = ob_dtype_size(test->options->dtype);
  test->dense_send = ob_allocate(test->send_count, sizeof(float));
  test->send = size == sizeof(float) ? test->dense_send : ob_allocate(test->send_count, size);
  test->receive = ob_allocate(test->receive_count, size);
  if (!test->dense_send || !test->send || !test->receive)
    return false;
  if (!has_dense(test->team, test->options))
    return true;
  test->dense_receive = ob_allocate(test->receive_count, sizeof(float));
  return test->dense_receive != NULL;
}

static void fill(struct bench_case *test) {
  bench_fill(test->dense_send, test->send_count, (uint64_t)test->team->rank + 1);
  for (size_t i = 0; test->send != test->dense_send && i < test->send_count; i++)
    ob_store(test->send, i, test->options->dtype, test->dense_send[i]);
}

static int create_plan(struct bench_case *test) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = test->collective->operation;
  options.dtype = test->options->dtype;
  options.scale = test->options->scale;
  options.block_size = test->options->block_size;
  options.chunk_size = test->options->chunk_size;
  options.threads = test->options->threads;
  onebit_status_t status = onebit_plan_create(test->team->comm, test->count, &options, &test->plan);
  if (status == ONEBIT_OK || test->team->rank == 0)
    return bench_status(status, "onebit_plan_create");
  return status == ONEBIT_ERROR_ARGUMENT ? BENCH_USAGE : BENCH_FAILED;
}

int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test) {
  size_t ranks = (size_t)team->size, elements = bytes / sizeof(float);
  size_t share = elements / ranks ? elements / ranks : 1;
  *test = (struct bench_case){.team = team, .options = options, .collective = collective};
  test->count = collective->scatters ? share : elements;
  test->send_count = test->count * (collective->scatters ? ranks : 1);
  test->receive_count = test->count * (collective->gathers ? ranks : 1);
  int status = create_plan(test);
  if (status != BENCH_OK)
    return status;
  if (!bench_team_agree(team, allocate(test))) {
    if (team->rank == 0)
      bench_complain("no memory for buffers of %zu bytes on every rank", bytes);
    bench_case_destroy(test);
    return BENCH_FAILED;
  }
  fill(test);
  return BENCH_OK;
}

void bench_case_destroy(struct bench_case *test) {
  onebit_plan_destroy(test->plan);
  if (test->send != test->dense_send)
    ob_release(test->send);
  ob_release(test->dense_send);
  ob_release(test->dense_receive);
  ob_release(test->receive);
}

/* Few enough iterations that a gigabit network is done with all sizes in minutes. */
static size_t iterations_for(const struct bench_options *options, size_t bytes) {
  if (options->iterations != BENCH_BY_SIZE)
    return options->iterations;
  return bytes <= 64 << 10 ? 200 : bytes <= 4 << 20 ? 40 : 11;
}

static size_t warmups_for(const struct bench_options *options, size_t bytes) {
  if (options->warmups != BENCH_BY_SIZE)
    return options->warmups;
  return bytes <= 64 << 10 ? 20 : bytes <= 4 << 20 ? 5 : 2;
}

/* Times of all iterations; of the dense collective too, where there is one. */
struct series {
  size_t count;
  double *times, *dense_times, *scratch;
  double wire_bytes; /* of one call: the most that a rank sent */
};

static int time_call(struct bench_case *test, double *time) {
  test->team->kind->barrier(test->team);
  double start = bench_now();
  onebit_status_t status = test->collective->call(test->send, test->receive, test->plan);
  *time = bench_now() - start;
  return bench_status(status, test->collective->name);
}

static void time_dense(struct bench_case *test, double *time) {
  struct bench_team *team = test->team;
  team->kind->barrier(team);
  double start = bench_now();
  team->kind->dense(team, test->collective->operation, test->dense_send, test->dense_receive,
                    test->count);
  *time = bench_now() - start;
}

/* A call that fails does so on all ranks, so all of them leave here together. */
static int time_all(struct bench_case *test, size_t warmups, struct series *series) {
  uint64_t before = onebit_comm_bytes_sent(test->team->comm);
  for (size_t i = 0; i < warmups + series->count; i++) {
    size_t slot = i < warmups ? 0 : i - warmups;
    int status = time_call(test, &series->times[slot]);
    if (status != BENCH_OK)
      return status;
    if (test->dense_receive)
      time_dense(test, &series->dense_times[slot]);
  }
  series->wire_bytes = (double)(onebit_comm_bytes_sent(test->team->comm) - before) /
                       (double)(warmups + series->count);
  test->team->kind->combine(test->team, series->times, series->count, false);
  test->team->kind->combine(test->team, series->dense_times, series->count, false);
  test->team->kind->combine(test->team, &series->wire_bytes, 1, false);
  return BENCH_OK;
}

static const char *setting(size_t number, const char *fallback, char text[32]) {
  if (number == 0)
    return fallback;
  if (number == ONEBIT_BLOCK_BUFFER)
    return "the buffer";
  snprintf(text, 32, "%zu elements", number);
  return text;
}

static void print_head(const struct bench_collective *collective,
                       const struct bench_options *options, const struct bench_case *test) {
  char text[32];
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(test->plan, &info);
  printf("# onebit-bench %s, version %s\n", collective->name, onebit_version());
  printf("# %d ranks over %s, codec %s, %s, one %s scale for %s\n", test->team->size,
         info.transport, info.codec, bench_dtype_name(options->dtype),
         bench_scale_name(options->scale), setting(info.block_size, "", text));
#ifdef ONEBIT_HAVE_MPI
  if (test->dense_receive)
    printf("# Dense: %s of float32 by %s, its own choice of algorithm\n", collective->dense_name,
           bench_mpi_library());
#endif
  printf("# Size: bytes of a rank's %s as float32. Latency: of the slowest rank%s\n",
         collective->gathers ? "part" : "send buffer",
         test->dense_receive ? ". Speed-up: of medians" : "");
  printf("%-12s%16s%12s", "# Size", "Avg Latency(us)", "Median(us)");
  if (options->full)
    printf("%12s%12s%12s%12s", "Min(us)", "P90(us)", "Max(us)", "Iterations");
  printf("%14s", "Wire(B/rank)");
  if (test->dense_receive)
    printf("%16s", "Dense median");
  if (test->dense_receive && options->full)
    printf("%12s%12s%12s", "Dense avg", "Dense min", "Dense max");
  printf("%s%s\n", test->dense_receive ? "  Speed-up" : "", options->check ? "  Validation" : "");
}

static void print_line(const struct bench_case *test, struct series *series, bool right) {
  const struct bench_options *options = test->options;
  struct bench_statistics s = bench_statistics(series->times, series->count);
  printf("%-12zu%16.2f%12.2f", test->send_count * sizeof(float), 1e6 * s.mean, 1e6 * s.median);
  if (options->full)
    printf("%12.2f%12.2f%12.2f%12zu", 1e6 * s.minimum, 1e6 * s.percentile90, 1e6 * s.maximum,
           series->count);
  printf("%14.0f", series->wire_bytes);
  if (test->dense_receive) {
    struct bench_statistics d = bench_statistics(series->dense_times, series->count);
    printf("%16.2f", 1e6 * d.median);
    if (options->full)
      printf("%12.2f%12.2f%12.2f", 1e6 * d.mean, 1e6 * d.minimum, 1e6 * d.maximum);
    printf("%10.2f", d.median / s.median);
  }
  printf("%s\n", !options->check ? "" : right ? "        Pass" : "        Fail");
  fflush(stdout);
}

static int measure(struct bench_case *test, size_t bytes, struct series *series, bool first) {
  bool right = true;
  series->times = ob_allocate(2 * series->count, sizeof(double));
  if (!bench_team_agree(test->team, series->times != NULL)) {
    bench_complain("no memory for %zu times", series->count);
    ob_release(series->times);
    return BENCH_FAILED;
  }
  series->dense_times = series->times + series->count;
  int status = time_all(test, warmups_for(test->options, bytes), series);
  if (status == BENCH_OK && test->options->check)
    status = bench_case_check(test, &right);
  if (test->team->rank == 0 && first)
    print_head(test->collective, test->options, test);
  if (test->team->rank == 0 && status == BENCH_OK)
    print_line(test, series, right);
  ob_release(series->times);
  if (status == BENCH_OK && test->options->timeline)
    status = bench_timeline(test);
  return status == BENCH_OK && !right ? BENCH_FAILED : status;
}

/* MPI's counts are an int, and so are the places in an allgather's receive buffer. */
static bool dense_fits(const struct bench_options *options, const struct bench_collective *which,
                       const struct bench_team *team) {
  size_t most = (size_t)INT_MAX / (which->gathers ? (size_t)team->size : 1);
  if (!has_dense(team, options) || options->largest / sizeof(float) <= most)
    return true;
  if (team->rank == 0)
    bench_complain("-m %zu: %s counts at most %zu elements; --no-dense goes without it",
                   options->largest, which->dense_name, most);
  return false;
}

/* A send buffer for all ranks has an element for each: sizes below that are left to the last. */
static bool too_small(const struct bench_options *options, const struct bench_collective *which,
                      const struct bench_team *team, size_t bytes) {
  return which->scatters && bytes / sizeof(float) < (size_t)team->size &&
         bytes <= options->largest / 2;
}

static int run_size(struct bench_team *team, const struct bench_options *options,
                    const struct bench_collective *collective, size_t bytes, bool first) {
  struct bench_case test;
  struct series series = {.count = iterations_for(options, bytes)};
  int status = bench_case_create(team, options, collective, bytes, &test);
  if (status != BENCH_OK)
    return status;
  status = measure(&test, bytes, &series, first);
  bench_case_destroy(&test);
  return status;
}

int bench_run_collective(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team) {
  const struct bench_collective *collective = find_collective(benchmark->name);
  int worst = BENCH_OK;
  bool first = true;
  if (!dense_fits(options, collective, team))
    return BENCH_USAGE;
  for (size_t bytes = options->smallest; bytes <= options->largest; bytes *= 2) {
    if (too_small(options, collective, team, bytes))
      continue;
    int status = run_size(team, options, collective, bytes, first);
    first = false;
    worst = status > worst ? status : worst;
    if (status == BENCH_USAGE)
      break;
  }
  return worst;
}
