/* Predicts the time of a training step and of a whole run. A step is a computation, and an exchange
 * after or during the computation. */
#include "tools/tune/model.h"

#include <limits.h>
#include <math.h>

#include "base/knobs.h"
#include "onebit/efficient_adam.h"
#include "optimizers/methods/zero_one_schedule.h"

const char *const tune_method_names[TUNE_ALL_METHODS] = {
    "dense float32", "dense float16",     "Efficient-Adam", "same, hierarchical",
    "1-bit Adam",    "0/1 Adam",          "momentum SGD",   "onebit run, 8 bits",
    "same, staged",  "staged, inside 1st"};

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
  const struct ob_zero_one_schedule schedule = ob_zero_one_fill_defaults(
      &(struct ob_zero_one_schedule){.variance_freeze_step = TUNE_FREEZE_STEP});
  uint64_t counts[3], whole = steps < 1 ? 1 : (uint64_t)steps;
  ob_zero_one_count_exchanges(&schedule, whole, counts);
  return (struct tune_policy){(double)counts[OB_EXCHANGE_BITS] / (double)whole, 0,
                              (double)counts[OB_EXCHANGE_DENSE] / (double)whole};
}

static struct ob_cost_task make_task(const struct tune_training *training) {
  return (struct ob_cost_task){.elements = (size_t)training->parameters,
                               .hosts = training->hosts,
                               .ranks_per_host = training->ranks_per_host};
}

double tune_sharing_factor(const struct ob_costs *costs, const struct tune_training *training) {
  const struct ob_cost_task task = make_task(training);
  return ob_cost_sharing_factor(costs, &task);
}

/* Returns the costs for a network that takes no time: an exchange then takes as long as its work on
 * one core. A core also copies the bytes that MPI sends. tune_fit assigns the time of these copies
 * to the link, so this function adds it to the core's work. */
static struct ob_costs get_core_costs(const struct ob_costs *costs) {
  struct ob_costs core = *costs;
  core.between.latency = core.mpi_round = core.oversubscribed = 0;
  core.between.bandwidth = INFINITY;
  core.mpi_byte = fmax(core.mpi_byte, 2 * core.between.byte);
  return core;
}

/* Returns the seconds by which an exchange delays a computation that uses all cores of the rank.
 * core_seconds: the work of the exchange on one core; seconds: the time of the whole exchange. */
static double get_work_seconds(const struct ob_costs *costs, struct ob_cost_task task,
                               double core_seconds, double seconds) {
  task.threads = INT_MAX; /* the model limits the threads to the number of cores */
  return fmin(seconds, core_seconds / ob_cost_model(costs, &task).threads);
}

/* Returns the seconds of an MPI_Allreduce with elements of `element_bytes` bytes, including their
 * conversion from and to float32. */
static double mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                          size_t element_bytes) {
  const double converting = element_bytes < 4 ? costs->load + costs->convert : 0;
  return ob_cost_mpi_seconds(costs, task, element_bytes) +
         (double)task->elements * converting * ob_cost_sharing_factor(costs, task);
}

static struct tune_exchange predict_dense(const struct ob_costs *costs,
                                          const struct ob_cost_task *task, size_t element_bytes) {
  const struct ob_costs core = get_core_costs(costs);
  const double ranks = task->hosts * task->ranks_per_host;
  const double bytes = 2.0 * (double)element_bytes * (ranks - 1) / ranks * (double)task->elements;
  const double seconds = mpi_seconds(costs, task, element_bytes);
  return (struct tune_exchange){
      .seconds = seconds,
      .host_bytes = task->hosts > 1 ? bytes : 0,
      .work = get_work_seconds(costs, *task, mpi_seconds(&core, task, element_bytes), seconds)};
}

/* Predicts a compressed exchange by a schedule. If the hierarchical schedule is not possible,
 * predicts schedule exchange. */
static struct tune_exchange predict_compressed(const struct ob_costs *costs,
                                               struct ob_cost_task task,
                                               onebit_schedule_t schedule) {
  const struct ob_costs core = get_core_costs(costs);
  struct ob_cost_choice choice, work;
  task.schedule = schedule;
  ob_cost_choose(costs, &task, &choice);
  task.chunk = choice.chunk;
  ob_cost_choose(&core, &task, &work);
  if (!ob_cost_possible(&task, schedule, ONEBIT_WIRE_BITS))
    schedule = ONEBIT_SCHEDULE_EXCHANGE;
  return (struct tune_exchange){.seconds = choice.seconds,
                                .host_bytes = ob_cost_host_bytes(&task, schedule, ONEBIT_WIRE_BITS),
                                .work =
                                    get_work_seconds(costs, task, work.seconds, choice.seconds)};
}

