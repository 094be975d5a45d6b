/* The cost model: parts of a call on wire and cores, and how they overlap. */
#include "collectives/cost/cost.h"

#include <string.h>

/* Bytes of a message's header, and the elements that share a scale where a plan does not say. */
#define HEADER_BYTES  40.0
#define DEFAULT_BLOCK 2048.0

/* Larger messages are agreed on before they are sent (rendezvous), which costs a round trip: the
 * limit of MPI libraries over TCP. */
#define EAGER_BYTES 65536.0

/* --- Defaults */

struct codec_speed {
  const char *name;
  double compress, reduce, reduce_stream, apply;
};

/* Nanoseconds an element: onebit-bench codec -m 32M on one core of an AMD EPYC, medians of 5; a
 * line through the reductions of 2 and 8 streams. neon was not measured: twice avx2's, since its
 * vectors are half as long. The last serves codecs that are not here. */
static const struct codec_speed speeds[] = {
    {"avx512", 0.31, 0.13, 0.038, 0.14},
    {"avx2", 0.30, 0.09, 0.058, 0.15},
    {"neon", 0.60, 0.18, 0.116, 0.30},
    {"scalar", 0.43, 0.36, 0.160, 0.16},
};

static const struct codec_speed *speed_of(const char *codec) {
  size_t k = 0, last = sizeof speeds / sizeof speeds[0] - 1;
  while (k < last && !(codec && strcmp(codec, speeds[k].name) == 0))
    k++;
  return &speeds[k];
}

void ob_costs_default(const char *codec, struct ob_costs *costs) {
  const struct codec_speed *speed = speed_of(codec);
  memset(costs, 0, sizeof *costs); /* padding too: the bytes are sent */
  /* TCP carries 1448 bytes in 1538 on the wire; 50 microseconds are a kernel's and a switch's. */
  costs->between = (struct ob_link){50e-6, 125e6 * 1448 / 1538, 4e-6, 0.3e-9};
  costs->inside = (struct ob_link){1e-6, 5e9, 0.5e-6, 0.2e-9};
  costs->compress = 1e-9 * speed->compress;
  costs->reduce = 1e-9 * speed->reduce;
  costs->reduce_stream = 1e-9 * speed->reduce_stream;
  costs->apply = 1e-9 * speed->apply;
  /* Eight bytes an element, and four, of a core's 40 GB/s. */
  costs->load = costs->convert = 0.2e-9;
  costs->add = 0.1e-9;
  costs->call = 10e-6;
  costs->exchange_efficiency = 0.9;
  costs->codec_factor = 1;
  costs->unhidden = 0.2;
  costs->mpi_call = 10e-6;
  costs->mpi_round = 60e-6;
  /* Between what fits to Open MPI's ring over an emulated gigabit Ethernet gave: 0.6 to 0.8, and
   * 1.5 to 8 ns, where cores were scarce. */
  costs->mpi_efficiency = 0.7;
  costs->mpi_byte = 2e-9;
  strncpy(costs->codec, speed->name, sizeof costs->codec - 1);
  strncpy(costs->source, "defaults: a gigabit Ethernet between hosts", sizeof costs->source - 1);
}

/* --- What a task comes to */

/* A task in numbers. */
struct ranks {
  double all, on_host, away; /* ranks; on the fullest host; on other hosts than that */
  double hosts;
  double core;    /* how many times longer than alone a rank's work takes: cores are shared */
  double flow;    /* the same of one rank that is alone on its host */
  double threads; /* how many times faster the codec is: they help where there are cores */
};

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

static double rounds_of(double ranks) {
  double rounds = 0;
  for (double reached = 1; reached < ranks; reached *= 2)
    rounds++;
  return rounds;
}

static double cores_of(const struct ob_costs *costs, const struct ranks *ranks) {
  double cores = costs->cores_per_host > 0 ? costs->cores_per_host : ranks->on_host;
  if (costs->cores_shared > 0)
    cores = smaller(cores, costs->cores_shared / ranks->hosts);
  return cores;
}

