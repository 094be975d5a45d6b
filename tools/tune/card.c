/* onebit-tune --predict --device cuda: predicts the time of a training step on GPUs, and prints how
 * much of it compression would save. */
#include <math.h>
#include <stdio.h>

#include "base/knobs.h"
#include "tools/tune/tune.h"

#define BLOCK ((double)OB_DEFAULT_BLOCK)
#define BITS  (1.0 / 8 + 4 / BLOCK)

/* The bytes per element that kernels read and write: those of cuda/compress.cu with momentum,
 * cuda/reduce.cu with the given number of members, cuda/passes.cu, and cuda/dense.cu. */
#define COMPRESS          12.26
#define APPLY             12.13
#define ADAM(of_gradient) (24.0 + (of_gradient))
#define LOCAL             24.0 /* 0/1 Adam's local step */
#define LOAD              8.0
#define MEAN              4.0 /* reads this rank's segment of the data of all ranks on the host */
#define REDUCE(members)   (8 + ((members) + 1) / 8 + 4 * ((members) + 3) / BLOCK)

/* The bytes per element that Efficient-Adam reads and writes on a processor: 4 of the gradient, 4
 * of the second moments, 8 of the residual, 2 of momentum and bits, and 8 of the parameter. */
#define STAGED 26.0

/* The number of kernels that run once in a call (conclude) and once per chunk (compress, seal,
 * open, reduce, seal, open, apply), as in tests/gpu/test_sizes.c. The hierarchical schedule adds
 * five kernels inside a host: load, seal, open, mean and open. If a message has at most 8 runs of
 * 1024 words, compress also seals it and reduce also opens it, without separate kernels. */
#define CALL_KERNELS        1
#define CHUNK_KERNELS       7
#define CHUNK_KERNELS_SHORT 4
#define CHUNK_KERNELS_HOST  12
#define SHORT               (8 * 1024 * 32 / (1 + 32 / BLOCK))

/* Limit the number of chunks of a plan over NCCL. More chunks would cost more than their overlap
 * saves, or would exceed a window of dense messages. */
#define ELEMENTS_A_CHUNK      (4.0 * (1 << 20))
#define MAX_CHUNKS            8
#define ELEMENTS_A_CHUNK_HOST (2.0 * (1 << 20))
#define MAX_CHUNKS_HOST       16

/* The values of an NVIDIA H200. copy: measured with a device-to-device copy. launch: the usual time
 * of a small kernel that follows another kernel on a stream. group: the usual time of an NCCL group
 * of a few messages over NVLink. inside: 18 links of NVLink 4, with 25 GB/s each way. latency: that
 * of sockets between hosts, with an interrupt and a switch. pcie: a copy over PCIe 5 in pieces.
 * memory: eight channels of DDR5. */
const struct tune_card tune_card_default = {.copy = 4.3e12,
                                            .launch = 2.5e-6,
                                            .group = 10e-6,
                                            .inside = 450e9,
                                            .latency = 30e-6,
                                            .pcie = 25e9,
                                            .memory = 300e9};

struct shape {
  double n, hosts, each, ranks;
};

static struct shape get_shape(const struct tune_training *training) {
  return (struct shape){training->parameters, training->hosts, training->ranks_per_host,
                        (double)training->hosts * training->ranks_per_host};
}

static double clamp_to_integer(double low, double value, double high) {
  return fmax(low, fmin(floor(value), high));
}

static double group_seconds(const struct tune_card *card, const struct shape *shape) {
  return card->group + (shape->hosts > 1 ? card->latency : 0);
}

/* Returns the seconds in which a GPU sends `inside` bytes inside its host while the host sends
 * `host` bytes to other hosts. */
static double wire_seconds(const struct tune_card *card, double inside, double host) {
  return fmax(inside / card->inside, host > 0 ? host / card->link : 0);
}

/* Predicts the update with the dense allreduce that sends the fewest bytes: a ring inside each
 * host, and a tree between hosts. A ring through all ranks would send up to twice as many bytes. */
