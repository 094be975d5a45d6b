/* The cost model: predicts the seconds and bytes of a call, and chooses the schedule. */
#include "collectives/cost/cost.h"

#include <stdio.h>
#include <string.h>

#include "collectives/schedules/schedule.h"

/* --- Seconds and bytes */

double ob_cost_sharing_factor(const struct ob_costs *costs, const struct ob_cost_task *task) {
  return ob_cost_model(costs, task).core;
}

const struct ob_schedule *ob_schedule_find(onebit_schedule_t schedule) {
#define ROW(constant, name) , &ob_schedule_##name
  static const struct ob_schedule *const rows[] = {&ob_schedule_exchange OB_SCHEDULES(ROW)};
#undef ROW
  return rows[schedule];
}

static const struct ob_schedule *task_schedule(const struct ob_cost_task *task,
                                               onebit_schedule_t schedule, onebit_wire_t wire) {
  if (wire == ONEBIT_WIRE_DENSE && task->operation != ONEBIT_ALLREDUCE)
    return &ob_schedule_window;
  if (task->operation == ONEBIT_ALLGATHER)
    return &ob_schedule_allgather;
  if (task->operation == ONEBIT_REDUCE_SCATTER)
    return &ob_schedule_exchange;
  return ob_schedule_find(schedule);
}

double ob_cost_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                       onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk) {
  struct ob_cost_model model = ob_cost_model(costs, task);
  return costs->call * model.core + task_schedule(task, schedule, wire)->cost(&model, wire, chunk);
}

/* Returns the time of the faster of two algorithms. Recursive doubling has few rounds, each of
 * which sends all elements. A ring has many rounds, each of which sends a segment, and one rank of
 * each host sends to the next host. */
double ob_cost_mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                           size_t size) {
  struct ob_cost_model model = ob_cost_model(costs, task);
  double bytes = (double)task->elements * (double)size, rounds = ob_cost_rounds(model.ranks);
  double near = costs->inside.bandwidth, away = costs->between.bandwidth * costs->mpi_efficiency;
  double round = model.away > 0 ? costs->mpi_round : costs->inside.latency;
  double far = model.away > 0 ? model.on_host * bytes / away : 0;
  double add = (double)task->elements * costs->add * model.core;
  double doubling = rounds * (round + add) + ob_cost_rounds(model.hosts) * far +
                    ob_cost_rounds(model.on_host) * bytes / near;
  double steps = 2 * (model.ranks - 1);
  double part = steps / model.ranks * bytes;
  double ring = steps * round + part / (model.away > 0 ? away : near) + add;
  if (model.away > 0) {
    doubling += ob_cost_rounds(model.hosts) * bytes * costs->mpi_byte * model.core;
    ring += part * costs->mpi_byte * model.flow; /* one rank of a host sends to the next host */
  }
  return costs->mpi_call * model.core + (doubling < ring ? doubling : ring);
}

double ob_cost_host_bytes(const struct ob_cost_task *task, onebit_schedule_t schedule,
                          onebit_wire_t wire) {
  struct ob_costs none = {.cores_per_host = 0};
  struct ob_cost_model model = ob_cost_model(&none, task);
  double bytes = (double)task->elements * ob_cost_element_bytes(task, wire);
  bool all = task->operation == ONEBIT_ALLGATHER || ob_schedule_find(schedule)->whole;
  if (all || task->operation == ONEBIT_REDUCE_SCATTER)
    return model.on_host * model.away * bytes;
  if (schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return 2 * (model.hosts - 1) / model.hosts * bytes;
  return 2 * model.on_host * model.away / model.ranks * bytes;
}

/* --- The candidates, and the text that says why one was chosen ---------------------------------*/

/* The candidates for the number of elements in a message of one bit; messages of more bits have
 * fewer. The first number is preferred. The smallest is 64 Ki (8 kB): below that size the cost of
 * each message is larger than the gain of finer overlap (measured: 16 Ki took 1.3 to 2 times as
 * long from 1 MiB on, 2 and 4 hosts at 1 Gbit/s). The largest is 448 Ki (57 kB with its scales),
 * which stays below the 64 KiB that MPI libraries send eagerly over TCP. */
static const size_t chunks[] = {131072, 65536, 262144, 458752};

/* Another chunk size replaces the first one only if its time, divided by that of the first, is
 * below this number: the model is not more precise than two per cent. */
#define WORTH 0.98

/* A compressed schedule is chosen only if it is faster than float32 by this factor, because
 * compression adds rounding errors. */
#define ROUNDING_COSTS 1.03

const struct ob_cost_candidate ob_cost_candidates[OB_COST_CANDIDATES] = {
    {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS},     {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS},
    {ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS}, {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_DENSE},
    {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_DENSE},
};

const char *ob_cost_schedule_name(onebit_schedule_t schedule) {
  static const char *const names[] = {"automatic" OB_SCHEDULES(OB_SCHEDULE_NAME)};
  return (unsigned)schedule < sizeof names / sizeof names[0] ? names[schedule] : "unknown";
}

static const char *find_refusal(const struct ob_cost_task *task, onebit_schedule_t schedule,
                                onebit_wire_t wire) {
  const struct ob_schedule *row = ob_schedule_find(schedule);
  return row->refuse ? row->refuse(task, wire) : NULL;
}

bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire) {
  return !find_refusal(task, schedule, wire);
}

