/* Predicts a step of training, which is computation and the exchange that follows it or hides
 * behind it, and a whole run. */
#include "tools/tune/model.h"

#include <math.h>

#include "base/knobs.h"
#include "onebit/efficient_adam.h"
#include "optimizers/methods/zero_one_schedule.h"

const char *const tune_method_names[TUNE_METHODS] = {
    "dense float32", "dense float16", "Efficient-Adam", "same, hierarchical",
    "1-bit Adam",    "0/1 Adam",      "momentum SGD",   "onebit run, 8 bits"};

struct tune_policy tune_policy(const struct tune_training *training, enum tune_method method) {
  const double steps = training->steps, warm_up = training->warm_up;
  const double eight_bits = fmin(1, ONEBIT_WARMUP_STEPS / steps);
  if (method == TUNE_ADAM)
    return (struct tune_policy){1 - warm_up, 0, warm_up};
  if (method == TUNE_FLAT || method == TUNE_HIERARCHICAL || method == TUNE_SGD)
    return (struct tune_policy){1 - eight_bits, eight_bits, 0};
  if (method == TUNE_RUN)
    return (struct tune_policy){0, 1, 0};
  if (method != TUNE_ZERO_ONE)
    return (struct tune_policy){0, 0, 1};
  const struct ob_zero_one_schedule schedule =
      ob_zero_one_resolve(&(struct ob_zero_one_schedule){.variance_freeze_step = TUNE_FREEZE_STEP});
  uint64_t counts[3], whole = steps < 1 ? 1 : (uint64_t)steps;
  ob_zero_one_count(&schedule, whole, counts);
  return (struct tune_policy){(double)counts[OB_EXCHANGE_BITS] / (double)whole, 0,
                              (double)counts[OB_EXCHANGE_DENSE] / (double)whole};
}

static struct tune_exchange training_dense(const struct ob_costs *costs,
                                           const struct ob_cost_task *task) {
  double ranks = task->hosts * task->ranks_per_host;
  return (struct tune_exchange){ob_cost_mpi_seconds(costs, task, 4),
                                task->hosts > 1 ? 8 * (ranks - 1) / ranks * (double)task->elements
                                                : 0};
}

static struct tune_exchange half(const struct ob_costs *costs, const struct ob_cost_task *task) {
  double converting = (costs->load + costs->convert) * ob_cost_sharing(costs, task);
  return (struct tune_exchange){ob_cost_mpi_seconds(costs, task, 2) +
                                    (double)task->elements * converting,
                                training_dense(costs, task).host_bytes / 2};
}

/* The exchange in bits; hierarchical falls back to exchange. */
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

static struct ob_cost_task training_task_of(const struct tune_training *training) {
  return (struct ob_cost_task){.elements = (size_t)training->parameters,
                               .hosts = training->hosts,
                               .ranks_per_host = training->ranks_per_host};
}

/* An exchange of one bit by the method's schedule, or by the better of both. */
static struct tune_exchange bits_of(const struct ob_costs *costs,
                                    const struct tune_training *training, enum tune_method method) {
  const struct ob_cost_task task = training_task_of(training);
  struct tune_exchange flat = one_bit(costs, task, ONEBIT_SCHEDULE_EXCHANGE);
  struct tune_exchange levels = one_bit(costs, task, ONEBIT_SCHEDULE_HIERARCHICAL);
  bool has_levels =
      method != TUNE_FLAT && (method == TUNE_HIERARCHICAL || levels.seconds < flat.seconds);
  return has_levels ? levels : flat;
}

static struct tune_exchange widen_bits(const struct ob_costs *costs, struct tune_exchange one,
                                       int bits) {
  const double scales = 4.0 / OB_DEFAULT_BLOCK; /* bytes an element */
  const double wider = one.host_bytes * (bits / 8.0 + scales) / (1 / 8.0 + scales);
  one.seconds += (wider - one.host_bytes) / (costs->between.bandwidth * costs->exchange_efficiency);
  one.host_bytes = wider;
  return one;
}

struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits) {
  return widen_bits(costs, bits_of(costs, training, TUNE_ZERO_ONE), bits);
}

/* The exchanges of a method, and how often they are made. */
struct parts {
  struct tune_policy policy;
  struct tune_exchange one_bit, eight_bits, full;
};

