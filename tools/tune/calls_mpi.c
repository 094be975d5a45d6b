/* Measures whole calls of MPI_Allreduce, and of onebit_allreduce with each schedule. First it
 * measures each call to which the model is fitted, alone. Then it measures the candidates (pairs of
 * schedule and wire format) in turn at several sizes, which shows the error of the model. */
#include <math.h>

#include "base/memory.h"
#include "base/process.h"
#include "onebit/mpi.h"
#include "onebit/onebit.h"
#include "tools/tune/run_mpi.h"
#include "tools/tune/tune.h"

/* Each point is measured in this many turns, and the smallest median is used. A disturbance of the
 * machine may last longer than all calls of one turn. */
#define TURNS     3
#define MAX_CALLS 60

#define LARGEST ((size_t)64 << 20)

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* --- Calls in turn -----------------------------------------------------------------------------*/

struct contest {
  struct tune_run *run;
  onebit_comm_t comm;
  float *send, *receive;
  size_t count; /* the number of different calls that are measured in turn */
  struct tune_point point[OB_COST_CANDIDATES];
  onebit_plan_t plan[OB_COST_CANDIDATES];
  double times[OB_COST_CANDIDATES][MAX_CALLS];
};

static bool print_call_error(const struct contest *contest, const struct tune_point *point) {
  if (contest->run->team.rank == 0)
    tune_print_error("%zu elements: %s", point->task.elements, onebit_last_error());
  return false;
}

/* Adds the call of a point, unless the library does not support it. After an error, prints a
 * message and returns false on all ranks. */
static bool add_call(struct contest *contest, struct tune_point point) {
  const struct ob_cost_task *task = &point.task;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan = NULL;
  if (!point.mpi) {
    options.schedule = task->schedule;
    options.wire = task->wire;
    options.chunk_size = task->chunk;
    options.bits = task->bits;
    if (!ob_cost_possible(task, task->schedule, task->wire))
      return true;
    onebit_status_t status = onebit_plan_create(contest->comm, task->elements, &options, &plan);
    if (status != ONEBIT_OK)
      return status == ONEBIT_ERROR_UNSUPPORTED || print_call_error(contest, &point);
    onebit_plan_get_info(plan, &info);
    if (info.schedule != options.schedule || info.wire != options.wire) {
      onebit_plan_destroy(plan);
      return true;
    }
  }
  contest->point[contest->count] = point;
  contest->plan[contest->count++] = plan;
  return true;
}

