/*
 * Measures how much of a nonblocking collective's communication a computation hides.
 *
 * The benchmark takes the three times of OSU's osu_iallreduce: of the communication alone, of a
 * dummy computation that takes equally long, and of both together. When both run together, calls of
 * onebit_test (or MPI_Test) are spread through the computation. Three things differ from OSU. The
 * three times are taken by turns instead of one after the other. The computation is a fixed amount
 * of work and not a fixed time, so it takes longer if it shares a core with the communication. The
 * time of test calls counts as communication.
 */
#include <math.h>
#include <string.h>

#include "bench/bench_collective.h"

enum { STRIDE = BENCH_OVERALL + 1 };

/* A side of the comparison: the library's nonblocking collective, or MPI's. It is started, tested
 * while a computation runs, and finished. */
struct side {
  struct bench_case *test;
  bool dense; /* the side is MPI's collective */
  onebit_request_t request;
  size_t tests;           /* number of test calls, spread through the computation */
  size_t units;           /* length of the computation, in bench_compute_units */
  onebit_status_t status; /* the first error */
};

/* --- The calls of a side. An error is only stored: it occurs on all ranks, and later calls on the
 * same plan fail at once. */

static void overlap_keep_error(struct side *side, onebit_status_t status) {
  if (status < 0 && side->status == ONEBIT_OK)
    side->status = status;
}

static void start_call(struct side *side) {
  const struct bench_case *test = side->test;
  if (side->dense)
    test->team->kind->start_dense(test->team, test->collective->operation, test->dense_send,
                                  test->dense_receive, test->count);
  else
    overlap_keep_error(
        side, test->collective->start(test->send, test->receive, test->plan, &side->request));
}

static void test_call(struct side *side) {
  if (side->dense)
    side->test->team->kind->finish_dense(side->test->team, false);
  else
    overlap_keep_error(side, onebit_test(&side->request));
}

static void finish_call(struct side *side) {
  if (side->dense)
    side->test->team->kind->finish_dense(side->test->team, true);
  else
    overlap_keep_error(side, onebit_wait(&side->request));
}

/* --- The timed functions: a side is one of the two compared exchanges */

static int run_pure(const struct bench_entry *entry) {
  start_call(entry->context);
  finish_call(entry->context);
  return BENCH_OK;
}

static int run_compute(const struct bench_entry *entry) {
  bench_compute_units(((struct side *)entry->context)->units);
  return BENCH_OK;
}

static int run_overall(const struct bench_entry *entry) {
  struct side *side = entry->context;
  start_call(side);
  for (size_t k = 0, slices = side->tests + 1; k < slices; k++) {
    bench_compute_units(side->units * (k + 1) / slices - side->units * k / slices);
    if (k < side->tests)
      test_call(side);
  }
  finish_call(side);
  return BENCH_OK;
}

double bench_overlap_percent(double overall, double compute, double pure) {
  double percent = 100 * (1 - (overall - compute) / pure);
  return percent > 0 ? percent : 0;
}

/* Finds a computation that takes as long as the communication. Corrects a guess three times, each
 * time by measured rounds: the time of a call depends on what ran before it, and a unit takes
 * longer if ranks share cores. */
static int calibrate_computation(struct bench_rounds *rounds, struct side *sides, size_t count,
                                 size_t warmups) {
  size_t wanted = rounds->rounds;
  rounds->rounds = wanted < 5 ? wanted : 5;
  for (size_t k = 0; k < count; k++)
    sides[k].units = 100;
  for (int turn = 0; turn < 3; turn++) {
    rounds->warmups = turn == 0 ? warmups : 0;
    BENCH_TRY(bench_rounds_measure(rounds));
    for (size_t k = 0; k < count; k++) {
      const struct bench_entry *times = &rounds->entries[k * STRIDE];
      double change = times[BENCH_PURE].time.median / times[BENCH_COMPUTE].time.median;
      sides[k].units = (size_t)((double)sides[k].units * change) + 1;
    }
  }
  rounds->warmups = 0;
  rounds->rounds = wanted;
  return BENCH_OK;
}

/* --- Measuring */

/* Sets the number of test calls to that of -t, or by default to one for each 200 us of the
 * computation. */
static void set_tests(const struct bench_rounds *rounds, const struct bench_options *options,
                      struct side *sides, size_t count) {
  for (size_t k = 0; k < count; k++) {
    double pure = rounds->entries[k * STRIDE].time.median;
    sides[k].tests = options->tests == BENCH_BY_TIME ? (size_t)ceil(pure / 200e-6) : options->tests;
  }
}

static int time_sides(struct bench_case *test, struct bench_rounds *rounds, struct side *sides,
                      size_t count) {
  for (size_t k = 0; k < count; k++) {
    bench_rounds_add_entry(rounds, "pure", run_pure, &sides[k]);
    bench_rounds_add_entry(rounds, "compute", run_compute, &sides[k]);
    bench_rounds_add_entry(rounds, "overall", run_overall, &sides[k]);
  }
  BENCH_TRY(calibrate_computation(rounds, sides, count, rounds->warmups));
  set_tests(rounds, test->options, sides, count);
  BENCH_TRY(bench_rounds_measure(rounds));
  return bench_check_status(sides[0].status, test->collective->nonblocking_name);
}

int bench_measure_overlap(struct bench_job *job, struct bench_case *test) {
  struct side sides[] = {{.test = test}, {.test = test, .dense = true}};
  size_t count = test->dense_receive ? 2 : 1;
  struct bench_rounds rounds = {.repeats = 1, .team = test->team};
  const struct bench_entry *dense = count > 1 ? &rounds.entries[STRIDE] : NULL;
  struct bench_row row = {.test = test,
                          .way = &test->ways[0],
                          .time = rounds.entries,
                          .dense = dense,
                          .dense_name = dense ? test->ways[1].algorithm->name : NULL,
                          .of_best = NAN,
                          .own = true,
                          .overlap = rounds.entries,
                          .dense_overlap = dense};
  bool right = true;
  bench_case_set_iterations(job, test, &rounds);
  test->rounds.rounds = rounds.rounds;
  if (job->team->rank == 0 && job->first) {
    bench_collective_print_notes(job, test);
    bench_collective_print_heads(job->table, &row);
  }
  int status = time_sides(test, &rounds, sides, count);
  row.tests = sides[0].tests;
  memcpy(rounds.entries[0].name, test->rounds.entries[0].name, sizeof rounds.entries[0].name);
  if (status == BENCH_OK)
    status = bench_case_check_all(test, &right);
  if (status == BENCH_OK && job->team->rank == 0)
    bench_collective_print_row(job->table, &row);
  bench_rounds_destroy(&rounds);
  return status == BENCH_OK && !right ? BENCH_FAILED : status;
}
