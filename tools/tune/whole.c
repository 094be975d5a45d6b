/* Predicts the time of a whole run for each way to train. */
#include "tools/tune/whole.h"

#include <math.h>

#include "onebit/efficient_adam.h"

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
