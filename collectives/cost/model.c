/* Computes the default costs, the seconds of phases of messages, and the time of parts that
 * overlap. */
#include "collectives/cost/model.h"

#include <stdio.h>
#include <string.h>

#include "base/knobs.h"
#include "base/process.h"

/* --- Defaults */

struct codec_speed {
  const char *name;
  double compress, reduce, reduce_stream, apply;
};

/* Nanoseconds per element, measured with onebit-bench codec -m 32M on one core of an AMD EPYC,
 * medians of 5. reduce and reduce_stream are the line through the times of reducing 2 and 8
 * streams. The codec neon was not measured: its numbers are twice those of avx2, since its vectors
 * are half as long. The last row serves codecs that are not listed. */
static const struct codec_speed speeds[] = {
    {"avx512", 0.31, 0.13, 0.038, 0.14},
    {"avx2", 0.30, 0.09, 0.058, 0.15},
    {"neon", 0.60, 0.18, 0.116, 0.30},
    {"scalar", 0.43, 0.36, 0.160, 0.16},
};

static const struct codec_speed *find_codec_speed(const char *codec) {
  size_t k = 0, last = sizeof speeds / sizeof speeds[0] - 1;
  while (k < last && !(codec && strcmp(codec, speeds[k].name) == 0))
    k++;
  return &speeds[k];
}

void ob_costs_default(const char *codec, struct ob_costs *costs) {
  const struct codec_speed *speed = find_codec_speed(codec);
  memset(costs, 0, sizeof *costs); /* the padding too, because rank 0 sends the bytes */
  /* TCP carries 1448 bytes in 1538 on the wire; the kernels and a switch take 50 microseconds. */
  costs->between = (struct ob_link){50e-6, 125e6 * 1448 / 1538, 4e-6, 0.3e-9};
  /* A call of two ranks on a host takes 1 to 2 microseconds in all, which includes two messages and
   * one latency. */
  costs->inside = (struct ob_link){1e-6, 5e9, 0.2e-6, 0.2e-9};
  costs->compress = 1e-9 * speed->compress;
  costs->reduce = 1e-9 * speed->reduce;
  costs->reduce_stream = 1e-9 * speed->reduce_stream;
  costs->apply = 1e-9 * speed->apply;
  /* A core moves 40 GB/s. Per element, load and convert move eight bytes, and add moves four. */
  costs->load = costs->convert = 0.2e-9;
  costs->add = 0.1e-9;
  costs->call = 10e-6;
  costs->exchange_efficiency = 0.9;
  costs->codec_factor = 1;
  costs->unhidden = 0.2;
  costs->mpi_call = 10e-6;
  costs->mpi_round = 60e-6;
  /* These values lie within the fits to Open MPI's ring over an emulated gigabit Ethernet with few
   * cores: an efficiency of 0.6 to 0.8, and 1.5 to 8 ns per byte. */
  costs->mpi_efficiency = 0.7;
  costs->mpi_byte = 2e-9;
  strncpy(costs->codec, speed->name, sizeof costs->codec - 1);
  strncpy(costs->source, "defaults: gigabit Ethernet between hosts", sizeof costs->source - 1);
}

void ob_costs_of_one_machine(struct ob_costs *costs) {
  size_t length = strlen(costs->source);
  if (costs->hosts > 0)
    return;
  costs->cores_shared = ob_machine_processors();
  snprintf(costs->source + length, sizeof costs->source - length, "; all hosts share %g cores",
           costs->cores_shared);
}

/* --- The model of a task */

#define HEADER_BYTES 40.0 /* bytes of a message's header */

static double max_of_two(double a, double b) { return a > b ? a : b; }
static double min_of_two(double a, double b) { return a < b ? a : b; }

double ob_cost_rounds(double ranks) {
  double rounds = 0;
  for (double reached = 1; reached < ranks; reached *= 2)
    rounds++;
  return rounds;
}

