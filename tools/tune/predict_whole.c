/* onebit-tune --predict --whole-run: what a run takes over a slow network, and how to train. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "onebit/efficient_adam.h"
#include "tools/tune/tune.h"
#include "tools/tune/whole.h"

/* The links, in bits a second, if none are given. */
static const double usual_links[] = {1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10};

const char *const tune_width_names[] = {"1", "2", "4", "8", "float32", "sparse", NULL};
static const int widths[] = {1, 2, 4, 8, TUNE_FLOAT32, TUNE_SPARSE};

static const char *width_name(int bits) {
  size_t k = 0;
  while (widths[k] != bits)
    k++;
  return tune_width_names[k];
}

static void duration_text(double seconds, char text[24]) {
  static const struct {
    double seconds;
    const char *name;
  } units[] = {{1, "s"}, {60, "min"}, {3600, "h"}, {86400, "days"}};
  size_t k = 0;
  while (k < 3 && seconds >= 2 * units[k + 1].seconds)
    k++;
  snprintf(text, 24, "%.3g %s", seconds / units[k].seconds, units[k].name);
}

struct whole_ways {
  struct tune_way way[TUNE_WAYS + 2]; /* and two to compare with */
  size_t count;                       /* to choose from */
  size_t others;                      /* behind them */
};

/* Adds float32 and SparseLoCo with their authors' settings, and the given H if there is one. */
static void add_others(const struct tune_wanted *wanted, struct whole_ways *ways) {
  const int local_steps = wanted->local_steps > 0 ? wanted->local_steps : 30;
  ways->way[ways->count + ways->others++] =
      (struct tune_way){"outer step", TUNE_FLOAT32, TUNE_FLOAT32, 0, local_steps, 1, 0};
  ways->way[ways->count + ways->others++] =
      (struct tune_way){"outer, SparseLoCo", TUNE_SPARSE, TUNE_SPARSE, 0, local_steps, 1, 0};
}

static void print_head(const struct tune_options *options, const struct ob_costs *costs) {
  char latency[24], run[24];
  tune_time_text(costs->between.latency, latency);
  duration_text(options->steps * options->compute, run);
  printf("# onebit-tune --predict --whole-run: %.4g parameters, %d host%s x %d rank%s, %.4g steps "
         "of\n#   %.4g s: %s without a network. Latency one way: %s.\n",
         options->parameters, options->hosts, options->hosts == 1 ? "" : "s",
         options->ranks_per_host, options->ranks_per_host == 1 ? "" : "s", options->steps,
         options->compute, run, latency);
  printf("# Costs: %s\n", costs->source);
  printf(
      "# Each step: %.0f %% of the computation hides the exchange; %d steps are Efficient-Adam's "
      "warm-up,\n#   in 8 bits. Outer step: every H steps F fragments of the drift, each applied "
      "`delay` steps after\n#   its exchange began. bytes: out of a host, as many come in.\n"
      "# Chosen: the way that changes training least of those within %.0f %% of no network, else "
      "the fastest.\n",
      100 * OB_STEP_HIDING, ONEBIT_WARMUP_STEPS, 100 * (TUNE_NEAR - 1));
}

static void way_text(const struct tune_way *way, char text[64]) {
  if (way->local_steps == 1)
    snprintf(text, 64, "%-23s%5s%9s%4s%7s", way->name, "1", width_name(way->bits), "-", "-");
  else
    snprintf(text, 64, "%-23s%5d%9s%4d%7d", way->name, way->local_steps, width_name(way->bits),
             way->fragments, way->delay);
}

static void print_way(const struct ob_costs *costs, const struct tune_training *training,
                      const struct tune_way *way, const char *mark) {
  const struct tune_whole whole = tune_whole(costs, training, way);
  char text[64], exchange[24], bytes[24], run[24];
  way_text(way, text);
  tune_time_text(whole.exchange, exchange);
  tune_bytes_text(whole.host_bytes, bytes);
  duration_text(whole.seconds, run);
  printf("%s%12s%12s%12s%11.2fx%s\n", text, exchange, bytes, run,
         whole.seconds / (training->steps * training->compute), mark);
}

static void predict_whole_print_link(const struct ob_costs *costs,
                                     const struct tune_training *training,
                                     const struct whole_ways *ways) {
  char rate[24];
  const size_t chosen = tune_choose(costs, training, ways->way, ways->count);
  tune_rate_text(costs->between.bandwidth, rate);
  printf("\n# Link of a host: %s of payload each way\n", rate);
  printf("%-23s%5s%9s%4s%7s%12s%12s%12s%12s\n", "way", "H", "bits", "F", "delay", "exchange",
         "bytes", "run", "no network");
  for (size_t k = 0; k < ways->count; k++)
    print_way(costs, training, &ways->way[k], k == chosen ? "  <- chosen" : "");
  for (size_t k = 0; k < ways->others; k++)
    print_way(costs, training, &ways->way[ways->count + k], k ? "" : "  to compare");
}