static int task_ranks(const struct ob_cost_task *task) {
  return task->ranks > 0 ? task->ranks : task->hosts * task->ranks_per_host;
}

static struct ranks ranks_of(const struct ob_costs *costs, const struct ob_cost_task *task) {
  struct ranks ranks = {.hosts = larger(1, task->hosts)};
  ranks.all = larger(1, task_ranks(task));
  ranks.on_host = task->most_ranks > 0 ? task->most_ranks : task->ranks_per_host;
  ranks.on_host = smaller(ranks.all, larger(1, ranks.on_host));
  ranks.away = ranks.hosts > 1 ? ranks.all - ranks.on_host : 0;
  double cores = cores_of(costs, &ranks), rank_cores = cores / ranks.on_host;
  ranks.core = larger(1, 1 / rank_cores);
  ranks.flow = larger(1, 1 / cores);
  ranks.threads = smaller(larger(1, task->threads), larger(1, rank_cores));
  return ranks;
}

double ob_cost_sharing(const struct ob_costs *costs, const struct ob_cost_task *task) {
  return ranks_of(costs, task).core;
}

/* Bytes an element takes in messages, headers left out. */
static double element_bytes(const struct ob_cost_task *task, onebit_wire_t wire) {
  if (wire == ONEBIT_WIRE_DENSE)
    return 4;
  if (task->block == ONEBIT_BLOCK_BUFFER)
    return 1.0 / 8;
  return 1.0 / 8 + 4 / (task->block ? (double)task->block : DEFAULT_BLOCK);
}

/* Messages to each peer in a phase: the whole number that is not below. */
static double pieces(double elements, size_t chunk) {
  double exact = elements / (double)chunk;
  size_t whole = (size_t)exact;
  return larger(1, (double)whole + ((double)whole < exact ? 1 : 0));
}

/* A phase in which every rank sends `elements` to each of its peers, `near` of them on its host and
 * `far` on others. */
struct phase {
  double near, far, elements, bytes; /* bytes: to each peer */
  double messages;                   /* to each peer */
  double near_sends, far_sends;      /* messages to all of them */
};

static double phase_wire(const struct ob_costs *costs, const struct ranks *ranks,
                         const struct phase *phase, bool compressed) {
  double between = costs->between.bandwidth * (compressed ? costs->exchange_efficiency : 1);
  return ranks->on_host * phase->far * phase->bytes / between +
         phase->near * phase->bytes / costs->inside.bandwidth;
}

/* Sending and receiving: both are work. */
static double phase_work(const struct ob_costs *costs, const struct ranks *ranks,
                         const struct phase *phase) {
  const struct ob_link *between = &costs->between, *inside = &costs->inside;
  double far = phase->far_sends * between->message + phase->far * phase->bytes * between->byte;
  double near = phase->near_sends * inside->message + phase->near * phase->bytes * inside->byte;
  return 2 * ranks->core * (far + near);
}

/* One way; ranks that share a core wait for their turn on it besides. */
static double latency(const struct ob_costs *costs, const struct ranks *ranks,
                      const struct phase *phase) {
  double turn = (ranks->core - 1) * costs->oversubscribed;
  return phase->far > 0    ? costs->between.latency + turn
         : phase->near > 0 ? costs->inside.latency + turn
                           : 0;
}

/* Parts of a call, in seconds: what is done before and between messages (cores), the messages
 * (wire), and what can only begin when all is there (after). */
struct parts {
  double wire, cores, after, pieces;
};

static double overlapped(const struct ob_costs *costs, const struct parts *parts) {
  double first = (parts->wire + parts->cores) / parts->pieces;
  double rest = larger(parts->wire, parts->cores) +
                smaller(1, costs->unhidden) * smaller(parts->wire, parts->cores);
  return first + (1 - 1 / parts->pieces) * rest + parts->after;
}

