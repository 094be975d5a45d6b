/*
 * The struct of a plan: what was decided, the memory, and the state of the call that is in flight
 * on it. For collectives/ and for executors; others call the functions of plan.h.
 */
#ifndef OB_COLLECTIVES_PLAN_PRIVATE_H
#define OB_COLLECTIVES_PLAN_PRIVATE_H

#include "collectives/plan.h"
#include "collectives/schedules/host.h"
#include "collectives/schedules/schedule.h"
#include "collectives/trace.h"
#include "collectives/watch.h"

struct ob_trace {
  struct ob_moment *moments;
  size_t capacity, count;
  bool open; /* moments[count] has begun */
};

struct onebit_plan {
  onebit_comm_t comm;
  onebit_plan_options_t options;
  uint64_t number; /* in its communicator, from 1 on; the same on all ranks */
  size_t count;    /* as the caller gave it */
  struct ob_geometry geometry;
  int *member_ranks; /* of the members of the group */
  struct ob_work work;
  const struct ob_executor *executor;
  struct ob_device *device;     /* the executor's own, where it is a device */
  struct ob_host host;          /* the schedule's own, where it is hierarchical */
  bool momentum, moments;       /* as struct ob_plan_shape has them */
  struct ob_cost_choice choice; /* what was decided, and why */
  const struct ob_schedule *schedule;
  struct ob_schedule_sizes sizes;
  struct ob_window *window; /* where the messages are; NULL: each kind has memory of its own */
  uint64_t wire_bytes, memory_bytes;
  struct ob_ladder ladder;

  /* Residuals of what this rank sends, and of the segment that it reduces; sums of their runs when
   * there is one scale. */
  struct ob_residual worker, server;
  bool server_large; /* a scale of it, or a value that was imported, is from OB_LARGE_SCALE on */
  double *worker_sums, *server_sums;

  int result_now;                       /* which copy of the results is the last call's */
  unsigned last_width;                  /* bits an element of that one */
  struct ob_batch **exchange, **gather; /* one a slot */
  struct ob_view *views;                /* scratch: one a rank */
  const void **inputs;                  /* by piece, for calls with one buffer */
  void **outputs;

  struct ob_step *steps;
  size_t step_count, decided; /* decided: the step after DECIDE */
  int tag;

  /* The call in flight. */
  struct ob_call call;
  size_t step, stop; /* the next one; where the walk ends */
  uint32_t sequence;
  uint64_t calls;
  int failed_rank, not_finite_rank; /* the first that said so, or -1 */
  bool large_heard;                 /* a rank has large scales */
  bool apply_early_ok;              /* the call will end well: results are applied as they come */
  float worker_scale, server_scale;
  onebit_status_t status; /* of this rank; `error` says why it is negative */
  char error[256];

  struct ob_watch watch; /* how long nothing has moved */
  struct ob_trace trace;
  double began; /* the call, where ONEBIT_DEBUG=TRACE tells of it, and the bytes that it sends */
  uint64_t call_bytes;
  bool clocked; /* `spent` is wanted */
  struct ob_spent spent;

  /* Of calls on streams, until ob_plan_settle: the first that did not end well. */
  struct ob_outcome outcome;

  bool in_flight, broken; /* broken: the transport failed, nothing can follow */
  /* A message was refused, and other ranks may have ended the call well: from then on this rank
   * takes no part in any call, and tells the others so, until ob_plan_accept. */
  bool *refused, own_refused;
  struct onebit_plan *next; /* in the engine's list */
  bool claimed;
};

/* This rank's part of that: what the plan has, of which ob_plan_release gives back whatever there
 * is. Local. */
onebit_status_t ob_plan_build(struct onebit_plan *plan, const struct ob_plan_shape *shape);
void ob_plan_release(struct onebit_plan *plan);

/* "allreduce call 3 of plan 1 (16 MiB)", for error messages; and what a wait without a rank is for.
 */
void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait);

#endif
