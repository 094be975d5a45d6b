/*
 * The struct of a plan: its settings, the call in flight, and the state that calls leave. It is for
 * collectives/ and for executors; other modules call the functions of plan.h.
 */
#ifndef OB_COLLECTIVES_PLAN_PRIVATE_H
#define OB_COLLECTIVES_PLAN_PRIVATE_H

#include "base/error.h"
#include "collectives/plan.h"
#include "collectives/schedules/host.h"
#include "collectives/schedules/schedule.h"
#include "collectives/steps.h"
#include "collectives/watch.h"

/* The call in flight: ob_plan_start fills it in; the steps read and update it. */
struct ob_flight {
  struct ob_call call;
  size_t step, stop;                /* next step; step before which the call stops */
  int failed_rank, not_finite_rank; /* first rank that reported it; -1: none */
  bool large_elsewhere;             /* another rank has large scales */
  bool apply_early_ok;              /* the call will succeed: results are applied as they arrive */
  float worker_scale, server_scale;
  struct ob_outcome outcome; /* the outcome on this rank */
  struct ob_host_call host;  /* used if the plan is hierarchical */
  struct ob_watch watch;     /* the time since a step last made progress */
  double began; /* for ONEBIT_DEBUG=TRACE: the time at which the call began, and its bytes */
  uint64_t call_bytes;
};

/* The state that calls leave for later calls. */
struct ob_plan_state {
  /* Residuals of the values that this rank sends, and of the segment that it reduces; with one
   * scale also the sums of their runs. */
  struct ob_residual worker, server;
  double *worker_sums, *server_sums;
  bool server_large;   /* a scale of `server`, or an imported value, is >= OB_LARGE_SCALE */
  int result_now;      /* index of the copy of the results that the last call wrote */
  unsigned last_width; /* bits per element of the last call's results */
  struct ob_ladder ladder;
  struct ob_work work;
  uint32_t sequence;   /* the number of the latest call */
  uint64_t calls;      /* the number of hierarchical calls */
  double (*now)(void); /* NULL: steps are not timed */
  struct ob_spent spent;
  struct ob_outcome outcome; /* of calls on streams, until ob_plan_settle */
  bool in_flight, broken;    /* broken: the transport failed, so no further call is possible */
  bool refused;              /* struct onebit_plan's `refused` points here unless it is shared */
  const struct onebit_plan *next; /* next plan in the engine's list */
  bool claimed;
};

/* The settings of a plan. Calls, steps and messages get a const plan; only ob_schedule_set_width
 * changes it after creation, between calls. */
struct onebit_plan {
  onebit_comm_t comm;
  struct ob_flight *flight;
  struct ob_plan_state *state;
  onebit_plan_options_t options;
  uint64_t number; /* in its communicator, from 1 on; the same on all ranks */
  size_t count;    /* the count that the caller gave */
  struct ob_geometry geometry;
  int *member_ranks; /* the rank of each member of the group */
  const struct ob_executor *executor;
  struct ob_device *device;     /* the executor's state, if it is on a device */
  struct ob_host host;          /* the schedule's state, if it is hierarchical */
  bool momentum, moments;       /* as in struct ob_plan_shape */
  struct ob_cost_choice choice; /* the schedule, and the reason for it */
  const struct ob_schedule *schedule;
  struct ob_schedule_sizes sizes;
  struct ob_window *window; /* memory that has all messages; NULL: each kind has its own */
  uint64_t wire_bytes, memory_bytes;
  struct ob_batch **exchange, **gather; /* one for each slot */
  struct ob_view *views;                /* scratch: one for each rank */
  const void **inputs;                  /* by piece, for calls with one buffer */
  void **outputs;
  struct ob_step *steps;
  size_t step_count, decided; /* decided: the step after DECIDE */
  int tag;
  /* True after a refused message. Other ranks may have completed the call, so this rank takes part
   * in no further call, and reports that to the others, until ob_plan_accept. */
  bool *refused;
};

/* ob_plan_build builds this rank's part of a plan. ob_plan_release frees whatever of it was
 * allocated. Local. */
onebit_status_t ob_plan_build(struct onebit_plan *plan, const struct ob_plan_shape *shape);
void ob_plan_release(struct onebit_plan *plan);

/* Fails while a request is in flight on the plan. */
static inline onebit_status_t ob_plan_check_idle(const struct onebit_plan *plan) {
  return plan->state->in_flight ? ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight")
                                : ONEBIT_OK;
}

/* ob_plan_describe_call writes "allreduce call 3 of plan 1 (16 MiB)" for error messages, and sets
 * wait->others, the text about the ranks that are waited for if none is known. ob_operation_name
 * returns "allreduce" and the like. */
const char *ob_operation_name(onebit_operation_t operation);
void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait);

#endif
