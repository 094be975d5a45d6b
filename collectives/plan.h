/*
 * Plans, for callers outside collectives/: the options of one, its calls, and functions that read
 * it. The struct is in plan_private.h.
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
#include "compression/blocks.h"
#include "onebit/collectives.h"

/* The request for a plan, with every default filled in. */
struct ob_plan_shape {
  onebit_plan_options_t options;
  onebit_dtype_t output_dtype; /* the options' dtype, unless the caller sets another */
  size_t block;                /* elements a block; with one_scale, elements a run of the sum */
  bool one_scale;
  bool segment_a_piece; /* rank k reduces piece k; else segments are cut by size */
  /* NULL, or a number for each rank and one more: rank k reduces the pieces segment_pieces[k] ..
   * segment_pieces[k + 1] - 1. */
  const size_t *segment_pieces;
  bool momentum;     /* compression reads the last call's result (struct ob_source) */
  bool moments;      /* moments of this rank's own gradients are kept (struct ob_source) */
  bool from_servers; /* a pass reads the result in the compressed form in which servers send it */
  struct ob_serving serving;
  /* Dense, with few message buffers: results are stored before the call is known to succeed. */
  bool windowed;
  /* A reduce-scatter or an allgather is about the segments of one list of pieces, cut by size as in
   * an allreduce. A dense allgather then copies values, finite or not. */
  bool of_segments;
  bool among_hosts; /* plans of other ranks run on processors: messages are cut as theirs are */
  size_t pieces;
  const size_t *counts, *valid; /* elements of each piece, and those without padding; NULL: all */
  bool *refused;                /* shared with other plans (struct onebit_plan); NULL: its own */
};

/* The arguments of a call: inputs by piece; and either outputs, or a pass of an optimizer. */
struct ob_call {
  struct ob_source source;
  void *const *outputs;
  const struct ob_pass_sink *sink;
  /* The segment that this rank reduces, float32, in the order of its words from its first one on: a
   * reduce-scatter's result, in place of outputs; an allgather of bits takes it in place of
   * inputs. */
  float *shard;
  /* The bits of a float32 argument that must be the same on all ranks, and its name. */
  uint32_t agreed;
  const char *agreed_name;
  bool agreed_whole; /* the agreed number is an integer, not a float32 */
  const float *rate; /* NULL, or in memory of the device the number that replaces `agreed` */
  /* Arrays of pointers, by piece, in memory of the plan's device; NULL: the plan's inputs and
   * outputs are parts of one buffer. */
  void *const *device_inputs, *const *device_outputs;
  bool counted;       /* only the device knows the bias corrections of the step */
  bool only_at_first; /* only the device knows until which step the source's momentum is kept */
  /* The stream of the device, if on_stream: NULL is a stream, too. */
  bool on_stream;
  void *stream;
  /* The call stops after the step DECIDE: the caller then applies all of several plans, or none
   * (ob_plan_apply). */
  bool hold;
};

/* The seconds in calls since the last reading: codecs' work on messages, and applying results. */
struct ob_spent {
  double compress, apply;
};

/* Collective; `status` is the caller's status so far, so that a rank with a wrong argument makes
 * the creation fail on all ranks. On failure *plan is NULL on all ranks. */
onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *plan);

/* Checks options and fills in the defaults. */
onebit_status_t ob_plan_resolve(const onebit_plan_options_t *options, struct ob_plan_shape *shape);

/* Sets the pieces of a plan on one buffer of `count` elements: the whole buffer, or a part for each
 * rank, in profile deepspeed of the padded buffer. Fills in counts and valid, which have at most an
 * entry for each rank. */
void ob_plan_cut(struct ob_plan_shape *shape, size_t ranks, size_t count, size_t *counts,
                 size_t *valid);

/* Creates a plan of a few float32 numbers, dense, for an allreduce or an allgather. Collective;
 * `status` as in ob_plan_create, `refused` as in the shape. */
onebit_status_t ob_plan_create_numbers(onebit_comm_t comm, onebit_status_t status,
                                       onebit_operation_t operation, onebit_device_t device,
                                       size_t count, bool *refused, onebit_plan_t *plan);

/* Returns the number of elements with the padding of profile deepspeed. */
size_t ob_plan_pad_count(size_t ranks, size_t count);

/* Begins a call. `status` is the result of checking this rank's arguments: an error is sent to the
 * other ranks, and returned at the end. Errors: ONEBIT_ERROR_BUSY, ONEBIT_ERROR_TRANSPORT. */
onebit_status_t ob_plan_start(onebit_plan_t plan, onebit_status_t status,
                              const struct ob_call *call);

/* Ends a call that ob_plan_start began: its status, or ONEBIT_IN_PROGRESS if `wait` is false and it
 * is not done. */
onebit_status_t ob_plan_test(onebit_plan_t plan, bool wait);

/* Marks a successful held call as one that will not be applied; its input is still valid. Does
 * nothing if the call was applied, or if there was none. */
void ob_plan_revoke(onebit_plan_t plan);

