/* Whole calls: MPI_Allreduce, and onebit_allreduce by its schedules. */
#ifdef ONEBIT_HAVE_MPI
#include <math.h>

#include "base/memory.h"
#include "bench/bench.h"
#include "bench/tune_mpi.h"
#include "onebit/mpi.h"

/* A point takes so many seconds, or so many calls. */
#define POINT_SECONDS  0.6
#define CALLS_AT_MOST  60
#define CALLS_AT_LEAST 4

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

struct buffers {
  float *send, *receive;
  onebit_comm_t comm;
};

static onebit_status_t call(const struct buffers *buffers, const struct tune_point *point,
                            onebit_plan_t plan) {
  if (!point->mpi)
    return onebit_allreduce(buffers->send, buffers->receive, plan);
  MPI_Allreduce(buffers->send, buffers->receive, (int)point->task.elements, MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
  return ONEBIT_OK;
}

/* Seconds of a call on the slowest rank; the first calls only say how many there is time for. */
static onebit_status_t time_point(const struct buffers *buffers, struct tune_point *point,
                                  onebit_plan_t plan) {
  double times[CALLS_AT_MOST];
  int calls = CALLS_AT_MOST, warmups = 2;
  for (int i = -warmups; i < calls; i++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = bench_now();
    onebit_status_t status = call(buffers, point, plan);
    double time = tune_largest(bench_now() - start);
    if (status != ONEBIT_OK)
      return status; /* on all ranks */
    if (i >= 0)
      times[i] = time;
    else if (i == -1)
      calls = (int)fmin(CALLS_AT_MOST, fmax(CALLS_AT_LEAST, POINT_SECONDS / time));
  }
  point->measured = bench_statistics(times, (size_t)calls).median;
  return ONEBIT_OK;
}

/* False when the library does not do this: then there is nothing to measure. */
static onebit_status_t make_plan(const struct buffers *buffers, const struct tune_point *point,
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
  return (struct tune_point){.task = task, .mpi = want->mpi};
}

static bool measure(const struct tune_cluster *cluster, const struct buffers *buffers,
                    const struct wanted *want, struct tune_points *points) {
  struct tune_point point = point_of(cluster, want);
  onebit_plan_t plan;
  bool possible;
  onebit_status_t status = make_plan(buffers, &point, &possible, &plan);
  if (status == ONEBIT_OK && possible)
    status = time_point(buffers, &point, plan);
  onebit_plan_destroy(plan);
  if (status != ONEBIT_OK && cluster->rank == 0)
    tune_complain("%zu bytes: %s", want->bytes, onebit_last_error());
  if (status == ONEBIT_OK && possible)
    points->point[points->count++] = point;
  return status == ONEBIT_OK;
}

bool tune_collectives(const struct tune_cluster *cluster, struct tune_points *points, bool quick) {
  struct buffers buffers = {.comm = NULL};
  size_t largest = (size_t)(quick ? 16 : 64) << 20, count = largest / sizeof(float);
  buffers.send = ob_allocate(count, sizeof(float));
  buffers.receive = ob_allocate(count, sizeof(float));
  bool well = tune_largest(buffers.send && buffers.receive ? 0 : 1) == 0;
  if (!well)
    tune_complain("no memory for buffers of %zu bytes on every rank", largest);
  well = well && onebit_comm_create_mpi(MPI_COMM_WORLD, &buffers.comm) == ONEBIT_OK;
  if (well)
    bench_fill(buffers.send, count, (uint64_t)cluster->rank + 1);
  for (size_t k = 0; well && k < sizeof wants / sizeof wants[0]; k++)
    if (!quick || !wants[k].full)
      well = measure(cluster, &buffers, &wants[k], points);
  onebit_comm_destroy(buffers.comm);
  ob_release(buffers.send);
  ob_release(buffers.receive);
  return well;
}

#else
typedef int tune_no_collectives_here; /* ISO C wants a declaration in every file */
#endif
