/*
 * Plans, for callers outside collectives/: the options of a plan, its calls, and functions that
 * read it. The struct is in plan_private.h.
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
  onebit_dtype_t output_dtype; /* the dtype of the options, unless the caller sets another */
  size_t block;                /* elements of a block; of a run, if all blocks have one scale */
  bool one_scale;
  bool segment_a_piece; /* rank k reduces piece k; false: segments are cut by size */
  /* NULL, or one number for each rank and one more at the end: rank k reduces the pieces
   * segment_pieces[k] .. segment_pieces[k + 1] - 1. */
  const size_t *segment_pieces;
  bool momentum;     /* compression reads the last call's result (struct ob_source) */
  bool moments;      /* second moments of this rank's gradients are stored (struct ob_source) */
  bool from_servers; /* a pass reads results in the compressed form that servers send */
  struct ob_serving serving;
  /* For dense plans: there are few message buffers, so results are stored before the call is known
   * to succeed. */
  bool windowed;
  /* True if a reduce-scatter or an allgather works on the segments of one list of pieces, cut by
   * size as in an allreduce. A dense allgather then copies values, even if they are not finite. */
  bool of_segments;
  bool among_hosts; /* other ranks' plans run on CPUs: messages are cut as theirs are */
  size_t pieces;
  const size_t *counts, *valid; /* elements of each piece; those that are not padding (NULL: all) */
  bool *refused;                /* may be shared with other plans (struct onebit_plan); NULL: own */
};

/* The arguments of a call: one input for each piece, and either outputs or a pass of an
 * optimizer. */
struct ob_call {
  struct ob_source source;
  void *const *outputs;
  const struct ob_pass_sink *sink;
  /* The segment that this rank reduces, in float32, in the order of its words, beginning with the
   * segment's first word. A reduce-scatter stores its result here in place of outputs; a compressed
   * allgather reads its input here in place of inputs. */
  float *shard;
  /* The bits of a float32 argument that must be the same on all ranks, and the argument's name. */
  uint32_t agreed;
  const char *agreed_name;
  bool agreed_whole; /* the agreed number is an integer, not a float32 */
  const float *rate; /* NULL, or the address on the device of the number that replaces `agreed` */
  /* Arrays of pointers in memory of the plan's device, one for each piece; NULL: the plan's inputs
   * and outputs are parts of one buffer. */
  void *const *device_inputs, *const *device_outputs;
  bool counted;       /* only the device knows the step's bias corrections */
  bool only_at_first; /* only the device knows when momentum_in_residual of the source ends */
  /* The stream of the device, if on_stream is true: NULL is a valid stream. */
  bool on_stream;
  void *stream;
  /* The call stops after the step DECIDE. The caller then applies the calls of several plans, or
   * none of them (ob_plan_apply). */
  bool hold;
};

/* The seconds spent in calls since the last reading: compress is the codecs' work on messages,
 * apply is the application of results. */
struct ob_spent {
  double compress, apply;
};

/* Creates a plan. Collective. `status` is the caller's status so far, so that a wrong argument on
 * one rank makes the creation fail on all ranks. On failure *plan is NULL on all ranks. */
onebit_status_t ob_plan_create(onebit_comm_t comm, onebit_status_t status,
                               const struct ob_plan_shape *shape, size_t count,
                               onebit_plan_t *plan);

/* Checks the options, and fills in the defaults. */
onebit_status_t ob_plan_resolve(const onebit_plan_options_t *options, struct ob_plan_shape *shape);

/* Sets the pieces of a plan on one buffer of `count` elements: the whole buffer, or one part for
 * each rank. In profile deepspeed the parts are of the padded buffer. Fills in counts and valid,
 * which need at most one entry for each rank. */
void ob_plan_cut(struct ob_plan_shape *shape, size_t ranks, size_t count, size_t *counts,
                 size_t *valid);

/* Creates a dense plan of a few float32 numbers, for an allreduce or an allgather. Collective.
 * `status` is as in ob_plan_create, and `refused` as in struct ob_plan_shape. */
onebit_status_t ob_plan_create_numbers(onebit_comm_t comm, onebit_status_t status,
                                       onebit_operation_t operation, onebit_device_t device,
                                       size_t count, bool *refused, onebit_plan_t *plan);

/* Returns the number of elements with the padding of profile deepspeed. */
size_t ob_plan_pad_count(size_t ranks, size_t count);

/* Begins a call. `status` is the result of checking this rank's arguments. An error in it is sent
 * to the other ranks, and returned when the call ends. Errors: ONEBIT_ERROR_BUSY,
 * ONEBIT_ERROR_TRANSPORT. */
onebit_status_t ob_plan_start(onebit_plan_t plan, onebit_status_t status,
                              const struct ob_call *call);

/* Ends a call that ob_plan_start began, and returns its status. Returns ONEBIT_IN_PROGRESS if
 * `wait` is false and the call has not finished. */
onebit_status_t ob_plan_test(onebit_plan_t plan, bool wait);

/* Tells the plan that a successful held call will not be applied; the call's input must still be
 * valid. Does nothing if the call was applied, or if none was held. */
void ob_plan_revoke(onebit_plan_t plan);

/* Ends a call, if one is in flight, without its messages. Afterwards the plan can only be
 * destroyed. NULL is fine. */