static struct parts parts_of(const struct ob_costs *costs, const struct tune_training *training,
                             enum tune_method method) {
  const struct ob_cost_task task = training_task_of(training);
  const struct tune_exchange bits = bits_of(costs, training, method);
  return (struct parts){.policy = tune_policy(training, method),
                        .one_bit = bits,
                        .eight_bits = widen_bits(costs, bits, 8),
                        .full = (method == TUNE_HALF ? half : training_dense)(costs, &task)};
}

struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method) {
  const struct parts parts = parts_of(costs, training, method);
#define MEAN_OF(what)                                                                              \
  (parts.policy.one_bit * parts.one_bit.what + parts.policy.eight_bits * parts.eight_bits.what +   \
   parts.policy.dense * parts.full.what)
  return (struct tune_exchange){MEAN_OF(seconds), MEAN_OF(host_bytes)};
#undef MEAN_OF
}

/* The part of an exchange that is not hidden. */
static double waiting(const struct tune_training *training, double exchange, bool overlap) {
  return overlap ? ob_step_waiting(exchange, training->compute) : exchange;
}

double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap) {
  const struct parts parts = parts_of(costs, training, method);
  return training->compute +
         parts.policy.one_bit * waiting(training, parts.one_bit.seconds, overlap) +
         parts.policy.eight_bits * waiting(training, parts.eight_bits.seconds, overlap) +
         parts.policy.dense * waiting(training, parts.full.seconds, overlap);
}

/* True if the method is worth it at a bandwidth. */
static bool worth(const struct ob_costs *costs, const struct tune_training *training,
                  enum tune_method method, double bandwidth) {
  struct ob_costs other = *costs;
  double faster = fmax(1, bandwidth / costs->between.bandwidth);
  other.between.bandwidth = bandwidth;
  other.mpi_byte /= faster;
  other.between.byte /= faster;
  return tune_step_seconds(&other, training, TUNE_DENSE, true) >=
         OB_STEP_WORTH * tune_step_seconds(&other, training, method, true);
}

/* Searches by bisection in the logarithm, from a modem to more than memory has: 60 halvings of 24
 * octaves are beyond what a double tells apart. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method) {
  double low = 1e4, high = 1e12;
  if (worth(costs, training, method, high))
    return INFINITY;
  if (!worth(costs, training, method, low))
    return 0;
  for (int k = 0; k < 60; k++) {
    double middle = sqrt(low * high);
    *(worth(costs, training, method, middle) ? &low : &high) = middle;
  }
  return low;
}

/* --- A whole run -------------------------------------------------------------------------------*/

/* Seconds of the codec for an exchange, which take cores from the computation. */
static double codec_seconds(const struct ob_costs *costs, const struct tune_training *training) {
  const struct ob_cost_task task = {.elements = (size_t)training->parameters,
                                    .hosts = training->hosts,
                                    .ranks_per_host = training->ranks_per_host};
  const double element = costs->compress + costs->apply + costs->reduce_stream;
  return training->parameters * element * costs->codec_factor * ob_cost_sharing(costs, &task);
}

/* The exchange in which every host sends a message to every other. */
static struct tune_exchange whole_gather(const struct ob_costs *costs,
                                         const struct tune_training *training) {
  const double bytes = training->parameters * TUNE_SPARSE_BITS / 8 * (training->hosts - 1);
  const double rate = costs->between.bandwidth * costs->exchange_efficiency;
  const double latency = training->hosts > 1 ? costs->between.latency : 0;
  return (struct tune_exchange){costs->call + latency + bytes / rate +
                                    training->hosts * codec_seconds(costs, training),
                                bytes};
}

static struct tune_exchange exchange_of(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits) {
  if (bits == TUNE_FLOAT32)
    return tune_exchange(costs, training, TUNE_DENSE);
  if (bits == TUNE_SPARSE)
    return whole_gather(costs, training);
  return tune_exchange_bits(costs, training, bits);
}

/* Adds exchanges in each step: seconds waited and bytes of so many steps. */
static void add_steps(const struct ob_costs *costs, const struct tune_training *training, int bits,
                      double steps, struct tune_whole *whole) {
  const struct tune_exchange exchange = exchange_of(costs, training, bits);
  whole->exchange = exchange.seconds;
  whole->waiting += steps * ob_step_waiting(exchange.seconds, training->compute);
  whole->host_bytes += steps * exchange.host_bytes;
}

