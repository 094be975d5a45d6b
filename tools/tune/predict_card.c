/* onebit-tune --predict --device cuda: what compression would bring to a training run on GPUs. */
#include <math.h>
#include <stdio.h>

#include "tools/tune/model.h"
#include "tools/tune/tune.h"

/* Links of hosts where none is given: 10, 25 and 100 Gbit/s. */
static const double usual_links[] = {1.25e9, 3.125e9, 12.5e9};
#define USUAL_LINKS (sizeof usual_links / sizeof usual_links[0])

struct network {
  struct tune_card card;
  struct tune_training training;
};

static size_t networks_of(const struct tune_options *options, const struct tune_training *training,
                          struct network *networks) {
  struct network first = {.card = {.copy = options->copy,
                                   .launch = options->launch,
                                   .group = options->group,
                                   .inside = options->inside,
                                   .latency = options->latency},
                          .training = *training};
  size_t count = 0;
  if (!(options->latency > 0))
    first.card.latency = tune_card_default.latency;
  if (options->hosts == 1 || options->ranks_per_host > 1) { /* for comparison, if not all */
    networks[count] = first;
    networks[count++].training.hosts = 1;
  }
  for (size_t k = 0; options->hosts > 1 && k < (options->bandwidth > 0 ? 1 : USUAL_LINKS); k++) {
    networks[count] = first;
    networks[count++].card.link =
        TUNE_PAYLOAD * (options->bandwidth > 0 ? options->bandwidth : usual_links[k]);
  }
  return count;
}

static void predict_card_print_assumptions(const struct network *network) {
  const struct tune_card *card = &network->card;
  printf("# Counted from the source, not measured: bytes of the kernels (cuda/), launches, NCCL "
         "groups.\n"
         "# A GPU: a copy moves %.3g TB/s, a kernel takes %s at least, an NCCL group %s.\n"
         "# In a host %.3g GB/s from each GPU to the others, each way; between hosts %s more a "
         "group.\n",
         1e-12 * card->copy, TUNE_WORDS(TUNE_TIME, card->launch),
         TUNE_WORDS(TUNE_TIME, card->group), 1e-9 * card->inside,
         TUNE_WORDS(TUNE_TIME, card->latency));
  printf(
      "# Dense: ncclAllReduce at the rate of its links, between hosts 2(H-1)/H of the buffer "
      "and no more,\n#   and a fused Adam; float16: gradients are.\n"
      "# One bit: the kernels of 1-bit Adam, chunks that overlap as plans over NCCL cut them; "
      "in all steps.\n"
      "# 1-bit Adam: after %.3g %% dense ones. 0/1 Adam: mean of %.0f steps, local ones too. All "
      "count the update.\n"
      "# Overlapped: messages hide behind %.0f %% of the computation, but for the last of %.0f "
      "buckets.\n",
      100 * network->training.warm_up, network->training.steps, 100 * OB_STEP_HIDING,
      1 / OB_STEP_EXPOSED);
}

static double best_step(const struct network *network, enum tune_method first,
                        enum tune_method last, bool overlap) {
  double best = INFINITY;
  for (enum tune_method m = first; m <= last; m++)
    best = fmin(best, tune_card_step(&network->card, &network->training, m, overlap));
  return best;
}

/* The speed-up of the better compressed step over the better dense one, which may be of 16 bits. */
static double gain(const struct network *network, bool overlap) {
  return best_step(network, TUNE_DENSE, TUNE_HALF, overlap) /
         best_step(network, TUNE_FLAT, TUNE_HIERARCHICAL, overlap);
}

/* The link above which compression is not worth it, overlapped; bytes a second. 0: there is
 * none. */
static double worth_below(struct network network) {
  double low = 1e4, high = 1e13;
  for (int k = 0; k < 60; k++) { /* as tune_break_even */
    network.card.link = sqrt(low * high);
    *(gain(&network, true) >= OB_STEP_WORTH ? &low : &high) = network.card.link;
  }
  return low > 1.01e4 ? low : 0;
}

