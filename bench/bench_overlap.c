/*
 * Nonblocking collectives beside a computation: how much of the communication it hides.
 *
 * As OSU's osu_iallreduce has it: the communication alone, a dummy computation that takes as long,
 * and the two together, with calls of onebit_test (of MPI_Test) spread through the computation.
 * Three differences. The three take turns instead of following each other. The computation is an
 * amount of work and not a time, so a core that it shares with the communication makes it longer.
 * And time spent in test calls is communication.
 */
#include <math.h>

#include "base/memory.h"
#include "bench/bench_collective.h"

/* The library's collective or MPI's, by the same calls. */
struct side {
  struct bench_case *test;
  bool dense;
  onebit_request_t request;
  onebit_status_t status; /* the first that went wrong */
  struct bench_overlap *overlap;
};

static void keep(struct side *side, onebit_status_t status) {
  if (status < 0 && side->status == ONEBIT_OK)
    side->status = status;
}

static void start(struct side *side) {
  struct bench_case *test = side->test;
  if (side->dense)
    test->team->kind->start_dense(test->team, test->collective->operation, test->dense_send,
                                  test->dense_receive, test->count);
  else
    keep(side, test->collective->start(test->send, test->receive, test->plan, &side->request));
}

static void look(struct side *side) {
  if (side->dense)
    side->test->team->kind->finish_dense(side->test->team, false);
  else
    keep(side, onebit_test(&side->request));
}

static void finish(struct side *side) {
  if (side->dense)
    side->test->team->kind->finish_dense(side->test->team, true);
  else
    keep(side, onebit_wait(&side->request));
}

static double now_together(struct bench_team *team) {
  team->kind->barrier(team);
  return bench_now();
}

static double time_pure(struct side *side) {
  double begin = now_together(side->test->team);
  start(side);
  finish(side);
  return bench_now() - begin;
}

static double time_compute(struct side *side) {
  double begin = now_together(side->test->team);
  bench_compute(side->overlap->units);
  return bench_now() - begin;
}

static double time_overall(struct side *side) {
  const struct bench_overlap *overlap = side->overlap;
  size_t slices = overlap->tests + 1;
  double begin = now_together(side->test->team);
  start(side);
  for (size_t k = 0; k < slices; k++) {
    bench_compute(overlap->units * (k + 1) / slices - overlap->units * k / slices);
    if (k + 1 < slices)
      look(side);
  }
  finish(side);
  return bench_now() - begin;
}

/* Seconds that a unit takes while all ranks compute, as they will: the mean over the ranks. */
static double time_unit(struct bench_team *team) {
  size_t units = 64;
  double time = 0;
  do {
    units *= 2;
    team->kind->barrier(team);
    double begin = bench_now();
    bench_compute(units);
    time = bench_now() - begin;
    team->kind->combine(team, &time, 1, true);
    time /= team->size;
  } while (time < 4e-3);
  return time / (double)units;
}

double bench_overlap_percent(double overall, double compute, double pure) {
  double percent = 100 * (1 - (overall - compute) / pure);
  return percent > 0 ? percent : 0;
}

static void sum_up(struct side *side, size_t rounds) {
  struct bench_team *team = side->test->team;
  struct bench_overlap *overlap = side->overlap;
  double *const times[] = {overlap->pure_times, overlap->compute_times, overlap->overall_times};
  struct bench_statistics *const sums[] = {&overlap->pure, &overlap->compute, &overlap->overall};
  for (int k = 0; k < 3; k++) {
    team->kind->combine(team, times[k], rounds, false);
    *sums[k] = bench_statistics(times[k], rounds);
  }
  overlap->percent =
      bench_overlap_percent(overlap->overall.median, overlap->compute.median, overlap->pure.median);
}

static void time_rounds(struct side *sides, size_t count, size_t rounds) {
  for (size_t i = 0; i < rounds; i++)
    for (size_t k = 0; k < count; k++) {
      struct side *side = &sides[k];
      side->overlap->pure_times[i] = time_pure(side);
      side->overlap->compute_times[i] = time_compute(side);
      side->overlap->overall_times[i] = time_overall(side);
    }
}

