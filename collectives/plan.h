/*
 * A plan: what was decided, the memory, and the state of the call that is in flight on it.
 */
#ifndef OB_COLLECTIVES_PLAN_H
#define OB_COLLECTIVES_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/communicator.h"
#include "collectives/place.h"
#include "collectives/schedules/host.h"
#include "collectives/trace.h"
#include "compression/blocks.h"
#include "onebit/collectives.h"

/* What a plan is made from, with every default filled in. */
struct ob_plan_shape {
  onebit_plan_options_t options;
  onebit_dtype_t output_dtype; /* that of the options, unless the caller sets another */
  size_t block;                /* elements a block; with one_scale, elements a run of the sum */
  bool one_scale;
  bool share_a_piece; /* rank k serves piece k; else shares are cut by size */
  /* NULL, or one a rank and another: rank k serves the pieces from share_pieces[k] up to the next
   * rank's. */
  const size_t *share_pieces;
  bool momentum; /* the source will want the last result */
  bool moments;  /* moments of this rank's own gradients are kept (struct ob_source) */
  bool served;   /* a pass takes the result, as servers send it in bits */
  struct ob_serving serving;
  /* Dense: few message buffers, results are stored before the call is known to be well. */
  bool windowed;
  /* Reduce-scatter and allgather: of the shares of one list of pieces, cut by size as an allreduce
   * cuts them. Dense, an allgather then moves its values as they are, finite or not. */
  bool of_shares;
  size_t pieces;
  const size_t *counts, *valid; /* one a piece; valid NULL: all */
};

enum ob_step_kind {
  OB_STEP_HOST_PUT,       /* hierarchical: a chunk of the inputs to the ranks of this host */
  OB_STEP_HOST_BARRIER,   /* until all of them have done that */
  OB_STEP_COMPRESS,       /* a chunk for every server */
  OB_STEP_FINISH_WORKER,  /* one scale: now it is known */
  OB_STEP_EXCHANGE,       /* begin sending it and receiving theirs */
  OB_STEP_RECEIVE,        /* until it is here */
  OB_STEP_HOST_WAIT_FREE, /* hierarchical: until the host has used what lies there */
  OB_STEP_REDUCE,         /* this rank's share of it */
  OB_STEP_FINISH_SERVER,  /* as above */
  OB_STEP_GATHER,         /* begin sending the result to all and receiving theirs */
  OB_STEP_COLLECT,        /* until it is here */
  OB_STEP_HOST_PUBLISH,   /* hierarchical: a chunk of the results to the ranks of this host */
  OB_STEP_HOST_WAIT,      /* until all of them have done that */
  OB_STEP_BEGIN_ROUND,    /* doubling: begin round `chunk`, passing on what is here */
  OB_STEP_END_ROUND,      /* until it is over */
  OB_STEP_CHECK_EARLY,    /* whether it is already certain that the call will end well */
  OB_STEP_APPLY_EARLY,    /* if so: a chunk of the result to its place */
  OB_STEP_DECIDE,         /* the last step, unless every rank is well */
  OB_STEP_APPLY,          /* a chunk of the result to its place, where that was not done */
  OB_STEP_COMMIT          /* the new residuals become the current ones */
};

struct ob_step {
  enum ob_step_kind kind;
  uint32_t chunk;
};

/* What one call works on: by piece, input; and either outputs, or a pass of an optimizer. */
struct ob_call {
  struct ob_source source;
  void *const *outputs;
  const struct ob_pass_sink *sink;
  /* Of shares: float32, the share that this rank serves as its words lie, from its first one on. A
   * reduce-scatter's result, in place of outputs; an allgather of bits takes it in place of
   * inputs. */
  float *share;
  /* The bits of a float32 argument that must be the same on all ranks, and its name. */
  uint32_t agreed;
  const char *agreed_name;
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

/* The ranks that exchange messages with each other: all of them, or in a hierarchical plan those of
 * one place on every host. */
struct ob_group {
  size_t size, place; /* members, and which of them this rank is */
  int *ranks;         /* of the members */
};

struct ob_trace {
  struct ob_moment *moments;
  size_t room, count;
  bool open; /* moments[count] has begun */
};

/* What the host's clock saw of the calls since somebody took it: the work of codecs on messages,
 * and bringing results to their place. */
struct ob_spent {
  double compress, apply; /* seconds */
};

struct onebit_request {
  struct onebit_plan *plan;
};

struct onebit_plan {
  onebit_comm_t comm;
  onebit_plan_options_t options;
  size_t count; /* as the caller gave it */
  struct ob_layout layout;
  struct ob_work work;
  const struct ob_place *place;
  struct ob_device *device; /* the place's own, where it is a device */
  bool momentum, moments, of_shares;
  uint64_t wire_bytes, memory_bytes;
  struct ob_cost_choice choice; /* what was decided, and why */
  onebit_schedule_t schedule;   /* of it: not automatic any more */
  struct ob_group group;
  /* Allgather in few messages: in round k every rank passes on all that it has, up to 2^k ranks'
   * messages. With 2^n ranks it goes to the rank whose number differs in bit k, who answers with
   * what that one has; with another number, to the rank 2^k places before, and results lie in the
   * order of their distance. */
  bool doubling, in_pairs;
  struct ob_host host;

