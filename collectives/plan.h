/*
 * A plan: what was decided, the memory, and the state of the call that is in flight on it.
 */
#ifndef OB_COLLECTIVES_PLAN_H
#define OB_COLLECTIVES_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "collectives/communicator.h"
#include "collectives/executor.h"
#include "collectives/geometry.h"
#include "collectives/ladder.h"
#include "collectives/schedules/host.h"
#include "collectives/schedules/schedule.h"
#include "collectives/trace.h"
#include "collectives/watch.h"
#include "compression/blocks.h"
#include "onebit/collectives.h"

/* What a plan is made from, with every default filled in. */
struct ob_plan_shape {
  onebit_plan_options_t options;
  onebit_dtype_t output_dtype; /* that of the options, unless the caller sets another */
  size_t block;                /* elements a block; with one_scale, elements a run of the sum */
  bool one_scale;
  bool segment_a_piece; /* rank k serves piece k; else shares are cut by size */
  /* NULL, or one a rank and another: rank k serves the pieces from segment_pieces[k] up to the next
   * rank's. */
  const size_t *segment_pieces;
  bool momentum;     /* the source will want the last result */
  bool moments;      /* moments of this rank's own gradients are kept (struct ob_source) */
  bool from_servers; /* a pass takes the result, as servers send it in bits */
  struct ob_serving serving;
  /* Dense: few message buffers, results are stored before the call is known to be well. */
  bool windowed;
  /* Reduce-scatter and allgather: of the shares of one list of pieces, cut by size as an allreduce
   * cuts them. Dense, an allgather then moves its values as they are, finite or not. */
  bool of_segments;
  bool among_hosts; /* other ranks' plans are on processors: messages are cut as theirs are */
  size_t pieces;
  const size_t *counts, *valid; /* one a piece; valid NULL: all */
  bool *refused;                /* shared with other plans (struct onebit_plan); NULL: its own */
};

/* What one call works on: by piece, input; and either outputs, or a pass of an optimizer. */
struct ob_call {
  struct ob_source source;
  void *const *outputs;
  const struct ob_pass_sink *sink;
  /* Of segments: float32, the one that this rank reduces as its words lie, from its first one on. A
   * reduce-scatter's result, in place of outputs; an allgather of bits takes it in place of
   * inputs. */
  float *shard;
  /* The bits of a float32 argument that must be the same on all ranks, and its name. */
  uint32_t agreed;
  const char *agreed_name;
  bool agreed_whole; /* it is no float32, but a whole number */
  const float *rate; /* NULL, or in memory of the device what counts instead of `agreed` */
  /* Where the plan is on a device: arrays of pointers there, by piece; NULL: the plan's inputs and
   * outputs are parts of one buffer. */
  void *const *device_inputs, *const *device_outputs;
  bool counted;       /* the device knows the bias corrections of the step, and the host may not */
  bool only_at_first; /* likewise, until when the source's momentum is kept */
  /* On which stream of the device, where the plan is on one: NULL is a stream too. */
  bool on_stream;
  void *stream;
  /* Stop when decided: the caller has several plans to apply all or none of (ob_plan_apply). */
  bool hold;
};

struct ob_trace {
  struct ob_moment *moments;
  size_t capacity, count;
  bool open; /* moments[count] has begun */
};

/* What the host's clock saw of the calls since somebody took it: the work of codecs on messages,
 * and bringing results to their place. */
struct ob_spent {
  double compress, apply; /* seconds */
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

/* Collective; `status` is how the caller fares so far, so that a rank with a wrong argument takes
 * part in the failure. On failure *plan is NULL on all ranks. */
onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *plan);

/* This rank's part of that: what the plan has, of which ob_plan_release gives back whatever there
 * is. Local. */
onebit_status_t ob_plan_build(struct onebit_plan *plan, const struct ob_plan_shape *shape);
void ob_plan_release(struct onebit_plan *plan);

