/* onebit-tune --predict --device cuda: what compression would bring to a training run on GPUs. */
#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "tools/tune/card.h"
#include "tools/tune/tune.h"

/* Links of hosts where none is given: 10, 25 and 100 Gbit/s. */
static const double usual_links[] = {1.25e9, 3.125e9, 12.5e9};
#define USUAL_LINKS (sizeof usual_links / sizeof usual_links[0])

struct network {
  struct tune_card card;
  struct tune_training training;
};

static size_t networks_of(const struct tune_options *options, struct network *networks) {
  struct network first = {.card = {.copy = options->copy,
                                   .launch = options->launch,
                                   .group = options->group,
                                   .inside = options->inside,
                                   .latency = options->latency},
                          .training = {.parameters = options->parameters,
                                       .compute = options->compute,
                                       .steps = options->steps,
                                       .warm_up = options->warm_up,
                                       .hosts = options->hosts,
                                       .ranks_per_host = options->ranks_per_host}};
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
  char launch[24], group[24], latency[24];
  tune_time_text(card->launch, launch);
  tune_time_text(card->group, group);
  tune_time_text(card->latency, latency);
  printf("# Counted from the source, not measured: bytes of the kernels (cuda/), launches, NCCL "
         "groups.\n"
         "# A GPU: a copy moves %.3g TB/s, a kernel takes %s at least, an NCCL group %s.\n"
         "# In a host %.3g GB/s from each GPU to the others, each way; between hosts %s more a "
         "group.\n",
         1e-12 * card->copy, launch, group, 1e-9 * card->inside, latency);
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
  char rate[24];
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
  tune_rate_text(worth_below(*network), rate);
  printf("# Overlapped, it brings %.0f %% or more on links below: %s.\n", 100 * (OB_STEP_WORTH - 1),
         rate);
}

static void print_network(const struct network *network) {
  const struct tune_training *training = &network->training;
  char rate[24];
  tune_rate_text(network->card.link, rate);
  if (training->hosts == 1)
    printf("\n# One host, %d GPU%s\n", training->ranks_per_host,
           training->ranks_per_host == 1 ? "" : "s");
  else
    printf("\n# %d hosts x %d, links of %s of payload each way\n", training->hosts,
           training->ranks_per_host, rate);
  printf("%-19s%10s%10s%10s%12s%10s%9s%12s%9s\n", "method", "kernels", "messages", "step",
         "bytes/host", "launches", "speed-up", "overlapped", "speed-up");
  for (enum tune_method m = 0; m < TUNE_CARD_METHODS; m++) {
    const struct tune_update update = tune_card_update(&network->card, training, m);
    const double step = tune_card_step(&network->card, training, m, false);
    const double hidden = tune_card_step(&network->card, training, m, true);
    char text[4][24], bytes[24];
    const double seconds[] = {update.kernels, update.messages, step, hidden};
    for (int k = 0; k < 4; k++)
      tune_time_text(seconds[k], text[k]);
    tune_bytes_text(update.host_bytes, bytes);
    printf("%-19s%10s%10s%10s%12s%10.0f%9.2f%12s%9.2f\n", tune_method_names[m], text[0], text[1],
           text[2], bytes, update.launches + update.groups,
           tune_card_step(&network->card, training, TUNE_DENSE, false) / step, text[3],
           tune_card_step(&network->card, training, TUNE_DENSE, true) / hidden);
  }
  print_verdict(network);
}

static void method_as_json(struct ob_json *json, const struct network *network,
                           enum tune_method method) {
  const struct tune_card *card = &network->card;
  const struct tune_training *training = &network->training;
  const struct tune_update update = tune_card_update(card, training, method);
  ob_json_begin(json, NULL, '{');
  ob_json_string(json, "method", tune_method_names[method]);
  ob_json_real(json, "kernels_s", update.kernels);
  ob_json_real(json, "messages_s", update.messages);
  ob_json_real(json, "step_s", tune_card_step(card, training, method, false));
  ob_json_real(json, "overlapped_step_s", tune_card_step(card, training, method, true));
  ob_json_real(json, "host_bytes", update.host_bytes);
  ob_json_real(json, "launches", update.launches);
  ob_json_real(json, "groups", update.groups);
  ob_json_end(json, '}');
}

static void predict_card_print_json(const struct network *networks, size_t count) {
  struct ob_json json = {.file = stdout, .spaced = true};
  ob_json_begin(&json, NULL, '{');
  ob_json_begin(&json, "networks", '[');
  for (const struct network *network = networks; network < networks + count; network++) {
    ob_json_begin(&json, NULL, '{');
    ob_json_integer(&json, "hosts", (uint64_t)network->training.hosts);
    ob_json_real(&json, "payload_bits_per_s", 8 * network->card.link);
    ob_json_begin(&json, "methods", '[');
    for (enum tune_method m = 0; m < TUNE_CARD_METHODS; m++)
      method_as_json(&json, network, m);
    ob_json_end(&json, ']');
    ob_json_end(&json, '}');
  }
  ob_json_end(&json, ']');
  ob_json_end(&json, '}');
  putchar('\n');
}

int tune_predict_card(const struct tune_options *options) {
  struct network networks[1 + USUAL_LINKS];
  size_t count = networks_of(options, networks);
  if (options->json) {
    predict_card_print_json(networks, count);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict --device cuda: %.4g parameters, %d host%s x %d GPU%s, %.4g s of "
         "computation a step\n",
         options->parameters, options->hosts, options->hosts == 1 ? "" : "s",
         options->ranks_per_host, options->ranks_per_host == 1 ? "" : "s", options->compute);
  predict_card_print_assumptions(&networks[0]);
  for (size_t k = 0; k < count; k++)
    print_network(&networks[k]);
  return TUNE_OK;
}
