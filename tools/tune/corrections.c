/* What corrects the model: the candidates in turn, at a ladder of sizes. */
#ifdef ONEBIT_HAVE_MPI
#include <math.h>

#include "base/memory.h"
#include "bench/bench.h"
#include "onebit/mpi.h"
#include "tools/tune/mpi.h"

/* A size has so many seconds a climb, and each candidate so many calls. */
#define SIZE_SECONDS       0.5
#define SIZE_SECONDS_QUICK 0.1
#define CALLS_AT_MOST      60
#define CALLS_AT_LEAST     3
#define WARMUPS            1

/* Not measured: what takes long, and what the model calls so many times slower than the best that
 * no correction will make it the choice, unless it takes hardly any time. */
#define HOPELESS      4
#define HARDLY        0.005
#define TOO_LONG      1.5
#define LARGEST       ((size_t)64 << 20)
#define LARGEST_QUICK ((size_t)16 << 20)

/* Close together where schedules cross. Bytes as float32. */
static const size_t ladder[] = {64,      1024,    4096,    16384,   65536,    131072,  262144,
                                1 << 19, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20};

enum { STEPS = sizeof ladder / sizeof ladder[0] };

/* Up the ladder so often, for the best median of each: what disturbs a machine lasts for longer
 * than the calls of a size do. */
#define CLIMBS 3

/* Where an exchange has several messages to each peer. The first chunk is preferred. */
static const size_t chunk_sizes[] = {4 << 20, 16 << 20, 64 << 20};
static const size_t chunks[] = {131072, 65536, 262144};

/* Another chunk must be faster by more than noise. */
#define WORTH 0.98

/* --- Calls in turn */

struct contest {
  struct tune_point point[OB_COST_CANDIDATES];
  size_t candidate[OB_COST_CANDIDATES]; /* whose point it is */
  onebit_plan_t plan[OB_COST_CANDIDATES];
  double times[OB_COST_CANDIDATES][CALLS_AT_MOST];
  size_t count;
};

/* False after complaining. What cannot be done is left out. */
static bool enter(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                  struct contest *contest, const struct tune_point *point, size_t candidate) {
  onebit_plan_t plan;
  bool possible;
  onebit_status_t status = tune_plan_create(buffers, point, &possible, &plan);
  if (status == ONEBIT_OK && possible) {
    contest->point[contest->count] = *point;
    contest->candidate[contest->count] = candidate;
    contest->plan[contest->count++] = plan;
    return true;
  }
  onebit_plan_destroy(plan);
  if (status != ONEBIT_OK && cluster->rank == 0)
    tune_complain("%zu elements: %s", point->task.elements, onebit_last_error());
  return status == ONEBIT_OK;
}

/* One call of each. *seconds: of all together. */
static bool take_turns(const struct tune_buffers *buffers, struct contest *contest, int round,
                       double *seconds) {
  *seconds = 0;
  for (size_t k = 0; k < contest->count; k++) {
    double time;
    if (tune_call_seconds(buffers, &contest->point[k], contest->plan[k], &time) != ONEBIT_OK) {
      tune_complain("%zu elements: %s", contest->point[k].task.elements, onebit_last_error());
      return false; /* on all ranks */
    }
    *seconds += time;
    if (round >= 0)
      contest->times[k][round] = time;
  }
  return true;
}

static bool hold(const struct tune_buffers *buffers, struct contest *contest, bool quick) {
  int calls = CALLS_AT_MOST;
  double budget = quick ? SIZE_SECONDS_QUICK : SIZE_SECONDS, seconds;
  for (int i = -WARMUPS; contest->count && i < calls; i++) {
    if (!take_turns(buffers, contest, i, &seconds))
      return false;
    if (i == -1)
      calls = (int)fmin(CALLS_AT_MOST, fmax(CALLS_AT_LEAST, budget / seconds));
  }
  for (size_t k = 0; k < contest->count; k++)
    contest->point[k].measured = bench_statistics(contest->times[k], (size_t)calls).median;
  return true;
}

static void end(struct contest *contest) {
  for (size_t k = 0; k < contest->count; k++)
    onebit_plan_destroy(contest->plan[k]);
  contest->count = 0;
}

/* --- What takes part */

static struct tune_point point_of(const struct tune_cluster *cluster, size_t bytes,
                                  const struct ob_cost_candidate *candidate) {
  struct ob_cost_task task = {.elements = bytes / sizeof(float),
                              .wire = candidate->wire,
                              .hosts = cluster->hosts,
                              .ranks_per_host = cluster->ranks_per_host,
                              .ranks = cluster->size,
                              .most_ranks = cluster->most_ranks,
                              .schedule = candidate->schedule};
  return (struct tune_point){.task = task};
}

static bool time_chunks(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                        size_t bytes, bool quick, struct contest *contest) {
  bool well = true;
  for (size_t k = 0; well && k < sizeof chunks / sizeof chunks[0]; k++) {
    struct tune_point point = point_of(cluster, bytes, &ob_cost_candidates[0]);
    point.task.chunk = chunks[k];
    well = enter(cluster, buffers, contest, &point, 0);
  }
  return well && hold(buffers, contest, quick);
}