static struct tune_update predict_dense(const struct tune_card *card, const struct shape *shape,
                                        double size) {
  const double bytes = 2 * size * shape->n, hops = 2 * ceil(log2(shape->hosts));
  const double near = (shape->each - 1) / shape->each * bytes;
  struct tune_update update = {.kernels = card->launch + ADAM(size) * shape->n / card->copy,
                               .launches = 1,
                               .groups = shape->ranks > 1,
                               .host_bytes = (shape->hosts - 1) / shape->hosts * bytes};
  if (shape->ranks > 1)
    update.messages =
        card->group + hops * card->latency + wire_seconds(card, near, update.host_bytes);
  update.together = update.kernels + update.messages;
  return update;
}

/* Returns the update if it runs in chunks. The kernels and the messages of the first chunk follow
 * each other. For the other chunks, kernels and messages overlap, and only the longer time of the
 * two counts. The result is applied at the end, when the device knows that all values are
 * finite. */
static struct tune_update overlap_chunks(const struct tune_card *card, double chunks,
                                         struct tune_update update, double apply) {
  const double launches = update.launches * card->launch, early = update.kernels + launches;
  update.kernels = early + apply;
  update.together =
      (early + update.messages) / chunks + (1 - 1 / chunks) * fmax(early, update.messages) + apply;
  return update;
}

static struct tune_update predict_flat(const struct tune_card *card, const struct shape *shape) {
  const double others = shape->ranks - 1, message = shape->n / shape->ranks * BITS;
  const double chunks =
      others > 0 ? clamp_to_integer(1, sqrt(shape->n / ELEMENTS_A_CHUNK), MAX_CHUNKS) : 1;
  const double near = (shape->each - 1) * message;
  const double host = shape->each * (shape->ranks - shape->each) * message;
  const double bytes = COMPRESS * shape->n + REDUCE(shape->ranks) * shape->n / shape->ranks;
  const double kernels =
      shape->n / shape->ranks / chunks > SHORT ? CHUNK_KERNELS : CHUNK_KERNELS_SHORT;
  struct tune_update update = {.kernels = bytes / card->copy,
                               .launches = CALL_KERNELS + chunks * kernels,
                               .groups = others > 0 ? 2 * chunks : 0,
                               .host_bytes = 2 * host};
  update.messages = update.groups * group_seconds(card, shape) + 2 * wire_seconds(card, near, host);
  return overlap_chunks(card, chunks, update, APPLY * shape->n / card->copy);
}

/* Predicts the update with the hierarchical schedule. Each rank of a host reduces and compresses an
 * equal part of the elements. The ranks of the host send it their gradients as float32, then hosts
 * exchange bits, and then each rank sends the resulting bits to the other ranks of its host. */
static struct tune_update predict_hierarchical(const struct tune_card *card,
                                               const struct shape *shape) {
  const double share = shape->n / shape->each, away = (shape->hosts - 1) / shape->hosts;
  const double near = (shape->each - 1) / shape->each * shape->n;
  const double chunks = clamp_to_integer(1, shape->n / ELEMENTS_A_CHUNK_HOST, MAX_CHUNKS_HOST);
  const double bytes = (LOAD + MEAN) * shape->n + (4 + COMPRESS) * share +
                       REDUCE(shape->hosts) * share / shape->hosts;
  struct tune_update update = {.kernels = bytes / card->copy,
                               .launches = CALL_KERNELS + chunks * CHUNK_KERNELS_HOST,
                               .groups = 4 * chunks,
                               .host_bytes = 2 * away * shape->n * BITS};
  update.messages = 2 * chunks * (card->group + group_seconds(card, shape)) +
                    wire_seconds(card, near * (4 + BITS), update.host_bytes);
  return overlap_chunks(card, chunks, update, APPLY * shape->n / card->copy);
}

/* Predicts the update if the processors compute it: gradients are copied to the host, hosts
 * exchange bits, and parameters are copied back. With `shares`, NCCL first does a reduce-scatter of
 * the gradients among the GPUs of a host, and afterwards an allgather of the parameters. Nothing
 * overlaps. */
static struct tune_update predict_staged(const struct tune_card *card, const struct shape *shape,
                                         bool shares) {
  const double own = shares ? shape->n / shape->each : shape->n; /* elements that one GPU copies */
  const double near = shares ? (shape->each - 1) / shape->each * shape->n * (4 + 4) : 0;
  struct tune_update update = {
      .kernels = own * (4 + 4) / card->pcie + own * shape->each * STAGED / card->memory,
      .groups = shares ? 2 : 0,
      .host_bytes = 2 * (shape->hosts - 1) / shape->hosts * shape->n * BITS};
  update.messages = update.groups * card->group + 2 * card->latency + near / card->inside +
                    update.host_bytes / card->link;
  update.together = update.kernels + update.messages;
  return update;
}

