/* onebit-tune --predict: prints how much time compression would save in a training step or in a
 * whole run. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "onebit/efficient_adam.h"
#include "tools/tune/tune.h"

/* Sets MPI's costs if there is no tuning file: MPI then needs as much time as the library to send
 * and receive a byte. The model then predicts that MPI reaches 0.93 of a gigabit link's rate. The
 * best of Open MPI's algorithms reached 0.92 at 16 MiB and 0.95 at 64 MiB on 4 hosts (README.md).
 * The default costs that plans use are not used here: they were fitted to Open MPI's ring on hosts
 * with too few cores. */
static void set_mpi_costs(struct ob_costs *costs) {
  costs->mpi_efficiency = 1;
  costs->mpi_byte = 2 * costs->between.byte;
}

/* Resets the costs between hosts to the defaults, if the tuning file is that of a single host: its
 * fit has changed them by times inside the host. */
static void forget_costs_between(struct ob_costs *costs) {
  struct ob_costs defaults;
  ob_costs_default("avx2", &defaults);
  costs->between = defaults.between;
  costs->exchange_efficiency = defaults.exchange_efficiency;
  costs->mpi_round = defaults.mpi_round;
  set_mpi_costs(costs);
  snprintf(costs->source + strlen(costs->source), sizeof costs->source - strlen(costs->source),
           "; for links between hosts, which it has not measured, the defaults");
}

static bool predict_load_costs(const struct tune_options *options, struct ob_costs *costs) {
  static const struct ob_tuning_here anywhere = {NULL, NULL};
  char found[OB_TUNING_PATH_CAPACITY];
  const char *path = options->tuning ? options->tuning : ob_tuning_path(found) ? found : "none";
  enum ob_tuning_state state = OB_TUNING_OFF;
  ob_costs_default("avx2", costs);
  if (strcmp(path, "none") != 0)
    state = ob_tuning_read(path, &anywhere, costs, NULL);
  if (options->tuning && state != OB_TUNING_READ && state != OB_TUNING_OFF) {
    tune_print_error("--tuning: %s", costs->source + strlen("defaults: "));
    return false;
  }
  if (state != OB_TUNING_READ) { /* keeps `source`, which says why the file was not read */
    char source[sizeof costs->source];
    memcpy(source, costs->source, sizeof source);
    ob_costs_default("avx2", costs);
    memcpy(costs->source, source, sizeof source);
    set_mpi_costs(costs);
  } else if (costs->hosts <= 1 && options->training.hosts > 1) {
    forget_costs_between(costs);
  }
  /* Removes the corrections by measured calls: they are valid only for the measured network and
   * number of hosts. */
  memset(&costs->measured, 0, sizeof costs->measured);
  if (options->bandwidth > 0)
    costs->between.bandwidth = options->bandwidth * TUNE_PAYLOAD;
  if (options->latency > 0) {
    costs->mpi_round += options->latency - costs->between.latency;
    costs->mpi_round = fmax(costs->mpi_round, options->latency);
    costs->between.latency = options->latency;
  }
  if (options->cores > 0 || options->shared_cores > 0) {
    costs->cores_per_host = options->cores;
    costs->cores_shared = options->shared_cores;
  }
  return true;
}

static struct ob_json predict_begin_json(const struct ob_costs *costs,
                                         const struct tune_training *training) {
  struct ob_json json = {.file = stdout, .spaced = true};
  ob_json_begin(&json, NULL, '{');
  ob_json_put_string(&json, "costs", costs->source);
  ob_json_real(&json, "core_sharing", tune_sharing_factor(costs, training));
  return json;
}

/* Ends the list of rows and the JSON object that contains it. */
static void predict_end_json(struct ob_json *json) {
  ob_json_end(json, ']');
  ob_json_end(json, '}');
  putchar('\n');
}

/* Prints which costs, latency and cores the prediction assumes. */
static void predict_print_costs(const struct ob_costs *costs,
                                const struct tune_training *training) {
  const double sharing = tune_sharing_factor(costs, training);
  printf("# Costs: %s\n# Latency one way: %s. Cores: ", costs->source,
         TUNE_WORDS(TUNE_TIME, costs->between.latency));
  if (costs->cores_per_host > 0)
    printf("%.3g a host%s; ", costs->cores_per_host,
           fmod(costs->cores_per_host, 1) > 0 ? ", as the ranks slowed each other down" : "");
  if (costs->cores_shared > 0)
    printf("%.3g in all, which the hosts share because they are one machine; ",
           costs->cores_shared);
  if (sharing > 1)
    printf("ranks share cores, so that\n#   computation, codec and TCP take %.2f times as long as "
           "alone.\n",
           sharing);
  else
    printf("each rank has a core of its own. If not, give\n#   --cores N for each host, or "
           "--shared-cores N for one machine that has all hosts.\n");
}

