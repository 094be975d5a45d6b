/* Lower bounds of a call's time: its bytes at the rate of the links, and its arithmetic on the
 * cores that all ranks have together. */
#include <math.h>

#include "bench/bench_collective.h"
#include "collectives/steps.h"

/* Calls of which the least arithmetic counts. */
#define CALLS 5

static double computing(const struct ob_moment *moments, size_t count) {
  double seconds = 0;
  for (size_t i = 0; i < count; i++)
    if (ob_step_computes(moments[i].kind))
      seconds += moments[i].processor;
  return seconds;
}

/* Measures the processor seconds of all ranks, by the core. */
static int limits_measure(struct bench_way *way, struct ob_moment *moments, size_t capacity) {
  const struct bench_case *test = way->test;
  double least = INFINITY, cores = test->options->cores ? test->options->cores : test->team->size;
  for (int k = 0; k < CALLS; k++) {
    ob_plan_trace(way->plan, moments, capacity);
    test->team->kind->barrier(test->team);
    onebit_status_t status = test->collective->call(test->send, test->receive, way->plan);
    double seconds = computing(moments, ob_plan_traced(way->plan));
    ob_plan_trace(way->plan, NULL, 0);
    BENCH_TRY(bench_status(status, test->collective->name));
    least = seconds < least ? seconds : least;
  }
  test->team->kind->combine(test->team, &least, 1, true);
  way->computing = least / cores;
  return BENCH_OK;
}

int bench_limits(struct bench_case *test) {
  for (size_t k = 0; k < test->plan_count; k++) {
    struct bench_way *way = &test->ways[k];
    if (!way->plan)
      continue; /* on all ranks alike */
    size_t capacity = 16 * bench_plan_info(way->plan).chunks + 64;
    struct ob_moment *moments = ob_allocate(capacity, sizeof *moments);
    bool have = bench_team_agree(test->team, moments != NULL);
    int status = have ? limits_measure(way, moments, capacity) : BENCH_FAILED;
    ob_release(moments);
    BENCH_TRY(status);
  }
  return BENCH_OK;
}

/* TCP carries 1448 bytes in 1538 on the wire. */
double bench_wire_seconds(const struct bench_options *options, double bytes) {
  return bytes / (options->rate * 1448 / 1538);
}