/* The first guess: as many units as fit in a call, all calls following each other. */
static void guess_length(struct side *side, double unit) {
  struct bench_case *test = side->test;
  struct bench_overlap *overlap = side->overlap;
  double time = 0;
  for (size_t i = 0; i <= bench_case_warmups(test); i++)
    time = time_pure(side);
  test->team->kind->combine(test->team, &time, 1, false);
  overlap->units = (size_t)(time / unit) + 1;
}

/* Then twice the length that the communication has in rounds such as will be timed: what a call
 * takes depends on what went before it, and a unit takes longer where ranks share cores. */
static void calibrate(struct side *sides, size_t count, size_t rounds) {
  const struct bench_case *test = sides->test;
  double unit = time_unit(test->team);
  for (size_t k = 0; k < count; k++)
    guess_length(&sides[k], unit);
  for (int pass = 0; pass < 2; pass++) {
    time_rounds(sides, count, rounds);
    for (size_t k = 0; k < count; k++) {
      struct bench_overlap *overlap = sides[k].overlap;
      sum_up(&sides[k], rounds);
      double change = overlap->pure.median / overlap->compute.median;
      overlap->units = (size_t)((double)overlap->units * change) + 1;
      overlap->tests = test->options->tests;
      if (overlap->tests == BENCH_BY_TIME)
        overlap->tests = (size_t)ceil(overlap->pure.median / 200e-6);
    }
  }
}

/* A failing call fails on all ranks, and the next on the same plan fails at once. */
static int run_sides(struct bench_case *test, struct side *sides, size_t count, size_t rounds) {
  calibrate(sides, count, rounds < 5 ? rounds : 5);
  uint64_t before = onebit_comm_bytes_sent(test->team->comm);
  time_rounds(sides, count, rounds);
  test->ways[0].wire_bytes =
      (double)(onebit_comm_bytes_sent(test->team->comm) - before) / (double)(2 * rounds);
  test->team->kind->combine(test->team, &test->ways[0].wire_bytes, 1, false);
  for (size_t k = 0; k < count; k++)
    sum_up(&sides[k], rounds);
  return bench_status(sides[0].status, test->collective->nonblocking_name);
}

static void report(struct bench_case *test, const struct side *sides, size_t count, size_t rounds,
                   bool first) {
  struct bench_row row = {.test = test,
                          .way = &test->ways[0],
                          .dense = count > 1 ? &test->ways[1] : NULL,
                          .iterations = rounds,
                          .of_best = NAN,
                          .overlap = sides[0].overlap,
                          .dense_overlap = count > 1 ? sides[1].overlap : NULL};
  for (size_t k = 0; k < count; k++)
    test->ways[k].time = sides[k].overlap->pure;
  if (first && !test->options->json)
    bench_print_head(test, true);
  bench_report_row(&row);
}

static int measure_sides(struct bench_case *test, double *times, size_t rounds, bool first) {
  struct bench_overlap overlaps[2];
  struct side sides[2];
  size_t count = test->dense_receive ? 2 : 1;
  bool right = true;
  for (size_t k = 0; k < count; k++) {
    double *own = times + 3 * k * rounds;
    overlaps[k] = (struct bench_overlap){own, own + rounds, own + 2 * rounds, .units = 0};
    sides[k] = (struct side){.test = test, .dense = k > 0, .overlap = &overlaps[k]};
  }
  int status = run_sides(test, sides, count, rounds);
  if (status == BENCH_OK)
    status = bench_case_judge(test, &right);
  if (status == BENCH_OK && test->team->rank == 0)
    report(test, sides, count, rounds, first);
  return status == BENCH_OK && !right ? BENCH_FAILED : status;
}

static int measure(struct bench_case *test, bool first) {
  size_t rounds = bench_case_iterations(test);
  double *times = ob_allocate(6 * rounds, sizeof *times);
  int status = BENCH_FAILED;
  if (bench_team_agree(test->team, times != NULL))
    status = measure_sides(test, times, rounds, first);
  else
    bench_complain("no memory for %zu times", 6 * rounds);
  ob_release(times);
  return status;
}

int bench_run_nonblocking(const struct bench_benchmark *benchmark,
                          const struct bench_options *options, struct bench_team *team) {
  return bench_run_sizes(benchmark, options, team, measure);
}