static void predict_print_overlap(const struct tune_training *training) {
  const double buckets = tune_buckets(training);
  printf(
      "# Overlapped: read this column and the speed-up after it if the program exchanges while it\n"
      "#   computes, as PyTorch's DistributedDataParallel does, else those before it. %s\n",
      training->clip ? "With clipping,\n#   exchanges in one bit do not overlap."
                     : "Add --clip if it\n#   clips gradients by their norm.");
  if (buckets > 1)
    printf("#   The exchange hides behind %.0f %% of the computation, but for the first and the "
           "last of\n"
           "#   %.3g buckets, and for the work of codec and TCP.",
           100 * OB_STEP_HIDING, buckets);
  else
    printf("#   The model has one bucket, whose exchange overlaps nothing.");
  printf(" (--buckets; DistributedDataParallel\n#   makes one for each 25 MiB of gradients.)\n");
}

/* Bytes per second. On faster links MPI usually runs over RDMA, whose costs the default model
 * lacks. */
#define FAST_LINK 3e9

static void predict_print_assumptions(const struct ob_costs *costs,
                                      const struct tune_training *training) {
  const struct tune_policy policy = tune_policy(training, TUNE_ZERO_ONE);
  const struct tune_exchange dense = tune_exchange(costs, training, TUNE_DENSE);
  predict_print_costs(costs, training);
  printf("# Link of a host: %s of payload each way.\n",
         TUNE_WORDS(TUNE_RATE, costs->between.bandwidth));
  if (costs->between.bandwidth > FAST_LINK && !strncmp(costs->source, "defaults", 8))
    printf("# These are costs of TCP on gigabit Ethernet. On so fast a link, RDMA makes dense sums "
           "faster\n"
           "#   than predicted: let onebit-tune measure them.\n");
  printf(
      "# Dense: MPI_Allreduce, which reaches %.2f of the link here; float16: half the bytes, and "
      "a conversion.\n",
      dense.host_bytes / costs->between.bandwidth / dense.seconds);
  predict_print_overlap(training);
  printf("# 0/1 Adam, %.0f steps: its variance is frozen after step %d, and all other options are "
         "the\n#   defaults. It sends one bit in %.1f %% of the steps, full precision in %.2f %%, "
         "nothing in %.1f %%.\n",
         training->steps, TUNE_FREEZE_STEP, 100 * policy.one_bit, 100 * policy.dense,
         100 * (1 - policy.one_bit - policy.dense));
  printf("# 1-bit Adam: %.3g %% of the steps are dense, its warm-up (--warm-up); the "
         "first %d steps of\n#   Efficient-Adam and momentum SGD send 8 bits, as all steps of "
         "onebit run do.\n",
         100 * training->warm_up, ONEBIT_WARMUP_STEPS);
  printf(
      "# Each row is the mean of a whole run. At the link's rate: the time of its bytes alone.\n"
      "# Pays below: on faster links expect less than %.0f %% gain, overlapped, even if software\n"
      "#   keeps up with the link. The optimizer's own time is left out.\n",
      100 * (OB_STEP_WORTH - 1));
}

static const struct tune_column step_columns[] = {
    {-20, "method", "method", TUNE_NAME},
    {12, "exchange", "exchange_s", TUNE_TIME},
    {12, "link's rate", "link_s", TUNE_TIME},
    {12, "step", "step_s", TUNE_TIME},
    {14, "bytes a host", "host_bytes", TUNE_BYTES},
    {10, "speed-up", NULL, TUNE_RATIO},
    {12, "overlapped", "overlapped_step_s", TUNE_TIME},
    {10, "speed-up", NULL, TUNE_RATIO},
    {15, "pays below", "break_even_bits_per_s", TUNE_RATE},
    {0}};

/* Prints a row for each method, or writes the rows as JSON. */
static void list_methods(const struct ob_costs *costs, const struct tune_training *training,
                         struct ob_json *json) {
  for (enum tune_method m = 0; m < TUNE_METHODS; m++) {
    const struct tune_exchange exchange = tune_exchange(costs, training, m);
    double step[2], dense[2];
    for (int overlap = 0; overlap < 2; overlap++) {
      step[overlap] = tune_step_seconds(costs, training, m, overlap);
      dense[overlap] = tune_step_seconds(costs, training, TUNE_DENSE, overlap);
    }
    const char *const texts[] = {tune_method_names[m]};
    const double values[] = {exchange.seconds,
                             exchange.host_bytes / costs->between.bandwidth,
                             step[0],
                             round(exchange.host_bytes),
                             dense[0] / step[0],
                             step[1],
                             dense[1] / step[1],
                             m == TUNE_DENSE ? NAN : tune_break_even(costs, training, m)};
    if (json)
      tune_write_row(json, step_columns, texts, values);
    else if (m != TUNE_HIERARCHICAL || training->ranks_per_host > 1) /* else it equals TUNE_FLAT */
      tune_print_row(step_columns, texts, values, "\n");
  }
}

