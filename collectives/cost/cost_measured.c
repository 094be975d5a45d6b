/* Applies the measurements of whole calls. */
#include "collectives/cost/cost.h"

bool ob_cost_add_point(struct ob_cost_curve *curve, double bytes, double value) {
  size_t count = (size_t)curve->count;
  if (count == OB_COST_POINTS || (count && bytes <= curve->point[count - 1].bytes))
    return false;
  curve->point[count].bytes = bytes;
  curve->point[count].value = value;
  curve->count++;
  return true;
}

/* One scale for all leaves no overlap, and chunks do not matter: it is another kind of call. */
static bool correction_applies(const struct ob_costs *costs, const struct ob_cost_task *task) {
  return task->operation == ONEBIT_ALLREDUCE && task->block != ONEBIT_BLOCK_BUFFER &&
         task->ranks_per_host > 0 && costs->hosts == task->hosts &&
         costs->ranks_per_host == task->ranks_per_host;
}

static double cost_measured_bytes_of(const struct ob_cost_task *task) {
  return (double)task->elements * (double)sizeof(float);
}

/* The logarithm to base 2, exact at powers of two and linear in between: the same on every machine,
 * which a library's is not. */
static double log2_linear(double bytes) {
  double whole = 0;
  for (; bytes >= 2; bytes /= 2)
    whole++;
  return whole + bytes - 1;
}

static double cost_measured_between(const struct ob_cost_curve *curve, size_t k, double bytes) {
  double low = log2_linear(curve->point[k].bytes), high = log2_linear(curve->point[k + 1].bytes);
  double part = (log2_linear(bytes) - low) / (high - low);
  return curve->point[k].value + part * (curve->point[k + 1].value - curve->point[k].value);
}

double ob_cost_factor(const struct ob_costs *costs, const struct ob_cost_task *task,
                      size_t candidate, bool *measured) {
  const struct ob_cost_curve *curve = &costs->measured.factor[candidate];
  size_t count = (size_t)curve->count, k = 0;
  double bytes = cost_measured_bytes_of(task);
  *measured = count && correction_applies(costs, task);
  if (!*measured)
    return 1;
  if (bytes <= curve->point[0].bytes)
    return curve->point[0].value;
  while (k + 1 < count && bytes > curve->point[k + 1].bytes)
    k++;
  return k + 1 < count ? cost_measured_between(curve, k, bytes) : curve->point[k].value;
}

/* Below half of the smallest size the model knows as much: there is hardly more than a message. */
size_t ob_cost_measured_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                              size_t candidate) {
  const struct ob_cost_candidate *which = &ob_cost_candidates[candidate];
  const struct ob_cost_curve *curve = &costs->measured.chunk;
  size_t count = (size_t)curve->count, k = 0;
  double bytes = cost_measured_bytes_of(task);
  if (which->schedule != ONEBIT_SCHEDULE_EXCHANGE || which->wire != ONEBIT_WIRE_BITS || !count ||
      !correction_applies(costs, task) || bytes < curve->point[0].bytes / 2)
    return 0;
  while (k + 1 < count && bytes * bytes >= curve->point[k].bytes * curve->point[k + 1].bytes)
    k++;
  return (size_t)curve->point[k].value;
}