static double host_cores(const struct ob_cost_model *model) {
  const struct ob_costs *costs = model->costs;
  double cores = costs->cores_per_host > 0 ? costs->cores_per_host : model->on_host;
  if (costs->cores_shared > 0)
    cores = min_of_two(cores, costs->cores_shared / model->hosts);
  return cores;
}

struct ob_cost_model ob_cost_model(const struct ob_costs *costs, const struct ob_cost_task *task) {
  struct ob_cost_model model = {.costs = costs, .task = task, .hosts = max_of_two(1, task->hosts)};
  int ranks = task->ranks > 0 ? task->ranks : task->hosts * task->ranks_per_host;
  model.ranks = max_of_two(1, ranks);
  model.on_host = task->max_ranks > 0 ? task->max_ranks : task->ranks_per_host;
  model.on_host = min_of_two(model.ranks, max_of_two(1, model.on_host));
  model.away = model.hosts > 1 ? model.ranks - model.on_host : 0;
  double cores = host_cores(&model), rank_cores = cores / model.on_host;
  model.core = max_of_two(1, 1 / rank_cores);
  model.flow = max_of_two(1, 1 / cores);
  model.threads = min_of_two(max_of_two(1, task->threads), max_of_two(1, rank_cores));
  model.codec = costs->codec_factor * model.core / model.threads;
  return model;
}

double ob_cost_element_bytes(const struct ob_cost_task *task, onebit_wire_t wire) {
  if (wire == ONEBIT_WIRE_DENSE)
    return 4;
  if (task->block == ONEBIT_BLOCK_BUFFER)
    return 1.0 / 8;
  return max_of_two(1, task->bits) / 8 + 4 / (double)(task->block ? task->block : OB_DEFAULT_BLOCK);
}

/* --- Phases ------------------------------------------------------------------------------------*/

/* Returns the number of messages to each peer, rounded up. */
static double message_count(double elements, size_t chunk) {
  double exact = elements / (double)chunk;
  size_t whole = (size_t)exact;
  return max_of_two(1, (double)whole + ((double)whole < exact ? 1 : 0));
}

struct ob_phase ob_phase_of(const struct ob_cost_model *model, onebit_wire_t wire, double near,
                            double far, double elements, size_t chunk) {
  double messages = message_count(elements, chunk);
  double bytes = elements * ob_cost_element_bytes(model->task, wire) + messages * HEADER_BYTES;
  return (struct ob_phase){near, far, elements, bytes, messages, near * messages, far * messages};
}

struct ob_phase ob_phase_among_all(const struct ob_cost_model *model, onebit_wire_t wire,
                                   double elements, size_t chunk) {
  return ob_phase_of(model, wire, model->on_host - 1, model->away, elements, chunk);
}

double ob_phase_wire(const struct ob_cost_model *model, const struct ob_phase *phase,
                     bool compressed) {
  const struct ob_costs *costs = model->costs;
  double between = costs->between.bandwidth * (compressed ? costs->exchange_efficiency : 1);
  return model->on_host * phase->far * phase->bytes / between +
         phase->near * phase->bytes / costs->inside.bandwidth;
}

double ob_phase_dense_wire(const struct ob_cost_model *model, const struct ob_phase *phase) {
  const struct ob_costs *costs = model->costs;
  double wire = ob_phase_wire(model, phase, false);
  if (phase->far == 0 || phase->bytes / phase->messages <= OB_COST_EAGER_BYTES)
    return wire;
  return wire / costs->mpi_efficiency + phase->far * phase->bytes * costs->mpi_byte * model->core;
}

double ob_phase_work(const struct ob_cost_model *model, const struct ob_phase *phase) {
  const struct ob_link *between = &model->costs->between, *inside = &model->costs->inside;
  double far = phase->far_sends * between->message + phase->far * phase->bytes * between->byte;
  double near = phase->near_sends * inside->message + phase->near * phase->bytes * inside->byte;
  return 2 * model->core * (far + near);
}

/* Returns the seconds that a rank waits for its turn on a shared core. */
static double core_wait_seconds(const struct ob_cost_model *model) {
  return (model->core - 1) * model->costs->oversubscribed;
}