/* Measures one call, in seconds on the slowest rank. */
static bool time_call(const struct contest *contest, size_t k, double *seconds) {
  const struct tune_point *point = &contest->point[k];
  onebit_status_t status = ONEBIT_OK;
  MPI_Barrier(MPI_COMM_WORLD);
  double start = ob_seconds();
  if (point->mpi)
    MPI_Allreduce(contest->send, contest->receive, (int)point->task.elements, MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
  else
    status = onebit_allreduce(contest->send, contest->receive, contest->plan[k]);
  *seconds = tune_allreduce_max(ob_seconds() - start);
  return status == ONEBIT_OK || print_call_error(contest, point);
}

/* Measures the calls in as many rounds as fit into `seconds`; the duration of the first round tells
 * how many do. A new median replaces the earlier median if it is smaller. */
static bool measure_contest(struct contest *contest, double seconds, int min_calls) {
  int calls = MAX_CALLS;
  for (int i = -1; contest->count && i < calls; i++) {
    double time, all = 0;
    for (size_t k = 0; k < contest->count; k++) {
      if (!time_call(contest, k, &time))
        return false; /* all ranks return false */
      all += time;
      if (i >= 0)
        contest->times[k][i] = time;
    }
    if (i == -1)
      calls = (int)fmin(MAX_CALLS, fmax(min_calls, seconds / all));
  }
  for (size_t k = 0; k < contest->count; k++)
    contest->point[k].measured =
        fmin(contest->point[k].measured, tune_median(contest->times[k], calls));
  return true;
}

static void end_contest(struct contest *contest) {
  for (size_t k = 0; k < contest->count; k++)
    onebit_plan_destroy(contest->plan[k]);
  contest->count = 0;
}

static bool begin_contest(struct tune_run *run, struct contest *contest) {
  size_t count = LARGEST / sizeof(float);
  *contest = (struct contest){.run = run,
                              .send = ob_allocate(count, sizeof(float)),
                              .receive = ob_allocate(count, sizeof(float))};
  if (!tune_have_all_succeeded(contest->send && contest->receive)) {
    tune_print_error("at least one rank is out of memory for buffers of %zu bytes", 4 * count);
    return false;
  }
  tune_fill_random(contest->send, count, (uint64_t)run->team.rank + 1);
  return onebit_comm_create_mpi(MPI_COMM_WORLD, &contest->comm) == ONEBIT_OK;
}

static struct tune_point make_point(const struct contest *contest, size_t bytes,
                                    onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk) {
  struct tune_point point = {.task = contest->run->cluster, .measured = INFINITY};
  point.task.elements = bytes / sizeof(float);
  point.task.schedule = schedule;
  point.task.wire = wire;
  point.task.chunk = chunk;
  return point;
}

/* --- Measurements for the fit of the model -----------------------------------------------------*/

#define POINT_SECONDS 0.2

/* Points to measure: the size in bytes of float32, smallest first; chunk 0 means MPI_Allreduce. The
 * point in 8 bits sends so much that its time depends on the rate of the link, and not on the queue
 * and on the burst that a link lets through at once. */
static const struct wanted {
  size_t bytes, chunk;
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  int bits;
} wants[] = {
#define MPI(bytes)                                                                                 \
  { bytes, 0, 0, 0, 0 }
#define BITS(bytes, chunk, schedule)                                                               \
  { bytes, chunk, ONEBIT_SCHEDULE_##schedule, ONEBIT_WIRE_BITS, 1 }
#define DENSE(bytes, chunk, schedule)                                                              \
  { bytes, chunk, ONEBIT_SCHEDULE_##schedule, ONEBIT_WIRE_DENSE, 0 }
    MPI(4),
    MPI(4096),
    MPI(65536),
    MPI(262144),
    MPI(1 << 20),
    MPI(4 << 20),
    MPI(16 << 20),
    BITS(4, 65536, EXCHANGE),
    BITS(65536, 65536, EXCHANGE),
    BITS(262144, 65536, EXCHANGE),
    BITS(1 << 20, 65536, EXCHANGE),
    BITS(4 << 20, 65536, EXCHANGE),
    BITS(16 << 20, 65536, EXCHANGE),
    BITS(64 << 20, 65536, EXCHANGE),
    BITS(16 << 20, 8192, EXCHANGE),
    BITS(16 << 20, 262144, EXCHANGE),
    {16 << 20, 16384, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS, 8},
    DENSE(65536, 65536, EXCHANGE),
    DENSE(1 << 20, 65536, EXCHANGE),
    BITS(65536, 65536, ALLGATHER),
    BITS(1 << 20, 65536, ALLGATHER),
    BITS(16 << 20, 65536, ALLGATHER),
    BITS(65536, 65536, HIERARCHICAL),
    BITS(1 << 20, 65536, HIERARCHICAL),
    BITS(16 << 20, 65536, HIERARCHICAL),
};

/* Measures one point alone. If the call is not supported, the point's time stays INFINITY. */
static bool measure_point(struct contest *contest, struct tune_point *point) {
  bool well = add_call(contest, *point) && measure_contest(contest, POINT_SECONDS, 2);
  if (contest->count)
    *point = contest->point[0];
  end_contest(contest);
  return well;
}

static bool measure_points(struct contest *contest, struct tune_points *points) {
  struct tune_point all[COUNT(wants)];
  bool well = true;
  for (size_t k = 0; k < COUNT(wants); k++) {
    const struct wanted *want = &wants[k];
    all[k] = make_point(contest, want->bytes, want->schedule, want->wire, want->chunk);
    all[k].task.bits = want->bits;
    all[k].mpi = want->chunk == 0;
  }
  for (int turn = 0; turn < TURNS; turn++)
    for (size_t k = 0; well && k < COUNT(wants); k++)
      well = measure_point(contest, &all[k]);
  for (size_t k = 0; well && k < COUNT(wants); k++)
    if (isfinite(all[k].measured))
      points->point[points->count++] = all[k];
  return well;
}

/* --- Measurements that correct the model -------------------------------------------------------*/

/* The seconds to measure one size in one turn, and the smallest number of calls of each
 * candidate. */
#define SIZE_SECONDS 0.5
#define MIN_CALLS    3

/* A candidate is not measured if its predicted time is more than TOO_LONG seconds. It is also not
 * measured if its predicted time is more than HARDLY seconds and more than HOPELESS times the
 * shortest one, since no correction could then make it the fastest. */
#define HOPELESS 4
#define HARDLY   0.005
#define TOO_LONG 1.5

/* Sizes to measure, in bytes of float32. They are close together where the fastest schedule
 * changes. */
static const size_t ladder[] = {64,      1024,    4096,    16384,   65536,    131072,  262144,
                                1 << 19, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20};

/* Sizes at which an exchange sends several messages (chunks) to each peer. The first chunk size is
 * preferred: another one is chosen only if it is faster by more than noise. */
static const size_t chunk_sizes[] = {4 << 20, 16 << 20, 64 << 20};
static const size_t chunks[] = {131072, 65536, 262144};
#define WORTH 0.98

/* Returns the point of a candidate, with the chunk size that a plan would choose. */
static struct tune_point make_candidate_point(const struct contest *contest, size_t bytes,
                                              size_t candidate) {
  const struct ob_cost_candidate *of = &ob_cost_candidates[candidate];
  struct tune_point point = make_point(contest, bytes, of->schedule, of->wire, 0);
  struct ob_cost_choice choice;
  ob_cost_choose(&contest->run->costs, &point.task, &choice);
  point.task.chunk = choice.chunk;
  point.candidate = candidate;
  point.predicted = tune_point_seconds(&contest->run->costs, &point);
  return point;
}

static bool measure_chunks(struct contest *contest, size_t bytes) {
  struct tune_point point = make_candidate_point(contest, bytes, 0);
  bool well = true;
  size_t best = 0;
  if (point.predicted > TOO_LONG)
    return true;
  for (size_t k = 0; well && k < COUNT(chunks); k++) {
    point.task.chunk = chunks[k];
    well = add_call(contest, point);
  }
  well = well && measure_contest(contest, SIZE_SECONDS, MIN_CALLS);
  for (size_t k = 1; well && k < contest->count; k++)
    if (contest->point[k].measured < WORTH * contest->point[best].measured)
      best = k;
  if (well && contest->count)
    ob_cost_add_point(&contest->run->costs.measured.chunk, (double)bytes,
                      (double)contest->point[best].task.chunk);
  end_contest(contest);
  return well;
}

/* Updates the smallest ratio of measured to predicted time of each candidate at a size. If a
 * candidate is not measured, its ratio stays INFINITY. */
static bool measure_factors(struct contest *contest, size_t bytes,
                            double factors[OB_COST_CANDIDATES]) {
  struct tune_point points[OB_COST_CANDIDATES];
  double best = INFINITY;
  bool well = true;
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++) {
    points[k] = make_candidate_point(contest, bytes, k);
    best = fmin(best, points[k].predicted);
  }
  for (size_t k = 0; well && k < OB_COST_CANDIDATES; k++)
    if (points[k].predicted <= fmin(fmax(HOPELESS * best, HARDLY), TOO_LONG))
      well = add_call(contest, points[k]);
  well = well && measure_contest(contest, SIZE_SECONDS, MIN_CALLS);
  for (size_t k = 0; well && k < contest->count; k++) {
    const struct tune_point *point = &contest->point[k];
    factors[point->candidate] = fmin(factors[point->candidate], point->measured / point->predicted);
  }
  end_contest(contest);
  return well;
}

/* Measures the corrections. Stores the factors only at the end, so that plans use the uncorrected
 * model during the measurements. */
static bool measure_corrections(struct contest *contest) {
  double factors[COUNT(ladder)][OB_COST_CANDIDATES];
  bool well = true;
  for (size_t i = 0; well && i < COUNT(chunk_sizes); i++)
    well = measure_chunks(contest, chunk_sizes[i]);
  for (size_t i = 0; i < COUNT(ladder); i++)
    for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
      factors[i][k] = INFINITY;
  for (int turn = 0; turn < TURNS; turn++)
    for (size_t i = 0; well && i < COUNT(ladder); i++)
      well = measure_factors(contest, ladder[i], factors[i]);
  for (size_t i = 0; i < COUNT(ladder); i++)
    for (size_t k = 0; k < OB_COST_CANDIDATES; k++)
      if (isfinite(factors[i][k]))
        ob_cost_add_point(&contest->run->costs.measured.factor[k], (double)ladder[i],
                          fmax(OB_COST_MIN_FACTOR, fmin(factors[i][k], OB_COST_MAX_FACTOR)));
  return well;
}

/* Measures points, fits the model to them on rank 0, and sends it to all ranks, since they must use
 * the same model. Then measures the corrections, unless hosts have different numbers of ranks. */
bool tune_measure_calls(struct tune_run *run, struct tune_points *points) {
  static struct contest contest;
  bool well = begin_contest(run, &contest) && measure_points(&contest, points);
  if (well) {
    if (run->team.rank == 0)
      tune_fit(&run->costs, points);
    MPI_Bcast(&run->costs, (int)sizeof run->costs, MPI_BYTE, 0, MPI_COMM_WORLD);
    well = run->cluster.ranks_per_host == 0 || measure_corrections(&contest);
  }
  onebit_comm_destroy(contest.comm);
  ob_release(contest.send);
  ob_release(contest.receive);
  return well;
}
