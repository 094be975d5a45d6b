/* Chooses a schedule: the candidates of the cost model, and the text of the reasons. */
#include <stdio.h>
#include <string.h>

#include "collectives/schedules/schedule.h"

/* Room for what a schedule says of itself. */
#define LINE 128

/* Elements a message of one bit may have; the first is preferred. Of more bits they are fewer. From
 * 64 Ki, 8 kB, below which the cost of each message outweighs what finer overlap brings (measured:
 * 16 Ki took 1.3 to 2 times as long from 1 MiB on, 2 and 4 hosts at 1 Gbit/s), to 448 Ki, 57 kB
 * with its scales: the largest that stays below the 64 KiB which MPI libraries send eagerly over
 * TCP. */
static const size_t chunks[] = {131072, 65536, 262144, 458752};

/* A tie of chunks goes to the first: the model does not know two per cent. */
#define WORTH 0.98

/* Bits round, float32 does not: to be chosen, bits must be this much faster. */
#define ROUNDING_COSTS 1.03

const struct ob_cost_candidate ob_cost_candidates[OB_COST_CANDIDATES] = {
    {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS},     {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS},
    {ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS}, {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_DENSE},
    {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_DENSE},
};

const char *ob_cost_schedule_name(onebit_schedule_t schedule) {
  static const char *const names[] = {"automatic", "exchange", "allgather", "hierarchical"};
  return (unsigned)schedule < sizeof names / sizeof names[0] ? names[schedule] : "unknown";
}

const char *ob_cost_wire_name(onebit_wire_t wire, int bits) {
  if (wire == ONEBIT_WIRE_DENSE)
    return "float32";
  return bits == 8 ? "8 bits" : bits == 4 ? "4 bits" : bits == 2 ? "2 bits" : "one bit";
}

bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire) {
  char line[LINE];
  return ob_schedule_named(schedule)->describe(task, wire, 1, line, sizeof line);
}

static bool wanted(const struct ob_cost_task *task, const struct ob_cost_candidate *row) {
  if (task->schedule != ONEBIT_SCHEDULE_AUTOMATIC && task->schedule != row->schedule)
    return false;
  return task->wire == row->wire || (task->dense_allowed && row->wire == ONEBIT_WIRE_DENSE);
}

/* A candidate's time, with the chunk that suits it. */
struct estimate {
  size_t chunk;
  double seconds;
  bool measured;
};

static struct estimate by_model(const struct ob_costs *costs, const struct ob_cost_task *task,
                                const struct ob_cost_candidate *row, size_t chunk) {
  return (struct estimate){
      .chunk = chunk, .seconds = ob_cost_seconds(costs, task, row->schedule, row->wire, chunk)};
}

static struct estimate estimate(const struct ob_costs *costs, const struct ob_cost_task *task,
                                size_t k) {
  const struct ob_cost_candidate *row = &ob_cost_candidates[k];
  size_t given = ob_cost_measured_chunk(costs, task, k);
  const size_t width = row->wire == ONEBIT_WIRE_BITS && task->bits > 1 ? (size_t)task->bits : 1;
  given = task->chunk ? task->chunk : given / width;
  struct estimate best = by_model(costs, task, row, given ? given : chunks[0] / width);
  for (size_t i = 1; !given && i < sizeof chunks / sizeof chunks[0]; i++) {
    struct estimate other = by_model(costs, task, row, chunks[i] / width);
    if (other.seconds < WORTH * best.seconds)
      best = other;
  }
  best.seconds *= ob_cost_factor(costs, task, k, &best.measured);
  return best;
}

static void append(struct ob_cost_choice *choice, const char *line) {
  size_t length = strlen(choice->text);
  snprintf(choice->text + length, sizeof choice->text - length, "%s", line);
}

/* Adds a line about a candidate, with its time or the reason why it has none. */
static bool tell(struct ob_cost_choice *choice, const struct ob_cost_task *task,
                 const struct ob_cost_candidate *row, const struct estimate *estimate) {
  char about[LINE] = "", line[LINE + 64];
  bool possible = ob_schedule_named(row->schedule)
                      ->describe(task, row->wire, estimate->chunk, about, sizeof about);
  if (possible)
    snprintf(line, sizeof line, "%s: %.0f us, %s\n", about, 1e6 * estimate->seconds,
             estimate->measured ? "as measured" : "by the model");
  else
    snprintf(line, sizeof line, "%s%s", about, about[0] ? "\n" : "");
  append(choice, line);
  return possible;
}

static void conclude(struct ob_cost_choice *choice, const struct ob_costs *costs, int bits) {
  char line[OB_COST_SOURCE_CAPACITY + 128];
  snprintf(line, sizeof line, "chosen: %s, %s, messages of %zu elements (costs: %s)\n",
           ob_cost_schedule_name(choice->schedule), ob_cost_wire_name(choice->wire, bits),
           choice->chunk, costs->source);
  append(choice, line);
}

static void choose(struct ob_cost_choice *choice, const struct ob_cost_candidate *row,
                   const struct estimate *estimate) {
  choice->schedule = row->schedule;
  choice->wire = row->wire;
  choice->chunk = estimate->chunk;
  choice->seconds = estimate->seconds;
}

/* With a schedule that these ranks cannot do, and nothing else allowed: exchange, which every
 * group can. */
static void fall_back(const struct ob_costs *costs, const struct ob_cost_task *task,
                      struct ob_cost_choice *choice) {
  size_t k = 0;
  while (ob_cost_candidates[k].schedule != ONEBIT_SCHEDULE_EXCHANGE ||
         ob_cost_candidates[k].wire != task->wire)
    k++;
  struct estimate only = estimate(costs, task, k);
  choose(choice, &ob_cost_candidates[k], &only);
}

void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice) {
  *choice = (struct ob_cost_choice){.schedule = ONEBIT_SCHEDULE_EXCHANGE, .wire = task->wire};
  for (size_t k = 0; k < OB_COST_CANDIDATES; k++) {
    const struct ob_cost_candidate *row = &ob_cost_candidates[k];
    if (!wanted(task, row))
      continue;
    struct estimate now = estimate(costs, task, k);
    if (!tell(choice, task, row, &now))
      continue;
    bool exact = row->wire == ONEBIT_WIRE_DENSE && choice->wire == ONEBIT_WIRE_BITS;
    if (choice->chunk == 0 || now.seconds < (exact ? ROUNDING_COSTS : 1) * choice->seconds)
      choose(choice, row, &now);
  }
  if (choice->chunk == 0)
    fall_back(costs, task, choice);
  conclude(choice, costs, task->bits);
}