void ob_plan_abandon(onebit_plan_t plan);

/* Enqueues a collective of a plan on a stream of its device. Returns the errors of the collective;
 * ob_plan_settle returns the status of work that has not run yet. */
onebit_status_t ob_collective_put(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                  onebit_operation_t operation, void *stream);

/* Ends a call that ob_plan_start began on a stream, once all its work is enqueued there. Returns
 * its status as far as it is known. */
onebit_status_t ob_plan_put(onebit_plan_t plan);

/* Resets the residuals, and returns their memory to the system until a call writes to it again. */
onebit_status_t ob_plan_return_residual(onebit_plan_t plan);

/* Clears the record of a refused message; the caller must know that the ranks have the same state
 * again. Errors: those of the executor. */
onebit_status_t ob_plan_accept(onebit_plan_t plan);

/* Waits for work on streams. Returns the first status since the last call that was not ONEBIT_OK;
 * an error takes precedence over a skip. */
onebit_status_t ob_plan_settle(onebit_plan_t plan);

/* ob_plan_apply applies and commits a held call that has succeeded, waits for its outputs unless it
 * is on a stream, and returns its status. ob_plan_run_pass, if called before it, runs the pass of
 * another sink on the call's results. */
onebit_status_t ob_plan_apply(onebit_plan_t plan);
void ob_plan_run_pass(onebit_plan_t plan, const struct ob_pass_sink *sink);

/* --- Functions that read a plan, for other modules */

/* Return the layout of elements in pieces and blocks, and the geometry of the messages. */
const struct ob_layout *ob_plan_layout(const struct onebit_plan *plan);
const struct ob_geometry *ob_plan_geometry(const struct onebit_plan *plan);

bool ob_plan_is_compressed(const struct onebit_plan *plan);
bool ob_plan_is_hierarchical(const struct onebit_plan *plan);
bool ob_plan_is_broken(const struct onebit_plan *plan); /* true if its transport has failed */

/* Return the bytes that this rank sends in a call, and the bytes of all memory of the plan. NULL is
 * fine: 0. */
uint64_t ob_plan_wire_bytes(const struct onebit_plan *plan);
uint64_t ob_plan_memory_bytes(const struct onebit_plan *plan);

/* Return the kind of memory of the residuals, and that of the messages. */
const struct ob_memory *ob_plan_memory(const struct onebit_plan *plan);
const struct ob_memory *ob_plan_message_memory(const struct onebit_plan *plan);

/* ob_plan_work returns the settings and the scratch memory of passes over the layout.
 * ob_plan_residual returns the worker residual or the server residual. */
struct ob_work *ob_plan_work(const struct onebit_plan *plan);
struct ob_residual *ob_plan_residual(const struct onebit_plan *plan, bool server);

/* ob_plan_start_timing makes later calls measure their time with the clock `now`.
 * ob_plan_read_spent returns the time since the last reading. */
void ob_plan_start_timing(onebit_plan_t plan, double (*now)(void));
struct ob_spent ob_plan_read_spent(onebit_plan_t plan);

/* Returns a call on one send buffer and one receive buffer; the caller may set further members. */
struct ob_call ob_plan_call(onebit_plan_t plan, const void *sendbuf, void *recvbuf);

/* Clears everything that calls have left: the residuals, of which the first copy becomes the
 * current one, and the results, which get a checkpoint's width `last_width`. */
onebit_status_t ob_plan_restart(onebit_plan_t plan, uint64_t last_width);

/* Tells the executor that the host has written the server's residual. `large`: the residual has a
 * value of at least OB_LARGE_SCALE. */
onebit_status_t ob_plan_note_import(onebit_plan_t plan, bool large);

/* Gets the range of sources, first .. end - 1, whose latest results are in memory of this rank. */
void ob_plan_own_results(const struct onebit_plan *plan, size_t *first, size_t *end);

/* Returns the result of member or rank `source`: with `next` that of the call in flight, else that
 * of the latest committed call. In a hierarchical plan `source` is the number of the segment, and
 * the result may be in another rank's memory. */
unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk);

/* Get the range of blocks, first .. end - 1, that this rank compresses, and the range of the
 * segment that it reduces. */
void ob_plan_find_compressed(const struct onebit_plan *plan, size_t *first, size_t *end);
void ob_plan_segment(const struct onebit_plan *plan, size_t *first, size_t *end);

/* Returns the number of results, each of which has a number `source`. */
size_t ob_plan_sources(const struct onebit_plan *plan);

/* Return the shape (blocks and words) of a message of this segment and chunk: of one that ranks
 * send to servers; of one that servers send; and of one of the latest committed call, which may
 * have another width. */
struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk);
struct ob_message_shape ob_plan_result_message(const struct onebit_plan *plan, size_t segment,
                                               size_t chunk);
struct ob_message_shape ob_plan_last_message(const struct onebit_plan *plan, size_t segment,
                                             size_t chunk);

/* Return the bytes of a message from a rank to a server, and of one from a server. */
size_t ob_plan_message_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk);
size_t ob_plan_result_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk);

/* Returns the elements of the longest message, including those that pad its last word. */
size_t ob_plan_longest_message(const struct onebit_plan *plan);

#endif
