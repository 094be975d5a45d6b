/*
 * The struct of a plan: the decision, the call in flight on it, and the state that calls leave. It
 * is for collectives/ and for executors; other modules call the functions of plan.h.
 */
#ifndef OB_COLLECTIVES_PLAN_PRIVATE_H
#define OB_COLLECTIVES_PLAN_PRIVATE_H

#include "base/error.h"
#include "collectives/plan.h"
#include "collectives/schedules/host.h"
#include "collectives/schedules/schedule.h"
#include "collectives/steps.h"
#include "collectives/watch.h"

/* The call in flight: ob_plan_start fills it in, the steps read and update it. */
struct ob_flight {
  struct ob_call call;
  size_t step, stop;                /* the next step; the step before which the call stops */
  int failed_rank, not_finite_rank; /* the first rank that reported it, or -1 */
  bool large_elsewhere;             /* a rank has large scales */
  bool apply_early_ok;              /* the call will succeed: results are applied as they arrive */
  float worker_scale, server_scale;
  struct ob_outcome outcome; /* of this rank */
  struct ob_host_call host;  /* used if the plan is hierarchical */
  struct ob_watch watch;     /* how long nothing has moved */
  double began; /* for ONEBIT_DEBUG=TRACE: when the call began, and the bytes that it sends */
  uint64_t call_bytes;
};

/* The state that calls leave for those that follow. */
struct ob_plan_state {
  /* Residuals of what this rank sends, and of the segment that it reduces; sums of their runs when
   * there is one scale. */
  struct ob_residual worker, server;
  double *worker_sums, *server_sums;
  bool server_large;   /* a scale of it, or an imported value, is at least OB_LARGE_SCALE */
  int result_now;      /* which copy of the results is the last call's */
  unsigned last_width; /* bits an element of that one */
  struct ob_ladder ladder;
  struct ob_work work;
  uint32_t sequence;   /* of the latest call */
  uint64_t calls;      /* the number of hierarchical calls */
  double (*now)(void); /* NULL: steps are not timed */
  struct ob_spent spent;
  struct ob_outcome outcome; /* of calls on streams, until ob_plan_settle */
  bool in_flight, broken;    /* broken: the transport failed, nothing can follow */
  bool refused;              /* struct onebit_plan's `refused` points here unless it is shared */
  const struct onebit_plan *next; /* in the engine's list */
  bool claimed;
};

/* The decision. Calls, steps and messages have a const plan; only ob_schedule_set_width changes it
 * again, between calls. */
struct onebit_plan {
  onebit_comm_t comm;
  struct ob_flight *flight;
  struct ob_plan_state *state;
  onebit_plan_options_t options;
  uint64_t number; /* in its communicator, from 1 on; the same on all ranks */
  size_t count;    /* as the caller gave it */
  struct ob_geometry geometry;
  int *member_ranks; /* of the members of the group */
  const struct ob_executor *executor;
  struct ob_device *device;     /* the executor's own, where it is a device */
  struct ob_host host;          /* the schedule's own, where it is hierarchical */
  bool momentum, moments;       /* as struct ob_plan_shape has them */
  struct ob_cost_choice choice; /* the schedule, and why */
  const struct ob_schedule *schedule;
  struct ob_schedule_sizes sizes;
  struct ob_window *window; /* where the messages are; NULL: each kind has memory of its own */
  uint64_t wire_bytes, memory_bytes;
  struct ob_batch **exchange, **gather; /* one a slot */
  struct ob_view *views;                /* scratch: one a rank */
  const void **inputs;                  /* by piece, for calls with one buffer */
  void **outputs;
  struct ob_step *steps;
  size_t step_count, decided; /* decided: the step after DECIDE */
  int tag;
  /* True after a refused message: other ranks may have completed the call, so this rank takes part
   * in no call, and reports that to the others, until ob_plan_accept. */
  bool *refused;
};

/* Builds this rank's part of a plan; ob_plan_release frees whatever was allocated of it. Local. */
onebit_status_t ob_plan_build(struct onebit_plan *plan, const struct ob_plan_shape *shape);
void ob_plan_release(struct onebit_plan *plan);

/* Fails while a request is in flight on the plan. */
static inline onebit_status_t ob_plan_check_idle(const struct onebit_plan *plan) {
  return plan->state->in_flight ? ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight")
                                : ONEBIT_OK;
}

/* Writes "allreduce call 3 of plan 1 (16 MiB)", for error messages, and what a wait without a rank
 * is for. */
const char *ob_operation_name(onebit_operation_t operation);
void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait);

#endif
