/*
 * Where the time of one call goes: of each rank a table of the kinds of its steps, or, as JSON and
 * CSV, a row for every step (bench/picture draws them).
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "bench/bench_collective.h"
#include "collectives/trace.h"

/* More kinds than there are. */
#define KINDS 32

/* A step as ranks send it to rank 0, who prints: seconds since the barrier before the call. */
struct moment {
  double kind, chunk, begin, end, processor;
};

struct row {
  const struct bench_case *test;
  int rank;
  struct moment moment;
};

static void fields(struct bench_table *table, const void *context) {
  const struct row *row = context;
  const struct moment *moment = &row->moment;
  bench_number(table, "bytes", NULL, 0, 0, (double)(row->test->send_count * sizeof(float)));
  bench_number(table, "rank", NULL, 0, 0, row->rank);
  bench_text(table, "step", NULL, 0, ob_step_name((unsigned)moment->kind));
  bench_number(table, "chunk", NULL, 0, 0, moment->chunk);
  bench_time(table, "begin_us", NULL, 0, 0, moment->begin);
  bench_time(table, "end_us", NULL, 0, 0, moment->end);
  bench_time(table, "busy_us", NULL, 0, 0, moment->processor);
}

/* By kind of step: seconds that passed, of them on the processor; and the whole. */
static void print_table(int rank, const struct moment *moments, size_t count) {
  struct moment sums[KINDS] = {{0}}, all = {0};
  double first = moments[0].begin, whole = moments[count - 1].end - first, passed[KINDS] = {0};
  for (size_t i = 0; i < count; i++) {
    const struct moment *m = &moments[i];
    struct moment *sum = &sums[(unsigned)m->kind];
    if (passed[(unsigned)m->kind] == 0)
      sum->begin = m->begin - first;
    passed[(unsigned)m->kind] += m->end - m->begin;
    sum->end = m->end - first;
    sum->processor += m->processor;
    all.processor += m->processor;
  }
  printf("# rank %d, %.3f ms\n# %-16s%12s%12s%12s%12s\n", rank, 1e3 * whole, "step", "passed(ms)",
         "busy(ms)", "first(ms)", "last(ms)");
  for (unsigned kind = 0; kind < KINDS && ob_step_name(kind); kind++)
    if (passed[kind] > 0)
      printf("  %-16s%12.3f%12.3f%12.3f%12.3f\n", ob_step_name(kind), 1e3 * passed[kind],
             1e3 * sums[kind].processor, 1e3 * sums[kind].begin, 1e3 * sums[kind].end);
  printf("  %-16s%12.3f%12.3f\n", "all", 1e3 * whole, 1e3 * all.processor);
}

static void print_rank(struct bench_table *table, struct row *row, const struct moment *moments,
                       size_t count) {
  if (table->format == BENCH_TEXT && count)
    print_table(row->rank, moments, count);
  for (size_t i = 0; i < count && table->format != BENCH_TEXT; i++) {
    row->moment = moments[i];
    bench_print_row(table, fields, row);
  }
}

/* One rank after the other: what it has is the sum over ranks of what only one has. */
static void print_ranks(struct bench_table *table, const struct bench_case *test,
                        const struct ob_moment *mine, size_t own, double start,
                        struct moment *moments) {
  struct bench_team *team = test->team;
  struct row row = {.test = test};
  for (row.rank = 0; row.rank < team->size; row.rank++) {
    double count = row.rank == team->rank ? (double)own : 0;
    team->kind->combine(team, &count, 1, true);
    memset(moments, 0, (size_t)count * sizeof *moments);
    for (size_t i = 0; row.rank == team->rank && i < own; i++)
      moments[i] = (struct moment){mine[i].kind, mine[i].chunk, mine[i].begin - start,
                                   mine[i].end - start, mine[i].processor};
    team->kind->combine(team, (double *)moments, 5 * (size_t)count, true);
    if (team->rank == 0)
      print_rank(table, &row, moments, (size_t)count);
  }
}

int bench_timeline(struct bench_table *table, struct bench_case *test) {
  size_t capacity =
      16 * bench_plan_info(test->plan).chunks + 16; /* at most so many steps a chunk */
  struct ob_moment *mine = ob_allocate(capacity, sizeof *mine);
  struct moment *moments = ob_allocate(capacity, sizeof *moments);
  onebit_status_t status = ONEBIT_OK;
  bool well = bench_team_agree(test->team, mine && moments);
  if (well) {
    ob_plan_trace(test->plan, mine, capacity);
    test->team->kind->barrier(test->team);
    double start = ob_seconds();
    status = test->collective->call(test->send, test->receive, test->plan);
    table->headed = false;
    print_ranks(table, test, mine, ob_plan_traced(test->plan), start, moments);
    table->headed = false;
    ob_plan_trace(test->plan, NULL, 0);
  }
  ob_release(mine);
  ob_release(moments);
  return well ? bench_status(status, test->collective->name) : BENCH_FAILED;
}