static size_t best_chunk(const struct contest *contest) {
  size_t best = 0;
  for (size_t k = 1; k < contest->count; k++)
    if (contest->point[k].measured < WORTH * contest->point[best].measured)
      best = k;
  return contest->point[best].task.chunk;
}

/* With the chunk that a plan would take. */
static struct tune_point entrant(const struct tune_cluster *cluster, const struct ob_costs *costs,
                                 size_t bytes, size_t candidate) {
  struct tune_point point = point_of(cluster, bytes, &ob_cost_candidates[candidate]);
  struct ob_cost_choice choice;
  ob_cost_choose(costs, &point.task, &choice);
  point.task.chunk = choice.chunk;
  point.predicted = tune_point_seconds(costs, &point);
  return point;
}

static bool time_candidates(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                            const struct ob_costs *costs, size_t bytes, bool quick,
                            struct contest *contest) {
  struct tune_point points[OB_COST_CANDIDATES];
  double best = INFINITY;
  bool well = true;
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++) {
    points[k] = entrant(cluster, costs, bytes, k);
    best = fmin(best, points[k].predicted);
  }
  for (size_t k = 0; well && k < OB_COST_CANDIDATES; k++)
    if (points[k].predicted <= fmin(fmax(HOPELESS * best, HARDLY), TOO_LONG))
      well = enter(cluster, buffers, contest, &points[k], k);
  return well && hold(buffers, contest, quick);
}

/* measured/model; INFINITY: not measured. */
struct factors {
  double of[OB_COST_CANDIDATES];
};

static void take_factors(const struct contest *contest, struct factors *factors) {
  for (size_t k = 0; k < contest->count; k++) {
    const struct tune_point *point = &contest->point[k];
    double *factor = &factors->of[contest->candidate[k]];
    *factor = fmin(*factor, point->measured / point->predicted);
  }
}

static void keep_factors(const struct factors *factors, size_t bytes,
                         struct ob_cost_measured *measured) {
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
    if (isfinite(factors->of[k]))
      ob_cost_add_point(&measured->factor[k], (double)bytes,
                        fmax(OB_COST_FACTOR_LEAST, fmin(factors->of[k], OB_COST_FACTOR_MOST)));
}

/* --- All of it */

static bool measure_chunks(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                           struct ob_costs *costs, bool quick, struct contest *contest) {
  bool well = true;
  for (size_t i = 0; well && i < sizeof chunk_sizes / sizeof chunk_sizes[0]; i++) {
    size_t bytes = chunk_sizes[i];
    struct tune_point point = entrant(cluster, costs, bytes, 0);
    if (point.predicted > TOO_LONG || bytes > (quick ? LARGEST_QUICK : LARGEST))
      continue;
    well = time_chunks(cluster, buffers, bytes, quick, contest);
    if (well && contest->count)
      ob_cost_add_point(&costs->measured.chunk, (double)bytes, (double)best_chunk(contest));
    end(contest);
  }
  return well;
}

static bool climb(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                  const struct ob_costs *costs, bool quick, struct contest *contest,
                  struct factors factors[STEPS]) {
  bool well = true;
  for (size_t i = 0; well && i < STEPS; i++) {
    if (ladder[i] > (quick ? LARGEST_QUICK : LARGEST))
      break;
    well = time_candidates(cluster, buffers, costs, ladder[i], quick, contest);
    if (well)
      take_factors(contest, &factors[i]);
    end(contest);
  }
  return well;
}

/* The factors are put in place last: until then plans are the model's. */
static bool measure_ladder(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                           struct ob_costs *costs, bool quick, struct contest *contest) {
  struct factors factors[STEPS];
  bool well = true;
  for (size_t i = 0; i < STEPS; i++)
    for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
      factors[i].of[k] = INFINITY;
  for (int time = 0; well && time < CLIMBS; time++)
    well = climb(cluster, buffers, costs, quick, contest, factors);
  for (size_t i = 0; i < STEPS; i++)
    keep_factors(&factors[i], ladder[i], &costs->measured);
  return well;
}

bool tune_corrections(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick) {
  struct tune_buffers buffers;
  struct contest *contest;
  if (cluster->ranks_per_host == 0)
    return true; /* nobody could tell when they apply */
  contest = ob_allocate(1, sizeof *contest);
  bool well = tune_buffers_create(cluster, quick ? LARGEST_QUICK : LARGEST, &buffers);
  if (tune_largest(contest ? 0 : 1) > 0) {
    tune_complain("no memory for measurements");
    well = false;
  }
  if (well) {
    contest->count = 0;
    well = measure_chunks(cluster, &buffers, costs, quick, contest) &&
           measure_ladder(cluster, &buffers, costs, quick, contest);
  }
  tune_buffers_destroy(&buffers);
  ob_release(contest);
  return well;
}

#else
typedef int tune_no_corrections_here; /* ISO C wants a declaration in every file */
#endif