static void add_rounds(const struct ob_costs *costs, const struct tune_training *training,
                       const struct tune_way *way, struct tune_whole *whole) {
  struct tune_training fragment = *training;
  fragment.parameters = ceil(training->parameters / way->fragments);
  const struct tune_exchange exchange = exchange_of(costs, &fragment, way->bits);
  const double hidden = way->delay * training->compute;
  const double exchanges = ceil(training->steps / way->local_steps) * way->fragments;
  whole->exchange = exchange.seconds;
  whole->waiting = exchanges * fmax(exchange.seconds - hidden,
                                    fmin(exchange.seconds, codec_seconds(costs, &fragment)));
  whole->host_bytes = exchanges * exchange.host_bytes;
}

struct tune_whole tune_whole(const struct ob_costs *costs, const struct tune_training *training,
                             const struct tune_way *way) {
  struct tune_whole whole = {.waiting = 0};
  if (way->local_steps > 1) {
    add_rounds(costs, training, way, &whole);
  } else {
    const double warm_up = fmin(way->warm_up_steps, training->steps);
    add_steps(costs, training, way->warm_up_bits, warm_up, &whole);
    add_steps(costs, training, way->bits, training->steps - warm_up, &whole);
  }
  whole.seconds = training->steps * training->compute + whole.waiting;
  return whole;
}

const char *tune_way_error(const struct tune_way *way) {
  if ((long long)way->delay * way->fragments > way->local_steps)
    return "--delay times --fragments is more than --local-steps: exchanges would pile up";
  return way->fragments > way->local_steps ? "--fragments is more than --local-steps" : NULL;
}

/* --- Which ways there are ----------------------------------------------------------------------*/

static bool whole_same(const struct tune_way *a, const struct tune_way *b) {
  return a->bits == b->bits && a->local_steps == b->local_steps && a->fragments == b->fragments &&
         a->delay == b->delay && a->warm_up_bits == b->warm_up_bits;
}

static size_t add_way(const struct tune_way *way, struct tune_way *ways, size_t count) {
  for (size_t k = 0; k < count; k++)
    if (whole_same(&ways[k], way))
      return count;
  if (count < TUNE_WAYS)
    ways[count++] = *way;
  return count;
}

/* Makes an outer step; overlapped: four fragments, each with as many steps to hide behind as lie
 * between two. */
static struct tune_way outer(const struct tune_wanted *wanted, int local_steps, int bits,
                             bool overlapped) {
  struct tune_way way = {"outer step", bits, bits, 0, local_steps, 1, 0};
  way.local_steps = wanted->local_steps > 0 ? wanted->local_steps : local_steps;
  way.bits = wanted->bits >= 0 ? wanted->bits : bits;
  way.fragments = overlapped && way.local_steps >= 4 ? 4 : 1;
  way.fragments = wanted->fragments > 0 ? wanted->fragments : way.fragments;
  way.delay = overlapped ? way.local_steps / way.fragments : 0;
  way.delay = wanted->delay >= 0 ? wanted->delay : way.delay;
  way.name = way.bits == TUNE_SPARSE ? "outer, SparseLoCo" : "outer step";
  way.warm_up_bits = way.bits;
  return way;
}

size_t tune_ways(const struct tune_wanted *wanted, struct tune_way ways[TUNE_WAYS]) {
  static const int local_steps[] = {10, 30, 100, 300}, bits[] = {4, 1};
  const struct tune_way each_step[] = {
      {"dense each step", TUNE_FLOAT32, TUNE_FLOAT32, 0, 1, 1, 0},
      {"Efficient-Adam", 1, 8, ONEBIT_WARMUP_STEPS, 1, 1, 0},
  };
  size_t count = 0;
  for (size_t k = 0; k < sizeof each_step / sizeof each_step[0]; k++)
    count = add_way(&each_step[k], ways, count);
  for (size_t h = 0; h < 4; h++)
    for (int k = 0; k < 4; k++) {
      const struct tune_way way = outer(wanted, local_steps[h], bits[k / 2], k % 2);
      count = add_way(&way, ways, count);
    }
  return count;
}

size_t tune_choose(const struct ob_costs *costs, const struct tune_training *training,
                   const struct tune_way *ways, size_t count) {
  size_t best = 0;
  double least = INFINITY;
  for (size_t k = 0; k < count; k++) {
    const double seconds = tune_whole(costs, training, &ways[k]).seconds;
    if (seconds <= TUNE_NEAR * training->steps * training->compute)
      return k;
    if (seconds < least)
      least = seconds, best = k;
  }
  return best;
}