/* Predicts an exchange with `bits` bits per element. If the method names no schedule, the faster
 * one is used. */
static struct tune_exchange predict_bits(const struct ob_costs *costs,
                                         const struct tune_training *training,
                                         enum tune_method method, int bits) {
  struct ob_cost_task task = make_task(training);
  task.bits = bits;
  const struct tune_exchange flat = predict_compressed(costs, task, ONEBIT_SCHEDULE_EXCHANGE);
  const struct tune_exchange levels = predict_compressed(costs, task, ONEBIT_SCHEDULE_HIERARCHICAL);
  const bool has_levels =
      method != TUNE_FLAT && (method == TUNE_HIERARCHICAL || levels.seconds < flat.seconds);
  return has_levels ? levels : flat;
}

struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits) {
  return predict_bits(costs, training, TUNE_ZERO_ONE, bits);
}

/* The exchanges of a method. The policy has the fraction of the steps that make each exchange. */
struct parts {
  struct tune_policy policy;
  struct tune_exchange one_bit, eight_bits, full;
};

static struct parts predict_parts(const struct ob_costs *costs,
                                  const struct tune_training *training, enum tune_method method) {
  const struct ob_cost_task task = make_task(training);
  return (struct parts){.policy = tune_policy(training, method),
                        .one_bit = predict_bits(costs, training, method, 1),
                        .eight_bits = predict_bits(costs, training, method, 8),
                        .full = predict_dense(costs, &task, method == TUNE_HALF ? 2 : 4)};
}

struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method) {
  const struct parts parts = predict_parts(costs, training, method);
#define MEAN_OF(what)                                                                              \
  (parts.policy.one_bit * parts.one_bit.what + parts.policy.eight_bits * parts.eight_bits.what +   \
   parts.policy.dense * parts.full.what)
  return (struct tune_exchange){MEAN_OF(seconds), MEAN_OF(host_bytes), MEAN_OF(work)};
#undef MEAN_OF
}

/* Returns the seconds that an exchange adds to a step. The work of an exchange never overlaps with
 * the computation, since both use the same cores. */
static double added_seconds(const struct tune_exchange *exchange, double compute, double buckets) {
  return exchange->work + ob_step_waiting(exchange->seconds - exchange->work, compute, buckets);
}

/* DistributedDataParallel's bucket_cap_mb: bytes of float32 gradients. */
#define BUCKET (25.0 * (1 << 20))

double tune_buckets(const struct tune_training *training) {
  const double full = 4 * training->parameters / BUCKET;
  return training->buckets > 0 ? training->buckets : fmin(fmax(full, 1), OB_STEP_BUCKETS);
}

bool tune_overlaps(const struct tune_training *training, enum tune_method method) {
  return !training->clip || method == TUNE_DENSE || method == TUNE_HALF || method == TUNE_RUN;
}

double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap) {
  const struct parts parts = predict_parts(costs, training, method);
  const double compute = training->compute * tune_sharing_factor(costs, training);
  overlap = overlap && tune_overlaps(training, method);
  const double buckets = overlap ? tune_buckets(training) : 1; /* one bucket does not overlap */
  return compute + parts.policy.one_bit * added_seconds(&parts.one_bit, compute, buckets) +
         parts.policy.eight_bits * added_seconds(&parts.eight_bits, compute, buckets) +
         parts.policy.dense * added_seconds(&parts.full, compute, buckets);
}

/* True if a step with the method, at a bandwidth, is at least OB_STEP_WORTH times as fast as a
 * dense step. */
static bool is_worth_using(const struct ob_costs *costs, const struct tune_training *training,
                           enum tune_method method, double bandwidth) {
  struct ob_costs other = *costs;
  double faster = fmax(1, bandwidth / costs->between.bandwidth);
  other.between.bandwidth = bandwidth;
  other.mpi_byte /= faster;
  other.between.byte /= faster;
  return tune_step_seconds(&other, training, TUNE_DENSE, true) >=
         OB_STEP_WORTH * tune_step_seconds(&other, training, method, true);
}

/* Bisects the logarithm of the bandwidth, between the bandwidth of a modem and more than that of
 * memory. 60 halvings make the interval as small as a double can represent. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method) {
  double low = 1e4, high = 1e12;
  if (is_worth_using(costs, training, method, high))
    return INFINITY;
  if (!is_worth_using(costs, training, method, low))
    return 0;
  for (int k = 0; k < 60; k++) {
    double middle = sqrt(low * high);
    *(is_worth_using(costs, training, method, middle) ? &low : &high) = middle;
  }
  return low;
}

/* --- A whole run -------------------------------------------------------------------------------*/