double ob_phase_latency(const struct ob_cost_model *model, const struct ob_phase *phase) {
  return phase->far > 0    ? model->costs->between.latency + core_wait_seconds(model)
         : phase->near > 0 ? model->costs->inside.latency + core_wait_seconds(model)
                           : 0;
}

double ob_phase_pieces(const struct ob_cost_model *model, const struct ob_phase *phase) {
  return model->task->block == ONEBIT_BLOCK_BUFFER ? 1 : phase->messages;
}

bool ob_cost_rounds_pay(const struct ob_costs *costs, const struct ob_cost_task *task) {
  struct ob_cost_model model = ob_cost_model(costs, task);
  double rounds = ob_cost_rounds(model.ranks), more = model.ranks - 1 - rounds;
  double wait = costs->inside.latency + core_wait_seconds(&model);
  return model.ranks >= OB_COST_DOUBLING_RANKS &&
         (model.hosts > 1 || (rounds - 1) * wait < 2 * more * costs->inside.message * model.core);
}

bool ob_cost_doubles(const struct ob_cost_model *model, const struct ob_phase *phase) {
  return model->task->operation == ONEBIT_ALLREDUCE && phase->messages <= 1 &&
         ob_cost_rounds_pay(model->costs, model->task);
}

double ob_phase_double(const struct ob_cost_model *model, struct ob_phase *phase) {
  const struct ob_costs *costs = model->costs;
  double seconds = 0;
  phase->near_sends = ob_cost_rounds(model->on_host);
  phase->far_sends = ob_cost_rounds(model->ranks) - phase->near_sends;
  for (double had = 1; had < model->ranks; had *= 2) {
    double trip = had < model->on_host ? costs->inside.latency : costs->between.latency;
    seconds +=
        (had * phase->bytes > OB_COST_EAGER_BYTES ? 3 : 1) * (trip + core_wait_seconds(model));
  }
  return seconds;
}

/* --- Calls -------------------------------------------------------------------------------------*/

double ob_cost_overlap(const struct ob_costs *costs, const struct ob_call_parts *parts) {
  double first = (parts->wire + parts->cores) / parts->pieces;
  double remainder = max_of_two(parts->wire, parts->cores) +
                     min_of_two(1, costs->unhidden) * min_of_two(parts->wire, parts->cores);
  return first + (1 - 1 / parts->pieces) * remainder + parts->after;
}

double ob_cost_of_mean(const struct ob_cost_model *model) {
  return max_of_two(model->costs->apply, model->ranks * model->costs->reduce_stream);
}

double ob_cost_of_exchange(const struct ob_cost_model *model, const struct ob_phase *phase,
                           double segment, double peers, double before, double after) {
  const struct ob_costs *costs = model->costs;
  double reduce = costs->reduce + peers * costs->reduce_stream;
  struct ob_call_parts parts = {
      .wire = 2 * ob_phase_wire(model, phase, true),
      .cores = model->codec * (before + segment * costs->compress + phase->elements * reduce) +
               2 * ob_phase_work(model, phase),
      .after = model->codec * after + 2 * ob_phase_latency(model, phase),
      .pieces = ob_phase_pieces(model, phase),
  };
  return ob_cost_overlap(costs, &parts);
}

double ob_cost_of_window(const struct ob_cost_model *model, size_t chunk, double elements,
                         double phases) {
  const struct ob_costs *costs = model->costs;
  struct ob_phase phase = ob_phase_among_all(model, ONEBIT_WIRE_DENSE, elements, chunk);
  double trips = phase.bytes / phase.messages > OB_COST_EAGER_BYTES ? 3 : 1;
  double codec =
      elements * model->ranks * (costs->load + costs->convert + costs->add) * model->core;
  return codec / model->threads + phases * ob_phase_dense_wire(model, &phase) +
         phases * ob_phase_work(model, &phase) +
         (phase.messages + 1) * trips * ob_phase_latency(model, &phase);
}
