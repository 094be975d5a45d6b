/* A step of training: computation, and the exchange that follows it or hides behind it. */
#include "tools/tune/training.h"

#include <math.h>

#include "optimizers/zero_one_schedule.h"

const char *const tune_method_names[TUNE_METHODS] = {"dense float32", "dense float16", "1-bit flat",
                                                     "1-bit hierarchical", "0/1 Adam"};

struct tune_policy tune_policy(double steps) {
  const struct ob_zero_one_schedule schedule =
      ob_zero_one_resolve(&(struct ob_zero_one_schedule){.variance_freeze_step = TUNE_FREEZE_STEP});
  uint64_t counts[3], whole = steps < 1 ? 1 : (uint64_t)steps;
  ob_zero_one_count(&schedule, whole, counts);
  return (struct tune_policy){(double)counts[OB_EXCHANGE_BITS] / (double)whole,
                              (double)counts[OB_EXCHANGE_DENSE] / (double)whole};
}

static struct ob_cost_task task_of(const struct tune_training *training) {
  return (struct ob_cost_task){.elements = (size_t)training->parameters,
                               .hosts = training->hosts,
                               .ranks_per_host = training->ranks_per_host};
}

static double one_bit(const struct ob_costs *costs, const struct tune_training *training,
                      onebit_schedule_t schedule) {
  struct ob_cost_task task = task_of(training);
  struct ob_cost_choice choice;
  task.schedule = schedule; /* hierarchical falls back to exchange */
  ob_cost_choose(costs, &task, &choice);
  return choice.seconds;
}

static double half_seconds(const struct ob_costs *costs, const struct tune_training *training) {
  struct ob_cost_task task = task_of(training);
  return ob_cost_mpi_seconds(costs, &task, 2) +
         training->parameters * (costs->load + costs->convert) * ob_cost_sharing(costs, &task);
}

double tune_exchange_seconds(const struct ob_costs *costs, const struct tune_training *training,
                             enum tune_method method) {
  struct ob_cost_task task = task_of(training);
  struct tune_policy policy = tune_policy(training->steps);
  double dense = ob_cost_mpi_seconds(costs, &task, 4);
  if (method == TUNE_DENSE)
    return dense;
  if (method == TUNE_HALF)
    return half_seconds(costs, training);
  double flat = one_bit(costs, training, ONEBIT_SCHEDULE_EXCHANGE);
  if (method == TUNE_FLAT)
    return flat;
  double levels = one_bit(costs, training, ONEBIT_SCHEDULE_HIERARCHICAL);
  if (method == TUNE_HIERARCHICAL)
    return levels;
  return policy.one_bit * fmin(flat, levels) + policy.dense * dense;
}

double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap) {
  double exchange = tune_exchange_seconds(costs, training, method);
  if (overlap)
    exchange = fmax(exchange - TUNE_HIDING * training->compute, TUNE_EXPOSED * exchange);
  return training->compute + exchange;
}

double tune_host_bytes(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method) {
  struct ob_cost_task task = task_of(training);
  struct tune_policy policy = tune_policy(training->steps);
  double ranks = training->hosts * training->ranks_per_host;
  double dense = training->hosts > 1 ? 2 * (ranks - 1) / ranks * 4 * training->parameters : 0;
  if (method == TUNE_DENSE)
    return dense;
  if (method == TUNE_HALF)
    return dense / 2;
  double flat = ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS);
  bool possible = ob_cost_possible(&task, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS);
  double levels =
      possible ? ob_cost_host_bytes(&task, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS) : flat;
  if (method == TUNE_FLAT)
    return flat;
  if (method == TUNE_HIERARCHICAL)
    return levels;
  bool by_levels = tune_exchange_seconds(costs, training, TUNE_HIERARCHICAL) <
                   tune_exchange_seconds(costs, training, TUNE_FLAT);
  return policy.one_bit * (by_levels ? levels : flat) + policy.dense * dense;
}

/* Seconds that the method saves at a bandwidth. */
static double saved(const struct ob_costs *costs, const struct tune_training *training,
                    enum tune_method method, double bandwidth) {
  struct ob_costs other = *costs;
  double faster = fmax(1, bandwidth / costs->between.bandwidth);
  other.between.bandwidth = bandwidth;
  other.mpi_byte /= faster;
  other.between.byte /= faster;
  return tune_exchange_seconds(&other, training, TUNE_DENSE) -
         tune_exchange_seconds(&other, training, method);
}

/* By bisection in the logarithm, from a modem to more than memory has: 60 halvings of 24 octaves
 * are beyond what a double tells apart. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method) {
  double low = 1e4, high = 1e12;
  if (saved(costs, training, method, high) > 0)
    return INFINITY;
  if (saved(costs, training, method, low) <= 0)
    return 0;
  for (int k = 0; k < 60; k++) {
    double middle = sqrt(low * high);
    *(saved(costs, training, method, middle) > 0 ? &low : &high) = middle;
  }
  return low;
}