static void print_links(const struct ob_costs *costs, const struct tune_training *training,
                        const struct whole_ways *ways) {
  printf("\n%-12s%12s%16s   %-23s%5s%9s%4s%7s%12s%12s%12s\n", "link", "dense", "Efficient-Adam",
         "chosen", "H", "bits", "F", "delay", "bytes", "run", "no network");
  for (size_t k = 0; k < sizeof usual_links / sizeof usual_links[0]; k++) {
    struct ob_costs there = *costs;
    there.between.bandwidth = usual_links[k] / 8 * TUNE_PAYLOAD;
    const struct tune_way *way = &ways->way[tune_choose(&there, training, ways->way, ways->count)];
    const struct tune_whole whole = tune_whole(&there, training, way);
    char rate[24], times[3][24], text[64], bytes[24];
    tune_rate_text(usual_links[k] / 8, rate);
    duration_text(tune_whole(&there, training, &ways->way[0]).seconds, times[0]);
    duration_text(tune_whole(&there, training, &ways->way[1]).seconds, times[1]);
    duration_text(whole.seconds, times[2]);
    way_text(way, text);
    tune_bytes_text(whole.host_bytes, bytes);
    printf("%-12s%12s%16s   %s%12s%12s%11.2fx\n", rate, times[0], times[1], text, bytes, times[2],
           whole.seconds / (training->steps * training->compute));
  }
}

static void predict_whole_print_json(const struct ob_costs *costs,
                                     const struct tune_training *training,
                                     const struct whole_ways *ways) {
  struct ob_json json = {.file = stdout, .spaced = true};
  const size_t chosen = tune_choose(costs, training, ways->way, ways->count);
  ob_json_begin(&json, NULL, '{');
  ob_json_string(&json, "costs", costs->source);
  ob_json_real(&json, "payload_bits_per_s", 8 * costs->between.bandwidth);
  ob_json_integer(&json, "chosen", chosen);
  ob_json_begin(&json, "ways", '[');
  for (size_t k = 0; k < ways->count + ways->others; k++) {
    const struct tune_way *way = &ways->way[k];
    const struct tune_whole whole = tune_whole(costs, training, way);
    ob_json_begin(&json, NULL, '{');
    ob_json_string(&json, "way", way->name);
    ob_json_integer(&json, "local_steps", (uint64_t)way->local_steps);
    ob_json_string(&json, "bits", width_name(way->bits));
    ob_json_integer(&json, "fragments", (uint64_t)way->fragments);
    ob_json_integer(&json, "delay", (uint64_t)way->delay);
    ob_json_real(&json, "exchange_s", whole.exchange);
    ob_json_real(&json, "run_s", whole.seconds);
    ob_json_real(&json, "waiting_s", whole.waiting);
    ob_json_real(&json, "host_bytes", whole.host_bytes);
    ob_json_end(&json, '}');
  }
  ob_json_end(&json, ']');
  ob_json_end(&json, '}');
  putchar('\n');
}

/* Fills in the ways to train. False after complaining that the request is impossible. */
static bool fill_ways(const struct tune_wanted *wanted, struct whole_ways *ways) {
  ways->count = tune_ways(wanted, ways->way);
  for (size_t k = 0; k < ways->count; k++)
    if (tune_way_error(&ways->way[k])) {
      tune_complain("%s", tune_way_error(&ways->way[k]));
      return false;
    }
  add_others(wanted, ways);
  return true;
}

int tune_predict_whole(const struct tune_options *options) {
  struct ob_costs costs;
  struct whole_ways ways = {.count = 0};
  const struct tune_training training = {.parameters = options->parameters,
                                         .compute = options->compute,
                                         .steps = floor(options->steps),
                                         .hosts = options->hosts,
                                         .ranks_per_host = options->ranks_per_host};
  const struct tune_wanted wanted = {.local_steps = options->local_steps,
                                     .bits = options->bits >= 0 ? widths[options->bits] : -1,
                                     .fragments = options->fragments,
                                     .delay = options->delay};
  if (!tune_load_costs(options, &costs))
    return TUNE_FAILED;
  if (!fill_ways(&wanted, &ways))
    return TUNE_USAGE;
  if (options->json) {
    predict_whole_print_json(&costs, &training, &ways);
    return TUNE_OK;
  }
  print_head(options, &costs);
  (options->bandwidth > 0 ? predict_whole_print_link : print_links)(&costs, &training, &ways);
  return TUNE_OK;
}