static struct tune_update predict_compressed(const struct tune_card *card,
                                             const struct shape *shape, enum tune_method method) {
  struct tune_update one = predict_flat(card, shape);
  if (method == TUNE_FLAT || shape->hosts < 2 || shape->each < 2)
    return one;
  struct tune_update two = predict_hierarchical(card, shape);
  return method == TUNE_HIERARCHICAL || two.together < one.together ? two : one;
}

/* Predicts the mean update of a run with compressed, dense and local steps. The policy has the
 * fraction of the steps of each kind. */
static struct tune_update predict_mixed(const struct tune_card *card, const struct shape *shape,
                                        struct tune_policy policy) {
  const struct tune_update bits = predict_compressed(card, shape, TUNE_ZERO_ONE),
                           full = predict_dense(card, shape, 4);
  const double none = 1 - policy.one_bit - policy.dense; /* local steps; none sends 8 bits */
  const double alone = card->launch + LOCAL * shape->n / card->copy;
#define MEAN_OF(what) (policy.one_bit * bits.what + policy.dense * full.what)
  return (struct tune_update){.kernels = MEAN_OF(kernels) + none * alone,
                              .messages = MEAN_OF(messages),
                              .together = MEAN_OF(together) + none * alone,
                              .launches = MEAN_OF(launches) + none,
                              .groups = MEAN_OF(groups),
                              .host_bytes = MEAN_OF(host_bytes)};
#undef MEAN_OF
}

struct tune_update tune_card_update(const struct tune_card *card,
                                    const struct tune_training *training, enum tune_method method) {
  const struct shape shape = get_shape(training);
  if (method == TUNE_DENSE || method == TUNE_HALF)
    return predict_dense(card, &shape, method == TUNE_DENSE ? 4 : 2);
  if (method == TUNE_ADAM || method == TUNE_ZERO_ONE)
    return predict_mixed(card, &shape, tune_policy(training, method));
  if (method == TUNE_STAGED || method == TUNE_STAGED_SHARES)
    return predict_staged(card, &shape, method == TUNE_STAGED_SHARES);
  return predict_compressed(card, &shape, method);
}

double tune_card_step(const struct tune_card *card, const struct tune_training *training,
                      enum tune_method method, bool overlap) {
  const struct tune_update update = tune_card_update(card, training, method);
  if (!overlap || !tune_overlaps(training, method))
    return training->compute + update.together;
  return training->compute + update.kernels +
         ob_step_waiting(update.messages, training->compute, tune_buckets(training));
}

/* --- The printed text --------------------------------------------------------------------------*/

/* The links between hosts if the command line gives none: 10, 25 and 100 Gbit/s. */
static const double usual_links[] = {1.25e9, 3.125e9, 12.5e9};
#define USUAL_LINKS (sizeof usual_links / sizeof usual_links[0])

struct network {
  struct tune_card card;
  struct tune_training training;
};

static size_t list_networks(const struct tune_options *options, struct network *networks) {
  const struct network first = {options->card, options->training};
  const int hosts = first.training.hosts;
  size_t count = 0;
  if (hosts == 1 || first.training.ranks_per_host > 1) { /* adds a single host, for comparison */
    networks[count] = first;
    networks[count++].training.hosts = 1;
  }
  for (size_t k = 0; hosts > 1 && k < (options->bandwidth > 0 ? 1 : USUAL_LINKS); k++) {
    networks[count] = first;
    networks[count++].card.link =
        TUNE_PAYLOAD * (options->bandwidth > 0 ? options->bandwidth : usual_links[k]);
  }
  return count;
}