/* Predicts SparseLoCo's exchange: every host sends its message to every other host. */
static struct tune_exchange predict_gather(const struct ob_costs *costs,
                                           const struct tune_training *training) {
  const double bytes = training->parameters * TUNE_SPARSE_BITS / 8 * (training->hosts - 1);
  const double element = costs->compress + costs->apply + costs->reduce_stream;
  const double core = costs->call + training->hosts * training->parameters * element *
                                        costs->codec_factor * tune_sharing_factor(costs, training);
  const double rate = costs->between.bandwidth * costs->exchange_efficiency;
  const double latency = training->hosts > 1 ? costs->between.latency : 0;
  const double seconds = core + latency + bytes / rate;
  return (struct tune_exchange){seconds, bytes,
                                get_work_seconds(costs, make_task(training), core, seconds)};
}

static struct tune_exchange predict_exchange(const struct ob_costs *costs,
                                             const struct tune_training *training, int bits) {
  if (bits == TUNE_FLOAT32)
    return tune_exchange(costs, training, TUNE_DENSE);
  if (bits == TUNE_SPARSE)
    return predict_gather(costs, training);
  return tune_exchange_bits(costs, training, bits);
}

/* Adds `steps` steps with one exchange each to the run's seconds of waiting and bytes. */
static void add_steps(const struct ob_costs *costs, const struct tune_training *training, int bits,
                      double steps, struct tune_whole *whole) {
  const struct tune_exchange exchange = predict_exchange(costs, training, bits);
  whole->exchange = exchange.seconds;
  whole->waiting +=
      steps *
      added_seconds(&exchange, training->compute * tune_sharing_factor(costs, training), true);
  whole->host_bytes += steps * exchange.host_bytes;
}

static void add_rounds(const struct ob_costs *costs, const struct tune_training *training,
                       const struct tune_way *way, struct tune_whole *whole) {
  struct tune_training fragment = *training;
  fragment.parameters = ceil(training->parameters / way->fragments);
  const struct tune_exchange exchange = predict_exchange(costs, &fragment, way->bits);
  const double hidden = way->delay * training->compute * tune_sharing_factor(costs, training);
  const double exchanges = ceil(training->steps / way->local_steps) * way->fragments;
  whole->exchange = exchange.seconds;
  whole->waiting = exchanges * fmax(exchange.seconds - hidden, exchange.work);
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
  whole.seconds =
      training->steps * training->compute * tune_sharing_factor(costs, training) + whole.waiting;
  return whole;
}

const char *tune_way_error(const struct tune_way *way) {
  if ((long long)way->delay * way->fragments > way->local_steps)
    return "--delay times --fragments is more than --local-steps, so exchanges would pile up";
  return way->fragments > way->local_steps ? "--fragments is more than --local-steps" : NULL;
}

/* --- The possible ways -------------------------------------------------------------------------*/

static bool is_same_way(const struct tune_way *a, const struct tune_way *b) {
  return a->bits == b->bits && a->local_steps == b->local_steps && a->fragments == b->fragments &&
         a->delay == b->delay && a->warm_up_bits == b->warm_up_bits;
}

static size_t add_way(const struct tune_way *way, struct tune_way *ways, size_t count) {
  for (size_t k = 0; k < count; k++)
    if (is_same_way(&ways[k], way))
      return count;
  if (count < TUNE_WAYS)
    ways[count++] = *way;
  return count;
}

/* Returns a way with an outer step. overlapped: it has four fragments, and each is exchanged during
 * the steps before the next one's exchange. */
static struct tune_way make_outer_way(const struct tune_wanted *wanted, int local_steps, int bits,
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

size_t tune_list_ways(const struct tune_wanted *wanted, struct tune_way ways[TUNE_WAYS]) {
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
      const struct tune_way way = make_outer_way(wanted, local_steps[h], bits[k / 2], k % 2);
      count = add_way(&way, ways, count);
    }
  return count;
}

size_t tune_choose_way(const struct ob_costs *costs, const struct tune_training *training,
                       const struct tune_way *ways, size_t count) {
  size_t best = 0;
  double least = INFINITY;
  for (size_t k = 0; k < count; k++) {
    const struct tune_whole whole = tune_whole(costs, training, &ways[k]);
    if (whole.seconds <= TUNE_NEAR * (whole.seconds - whole.waiting))
      return k;
    if (whole.seconds < least)
      least = whole.seconds, best = k;
  }
  return best;
}
