/* A step of training: computation, and the exchange that follows it or hides behind it. */
#include "tools/tune/training.h"

#include <math.h>

#include "optimizers/methods/zero_one_schedule.h"

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

static struct tune_exchange dense(const struct ob_costs *costs, const struct ob_cost_task *task) {
  double ranks = task->hosts * task->ranks_per_host;
  return (struct tune_exchange){ob_cost_mpi_seconds(costs, task, 4),
                                task->hosts > 1 ? 8 * (ranks - 1) / ranks * (double)task->elements
                                                : 0};
}

static struct tune_exchange half(const struct ob_costs *costs, const struct ob_cost_task *task) {
  double converting = (costs->load + costs->convert) * ob_cost_sharing(costs, task);
  return (struct tune_exchange){ob_cost_mpi_seconds(costs, task, 2) +
                                    (double)task->elements * converting,
                                dense(costs, task).host_bytes / 2};
}

/* Hierarchical falls back to exchange. */
static struct tune_exchange one_bit(const struct ob_costs *costs, struct ob_cost_task task,
                                    onebit_schedule_t schedule) {
  struct ob_cost_choice choice;
  task.schedule = schedule;
  ob_cost_choose(costs, &task, &choice);
  if (!ob_cost_possible(&task, schedule, ONEBIT_WIRE_BITS))
    schedule = ONEBIT_SCHEDULE_EXCHANGE;
  return (struct tune_exchange){choice.seconds,
                                ob_cost_host_bytes(&task, schedule, ONEBIT_WIRE_BITS)};
}

struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method) {
  struct ob_cost_task task = {.elements = (size_t)training->parameters,
                              .hosts = training->hosts,
                              .ranks_per_host = training->ranks_per_host};
  if (method == TUNE_DENSE)
    return dense(costs, &task);
  if (method == TUNE_HALF)
    return half(costs, &task);
  struct tune_exchange flat = one_bit(costs, task, ONEBIT_SCHEDULE_EXCHANGE);
  if (method == TUNE_FLAT)
    return flat;
  struct tune_exchange levels = one_bit(costs, task, ONEBIT_SCHEDULE_HIERARCHICAL);
  if (method == TUNE_HIERARCHICAL)
    return levels;
  struct tune_policy policy = tune_policy(training->steps);
  struct tune_exchange bits = levels.seconds < flat.seconds ? levels : flat;
  struct tune_exchange full = dense(costs, &task);
  return (struct tune_exchange){policy.one_bit * bits.seconds + policy.dense * full.seconds,
                                policy.one_bit * bits.host_bytes + policy.dense * full.host_bytes};
}

double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap) {
  double exchange = tune_exchange(costs, training, method).seconds;
  if (overlap)
    exchange = fmax(exchange - TUNE_HIDING * training->compute, TUNE_EXPOSED * exchange);
  return training->compute + exchange;
}

/* Seconds that the method saves at a bandwidth. */
static double saved(const struct ob_costs *costs, const struct tune_training *training,
                    enum tune_method method, double bandwidth) {
  struct ob_costs other = *costs;
  double faster = fmax(1, bandwidth / costs->between.bandwidth);
  other.between.bandwidth = bandwidth;
  other.mpi_byte /= faster;
  other.between.byte /= faster;
  return tune_exchange(&other, training, TUNE_DENSE).seconds -
         tune_exchange(&other, training, method).seconds;
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