/* Ends a call that may be in flight, without its messages: then the plan can only be destroyed.
 * NULL is fine. */
void ob_plan_abandon(onebit_plan_t plan);

/* Enqueues a collective of a plan on a stream of its device. The errors are those of the
 * collective; ob_plan_settle returns the status of what has not run yet. */
onebit_status_t ob_collective_put(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, void *stream);

/* Ends a call that ob_plan_start began on a stream once all its work is enqueued there. Returns its
 * status as far as that is known. */
onebit_status_t ob_plan_put(onebit_plan_t plan);

/* Resets the residuals, whose memory goes back to the system until a call writes it again. */
onebit_status_t ob_plan_return_residual(onebit_plan_t plan);

/* Forgets that a message was refused; the caller knows that the ranks have the same state again.
 * Errors: the executor's. */
onebit_status_t ob_plan_accept(onebit_plan_t plan);

/* Waits for work on streams. Returns the first status since the last time that was not ONEBIT_OK;
 * an error counts more than a skip. */
onebit_status_t ob_plan_settle(onebit_plan_t plan);

/* Applies and commits a held call that ended well, waits for its outputs unless it is on a stream,
 * and returns its status. ob_plan_run_pass, called before, runs the pass of another sink over its
 * results. */
onebit_status_t ob_plan_apply(onebit_plan_t plan);
void ob_plan_run_pass(onebit_plan_t plan, const struct ob_pass_sink *sink);

/* --- Functions that read a plan, for other modules */

/* Return the layout of the elements in pieces and blocks, and that of the messages. */
const struct ob_layout *ob_plan_layout(const struct onebit_plan *plan);
const struct ob_geometry *ob_plan_geometry(const struct onebit_plan *plan);

bool ob_plan_is_compressed(const struct onebit_plan *plan);
bool ob_plan_is_hierarchical(const struct onebit_plan *plan);
bool ob_plan_is_broken(const struct onebit_plan *plan); /* its transport has failed */

/* The bytes that this rank sends in a call; the bytes of all its memory. NULL is fine: 0. */
uint64_t ob_plan_wire_bytes(const struct onebit_plan *plan);
uint64_t ob_plan_memory_bytes(const struct onebit_plan *plan);

/* Return the kind of memory that residuals are in, and that messages are in. */
const struct ob_memory *ob_plan_memory(const struct onebit_plan *plan);
const struct ob_memory *ob_plan_message_memory(const struct onebit_plan *plan);

/* Return the settings and scratch memory of passes over the layout; the worker residual, or the
 * server residual. */
struct ob_work *ob_plan_work(const struct onebit_plan *plan);
struct ob_residual *ob_plan_residual(const struct onebit_plan *plan, bool server);

/* Begin to measure the time of calls with a clock; return the time since the last reading. */
void ob_plan_start_timing(onebit_plan_t plan, double (*now)(void));
struct ob_spent ob_plan_read_spent(onebit_plan_t plan);

/* Returns a call on one send and one receive buffer, to which the caller may add more. */
struct ob_call ob_plan_call(onebit_plan_t plan, const void *sendbuf, void *recvbuf);

/* Clears everything that calls have left: residuals, of which the first copy becomes the current
 * one, and results, which get the width `last_width` of a checkpoint. */
onebit_status_t ob_plan_restart(onebit_plan_t plan, uint64_t last_width);

/* Tells the executor that the host has written the server's residual; large: it has a value from
 * OB_LARGE_SCALE on. */
onebit_status_t ob_plan_note_import(onebit_plan_t plan, bool large);

/* Finds the sources whose latest results are in memory of this rank: first .. end - 1. */
void ob_plan_own_results(const struct onebit_plan *plan, size_t *first, size_t *end);

/* Returns the result of member or rank `source`: that of the latest committed call, or of the one
 * in flight. In a hierarchical plan `source` is the number of the share, and its memory may be
 * another rank's. */
unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk);

/* The blocks first .. end - 1 that this rank compresses; those of the segment that it reduces. */
void ob_plan_find_compressed(const struct onebit_plan *plan, size_t *first, size_t *end);
void ob_plan_segment(const struct onebit_plan *plan, size_t *first, size_t *end);

/* Returns the number of results. */
size_t ob_plan_sources(const struct onebit_plan *plan);

/* Return the blocks and words of a message of this segment and chunk: from ranks to servers; from
 * servers; and that of the latest committed call, which may have another width. */
struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk);
struct ob_message_shape ob_plan_result_message(const struct onebit_plan *plan, size_t segment,
                                               size_t chunk);
struct ob_message_shape ob_plan_last_message(const struct onebit_plan *plan, size_t segment,
                                             size_t chunk);

/* Return the bytes of such messages from ranks to servers, and from servers. */
size_t ob_plan_message_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk);
size_t ob_plan_result_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk);

/* Returns the elements of the longest message, with those that pad its last word. */
size_t ob_plan_longest_message(const struct onebit_plan *plan);

#endif
