/*
 * Where the time of one call goes: every step of every rank, as a table and, for a plot, as lines.
 */
#include <stdio.h>
#include <string.h>

#include "bench/bench_collective.h"
#include "collectives/trace.h"

/* More kinds than there are. */
#define KINDS 32

/* Of one rank, by kind of step: seconds that passed, of them on the processor; and the whole. */
struct sums {
  double passed[KINDS], processor[KINDS], begin[KINDS], end[KINDS], whole;
};

static void add_up(const struct ob_moment *moments, size_t count, struct sums *sums) {
  memset(sums, 0, sizeof *sums);
  for (size_t i = 0; i < count; i++) {
    const struct ob_moment *m = &moments[i];
    if (sums->passed[m->kind] == 0)
      sums->begin[m->kind] = m->begin - moments[0].begin;
    sums->passed[m->kind] += m->end - m->begin;
    sums->processor[m->kind] += m->processor;
    sums->end[m->kind] = m->end - moments[0].begin;
  }
  sums->whole = count ? moments[count - 1].end - moments[0].begin : 0;
}

static void print_rank(int rank, const struct sums *sums) {
  double processor = 0;
  printf("# rank %d, %.3f ms\n# %-16s%12s%12s%12s%12s\n", rank, 1e3 * sums->whole, "step",
         "passed(ms)", "busy(ms)", "first(ms)", "last(ms)");
  for (unsigned kind = 0; kind < KINDS && ob_step_name(kind); kind++) {
    if (sums->passed[kind] == 0)
      continue;
    printf("  %-16s%12.3f%12.3f%12.3f%12.3f\n", ob_step_name(kind), 1e3 * sums->passed[kind],
           1e3 * sums->processor[kind], 1e3 * sums->begin[kind], 1e3 * sums->end[kind]);
    processor += sums->processor[kind];
  }
  printf("  %-16s%12.3f%12.3f\n", "all", 1e3 * sums->whole, 1e3 * processor);
}

/* One rank after the other. The sums travel as the sum over ranks of what only one has. */
static void print_ranks(struct bench_team *team, const struct sums *mine) {
  struct sums shown;
  for (int rank = 0; rank < team->size; rank++) {
    memset(&shown, 0, sizeof shown);
    if (rank == team->rank)
      shown = *mine;
    team->kind->combine(team, (double *)&shown, sizeof shown / sizeof(double), true);
    if (team->rank == 0)
      print_rank(rank, &shown);
  }
}

int bench_timeline(struct bench_case *test) {
  size_t capacity =
      16 * bench_plan_info(test->plan).chunks + 16; /* at most so many steps a chunk */
  struct ob_moment *moments = ob_allocate(capacity, sizeof *moments);
  if (!bench_team_agree(test->team, moments != NULL)) {
    ob_release(moments);
    return BENCH_FAILED;
  }
  ob_plan_trace(test->plan, moments, capacity);
  test->team->kind->barrier(test->team);
  onebit_status_t status = test->collective->call(test->send, test->receive, test->plan);
  struct sums sums;
  add_up(moments, ob_plan_traced(test->plan), &sums);
  print_ranks(test->team, &sums);
  ob_plan_trace(test->plan, NULL, 0);
  ob_release(moments);
  return bench_status(status, test->collective->name);
}
