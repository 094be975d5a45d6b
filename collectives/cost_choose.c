/* Which schedule: the candidates of the cost model, and the words that say why. */
#include <stdio.h>
#include <string.h>

#include "collectives/cost.h"

/* Elements a message of bits may have; the first is preferred. From 64 Ki, 8 kB, below which the
 * cost of each message outweighs what finer overlap brings (measured: 16 Ki took 1.3 to 2 times as
 * long from 1 MiB on, 2 and 4 hosts at 1 Gbit/s), to 448 Ki, 57 kB with its scales: the largest
 * that stays below the 64 KiB which MPI libraries send eagerly over TCP. */
static const size_t chunks[] = {131072, 65536, 262144, 458752};

/* A tie of chunks goes to the first: the model does not know two per cent. */
#define WORTH 0.98

/* Bits round, float32 does not: to be chosen, bits must be this much faster. */
#define ROUNDING_COSTS 1.03

struct row {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
};

static const struct row rows[] = {
    {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_BITS},     {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_BITS},
    {ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_WIRE_BITS}, {ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_WIRE_DENSE},
    {ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_WIRE_DENSE},
};

const char *ob_cost_schedule_name(onebit_schedule_t schedule) {
  static const char *const names[] = {"automatic", "exchange", "allgather", "hierarchical"};
  return (unsigned)schedule < sizeof names / sizeof names[0] ? names[schedule] : "unknown";
}

static const char *wire_name(onebit_wire_t wire) {
  return wire == ONEBIT_WIRE_DENSE ? "float32" : "one bit";
}

bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire) {
  if (schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    return task->operation == ONEBIT_ALLREDUCE && wire == ONEBIT_WIRE_BITS && task->hosts > 1 &&
           task->ranks_per_host > 1;
  if (task->operation == ONEBIT_ALLREDUCE)
    return true;
  return schedule == ONEBIT_SCHEDULE_EXCHANGE && wire == ONEBIT_WIRE_BITS;
}

static bool wanted(const struct ob_cost_task *task, const struct row *row) {
  if (task->schedule != ONEBIT_SCHEDULE_AUTOMATIC && task->schedule != row->schedule)
    return false;
  return task->wire == row->wire || (task->dense_allowed && row->wire == ONEBIT_WIRE_DENSE);
}

static size_t best_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                         const struct row *row, double *seconds) {
  size_t best = task->chunk ? task->chunk : chunks[0];
  *seconds = ob_cost_seconds(costs, task, row->schedule, row->wire, best);
  for (size_t k = 1; !task->chunk && k < sizeof chunks / sizeof chunks[0]; k++) {
    double other = ob_cost_seconds(costs, task, row->schedule, row->wire, chunks[k]);
    if (other < WORTH * *seconds) {
      *seconds = other;
      best = chunks[k];
    }
  }
  return best;
}

static void append(struct ob_cost_choice *choice, const char *line) {
  size_t length = strlen(choice->words);
  snprintf(choice->words + length, sizeof choice->words - length, "%s", line);
}

static void tell(struct ob_cost_choice *choice, const struct row *row, size_t chunk,
                 double seconds) {
  char line[128];
  snprintf(line, sizeof line, "%s, %s, messages of %zu elements: %.0f us\n",
           ob_cost_schedule_name(row->schedule), wire_name(row->wire), chunk, 1e6 * seconds);
  append(choice, line);
}

static void tell_impossible(struct ob_cost_choice *choice, const struct ob_cost_task *task,
                            const struct row *row) {
  if (row->schedule != ONEBIT_SCHEDULE_HIERARCHICAL || task->operation != ONEBIT_ALLREDUCE)
    return;
  append(choice, task->hosts < 2             ? "hierarchical: not with one host\n"
                 : task->ranks_per_host == 0 ? "hierarchical: hosts have different numbers of "
                                               "ranks\n"
                                             : "hierarchical: is exchange with one rank a host\n");
}

static void conclude(struct ob_cost_choice *choice, const struct ob_costs *costs) {
  char line[OB_COST_SOURCE_ROOM + 128];
  snprintf(line, sizeof line, "chosen: %s, %s, messages of %zu elements (costs: %s)\n",
           ob_cost_schedule_name(choice->schedule), wire_name(choice->wire), choice->chunk,
           costs->source);
  append(choice, line);
}

/* With a schedule that these ranks cannot do, and nothing else allowed: exchange, which every
 * group can. */
void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice) {
  *choice = (struct ob_cost_choice){.schedule = ONEBIT_SCHEDULE_EXCHANGE, .wire = task->wire};
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    double seconds;
    if (!wanted(task, &rows[k]))
      continue;
    if (!ob_cost_possible(task, rows[k].schedule, rows[k].wire)) {
      tell_impossible(choice, task, &rows[k]);
      continue;
    }
    size_t chunk = best_chunk(costs, task, &rows[k], &seconds);
    tell(choice, &rows[k], chunk, seconds);
    bool exact = rows[k].wire == ONEBIT_WIRE_DENSE && choice->wire == ONEBIT_WIRE_BITS;
    if (choice->chunk == 0 || seconds < (exact ? ROUNDING_COSTS : 1) * choice->seconds) {
      choice->schedule = rows[k].schedule;
      choice->wire = rows[k].wire;
      choice->chunk = chunk;
      choice->seconds = seconds;
    }
  }
  const struct row any = {choice->schedule, choice->wire};
  if (choice->chunk == 0)
    choice->chunk = best_chunk(costs, task, &any, &choice->seconds);
  conclude(choice, costs);
}
