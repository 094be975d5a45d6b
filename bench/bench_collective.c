/* The collectives beside MPI: every way of a case timed by turns, and the rows that come of it. */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
#include "bench/bench_link.h"

/* The host's counter, when nothing of the call before is on its way any more, and nothing of this
 * one yet. */
static double begin_link(const struct bench_case *test) {
  if (!test->options->link)
    return 0;
  test->team->kind->barrier(test->team);
  return bench_link_sent(test->options->link);
}

/* All ranks have their results, so all messages have left; their acknowledgements soon will have.
 * */
static void count_link(const struct bench_case *test, struct bench_way *way, double before) {
  if (!test->options->link)
    return;
  test->team->kind->barrier(test->team);
  way->link_bytes += bench_link_sent(test->options->link) - before;
}

/* Of one call. A way that was refused costs nothing and says so. */
static int time_way(struct bench_case *test, struct bench_way *way, double *time) {
  struct bench_team *team = test->team;
  onebit_status_t status = ONEBIT_OK;
  if (!way->plan && !way->algorithm)
    return BENCH_OK;
  uint64_t before = onebit_comm_bytes_sent(team->comm);
  double link = begin_link(test);
  team->kind->barrier(team);
  double start = bench_now();
  if (way->algorithm)
    team->kind->dense(team, (size_t)(way->algorithm - team->algorithms),
                      test->collective->operation, test->dense_send, test->dense_receive,
                      test->count);
  else
    status = test->collective->call(test->send, test->receive, way->plan);
  *time = bench_now() - start;
  count_link(test, way, link);
  way->sent += onebit_comm_bytes_sent(team->comm) - before;
  return bench_status(status, test->collective->name);
}

/* Another order each iteration, the same on all ranks: what a call finds (a network's buffers full
 * or empty, memory in the cache) must not always be what one and the same other way left. */
static void shuffle(size_t *order, size_t count, uint64_t *state) {
  for (size_t k = count; k > 1; k--) {
    *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
    size_t other = (size_t)(*state >> 33) % k, kept = order[k - 1];
    order[k - 1] = order[other];
    order[other] = kept;
  }
}

static void sum_up(struct bench_case *test, struct bench_way *way, size_t iterations, size_t all) {
  test->team->kind->combine(test->team, way->times, iterations, false);
  way->time = bench_statistics(way->times, iterations);
  way->wire_bytes = (double)way->sent / (double)all;
  way->link_bytes /= (double)all;
  test->team->kind->combine(test->team, &way->wire_bytes, 1, false);
  test->team->kind->combine(test->team, &way->link_bytes, 1, false);
}

/* A call that fails does so on all ranks, so all of them leave here together. */
static int time_all(struct bench_case *test, size_t iterations) {
  size_t warmups = bench_case_warmups(test), all = warmups + iterations;
  size_t order[sizeof test->ways / sizeof test->ways[0]];
  uint64_t state = 1;
  for (size_t k = 0; k < test->way_count; k++)
    order[k] = k;
  for (size_t i = 0; i < all; i++) {
    shuffle(order, test->way_count, &state);
    for (size_t k = 0; k < test->way_count; k++) {
      struct bench_way *way = &test->ways[order[k]];
      int status = time_way(test, way, &way->times[i < warmups ? 0 : i - warmups]);
      if (status != BENCH_OK)
        return status;
    }
  }
  for (size_t k = 0; k < test->way_count; k++)
    sum_up(test, &test->ways[k], iterations, all);
  return BENCH_OK;
}

/* The quickest of ways first .. end - 1 that ran, leaving out automatic ones; NULL: none. */
static const struct bench_way *quickest(const struct bench_case *test, size_t first, size_t end) {
  const struct bench_way *best = NULL;
  for (const struct bench_way *way = test->ways + first; way < test->ways + end; way++)
    if ((way->algorithm || (way->plan && way->variant.schedule != ONEBIT_SCHEDULE_AUTOMATIC)) &&
        (!best || way->time.median < best->time.median))
      best = way;
  return best;
}