static struct phase phase_of(const struct ob_cost_task *task, onebit_wire_t wire, double near,
                             double far, double elements, double messages) {
  double bytes = elements * element_bytes(task, wire) + messages * HEADER_BYTES;
  return (struct phase){near, far, elements, bytes, messages, near * messages, far * messages};
}

/* --- Everyone's whole message to everyone */

/* Whether one message is passed on in rounds, each of which doubles what a rank has. */
static bool doubles(const struct ob_cost_task *task, const struct ranks *ranks,
                    const struct phase *phase) {
  return task->operation == ONEBIT_ALLREDUCE && ranks->all >= OB_COST_DOUBLING_RANKS &&
         phase->messages <= 1;
}

static struct phase gathering(const struct ob_cost_task *task, const struct ranks *ranks,
                              onebit_wire_t wire, size_t chunk) {
  double n = (double)task->elements;
  struct phase phase = phase_of(task, wire, ranks->on_host - 1, ranks->away, n, pieces(n, chunk));
  if (doubles(task, ranks, &phase)) {
    phase.near_sends = rounds_of(ranks->on_host);
    phase.far_sends = rounds_of(ranks->all) - phase.near_sends;
  }
  return phase;
}

/* Ranks of a host are neighbours: the first rounds are theirs. A round sends all that a rank has,
 * and what is too much to be sent eagerly takes a round trip more. */
static double gathering_latency(const struct ob_costs *costs, const struct ob_cost_task *task,
                                const struct ranks *ranks, const struct phase *phase) {
  double turn = (ranks->core - 1) * costs->oversubscribed, seconds = 0;
  bool dense = phase->bytes > 2 * phase->elements;
  if (!doubles(task, ranks, phase))
    return (dense && phase->bytes / phase->messages > EAGER_BYTES ? 3 : 1) *
           latency(costs, ranks, phase);
  for (double had = 1; had < ranks->all; had *= 2) {
    double trip = had < ranks->on_host ? costs->inside.latency : costs->between.latency;
    seconds += (had * phase->bytes > EAGER_BYTES ? 3 : 1) * (trip + turn);
  }
  return seconds;
}

/* --- The schedules */

struct candidate {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  size_t chunk;
};

/* Compressing and decoding a segment between `peers` ranks that each serve a share of it: exchange,
 * or the part of hierarchical that is between hosts. */
static double served(const struct ob_costs *costs, const struct ob_cost_task *task,
                     const struct ranks *ranks, const struct phase *phase, double segment,
                     double peers, double before, double after) {
  double codec = costs->codec_factor * ranks->core / ranks->threads;
  double reduce = costs->reduce + peers * costs->reduce_stream;
  struct parts parts = {
      .wire = 2 * phase_wire(costs, ranks, phase, true),
      .cores = codec * (before + segment * costs->compress + phase->elements * reduce) +
               2 * phase_work(costs, ranks, phase),
      .after = codec * after + 2 * latency(costs, ranks, phase),
      .pieces = task->block == ONEBIT_BLOCK_BUFFER ? 1 : phase->messages,
  };
  return overlapped(costs, &parts);
}

static double exchange_bits(const struct ob_costs *costs, const struct ob_cost_task *task,
                            const struct ranks *ranks, size_t chunk) {
  double n = (double)task->elements, share = n / ranks->all;
  struct phase phase = phase_of(task, ONEBIT_WIRE_BITS, ranks->on_host - 1, ranks->away, share,
                                pieces(share, chunk));
  return served(costs, task, ranks, &phase, n, ranks->all, 0, n * costs->apply);
}