static void card_print_assumptions(const struct network *network) {
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
      "# Dense: ncclAllReduce at the rate of its links, which sends 2(H-1)/H of the buffer between "
      "hosts,\n#   and a fused Adam. Float16: the gradients are float16.\n"
      "# One bit: 1-bit Adam's kernels in every step; chunks overlap as plans over NCCL cut them.\n"
      "# Staged: without kernels of the library. A GPU copies gradients to its host, and "
      "parameters "
      "back, at\n#   %.3g GB/s; processors move %.3g GB/s, %.0f bytes a parameter; nothing "
      "overlaps.\n"
      "#   Inside 1st: NCCL gives each GPU a share before, and gathers parameters after.\n"
      "# 1-bit Adam: after %.3g %% dense steps. 0/1 Adam: mean of %.0f steps, with local ones. All "
      "times include the update.\n"
      "# Overlapped: messages hide behind %.0f %% of the computation, but for the last of %.3g "
      "buckets.%s\n",
      1e-9 * card->pcie, 1e-9 * card->memory, STAGED, 100 * network->training.warm_up,
      network->training.steps, 100 * OB_STEP_HIDING, tune_buckets(&network->training),
      network->training.clip ? " With clipping, messages in one bit do not." : "");
}

static double find_best_step(const struct network *network, enum tune_method first,
                             enum tune_method last, bool overlap) {
  double best = INFINITY;
  for (enum tune_method m = first; m <= last; m++)
    best = fmin(best, tune_card_step(&network->card, &network->training, m, overlap));
  return best;
}

/* Returns the speed-up of the fastest compressed step over the faster of the two dense steps, of 32
 * and 16 bits. */
static double find_speedup(const struct network *network, bool overlap) {
  return find_best_step(network, TUNE_DENSE, TUNE_HALF, overlap) /
         find_best_step(network, TUNE_FLAT, TUNE_HIERARCHICAL, overlap);
}

/* Returns the bandwidth of a link, in bytes per second, above which compression does not pay if the
 * exchange overlaps with the computation. 0 means that it pays at no bandwidth. */
static double find_break_even(struct network network) {
  double low = 1e4, high = 1e13;
  for (int k = 0; k < 60; k++) { /* as many as in tune_break_even */
    network.card.link = sqrt(low * high);
    *(find_speedup(&network, true) >= OB_STEP_WORTH ? &low : &high) = network.card.link;
  }
  return low > 1.01e4 ? low : 0;
}

static void print_verdict(const struct network *network) {
  double apart = find_speedup(network, false), overlapped = find_speedup(network, true);
  printf("# Compression %s: %.2fx the steps of the better dense method, overlapped %.2fx.\n",
         overlapped >= OB_STEP_WORTH ? "pays"
         : apart >= OB_STEP_WORTH
             ? "pays only if the exchange does not overlap with the computation"
             : "does not pay here",
         apart, overlapped);
  if (network->training.hosts == 1) {
    printf("# An allreduce alone gains nothing over bfloat16 inside a host: kernels take what "
           "messages save.\n# The gain is between hosts.\n");
    return;
  }
  printf("# Overlapped, compression brings %.0f %% or more on links below: %s.\n",
         100 * (OB_STEP_WORTH - 1), TUNE_WORDS(TUNE_RATE, find_break_even(*network)));
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

/* Prints a row for each method, or writes the row as JSON. */
static void list_updates(const struct network *network, struct ob_json *json) {
  const struct tune_card *card = &network->card;
  const struct tune_training *training = &network->training;
  static const enum tune_method methods[] = {TUNE_DENSE,        TUNE_HALF,    TUNE_FLAT,
                                             TUNE_HIERARCHICAL, TUNE_STAGED,  TUNE_STAGED_SHARES,
                                             TUNE_ADAM,         TUNE_ZERO_ONE};
  for (size_t k = 0; k < sizeof methods / sizeof methods[0]; k++) {
    const enum tune_method m = methods[k];
    if ((m == TUNE_STAGED && training->hosts == 1) ||
        (m == TUNE_STAGED_SHARES && (training->hosts == 1 || training->ranks_per_host == 1)))
      continue;
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

int tune_predict_card(const struct tune_options *options) {
  const struct tune_training *training = &options->training;
  struct network networks[1 + USUAL_LINKS];
  size_t count = list_networks(options, networks);
  if (options->json) {
    write_networks(networks, count);
    return TUNE_OK;
  }
  printf("# onebit-tune --predict --device cuda: %.4g parameters, %d host%s x %d GPU%s, %.4g s of "
         "computation a step\n",
         training->parameters, TUNE_COUNTED(training->hosts),
         TUNE_COUNTED(training->ranks_per_host), training->compute);
  card_print_assumptions(&networks[0]);
  for (size_t k = 0; k < count; k++)
    print_network(&networks[k]);
  return TUNE_OK;
}