/* A row for each plan. In a table that compares, one for each of MPI's algorithms too. */
static void report(const struct bench_case *test, size_t iterations) {
  bool compare = test->options->compare_count > 0;
  size_t rows = compare && !test->options->json ? test->way_count : test->plan_count;
  const struct bench_way *best = compare ? quickest(test, 0, test->plan_count) : NULL;
  struct bench_row row = {.test = test,
                          .dense = quickest(test, test->plan_count, test->way_count),
                          .iterations = iterations};
  for (size_t k = 0; k < rows; k++) {
    row.way = &test->ways[k];
    row.of_best = best ? row.way->time.median / best->time.median : NAN;
    bench_report_row(&row);
  }
}

static int measure_ways(struct bench_case *test, size_t iterations, bool first) {
  bool right = true;
  int status = time_all(test, iterations);
  if (status == BENCH_OK)
    status = bench_case_judge(test, &right);
  if (status == BENCH_OK && test->team->rank == 0) {
    if (first && !test->options->json)
      bench_print_head(test, false);
    report(test, iterations);
  }
  if (status == BENCH_OK && test->options->timeline)
    status = bench_timeline(test);
  return status == BENCH_OK && !right ? BENCH_FAILED : status;
}

static int measure(struct bench_case *test, bool first) {
  size_t iterations = bench_case_iterations(test);
  double *times = ob_allocate(test->way_count * iterations, sizeof *times);
  int status = BENCH_FAILED;
  for (size_t k = 0; times && k < test->way_count; k++) {
    test->ways[k].times = times + k * iterations;
    memset(test->ways[k].times, 0, iterations * sizeof *times);
  }
  if (bench_team_agree(test->team, times != NULL))
    status = measure_ways(test, iterations, first);
  else
    bench_complain("no memory for %zu times", test->way_count * iterations);
  ob_release(times);
  return status;
}

const struct bench_collective *bench_find_collective(const char *name) {
  const struct bench_collective *row = bench_collectives;
  while (strcmp(row->name, name) != 0 && strcmp(row->nonblocking_name, name) != 0)
    row++;
  return row;
}

/* MPI's counts are an int, and so are the places in an allgather's receive buffer. */
static bool dense_fits(const struct bench_options *options, const struct bench_collective *which,
                       const struct bench_team *team) {
  size_t most = (size_t)INT_MAX / (which->gathers ? (size_t)team->size : 1);
  if (!team->algorithm_count || options->largest / sizeof(float) <= most)
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
                    const struct bench_collective *collective, size_t bytes, bench_measure *run,
                    bool first) {
  struct bench_case test;
  int status = bench_case_create(team, options, collective, bytes, &test);
  if (status != BENCH_OK)
    return status;
  status = run(&test, first);
  bench_case_destroy(&test);
  return status;
}

int bench_run_sizes(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team, bench_measure *run) {
  const struct bench_collective *collective = bench_find_collective(benchmark->name);
  int worst = BENCH_OK;
  bool first = true;
  if (team->kind->choose && !options->no_dense)
    worst = team->kind->choose(team, options, collective->operation);
  if (worst != BENCH_OK || !dense_fits(options, collective, team))
    return BENCH_USAGE;
  for (size_t bytes = options->smallest; bytes <= options->largest; bytes *= 2) {
    if (too_small(options, collective, team, bytes))
      continue;
    int status = run_size(team, options, collective, bytes, run, first);
    first = false;
    worst = status > worst ? status : worst;
    if (status == BENCH_USAGE)
      break;
  }
  return worst;
}

int bench_run_collective(const struct bench_benchmark *benchmark,
                         const struct bench_options *options, struct bench_team *team) {
  return bench_run_sizes(benchmark, options, team, measure);
}