static double hierarchical(const struct ob_costs *costs, const struct ob_cost_task *task,
                           const struct ranks *ranks, size_t chunk) {
  double n = (double)task->elements, segment = n / ranks->on_host;
  double share = segment / ranks->hosts;
  struct phase phase =
      phase_of(task, ONEBIT_WIRE_BITS, 0, ranks->hosts - 1, share, pieces(share, chunk));
  /* Input goes to shared memory, and every rank adds the segments of its place. Ranks of a host
   * wait for each other before, after adding, and when bits are there. */
  double before = n * costs->load + n * costs->add;
  return served(costs, task, ranks, &phase, segment, ranks->hosts, before, n * costs->apply) +
         3 * ranks->on_host * costs->inside.latency + 3 * (ranks->core - 1) * costs->oversubscribed;
}

/* The allgather schedule of an allreduce; `streams` messages are decoded at the end, into one
 * buffer or, in the operation of that name, into one each. */
static double allgather_bits(const struct ob_costs *costs, const struct ob_cost_task *task,
                             const struct ranks *ranks, size_t chunk) {
  double n = (double)task->elements, codec = costs->codec_factor * ranks->core / ranks->threads;
  struct phase phase = gathering(task, ranks, ONEBIT_WIRE_BITS, chunk);
  bool apart = task->operation == ONEBIT_ALLGATHER;
  double decode =
      apart ? ranks->all * costs->apply : costs->apply + ranks->all * costs->reduce_stream;
  struct parts parts = {
      .wire = phase_wire(costs, ranks, &phase, true),
      .cores = codec * n * costs->compress + phase_work(costs, ranks, &phase),
      .after = codec * n * decode + gathering_latency(costs, task, ranks, &phase),
      .pieces = task->block == ONEBIT_BLOCK_BUFFER ? 1 : phase.messages,
  };
  return overlapped(costs, &parts);
}

static double scatter_bits(const struct ob_costs *costs, const struct ob_cost_task *task,
                           const struct ranks *ranks, size_t chunk) {
  double share = (double)task->elements, codec = costs->codec_factor * ranks->core / ranks->threads;
  struct phase phase = phase_of(task, ONEBIT_WIRE_BITS, ranks->on_host - 1, ranks->away, share,
                                pieces(share, chunk));
  struct parts parts = {
      .wire = phase_wire(costs, ranks, &phase, true),
      .cores = codec * share * ranks->all * costs->compress + phase_work(costs, ranks, &phase),
      .after = codec * share * (costs->apply + ranks->all * costs->reduce_stream) +
               latency(costs, ranks, &phase),
      .pieces = task->block == ONEBIT_BLOCK_BUFFER ? 1 : phase.messages,
  };
  return overlapped(costs, &parts);
}

/* Dense messages on the wire. What is too large to be sent eagerly fares as MPI_Allreduce's large
 * messages do. */
static double dense_wire(const struct ob_costs *costs, const struct ranks *ranks,
                         const struct phase *phase) {
  double wire = phase_wire(costs, ranks, phase, false);
  if (phase->far == 0 || phase->bytes / phase->messages <= EAGER_BYTES)
    return wire;
  return wire / costs->mpi_efficiency + phase->far * phase->bytes * costs->mpi_byte * ranks->core;
}

/* Dense messages go through a window of two: a chunk's result is waited for before the next but one
 * leaves, so nothing overlaps, and every chunk pays a latency; a rendezvous is two more. */
static double window_dense(const struct ob_costs *costs, const struct ob_cost_task *task,
                           const struct ranks *ranks, size_t chunk, double share, double phases) {
  struct phase phase = phase_of(task, ONEBIT_WIRE_DENSE, ranks->on_host - 1, ranks->away, share,
                                pieces(share, chunk));
  double trips = phase.bytes / phase.messages > EAGER_BYTES ? 3 : 1;
  double codec = share * ranks->all * (costs->load + costs->convert + costs->add) * ranks->core;
  return codec / ranks->threads + phases * dense_wire(costs, ranks, &phase) +
         phases * phase_work(costs, ranks, &phase) +
         (phase.messages + 1) * trips * latency(costs, ranks, &phase);
}

static double exchange_dense(const struct ob_costs *costs, const struct ob_cost_task *task,
                             const struct ranks *ranks, size_t chunk) {
  return window_dense(costs, task, ranks, chunk, (double)task->elements / ranks->all, 2);
}