  /* Share k is cut in `chunks` parts; part i is the blocks bounds[k * chunks + i] up to the next
   * bound. Member k of the group serves share first_share + k. */
  size_t shares, first_share, chunks, *bounds;

  /* Kept values of what this rank sends, and of the share that it serves; sums of their runs when
   * there is one scale. */
  struct ob_kept worker, server;
  bool server_large; /* a scale of it, or a value that was imported, is from OB_LARGE_SCALE on */
  double *worker_sums, *server_sums;

  /* Messages: to each server, from each worker, and the result of each server, current and next. A
   * chunk's are in slot chunk mod slots; each takes `stride` bytes, those of a peer `peer_stride`.
   * */
  size_t slots, stride, peer_stride;
  unsigned char *outgoing, *incoming, *results[2];
  int result_now;
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
  onebit_status_t status; /* of this rank; words say why it is negative */
  char words[256];

  struct ob_trace trace;
  bool clocked; /* `spent` is wanted */
  struct ob_spent spent;

  /* Of calls on streams, until ob_plan_settle: the first that did not end well. */
  onebit_status_t outcome;
  char outcome_words[256];

  bool in_flight, broken; /* broken: the transport failed, nothing can follow */
  struct onebit_request request;
  struct onebit_plan *next; /* in the engine's list */
  bool claimed;
};

/* Collective; `status` is how the caller fares so far, so that a rank with a wrong argument takes
 * part in the failure. On failure *plan is NULL on all ranks. */
onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *plan);

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

/* A collective of a plan on a device, on this stream of it; the errors are the collectives', and
 * what is not known yet when it returns comes from ob_plan_settle. */
onebit_status_t ob_collective_put(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, void *stream);

/* Ends a call that ob_plan_start began on a stream as soon as all of it is there: its status as far
 * as that is known. */
onebit_status_t ob_plan_put(onebit_plan_t plan);

/* Waits for what is on streams. The status of the first call since the last time that did not end
 * well, an error counting more than a skip. */
onebit_status_t ob_plan_settle(onebit_plan_t plan);

/* Keeps the status of a call on a stream for ob_plan_settle, with the latest words. */
void ob_plan_note(onebit_plan_t plan, onebit_status_t status);

/* After a held call ended well: applies and commits it. Or first lets a pass of another sink look
 * at its results. */
void ob_plan_apply(onebit_plan_t plan);
void ob_plan_visit(onebit_plan_t plan, const struct ob_pass_sink *sink);

/* Where the result that member or rank `source` sent lies: of the latest call that was committed,
 * or of the one in flight. In a hierarchical plan `source` is the number of the share, and its
 * memory perhaps another rank's. */
unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk);

/* The blocks first .. end - 1 that this rank compresses; those of the share that it serves. */
void ob_plan_compressed(const struct onebit_plan *plan, size_t *first, size_t *end);
void ob_plan_share(const struct onebit_plan *plan, size_t *first, size_t *end);

/* Everyone's message is about everything: an allgather that is not of shares, or the schedule of
 * that name. */
bool ob_gathers_whole(const struct onebit_plan *plan);

/* Whether dense messages have the 16-bit values of the buffers. Those of an allreduce do not. */
bool ob_sends_halves(const struct onebit_plan *plan);

/* How many results there are. */
size_t ob_plan_sources(const struct onebit_plan *plan);

/* Which blocks and words a message of this share and chunk has. */
struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t share, size_t chunk);

/* Elements in the longest message, those that fill its last words up too. */
size_t ob_plan_longest_message(const struct onebit_plan *plan);

#endif
