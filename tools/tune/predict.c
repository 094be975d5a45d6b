/* onebit-tune --predict: what compression would bring to a training run. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "onebit/efficient_adam.h"
#include "tools/tune/training.h"
#include "tools/tune/tune.h"

/* Sets the costs without a tuning file: a byte costs MPI what it costs the library, once sent and
 * once received. With that the model comes to 0.93 of a gigabit link; the best of Open MPI's
 * algorithms reached 0.92 at 16 MiB and 0.95 at 64 MiB on 4 hosts (README.md). The defaults of
 * plans are fits to its ring where cores were scarce. */
static void reach_link(struct ob_costs *costs) {
  costs->mpi_efficiency = 1;
  costs->mpi_byte = 2 * costs->between.byte;
}

bool tune_load_costs(const struct tune_options *options, struct ob_costs *costs) {
  static const struct ob_tuning_here anywhere = {NULL, NULL};
  char found[OB_TUNING_PATH_CAPACITY];
  const char *path = options->tuning ? options->tuning : ob_tuning_path(found) ? found : "none";
  enum ob_tuning_state state = OB_TUNING_OFF;
  ob_costs_default("avx2", costs);
  if (strcmp(path, "none") != 0)
    state = ob_tuning_read(path, &anywhere, costs, NULL);
  if (options->tuning && state != OB_TUNING_READ && state != OB_TUNING_OFF) {
    tune_complain("--tuning: %s", costs->source + strlen("defaults: "));
    return false;
  }
  if (state != OB_TUNING_READ) { /* why the file was not read stays */
    char source[sizeof costs->source];
    memcpy(source, costs->source, sizeof source);
    ob_costs_default("avx2", costs);
    memcpy(costs->source, source, sizeof source);
    reach_link(costs);
  }
  /* Times of whole calls are left out: they are of one network and one number of hosts. */
  memset(&costs->measured, 0, sizeof costs->measured);
  if (options->bandwidth > 0)
    costs->between.bandwidth = options->bandwidth * TUNE_PAYLOAD;
  if (options->latency > 0) {
    costs->mpi_round += options->latency - costs->between.latency;
    costs->mpi_round = fmax(costs->mpi_round, options->latency);
    costs->between.latency = options->latency;
  }
  if (options->cores > 0) {
    costs->cores_per_host = options->cores;
    costs->cores_shared = 0;
  }
  return true;
}

void tune_rate_text(double bytes_a_second, char text[24]) {
  double bits = 8 * bytes_a_second, unit = bits < 1e9 ? 1e6 : bits < 1e12 ? 1e9 : 1e12;
  if (isinf(bits))
    snprintf(text, 24, "none: always");
  else if (bits == 0)
    snprintf(text, 24, "none: never");
  else
    snprintf(text, 24, "%.3g %cbit/s", bits / unit, unit == 1e6 ? 'M' : unit == 1e9 ? 'G' : 'T');
}

static void predict_print_assumptions(const struct ob_costs *costs,
                                      const struct tune_training *training) {
  const struct tune_policy policy = tune_policy(training, TUNE_ZERO_ONE);
  const struct tune_exchange dense = tune_exchange(costs, training, TUNE_DENSE);
  char rate[24], latency[24];
  tune_rate_text(costs->between.bandwidth, rate);
  tune_time_text(costs->between.latency, latency);
  printf("# Costs: %s\n# Link of a host: %s of payload each way, latency %s.", costs->source, rate,
         latency);
  if (costs->cores_per_host > 0)
    printf(" %g cores a host.\n", costs->cores_per_host);
  else
    printf(" A core a rank;\n#   where ranks share cores, all steps take longer: --cores.\n");
  if (costs->cores_shared > 0)
    printf("# %.3g cores that all hosts share, as measured: one machine. --cores says otherwise.\n",
           costs->cores_shared);
  printf(
      "# Dense: MPI_Allreduce, which reaches %.2f of the link here; float16: half the bytes, and "
      "a conversion.\n",
      dense.host_bytes / costs->between.bandwidth / dense.seconds);
  printf("# Overlap: the exchange hides behind %.0f %% of the computation (backward), but for the "
         "last of %.0f\n#   buckets.\n",
         100 * OB_STEP_HIDING, 1 / OB_STEP_EXPOSED);
  printf(
      "# 0/1 Adam, %.0f steps: its variance is frozen after %d, all else is as onebit_zero_one_adam"
      "\n#   has it by default. One bit in %.1f %% of the steps, full precision in %.2f %%, "
      "nothing in %.1f %%.\n",
      training->steps, TUNE_FREEZE_STEP, 100 * policy.one_bit, 100 * policy.dense,
      100 * (1 - policy.one_bit - policy.dense));
  printf("# 1-bit Adam: %.3g %% of the steps are dense, its warm-up (--warm-up); of "
         "Efficient-Adam's %d\n#   steps send 8 bits. Momentum SGD: one bit in each, as onebit run "
         "--bits 1; onebit run: 8.\n",
         100 * training->warm_up, ONEBIT_WARMUP_STEPS);
  printf(
      "# Each row is the mean of a whole run. At the link's rate: what its bytes take if nothing "
      "else did.\n"
      "# Pays below: on links faster than this, expect less than %.0f %% gain, overlapped, even if "
      "software\n#   moves the bytes of a faster link faster. The optimizer's own time is left "
      "out.\n",
      100 * (OB_STEP_WORTH - 1));
}