static bool is_candidate_allowed(const struct ob_cost_task *task,
                                 const struct ob_cost_candidate *row) {
  if (task->schedule != ONEBIT_SCHEDULE_AUTOMATIC && task->schedule != row->schedule)
    return false;
  return task->wire == row->wire || (task->dense_allowed && row->wire == ONEBIT_WIRE_DENSE);
}

/* A candidate's predicted time, with its fastest chunk size. */
struct estimate {
  size_t chunk;
  double seconds;
  bool measured;
};

static struct estimate estimate_with_chunk(const struct ob_costs *costs,
                                           const struct ob_cost_task *task,
                                           const struct ob_cost_candidate *row, size_t chunk) {
  return (struct estimate){
      .chunk = chunk, .seconds = ob_cost_seconds(costs, task, row->schedule, row->wire, chunk)};
}

static struct estimate estimate_candidate(const struct ob_costs *costs,
                                          const struct ob_cost_task *task, size_t k) {
  const struct ob_cost_candidate *row = &ob_cost_candidates[k];
  size_t given = ob_cost_measured_chunk(costs, task, k);
  const size_t width = row->wire == ONEBIT_WIRE_BITS && task->bits > 1 ? (size_t)task->bits : 1;
  given = task->chunk ? task->chunk : given / width;
  struct estimate best = estimate_with_chunk(costs, task, row, given ? given : chunks[0] / width);
  for (size_t i = 1; !given && i < sizeof chunks / sizeof chunks[0]; i++) {
    struct estimate other = estimate_with_chunk(costs, task, row, chunks[i] / width);
    if (other.seconds < WORTH * best.seconds)
      best = other;
  }
  best.seconds *= ob_cost_factor(costs, task, k, &best.measured);
  return best;
}

static void append_line(struct ob_cost_choice *choice, const char *line) {
  size_t length = strlen(choice->text);
  snprintf(choice->text + length, sizeof choice->text - length, "%s", line);
}

/* Appends a line about a candidate: its predicted time, or the reason why it cannot be used. */
static bool append_candidate_line(struct ob_cost_choice *choice, const struct ob_cost_task *task,
                                  const struct ob_cost_candidate *row,
                                  const struct estimate *estimate) {
  const char *refusal = find_refusal(task, row->schedule, row->wire);
  char line[192];
  if (!refusal)
    snprintf(line, sizeof line, "%s, %s, messages of %zu elements: %.0f us, %s\n",
             ob_cost_schedule_name(row->schedule), ob_wire_name(row->wire, task->bits),
             estimate->chunk, 1e6 * estimate->seconds,
             estimate->measured ? "as measured" : "by the model");
  else
    snprintf(line, sizeof line, "%s%s", refusal, refusal[0] ? "\n" : "");
  append_line(choice, line);
  return !refusal;
}

static void append_chosen_line(struct ob_cost_choice *choice, const struct ob_costs *costs,
                               int bits) {
  char line[OB_COST_SOURCE_CAPACITY + 128];
  snprintf(line, sizeof line, "chosen: %s, %s, messages of %zu elements (costs: %s)\n",
           ob_cost_schedule_name(choice->schedule), ob_wire_name(choice->wire, bits), choice->chunk,
           costs->source);
  append_line(choice, line);
}

static void set_choice(struct ob_cost_choice *choice, const struct ob_cost_candidate *row,
                       const struct estimate *estimate) {
  choice->schedule = row->schedule;
  choice->wire = row->wire;
  choice->chunk = estimate->chunk;
  choice->seconds = estimate->seconds;
}

/* Chooses the exchange, which all ranks can run, if these ranks cannot run the only schedule that
 * is allowed. */