static double allgather_dense(const struct ob_costs *costs, const struct ob_cost_task *task,
                              const struct ranks *ranks, size_t chunk) {
  double n = (double)task->elements;
  struct phase phase = gathering(task, ranks, ONEBIT_WIRE_DENSE, chunk);
  double codec = n * (costs->load + costs->convert + ranks->all * costs->add) * ranks->core;
  return codec / ranks->threads + dense_wire(costs, ranks, &phase) +
         phase_work(costs, ranks, &phase) + gathering_latency(costs, task, ranks, &phase);
}

static double schedule_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                               const struct ranks *ranks, const struct candidate *which) {
  bool dense = which->wire == ONEBIT_WIRE_DENSE;
  if (dense && task->operation != ONEBIT_ALLREDUCE)
    return window_dense(costs, task, ranks, which->chunk, (double)task->elements, 1);
  if (task->operation == ONEBIT_ALLGATHER)
    return allgather_bits(costs, task, ranks, which->chunk);
  if (task->operation == ONEBIT_REDUCE_SCATTER)
    return scatter_bits(costs, task, ranks, which->chunk);
  if (which->schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return hierarchical(costs, task, ranks, which->chunk);
  if (which->schedule == ONEBIT_SCHEDULE_ALLGATHER)
    return (dense ? allgather_dense : allgather_bits)(costs, task, ranks, which->chunk);
  return (dense ? exchange_dense : exchange_bits)(costs, task, ranks, which->chunk);
}

double ob_cost_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                       onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk) {
  struct ranks ranks = ranks_of(costs, task);
  const struct candidate which = {schedule, wire, chunk};
  return costs->call * ranks.core + schedule_seconds(costs, task, &ranks, &which);
}

/* --- MPI_Allreduce, and bytes */

/* The better of recursive doubling, which sends everything in each of few rounds, and a ring, which
 * sends a share in each of many and has one rank of a host send to the next host. */
double ob_cost_mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                           size_t size) {
  struct ranks ranks = ranks_of(costs, task);
  double bytes = (double)task->elements * (double)size, rounds = rounds_of(ranks.all);
  double near = costs->inside.bandwidth, away = costs->between.bandwidth * costs->mpi_efficiency;
  double round = ranks.away > 0 ? costs->mpi_round : costs->inside.latency;
  double far = ranks.away > 0 ? ranks.on_host * bytes / away : 0;
  double add = (double)task->elements * costs->add * ranks.core;
  double doubling = rounds * (round + add) + rounds_of(ranks.hosts) * far +
                    rounds_of(ranks.on_host) * bytes / near;
  double steps = 2 * (ranks.all - 1);
  double part = steps / ranks.all * bytes;
  double ring = steps * round + part / (ranks.away > 0 ? away : near) + add;
  if (ranks.away > 0) {
    doubling += rounds_of(ranks.hosts) * bytes * costs->mpi_byte * ranks.core;
    ring += part * costs->mpi_byte * ranks.flow; /* one rank of a host sends to the next host */
  }
  return costs->mpi_call * ranks.core + smaller(doubling, ring);
}

double ob_cost_host_bytes(const struct ob_cost_task *task, onebit_schedule_t schedule,
                          onebit_wire_t wire) {
  struct ob_costs none = {.cores_per_host = 0};
  struct ranks ranks = ranks_of(&none, task);
  double bytes = (double)task->elements * element_bytes(task, wire);
  bool all = task->operation == ONEBIT_ALLGATHER || schedule == ONEBIT_SCHEDULE_ALLGATHER;
  if (all || task->operation == ONEBIT_REDUCE_SCATTER)
    return ranks.on_host * ranks.away * bytes;
  if (schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return 2 * (ranks.hosts - 1) / ranks.hosts * bytes;
  return 2 * ranks.on_host * ranks.away / ranks.all * bytes;
}