static int predict_steps(const struct tune_options *options, const struct ob_costs *costs) {
  const struct tune_training *training = &options->training;
  if (options->json) {
    struct ob_json json = predict_begin_json(costs, training);
    ob_json_begin(&json, "methods", '[');
    list_methods(costs, training, &json);
    predict_end_json(&json);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict: %.4g parameters, %d host%s x %d rank%s, %.4g s of computation a "
         "step\n",
         training->parameters, TUNE_COUNTED(training->hosts),
         TUNE_COUNTED(training->ranks_per_host), training->compute);
  predict_print_assumptions(costs, training);
  printf("\n");
  tune_print_headings(step_columns, "\n");
  list_methods(costs, training, NULL);
  return TUNE_OK;
}
/* --- A whole run over a slow network -----------------------------------------------------------*/

/* The bandwidths of links in bits per second, if the command line gives none. */
static const double slow_links[] = {1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10};

const char *const tune_width_names[] = {"1", "2", "4", "8", "float32", "sparse", NULL};
static const int widths[] = {1, 2, 4, 8, TUNE_FLOAT32, TUNE_SPARSE};

static const char *get_width_name(int bits) {
  size_t k = 0;
  while (widths[k] != bits)
    k++;
  return tune_width_names[k];
}

struct whole_ways {
  struct tune_way way[TUNE_WAYS + 2]; /* the ways to choose from, and two for comparison */
  size_t count;                       /* number of ways to choose from */
  size_t others;                      /* number of ways for comparison, which follow */
};

/* Adds outer steps in float32 and in SparseLoCo's format for comparison, with the settings that
 * their authors published, but with the command line's H if it gives one. */
static void add_compared_ways(const struct tune_wanted *wanted, struct whole_ways *ways) {
  const int local_steps = wanted->local_steps > 0 ? wanted->local_steps : 30;
  ways->way[ways->count + ways->others++] =
      (struct tune_way){"outer step", TUNE_FLOAT32, TUNE_FLOAT32, 0, local_steps, 1, 0};
  ways->way[ways->count + ways->others++] =
      (struct tune_way){"outer, SparseLoCo", TUNE_SPARSE, TUNE_SPARSE, 0, local_steps, 1, 0};
}

static void print_whole_heading(const struct tune_training *training,
                                const struct ob_costs *costs) {
  printf("# onebit-tune --predict --whole-run: %.4g parameters, %d host%s x %d rank%s, %.4g steps "
         "of\n#   %.4g s: %s without a network.\n",
         training->parameters, TUNE_COUNTED(training->hosts),
         TUNE_COUNTED(training->ranks_per_host), training->steps, training->compute,
         TUNE_WORDS(TUNE_DURATION,
                    training->steps * training->compute * tune_sharing_factor(costs, training)));
  predict_print_costs(costs, training);
  printf(
      "# Each step: %.0f %% of the computation hides the exchange, but for the work of codec "
      "and TCP;\n#   %d steps are Efficient-Adam's warm-up, in 8 bits. Outer step: every H steps F "
      "fragments of the\n#   drift, each applied `delay` steps after its exchange began. bytes: "
      "out of a "
      "host, as many come in.\n"
      "# Chosen: the way that changes training least of those within %.0f %% of no network, else "
      "the fastest.\n",
      100 * OB_STEP_HIDING, ONEBIT_WARMUP_STEPS, 100 * (TUNE_NEAR - 1));
}

static const struct tune_column link_columns[] = {{-12, "link", NULL, TUNE_RATE},
                                                  {12, "dense", NULL, TUNE_DURATION},
                                                  {16, "Efficient-Adam", NULL, TUNE_DURATION},
                                                  {0}};
static const struct tune_column way_columns[] = {{-23, "way", "way", TUNE_NAME},
                                                 {5, "H", "local_steps", TUNE_COUNT},
                                                 {9, "bits", "bits", TUNE_NAME},
                                                 {4, "F", "fragments", TUNE_COUNT},
                                                 {7, "delay", "delay", TUNE_COUNT},
                                                 {12, "exchange", "exchange_s", TUNE_TIME},
                                                 {12, "bytes", "host_bytes", TUNE_BYTES},
                                                 {12, "run", "run_s", TUNE_DURATION},
                                                 {12, "no network", NULL, TUNE_TIMES},
                                                 {0, NULL, "waiting_s", TUNE_TIME},
                                                 {0}};