static void choose_exchange(const struct ob_costs *costs, const struct ob_cost_task *task,
                            struct ob_cost_choice *choice) {
  size_t k = 0;
  while (ob_cost_candidates[k].schedule != ONEBIT_SCHEDULE_EXCHANGE ||
         ob_cost_candidates[k].wire != task->wire)
    k++;
  struct estimate only = estimate_candidate(costs, task, k);
  set_choice(choice, &ob_cost_candidates[k], &only);
}

void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice) {
  *choice = (struct ob_cost_choice){.schedule = ONEBIT_SCHEDULE_EXCHANGE, .wire = task->wire};
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++) {
    const struct ob_cost_candidate *row = &ob_cost_candidates[k];
    if (!is_candidate_allowed(task, row))
      continue;
    struct estimate now = estimate_candidate(costs, task, k);
    if (!append_candidate_line(choice, task, row, &now))
      continue;
    bool exact = row->wire == ONEBIT_WIRE_DENSE && choice->wire == ONEBIT_WIRE_BITS;
    if (choice->chunk == 0 || now.seconds < (exact ? ROUNDING_COSTS : 1) * choice->seconds)
      set_choice(choice, row, &now);
  }
  if (choice->chunk == 0)
    choose_exchange(costs, task, choice);
  append_chosen_line(choice, costs, task->bits);
}

/* --- The measurements of whole calls -----------------------------------------------------------*/

bool ob_cost_add_point(struct ob_cost_curve *curve, double bytes, double value) {
  size_t count = (size_t)curve->count;
  if (count == OB_COST_POINTS || (count && bytes <= curve->point[count - 1].bytes))
    return false;
  curve->point[count].bytes = bytes;
  curve->point[count].value = value;
  curve->count++;
  return true;
}

/* True if corrections apply to the task, because the task is of the kind that was measured. With
 * one scale for the whole buffer no steps overlap, so corrections that were measured with blocks do
 * not apply. */
static bool is_corrected(const struct ob_costs *costs, const struct ob_cost_task *task) {
  return task->operation == ONEBIT_ALLREDUCE && task->block != ONEBIT_BLOCK_BUFFER &&
         task->ranks_per_host > 0 && costs->hosts == task->hosts &&
         costs->ranks_per_host == task->ranks_per_host;
}

static double buffer_bytes(const struct ob_cost_task *task) {
  return (double)task->elements * (double)sizeof(float);
}

/* Returns the logarithm to base 2, exact at powers of two and linear in between. Unlike the C
 * library's log2, it gives the same result on every machine. */
static double log2_linear(double bytes) {
  double whole = 0;
  for (; bytes >= 2; bytes /= 2)
    whole++;
  return whole + bytes - 1;
}

static double interpolate_curve(const struct ob_cost_curve *curve, size_t k, double bytes) {
  double low = log2_linear(curve->point[k].bytes), high = log2_linear(curve->point[k + 1].bytes);
  double part = (log2_linear(bytes) - low) / (high - low);
  return curve->point[k].value + part * (curve->point[k + 1].value - curve->point[k].value);
}

double ob_cost_factor(const struct ob_costs *costs, const struct ob_cost_task *task,
                      size_t candidate, bool *measured) {
  const struct ob_cost_curve *curve = &costs->measured.factor[candidate];
  size_t count = (size_t)curve->count, k = 0;
  double bytes = buffer_bytes(task);
  *measured = count && is_corrected(costs, task);
  if (!*measured)
    return 1;
  if (bytes <= curve->point[0].bytes)
    return curve->point[0].value;
  while (k + 1 < count && bytes > curve->point[k + 1].bytes)
    k++;
  return k + 1 < count ? interpolate_curve(curve, k, bytes) : curve->point[k].value;
}

/* Returns the fastest measured chunk at the nearest size. Sizes below half of the smallest measured
 * size use the model instead: they are hardly more than one message. */
size_t ob_cost_measured_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                              size_t candidate) {
  const struct ob_cost_candidate *which = &ob_cost_candidates[candidate];
  const struct ob_cost_curve *curve = &costs->measured.chunk;
  size_t count = (size_t)curve->count, k = 0;
  double bytes = buffer_bytes(task);
  if (which->schedule != ONEBIT_SCHEDULE_EXCHANGE || which->wire != ONEBIT_WIRE_BITS || !count ||
      !is_corrected(costs, task) || bytes < curve->point[0].bytes / 2)
    return 0;
  while (k + 1 < count && bytes * bytes >= curve->point[k].bytes * curve->point[k + 1].bytes)
    k++;
  return (size_t)curve->point[k].value;
}
