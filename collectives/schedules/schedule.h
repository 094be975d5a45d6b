/*
 * A schedule defines which rank reduces which elements, in which messages, and in which order. Each
 * schedule is a row of five functions, in a file of its own. The files show the steps as letters,
 * with the numbers of chunks, 0, 1, ...:
 *
 *   C compress   E exchange: send to servers   r receive from workers   R reduce
 *   G gather: send results to all              c collect results        A apply
 */
#ifndef OB_COLLECTIVES_SCHEDULES_SCHEDULE_H
#define OB_COLLECTIVES_SCHEDULES_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/cost/model.h"
#include "collectives/steps.h"

/* The largest number of elements of a message: an MPI count is an int, and a dense message has 4
 * bytes per element. */
#define OB_MAX_CHUNK_ELEMENTS ((size_t)1 << 28)

/* The largest number of elements of a message on a stream: counts are a size_t; a launch has fewer
 * than 2^31 thread blocks, each of which processes 4 blocks of at least 32 elements. */
#define OB_MAX_STREAM_ELEMENTS ((size_t)1 << 37)

struct onebit_plan;
struct ob_plan_shape;

/* The memory that a schedule needs on this rank. */
struct ob_schedule_sizes {
  size_t outgoing, incoming, results;      /* members whose messages need memory */
  size_t compressed_first, compressed_end; /* the blocks that this rank compresses */
  size_t reduced_first, reduced_end;       /* the blocks that it reduces, which have a residual */
  uint64_t wire_bytes;                     /* bytes that this rank sends in a call */
};

struct ob_schedule {
  size_t window; /* the number of message slots; 0: one for each chunk */
  bool whole;    /* each message of an allreduce covers all elements: no servers */

  /* Fails if this plan cannot use the schedule with its options. NULL: every plan can. */
  onebit_status_t (*applicable)(const struct onebit_plan *plan, const struct ob_plan_shape *shape);

  /* Appends steps of a call (ob_steps_add). `decided` false: the steps before OB_STEP_DECIDE.
   * `decided` true: those after it, which apply the results. The caller appends OB_STEP_DECIDE
   * itself. */
  void (*build)(struct onebit_plan *plan, bool decided);

  /* Computes the memory that this rank needs; called once the plan is cut into messages. */
  void (*sizes)(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes);

  /* Returns NULL if the model can estimate the task with this schedule; otherwise the reason, which
   * may be "". A NULL pointer: the model can estimate every task. */
  const char *(*refuse)(const struct ob_cost_task *task, onebit_wire_t wire);

  /* Returns the predicted seconds of a call, without the time that a call of any size takes. NULL:
   * the model uses another row's function. */
  double (*cost)(const struct ob_cost_model *model, onebit_wire_t wire, size_t chunk);
};

/* The schedules that have a public name, in the order of onebit_schedule_t from 1 on. Checks, names
 * and programs are generated from this list. */
#define OB_SCHEDULES(row)                                                                          \
  row(EXCHANGE, exchange) row(ALLGATHER, allgather) row(HIERARCHICAL, hierarchical)
#define OB_SCHEDULE_NAME(constant, name)     , #name
#define OB_SCHEDULE_DECLARED(constant, name) extern const struct ob_schedule ob_schedule_##name;
OB_SCHEDULES(OB_SCHEDULE_DECLARED)
#undef OB_SCHEDULE_DECLARED
#define OB_SCHEDULE_COUNTED(constant, name) +1
enum { OB_SCHEDULE_LAST = OB_SCHEDULES(OB_SCHEDULE_COUNTED) };
#undef OB_SCHEDULE_COUNTED
extern const struct ob_schedule ob_schedule_doubling, ob_schedule_replicas, ob_schedule_window;

/* Returns the row of a schedule with a public name; for AUTOMATIC the row of the exchange. */
const struct ob_schedule *ob_schedule_find(onebit_schedule_t schedule);

/* Sets plan->choice and plan->schedule. ONEBIT_ERROR_ARGUMENT or ONEBIT_ERROR_UNSUPPORTED: the
 * requested schedule is not possible. */
onebit_status_t ob_schedule_choose(struct onebit_plan *plan, const struct ob_plan_shape *shape);

/* Cuts the layout into segments and chunks, and may replace the allgather by doubling. Fills in
 * plan->sizes and the plan's geometry, except the addresses of messages. */
onebit_status_t ob_schedule_cut(struct onebit_plan *plan, const struct ob_plan_shape *shape);

/* Sets the bits per element of all later messages, for which the plan must have memory. Called
 * between calls. */
void ob_schedule_set_width(struct onebit_plan *plan, unsigned width);

/* Writes the plan's list of steps. */
onebit_status_t ob_schedule_steps(struct onebit_plan *plan);

/* --- Functions that schedules share */

void ob_schedule_add_all(struct onebit_plan *plan, enum ob_step_kind kind);

/* Adds the steps that compress every chunk and send it as soon as its scales are known: each chunk
 * at once, or with one scale for the buffer all chunks after the last one is compressed. */
void ob_schedule_add_sending(struct onebit_plan *plan, enum ob_step_kind compress,
                             enum ob_step_kind send);

/* Return the bytes that this rank sends: to the servers, in messages about the other members'
 * segments; to all other members, in messages about its own segment; and to all other members as
 * replicated servers, in messages about all segments. */
uint64_t ob_schedule_bytes_to_servers(const struct onebit_plan *plan);
uint64_t ob_schedule_bytes_to_all(const struct onebit_plan *plan);
uint64_t ob_schedule_bytes_to_replicas(const struct onebit_plan *plan);

/* Returns the name of a wire format for people: "one bit", "8 bits", "float32". */
const char *ob_wire_name(onebit_wire_t wire, int bits);

/* --- Replicated servers (replicas.c) */

/* Fails if the servers of this plan cannot be replicated. */
onebit_status_t ob_replicas_applicable(const struct onebit_plan *plan,
                                       const struct ob_plan_shape *shape);

/* --- Steps of doubling (doubling.c); `chunk` is the number of the round */

ob_step_run ob_begin_round, ob_end_round;
struct ob_batch *ob_round_batch(const struct onebit_plan *plan, size_t round);

/* True if the messages of a plan with the allgather schedule can be sent by doubling. */
bool ob_doubling_fits(const struct onebit_plan *plan);

#endif