static void print_methods(const struct ob_costs *costs, const struct tune_training *training) {
  printf("\n%-20s%12s%12s%12s%14s%10s%12s%10s%15s\n", "method", "exchange", "link's rate", "step",
         "bytes a host", "speed-up", "overlapped", "speed-up", "pays below");
  for (enum tune_method m = 0; m < TUNE_METHODS; m++) {
    if (m == TUNE_HIERARCHICAL && training->ranks_per_host == 1)
      continue; /* as flat */
    struct tune_exchange exchange = tune_exchange(costs, training, m);
    double step = tune_step_seconds(costs, training, m, false);
    double hidden = tune_step_seconds(costs, training, m, true);
    char exchange_text[24], link_text[24], step_text[24], hidden_text[24], bytes[24],
        rate[24] = "-";
    tune_time_text(exchange.seconds, exchange_text);
    tune_time_text(exchange.host_bytes / costs->between.bandwidth, link_text);
    tune_time_text(step, step_text);
    tune_time_text(hidden, hidden_text);
    tune_bytes_text(exchange.host_bytes, bytes);
    if (m != TUNE_DENSE)
      tune_rate_text(tune_break_even(costs, training, m), rate);
    printf("%-20s%12s%12s%12s%14s%10.2f%12s%10.2f%15s\n", tune_method_names[m], exchange_text,
           link_text, step_text, bytes,
           tune_step_seconds(costs, training, TUNE_DENSE, false) / step, hidden_text,
           tune_step_seconds(costs, training, TUNE_DENSE, true) / hidden, rate);
  }
}

/* A hierarchical exchange that is not possible counts as flat; the better of both is printed. */
static void print_scales(const struct ob_costs *costs, struct tune_training training) {
  printf("\n# The same with other numbers of hosts, %d rank%s each, no overlap: seconds a step\n",
         training.ranks_per_host, training.ranks_per_host == 1 ? "" : "s");
  printf("%-8s", "hosts");
  for (int m = 0; m < TUNE_CARD_METHODS; m++)
    printf("%20s", tune_method_names[m]);
  printf("%10s\n", "speed-up");
  for (training.hosts = 4; training.hosts <= 1024; training.hosts *= 2) {
    double step[TUNE_CARD_METHODS];
    printf("%-8d", training.hosts);
    for (enum tune_method m = 0; m < TUNE_CARD_METHODS; m++)
      printf("%20.4f", step[m] = tune_step_seconds(costs, &training, m, false));
    printf("%10.2f\n", step[TUNE_DENSE] / fmin(step[TUNE_FLAT], step[TUNE_HIERARCHICAL]));
  }
  printf("# speed-up: the better one-bit schedule over dense. Assumed: a network that carries "
         "every host's\n# link at full rate, and the same computation on each rank.\n");
}

static void predict_print_json(const struct ob_costs *costs, const struct tune_training *training) {
  struct ob_json json = {.file = stdout, .spaced = true};
  ob_json_begin(&json, NULL, '{');
  ob_json_string(&json, "costs", costs->source);
  ob_json_begin(&json, "methods", '[');
  for (enum tune_method m = 0; m < TUNE_METHODS; m++) {
    struct tune_exchange exchange = tune_exchange(costs, training, m);
    double even = m == TUNE_DENSE ? NAN : tune_break_even(costs, training, m);
    ob_json_begin(&json, NULL, '{');
    ob_json_string(&json, "method", tune_method_names[m]);
    ob_json_real(&json, "exchange_s", exchange.seconds);
    ob_json_real(&json, "link_s", exchange.host_bytes / costs->between.bandwidth);
    ob_json_real(&json, "step_s", tune_step_seconds(costs, training, m, false));
    ob_json_real(&json, "overlapped_step_s", tune_step_seconds(costs, training, m, true));
    ob_json_integer(&json, "host_bytes", (uint64_t)round(exchange.host_bytes));
    ob_json_real(&json, "break_even_bits_per_s", 8 * even);
    ob_json_end(&json, '}');
  }
  ob_json_end(&json, ']');
  ob_json_end(&json, '}');
  putchar('\n');
}

int tune_predict(const struct tune_options *options) {
  if (options->device == TUNE_CUDA)
    return tune_predict_card(options);
  if (options->whole)
    return tune_predict_whole(options);
  struct ob_costs costs;
  const struct tune_training training = {.parameters = options->parameters,
                                         .compute = options->compute,
                                         .steps = fmax(1, floor(options->steps)),
                                         .warm_up = options->warm_up,
                                         .hosts = options->hosts,
                                         .ranks_per_host = options->ranks_per_host};
  if (!tune_load_costs(options, &costs))
    return TUNE_FAILED;
  if (options->json) {
    predict_print_json(&costs, &training);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict: %.4g parameters, %d host%s x %d rank%s, %.4g s of computation a "
         "step\n",
         training.parameters, training.hosts, training.hosts == 1 ? "" : "s",
         training.ranks_per_host, training.ranks_per_host == 1 ? "" : "s", training.compute);
  predict_print_assumptions(&costs, &training);
  print_methods(&costs, &training);
  print_scales(&costs, training);
  return TUNE_OK;
}
