/* onebit-tune --predict: what compression would bring to a training run. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tools/tune/training.h"
#include "tools/tune/tune.h"

/* TCP over Ethernet carries 1448 bytes in every 1538. */
#define PAYLOAD (1448.0 / 1538)

/* --- What the prediction starts from */

static void load_costs(const struct tune_options *options, struct ob_costs *costs) {
  static const struct ob_tuning_here anywhere = {NULL, NULL};
  char path[OB_TUNING_PATH_ROOM];
  if (options->tuning && strcmp(options->tuning, "none") == 0)
    ob_costs_default("avx2", costs);
  else if (options->tuning)
    ob_tuning_read(options->tuning, &anywhere, costs, NULL);
  else if (ob_tuning_path(path))
    ob_tuning_read(path, &anywhere, costs, NULL);
  else
    ob_costs_default("avx2", costs);
  /* What whole calls took is of one network and one number of hosts: not what is asked for. */
  memset(&costs->measured, 0, sizeof costs->measured);
  if (options->bandwidth > 0)
    costs->between.bandwidth = options->bandwidth * PAYLOAD;
  if (options->latency > 0) {
    costs->mpi_round += options->latency - costs->between.latency;
    costs->mpi_round = fmax(costs->mpi_round, options->latency);
    costs->between.latency = options->latency;
  }
  if (options->cores > 0) {
    costs->cores_per_host = options->cores;
    costs->cores_shared = 0;
  }
}

static struct tune_training training_of(const struct tune_options *options) {
  return (struct tune_training){.parameters = options->parameters,
                                .compute = options->compute,
                                .steps = options->steps,
                                .hosts = options->hosts,
                                .ranks_per_host = options->ranks_per_host};
}

static void rate_text(double bytes_a_second, char text[24]) {
  double bits = 8 * bytes_a_second;
  if (isinf(bits))
    snprintf(text, 24, "none: always");
  else if (bits == 0)
    snprintf(text, 24, "none: never");
  else
    snprintf(text, 24, bits < 1e9 ? "%.3g Mbit/s" : "%.3g Gbit/s", bits / (bits < 1e9 ? 1e6 : 1e9));
}

/* --- Tables */

static void print_assumptions(const struct ob_costs *costs, const struct tune_training *training) {
  struct tune_policy policy = tune_policy(training->steps);
  char rate[24], latency[24];
  rate_text(costs->between.bandwidth, rate);
  tune_time_text(costs->between.latency, latency);
  printf("# Costs: %s\n", costs->source);
  printf("# Link of a host: %s of payload each way, latency %s.", rate, latency);
  if (costs->cores_per_host > 0)
    printf(" %g cores a host.\n", costs->cores_per_host);
  else
    printf(" A core a rank.\n");
  if (costs->cores_shared > 0)
    printf("# %.3g cores that all hosts share, as measured: one machine. --cores says otherwise.\n",
           costs->cores_shared);
  printf("# Dense: MPI_Allreduce at %.2f of that, and %.2f ns of a core a byte; float16: half the "
         "bytes,\n#   and converting.\n",
         costs->mpi_efficiency, 1e9 * costs->mpi_byte);
  printf("# Overlap: the exchange hides behind %.0f %% of the computation (backward), but for the "
         "last of %.0f\n#   buckets.\n",
         100 * TUNE_HIDING, 1 / TUNE_EXPOSED);
  printf(
      "# 0/1 Adam, %.0f steps: its variance is frozen after %d, all else is as onebit_zero_one_adam"
      "\n#   has it by default. One bit in %.1f %% of the steps, full precision in %.2f %%, "
      "nothing in "
      "%.1f %%.\n",
      training->steps, TUNE_FREEZE_STEP, 100 * policy.one_bit, 100 * policy.dense,
      100 * (1 - policy.one_bit - policy.dense));
  printf("# Pays below: the link at which dense takes as long, if a faster one comes with software "
         "that\n#   moves its bytes faster in proportion; no overlap.\n");
  printf("# One bit: the compressed stage; warm-up steps are as dense. The time of the optimizer "
         "is left out.\n");
}