/* Prints the time and bytes of a run that trains in one way, or writes them as JSON. */
static void list_way(const struct ob_costs *costs, const struct tune_training *training,
                     const struct tune_way *way, struct ob_json *json, const char *mark) {
  const struct tune_whole whole = tune_whole(costs, training, way);
  const char *const texts[] = {way->name, get_width_name(way->bits)};
  const double values[] = {way->local_steps,
                           way->fragments,
                           way->delay,
                           whole.exchange,
                           whole.host_bytes,
                           whole.seconds,
                           whole.seconds / (whole.seconds - whole.waiting),
                           whole.waiting};
  if (json)
    tune_write_row(json, way_columns, texts, values);
  else
    tune_print_row(way_columns, texts, values, mark);
}

static void print_ways(const struct ob_costs *costs, const struct tune_training *training,
                       const struct whole_ways *ways) {
  const size_t chosen = tune_choose_way(costs, training, ways->way, ways->count);
  printf("\n# Link of a host: %s of payload each way\n",
         TUNE_WORDS(TUNE_RATE, costs->between.bandwidth));
  tune_print_headings(way_columns, "\n");
  for (size_t k = 0; k < ways->count + ways->others; k++)
    list_way(costs, training, &ways->way[k], NULL,
             k == chosen        ? "  <- chosen\n"
             : k == ways->count ? "  to compare\n"
                                : "\n");
}

/* Prints the chosen way for each bandwidth of slow_links. */
static void print_links(const struct ob_costs *costs, const struct tune_training *training,
                        const struct whole_ways *ways) {
  printf("\n");
  tune_print_headings(link_columns, "   ");
  tune_print_headings(way_columns, "\n");
  for (size_t k = 0; k < sizeof slow_links / sizeof slow_links[0]; k++) {
    struct ob_costs there = *costs;
    there.between.bandwidth = slow_links[k] / 8 * TUNE_PAYLOAD;
    const double values[] = {slow_links[k] / 8, tune_whole(&there, training, &ways->way[0]).seconds,
                             tune_whole(&there, training, &ways->way[1]).seconds};
    tune_print_row(link_columns, NULL, values, "   ");
    list_way(&there, training,
             &ways->way[tune_choose_way(&there, training, ways->way, ways->count)], NULL, "\n");
  }
}

static void write_ways(const struct ob_costs *costs, const struct tune_training *training,
                       const struct whole_ways *ways) {
  struct ob_json json = predict_begin_json(costs, training);
  ob_json_real(&json, "payload_bits_per_s", 8 * costs->between.bandwidth);
  ob_json_integer(&json, "chosen", tune_choose_way(costs, training, ways->way, ways->count));
  ob_json_begin(&json, "ways", '[');
  for (size_t k = 0; k < ways->count + ways->others; k++)
    list_way(costs, training, &ways->way[k], &json, "");
  predict_end_json(&json);
}

/* Fills in the ways to train. If the requested values make a way impossible, prints an error
 * message and returns false. */
static bool fill_ways(const struct tune_wanted *wanted, struct whole_ways *ways) {
  ways->count = tune_list_ways(wanted, ways->way);
  for (size_t k = 0; k < ways->count; k++)
    if (tune_way_error(&ways->way[k])) {
      tune_print_error("%s", tune_way_error(&ways->way[k]));
      return false;
    }
  add_compared_ways(wanted, ways);
  return true;
}

static int predict_whole(const struct tune_options *options, const struct ob_costs *costs) {
  const struct tune_training *training = &options->training;
  struct whole_ways ways = {.count = 0};
  struct tune_wanted wanted = options->wanted;
  wanted.bits = wanted.bits >= 0 ? widths[wanted.bits] : -1;
  if (!fill_ways(&wanted, &ways))
    return TUNE_USAGE;
  if (options->json) {
    write_ways(costs, training, &ways);
    return TUNE_OK;
  }
  print_whole_heading(training, costs);
  (options->bandwidth > 0 ? print_ways : print_links)(costs, training, &ways);
  return TUNE_OK;
}

int tune_predict(const struct tune_options *options) {
  struct ob_costs costs;
  if (options->device == TUNE_CUDA)
    return tune_predict_card(options);
  if (!predict_load_costs(options, &costs))
    return TUNE_FAILED;
  return (options->whole ? predict_whole : predict_steps)(options, &costs);
}
