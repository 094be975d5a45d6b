/* Whole calls: MPI_Allreduce, and onebit_allreduce by its schedules. */
#ifdef ONEBIT_HAVE_MPI
#include <math.h>

#include "base/memory.h"
#include "bench/bench.h"
#include "onebit/mpi.h"
#include "tools/tune/mpi.h"

/* A point takes so many seconds, or so many calls, in each of so many turns, for the best median:
 * what disturbs a machine lasts for longer than the calls of a point do. */
#define TURNS          3
#define POINT_SECONDS  0.2
#define CALLS_AT_MOST  30
#define CALLS_AT_LEAST 2

/* What is measured, smallest first: bytes as float32. */
struct wanted {
  size_t bytes;
  bool mpi, full; /* full: left out when quick */
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  size_t chunk;
};

#define EXCHANGE ONEBIT_SCHEDULE_EXCHANGE

static const struct wanted wants[] = {
    {4, true, false, 0, 0, 0},
    {4096, true, true, 0, 0, 0},
    {65536, true, false, 0, 0, 0},
    {262144, true, true, 0, 0, 0},
    {1 << 20, true, false, 0, 0, 0},
    {4 << 20, true, false, 0, 0, 0},
    {16 << 20, true, true, 0, 0, 0},
    {4, false, false, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {65536, false, false, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {262144, false, true, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {1 << 20, false, false, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {4 << 20, false, false, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {16 << 20, false, false, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {64 << 20, false, true, EXCHANGE, ONEBIT_WIRE_BITS, 65536},
    {16 << 20, false, true, EXCHANGE, ONEBIT_WIRE_BITS, 8192},
    {16 << 20, false, true, EXCHANGE, ONEBIT_WIRE_BITS, 262144},
    {65536, false, true, EXCHANGE, ONEBIT_WIRE_DENSE, 65536},
    {1 << 20, false, true, EXCHANGE, ONEBIT_WIRE_DENSE, 65536},
    {65536, false, false, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536},
    {1 << 20, false, true, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536},
    {16 << 20, false, true, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS, 65536},
    {65536, false, false, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS, 65536},
    {1 << 20, false, false, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS, 65536},
    {16 << 20, false, false, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS, 65536},
};

static onebit_status_t call(const struct tune_buffers *buffers, const struct tune_point *point,
                            onebit_plan_t plan) {
  if (!point->mpi)
    return onebit_allreduce(buffers->send, buffers->receive, plan);
  MPI_Allreduce(buffers->send, buffers->receive, (int)point->task.elements, MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
  return ONEBIT_OK;
}

onebit_status_t tune_call_seconds(const struct tune_buffers *buffers,
                                  const struct tune_point *point, onebit_plan_t plan,
                                  double *seconds) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = bench_now();
  onebit_status_t status = call(buffers, point, plan);
  *seconds = tune_largest(bench_now() - start);
  return status;
}

/* The first calls only say how many there is time for. */
static onebit_status_t time_point(const struct tune_buffers *buffers, struct tune_point *point,
                                  onebit_plan_t plan) {
  double times[CALLS_AT_MOST], time;
  int calls = CALLS_AT_MOST, warmups = 1;
  for (int i = -warmups; i < calls; i++) {
    onebit_status_t status = tune_call_seconds(buffers, point, plan, &time);
    if (status != ONEBIT_OK)
      return status; /* on all ranks */
    if (i >= 0)
      times[i] = time;
    else if (i == -1)
      calls = (int)fmin(CALLS_AT_MOST, fmax(CALLS_AT_LEAST, POINT_SECONDS / time));
  }
  point->measured = fmin(point->measured, bench_statistics(times, (size_t)calls).median);
  return ONEBIT_OK;
}

onebit_status_t tune_plan_create(const struct tune_buffers *buffers, const struct tune_point *point,
                                 bool *possible, onebit_plan_t *plan) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_info_t info = {.size = sizeof info};
  options.schedule = point->task.schedule;
  options.wire = point->task.wire;
  options.chunk_size = point->task.chunk;
  *plan = NULL;
  *possible = point->mpi || ob_cost_possible(&point->task, options.schedule, options.wire);
  if (point->mpi || !*possible)
    return ONEBIT_OK;
  onebit_status_t status = onebit_plan_create(buffers->comm, point->task.elements, &options, plan);
  if (status == ONEBIT_ERROR_UNSUPPORTED)
    *possible = false;
  if (status != ONEBIT_OK)
    return *possible ? status : ONEBIT_OK;
  onebit_plan_get_info(*plan, &info);
  *possible = info.schedule == options.schedule && info.wire == options.wire;
  return ONEBIT_OK;
}

static struct tune_point point_of(const struct tune_cluster *cluster, const struct wanted *want) {
  struct ob_cost_task task = {.elements = want->bytes / sizeof(float),
                              .wire = want->wire,
                              .hosts = cluster->hosts,
                              .ranks_per_host = cluster->ranks_per_host,
                              .ranks = cluster->size,
                              .most_ranks = cluster->most_ranks,
                              .schedule = want->schedule,
                              .chunk = want->chunk};
  return (struct tune_point){.task = task, .mpi = want->mpi, .measured = INFINITY};
}

/* *possible is false when there is nothing to measure. False after complaining. */
static bool measure(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                    struct tune_point *point, bool *possible) {
  onebit_plan_t plan;
  onebit_status_t status = tune_plan_create(buffers, point, possible, &plan);
  if (status == ONEBIT_OK && *possible)
    status = time_point(buffers, point, plan);
  onebit_plan_destroy(plan);
  if (status != ONEBIT_OK && cluster->rank == 0)
    tune_complain("%zu elements: %s", point->task.elements, onebit_last_error());
  return status == ONEBIT_OK;
}

static bool measure_again(const struct tune_cluster *cluster, const struct tune_buffers *buffers,
                          struct tune_points *points) {
  bool well = true, possible;
  for (size_t k = 0; well && k < points->count; k++)
    well = measure(cluster, buffers, &points->point[k], &possible);
  return well;
}

bool tune_buffers_create(const struct tune_cluster *cluster, size_t bytes,
                         struct tune_buffers *buffers) {
  size_t count = bytes / sizeof(float);
  *buffers = (struct tune_buffers){.send = ob_allocate(count, sizeof(float)),
                                   .receive = ob_allocate(count, sizeof(float))};
  bool well = tune_largest(buffers->send && buffers->receive ? 0 : 1) == 0;
  if (!well)
    tune_complain("no memory for buffers of %zu bytes on every rank", bytes);
  well = well && onebit_comm_create_mpi(MPI_COMM_WORLD, &buffers->comm) == ONEBIT_OK;
  if (well)
    bench_fill(buffers->send, count, (uint64_t)cluster->rank + 1);
  return well;
}

void tune_buffers_destroy(struct tune_buffers *buffers) {
  onebit_comm_destroy(buffers->comm);
  ob_release(buffers->send);
  ob_release(buffers->receive);
}

bool tune_collectives(const struct tune_cluster *cluster, struct tune_points *points, bool quick) {
  struct tune_buffers buffers;
  bool well = tune_buffers_create(cluster, (size_t)(quick ? 16 : 64) << 20, &buffers), possible;
  for (size_t k = 0; well && k < sizeof wants / sizeof wants[0]; k++) {
    struct tune_point *point = &points->point[points->count];
    if (quick && wants[k].full)
      continue;
    *point = point_of(cluster, &wants[k]);
    well = measure(cluster, &buffers, point, &possible);
    points->count += well && possible;
  }
  for (int turn = 1; well && turn < TURNS; turn++)
    well = measure_again(cluster, &buffers, points);
  tune_buffers_destroy(&buffers);
  return well;
}

#else
typedef int tune_no_collectives_here; /* ISO C wants a declaration in every file */
#endif