static void print_methods(const struct ob_costs *costs, const struct tune_training *training) {
  printf("\n%-20s%13s%13s%14s%10s%13s%10s%16s\n", "method", "exchange", "step", "bytes a host",
         "speed-up", "overlapped", "speed-up", "pays below");
  for (int m = 0; m < TUNE_METHODS; m++) {
    enum tune_method method = (enum tune_method)m;
    double step = tune_step_seconds(costs, training, method, false);
    double hidden = tune_step_seconds(costs, training, method, true);
    char exchange_text[24], step_text[24], hidden_text[24], bytes[24], rate[24] = "-";
    tune_time_text(tune_exchange_seconds(costs, training, method), exchange_text);
    tune_time_text(step, step_text);
    tune_time_text(hidden, hidden_text);
    tune_bytes_text(tune_host_bytes(costs, training, method), bytes);
    if (method != TUNE_DENSE)
      rate_text(tune_break_even(costs, training, method), rate);
    printf("%-20s%13s%13s%14s%10.2f%13s%10.2f%16s\n", tune_method_names[m], exchange_text,
           step_text, bytes, tune_step_seconds(costs, training, TUNE_DENSE, false) / step,
           hidden_text, tune_step_seconds(costs, training, TUNE_DENSE, true) / hidden, rate);
  }
}

/* Where one-bit hierarchical is not possible it is as flat; the better of both is printed. */
static void print_scales(const struct ob_costs *costs, const struct tune_training *training) {
  printf("\n# The same with other numbers of hosts, %d rank%s each, no overlap: seconds a step\n",
         training->ranks_per_host, training->ranks_per_host == 1 ? "" : "s");
  printf("%-8s", "hosts");
  for (int m = 0; m < TUNE_METHODS; m++)
    printf("%20s", tune_method_names[m]);
  printf("%10s\n", "speed-up");
  for (int hosts = 4; hosts <= 1024; hosts *= 2) {
    struct tune_training other = *training;
    double step[TUNE_METHODS];
    other.hosts = hosts;
    printf("%-8d", hosts);
    for (int m = 0; m < TUNE_METHODS; m++) {
      step[m] = tune_step_seconds(costs, &other, (enum tune_method)m, false);
      printf("%20.4f", step[m]);
    }
    printf("%10.2f\n", step[TUNE_DENSE] / fmin(step[TUNE_FLAT], step[TUNE_HIERARCHICAL]));
  }
  printf(
      "# speed-up: the better one-bit schedule over dense. Assumed: a network that carries every "
      "host's\n# link at full rate, and the same computation on each rank.\n");
}

/* Words may hold what JSON must not. */
static void print_quoted(const char *text) {
  putchar('"');
  for (; *text; text++)
    if ((unsigned char)*text >= ' ' && *text != '"' && *text != '\\')
      putchar(*text);
    else
      putchar('?');
  putchar('"');
}

static void print_json(const struct ob_costs *costs, const struct tune_training *training) {
  printf("{\"costs\": ");
  print_quoted(costs->source);
  printf(", \"methods\": [");
  for (int m = 0; m < TUNE_METHODS; m++) {
    enum tune_method method = (enum tune_method)m;
    double even = method == TUNE_DENSE ? 0 : tune_break_even(costs, training, method);
    printf("%s\n  {\"method\": \"%s\", \"exchange_s\": %.9g, \"step_s\": %.9g, "
           "\"overlapped_step_s\": %.9g, \"host_bytes\": %.0f, \"break_even_bits_per_s\": ",
           m ? "," : "", tune_method_names[m], tune_exchange_seconds(costs, training, method),
           tune_step_seconds(costs, training, method, false),
           tune_step_seconds(costs, training, method, true),
           tune_host_bytes(costs, training, method));
    if (method == TUNE_DENSE || isinf(even))
      printf("null}");
    else
      printf("%.9g}", 8 * even);
  }
  printf("\n]}\n");
}

int tune_predict(const struct tune_options *options) {
  struct ob_costs costs;
  struct tune_training training = training_of(options);
  load_costs(options, &costs);
  if (options->json) {
    print_json(&costs, &training);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict: %.4g parameters, %d host%s x %d rank%s, %.4g s of computation a "
         "step\n",
         training.parameters, training.hosts, training.hosts == 1 ? "" : "s",
         training.ranks_per_host, training.ranks_per_host == 1 ? "" : "s", training.compute);
  print_assumptions(&costs, &training);
  print_methods(&costs, &training);
  print_scales(&costs, &training);
  return TUNE_OK;
}