static void print_verdict(const struct network *network) {
  double apart = gain(network, false), overlapped = gain(network, true);
  printf("# Compression %s: %.2fx the steps of the better dense method, overlapped %.2fx.\n",
         overlapped >= OB_STEP_WORTH ? "pays"
         : apart >= OB_STEP_WORTH    ? "pays only where nothing overlaps with the computation"
                                     : "does not pay here",
         apart, overlapped);
  if (network->training.hosts == 1) {
    printf("# An allreduce alone gains nothing over bfloat16 inside a host: kernels take what "
           "messages save.\n# The gain is between hosts.\n");
    return;
  }
  printf("# Overlapped, it brings %.0f %% or more on links below: %s.\n", 100 * (OB_STEP_WORTH - 1),
         TUNE_WORDS(TUNE_RATE, worth_below(*network)));
}

static const struct tune_column card_columns[] = {
    {-19, "method", "method", TUNE_NAME},
    {10, "kernels", "kernels_s", TUNE_TIME},
    {10, "messages", "messages_s", TUNE_TIME},
    {10, "step", "step_s", TUNE_TIME},
    {12, "bytes/host", "host_bytes", TUNE_BYTES},
    {10, "launches", NULL, TUNE_COUNT},
    {9, "speed-up", NULL, TUNE_RATIO},
    {12, "overlapped", "overlapped_step_s", TUNE_TIME},
    {9, "speed-up", NULL, TUNE_RATIO},
    {0, NULL, "launches", TUNE_COUNT},
    {0, NULL, "groups", TUNE_COUNT},
    {0}};

/* Prints a row for each method, or writes it. */
static void list_updates(const struct network *network, struct ob_json *json) {
  const struct tune_card *card = &network->card;
  const struct tune_training *training = &network->training;
  for (enum tune_method m = 0; m < TUNE_CARD_METHODS; m++) {
    const struct tune_update update = tune_card_update(card, training, m);
    double step[2], dense[2];
    for (int overlap = 0; overlap < 2; overlap++) {
      step[overlap] = tune_card_step(card, training, m, overlap);
      dense[overlap] = tune_card_step(card, training, TUNE_DENSE, overlap);
    }
    const char *const texts[] = {tune_method_names[m]};
    const double values[] = {update.kernels,
                             update.messages,
                             step[0],
                             update.host_bytes,
                             update.launches + update.groups,
                             dense[0] / step[0],
                             step[1],
                             dense[1] / step[1],
                             update.launches,
                             update.groups};
    if (json)
      tune_write_row(json, card_columns, texts, values);
    else
      tune_print_row(card_columns, texts, values, "\n");
  }
}

static void print_network(const struct network *network) {
  const struct tune_training *training = &network->training;
  if (training->hosts == 1)
    printf("\n# One host, %d GPU%s\n", TUNE_COUNTED(training->ranks_per_host));
  else
    printf("\n# %d hosts x %d, links of %s of payload each way\n", training->hosts,
           training->ranks_per_host, TUNE_WORDS(TUNE_RATE, network->card.link));
  tune_print_headings(card_columns, "\n");
  list_updates(network, NULL);
  print_verdict(network);
}

static void write_networks(const struct network *networks, size_t count) {
  struct ob_json json = {.file = stdout, .spaced = true};
  ob_json_begin(&json, NULL, '{');
  ob_json_begin(&json, "networks", '[');
  for (const struct network *network = networks; network < networks + count; network++) {
    ob_json_begin(&json, NULL, '{');
    ob_json_integer(&json, "hosts", (uint64_t)network->training.hosts);
    ob_json_real(&json, "payload_bits_per_s", 8 * network->card.link);
    ob_json_begin(&json, "methods", '[');
    list_updates(network, &json);
    ob_json_end(&json, ']');
    ob_json_end(&json, '}');
  }
  ob_json_end(&json, ']');
  ob_json_end(&json, '}');
  putchar('\n');
}

int tune_predict_card(const struct tune_options *options, const struct tune_training *training) {
  struct network networks[1 + USUAL_LINKS];
  size_t count = networks_of(options, training, networks);
  if (options->json) {
    write_networks(networks, count);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict --device cuda: %.4g parameters, %d host%s x %d GPU%s, %.4g s of "
         "computation a step\n",
         options->parameters, TUNE_COUNTED(options->hosts), TUNE_COUNTED(options->ranks_per_host),
         options->compute);
  predict_card_print_assumptions(&networks[0]);
  for (size_t k = 0; k < count; k++)
    print_network(&networks[k]);
  return TUNE_OK;
}