/* Checks options and fills in the defaults. */
onebit_status_t ob_plan_resolve(const onebit_plan_options_t *options, struct ob_plan_shape *shape);

/* The pieces of a plan on one buffer of `count` elements: the buffer, or a part for each rank,
 * which in profile deepspeed comes from padding. Fills in counts and valid, one a piece and at most
 * one a rank, for the shape. */
void ob_plan_cut(struct ob_plan_shape *shape, size_t ranks, size_t count, size_t *counts,
                 size_t *valid);

/* `count` elements with the padding of profile deepspeed. */
size_t ob_plan_padded(size_t ranks, size_t count);

/* Begins a call. `status`: this rank's arguments; a negative one is told to the other ranks, and
 * comes out at the end. Errors: ONEBIT_ERROR_BUSY, ONEBIT_ERROR_TRANSPORT (broken). */
onebit_status_t ob_plan_start(onebit_plan_t plan, onebit_status_t status,
                              const struct ob_call *call);

/* Ends a call that ob_plan_start began: its status, or ONEBIT_IN_PROGRESS if `wait` is false and it
 * is not done. */
onebit_status_t ob_plan_test(onebit_plan_t plan, bool wait);

/* A call that was held and ended well will not be applied; its input is still there. Nothing is
 * done for one that was applied, or where there was none. */
void ob_plan_revoke(onebit_plan_t plan);

/* Ends a call that may be in flight, without its messages: then the plan can only be destroyed.
 * NULL is fine. */
void ob_plan_abandon(onebit_plan_t plan);

/* A collective of a plan on a device, on this stream of it; the errors are the collectives', and
 * what is not known yet when it returns comes from ob_plan_settle. */
onebit_status_t ob_collective_put(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, void *stream);

/* Ends a call that ob_plan_start began on a stream as soon as all of it is there: its status as far
 * as that is known. */
onebit_status_t ob_plan_put(onebit_plan_t plan);

/* Resets the residuals, whose memory goes back to the system until a call writes it again. */
onebit_status_t ob_plan_return_residual(onebit_plan_t plan);

/* The ranks have the same again: forgets that a message was refused. Errors: the executor's. */
onebit_status_t ob_plan_accept(onebit_plan_t plan);

/* Waits for what is on streams. The status of the first call since the last time that did not end
 * well, an error counting more than a skip. */
onebit_status_t ob_plan_settle(onebit_plan_t plan);

/* After a held call ended well: applies and commits it. Or first lets a pass of another sink look
 * at its results. */
void ob_plan_apply(onebit_plan_t plan);
void ob_plan_visit(onebit_plan_t plan, const struct ob_pass_sink *sink);

/* Where the result that member or rank `source` sent lies: of the latest call that was committed,
 * or of the one in flight. In a hierarchical plan `source` is the number of the share, and its
 * memory perhaps another rank's. */
unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk);

/* The blocks first .. end - 1 that this rank compresses; those of the segment that it reduces. */
void ob_plan_compressed(const struct onebit_plan *plan, size_t *first, size_t *end);
void ob_plan_segment(const struct onebit_plan *plan, size_t *first, size_t *end);

/* How many results there are. */
size_t ob_plan_sources(const struct onebit_plan *plan);

/* Which blocks and words a message of this segment and chunk has: what ranks send to servers; what
 * these send back; and that of the latest call that was committed, perhaps of another width. */
struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk);
struct ob_message_shape ob_plan_result_message(const struct onebit_plan *plan, size_t segment,
                                               size_t chunk);
struct ob_message_shape ob_plan_last_message(const struct onebit_plan *plan, size_t segment,
                                             size_t chunk);

/* "allreduce call 3 of plan 1 (16 MiB)", for error messages; and what a wait without a rank is for.
 */
void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait);

/* Elements in the longest message, those that fill its last words up too. */
size_t ob_plan_longest_message(const struct onebit_plan *plan);

#endif
