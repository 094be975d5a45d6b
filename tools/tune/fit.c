/* Fits the cost model to the measurements. */
#include <math.h>

#include "tools/tune/tune.h"

/* A number that the fit may change, in its logarithm, and its bounds. stiffness: how far, in that
 * logarithm, it may go from where it starts (measured alone, or a default) at the price of a point
 * that is off by a tenth. */
struct knob {
  size_t offset;
  double stiffness, smallest, largest;
};

#define AT(field) offsetof(struct ob_costs, field)

/* Numbers with bounds. The codec may be faster in an exchange than alone, where messages stay in
 * the caches, but not by much; no more than all of a bandwidth can be used. */
static const struct knob knobs[] = {
    {AT(codec_factor), 0.5, 0.8, 10},
    {AT(between.message), 0.7, 1e-8, 1},
    {AT(between.byte), 1, 1e-12, 1e-7},
    {AT(inside.message), 0.7, 1e-8, 1},
    {AT(exchange_efficiency), 0.2, 0.1, 1},
    {AT(unhidden), 1, 0.01, 1},
    {AT(call), 2, 1e-7, 1},
    {AT(oversubscribed), 2, 1e-7, 1},
    {AT(mpi_call), 2, 1e-7, 1},
    {AT(mpi_round), 2, 1e-7, 1},
    {AT(mpi_efficiency), 2, 0.011, 1},
};
enum { KNOBS = sizeof knobs / sizeof knobs[0] };

static double *knob_of(struct ob_costs *costs, int k) {
  return (double *)(void *)((char *)costs + knobs[k].offset);
}

double tune_point_seconds(const struct ob_costs *costs, const struct tune_point *point) {
  const struct ob_cost_task *task = &point->task;
  return point->mpi ? ob_cost_mpi_seconds(costs, task, sizeof(float))
                    : ob_cost_seconds(costs, task, task->schedule, task->wire, task->chunk);
}

/* The loss of an error: a large one counts less than by its square, since some measurements are
 * disturbed. */
static double fit_loss(double error) {
  double size = fabs(error), bend = 0.3;
  return size < bend ? error * error : bend * (2 * size - bend);
}

/* The weight of a point: training waits for large calls. Small ones look better than they are: by
 * caches, and by the burst that links let through at once. */
static double fit_weight(const struct tune_point *point) {
  size_t mebi = point->task.elements >> 18;
  return mebi >= 16 ? 16 : mebi >= 4 ? 8 : mebi >= 1 ? 2 : 1;
}

static double fit_objective(const struct ob_costs *costs, const struct ob_costs *start,
                            const struct tune_points *points) {
  double sum = 0;
  for (size_t i = 0; i < points->count; i++)
    sum += fit_weight(&points->point[i]) *
           fit_loss(log(tune_point_seconds(costs, &points->point[i]) / points->point[i].measured));
  for (int k = 0; k < KNOBS; k++) {
    double now = *knob_of((struct ob_costs *)costs, k);
    double then = *knob_of((struct ob_costs *)start, k);
    sum += 0.01 * fit_loss(log(now / then) / knobs[k].stiffness);
  }
  return sum;
}

/* Changes one knob by a factor, if that is better. */
static bool try_factor(struct ob_costs *costs, const struct ob_costs *start,
                       const struct tune_points *points, int k, double factor, double *best) {
  double *value = knob_of(costs, k), before = *value;
  *value = fmax(knobs[k].smallest, fmin(before * factor, knobs[k].largest));
  double now = fit_objective(costs, start, points);
  if (now < *best) {
    *best = now;
    return true;
  }
  *value = before;
  return false;
}

void tune_fit(struct ob_costs *costs, struct tune_points *points) {
  double square = 0;
  /* The bandwidth that MPI_Allreduce loses may be the link's loss (round trips, congestion) or the
   * cores' (copies): one bandwidth cannot tell. All of it is taken for the link's: after a fit at 1
   * Gbit/s, calls at 200 and at 500 Mbit/s lost as large a part. On faster links than the one
   * measured that speaks for MPI, so that compression is never promised too much. */
  costs->mpi_byte = 0;
  costs->oversubscribed = 100e-6; /* a turn of a scheduler, to start from */
  struct ob_costs start = *costs;
  double best = fit_objective(costs, &start, points);
  for (double factor = 2; factor > 1.002; factor = sqrt(factor))
    for (int pass = 0, better = 1; better && pass < 100; pass++) {
      better = 0;
      for (int k = 0; k < KNOBS; k++)
        better |= try_factor(costs, &start, points, k, factor, &best) ||
                  try_factor(costs, &start, points, k, 1 / factor, &best);
    }
  for (size_t i = 0; i < points->count; i++) {
    struct tune_point *point = &points->point[i];
    point->predicted = tune_point_seconds(costs, point);
    square += pow(log(point->predicted / point->measured), 2);
  }
  costs->residual = points->count ? sqrt(square / (double)points->count) : 0;
}
