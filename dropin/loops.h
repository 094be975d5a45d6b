/*
 * A loop identifies the tensor of a call by the call's position in the order of calls. Buffers can
 * not identify it: they are local to a rank, and a program may use other buffers each time. All
 * ranks see the same order of calls on a communicator, with their counts, types and operations, and
 * with the small sums between them. A program that trains repeats its calls in loops. The library
 * knows several loops at once, and a program changes from one to another. Buffers are used only to
 * find the length of a loop whose calls are all equal: it is enough if the send buffers or the
 * receive buffers repeat on some rank.
 *
 * After an unexpected call the position is uncertain, so calls get no position until all calls of
 * the loop have come once in order. The residuals of the loop that was left are reset: its latest
 * calls may have belonged to another loop that begins with the same calls.
 *
 * All ranks compute the same positions, except where buffers are used, since MPI and NCCL require
 * the same order of calls on all ranks.
 */
#ifndef OB_DROPIN_LOOPS_H
#define OB_DROPIN_LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dropin/counters.h"
#include "onebit/plan.h"
#include "onebit/status.h"

/* The number of positions of all loops together, and so the largest length of a loop. */
#define OB_MAX_POSITIONS 4096
#define OB_NO_POSITION   (-1)

struct ob_loops;

/* Replaces each value by the largest of all ranks. Collective. Returns false if it fails. */
typedef bool ob_loops_allreduce_max(void *context, int64_t *values, int count);

/* Creates loops. repeats: how many times a whole loop must be repeated before the ranks follow it,
 * 2 or more. Errors: ONEBIT_ERROR_ARGUMENT (repeats), ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_loops_create(unsigned repeats, ob_loops_allreduce_max *largest, void *context,
                                struct ob_loops **loops);
void ob_loops_destroy(struct ob_loops *loops);

/* Returns a number that is equal for calls with the same operation, count, type and kind of
 * result. */
uint64_t ob_loops_signature(onebit_operation_t operation, onebit_dtype_t dtype, bool sum,
                            size_t count);

/* Notes a call that gets no position. It distinguishes the calls after it from otherwise equal
 * calls. */
void ob_loops_note(struct ob_loops *loops, uint64_t signature);

/* Notes a call, and returns its position, or OB_NO_POSITION. *look: the caller should call
 * ob_loops_find_loop. */
int ob_loops_position(struct ob_loops *loops, uint64_t signature, const void *sendbuf,
                      const void *recvbuf, bool *look);

/* Looks for a loop on which all ranks agree. Collective. Returns true if there was no space for the
 * loop, so that positions have new meanings. */
bool ob_loops_find_loop(struct ob_loops *loops);

/* Returns a pointer to the caller's value for a position: the number of its tensor plus one, or 0
 * if it has none yet. */
int *ob_loops_tensor(struct ob_loops *loops, int position);

/* Sets the tensor of the last call, which had no position: the ranks have agreed on the tensor by a
 * message. A loop that is found later has this tensor at the position of the call. */
void ob_loops_set_last_tensor(struct ob_loops *loops, int tensor);

/* Removes the tensor of this number from all positions. */
void ob_loops_remove_tensor(struct ob_loops *loops, int tensor);

/* Returns the positions of the loop that the program left with its latest call, which was
 * unexpected: `count` positions from `first` on; count is 0 if it left no loop. */
void ob_loops_read_left_positions(const struct ob_loops *loops, int *first, int *count);

/* Finds the position of a call without noting it, for instance during the capture of a graph. It is
 * the first position with this signature in the followed loop, after position `after`, or from the
 * next call on if `after` is OB_NO_POSITION. Returns OB_NO_POSITION if no position fits. All ranks
 * get the same result. */
int ob_loops_find(const struct ob_loops *loops, uint64_t signature, int after);

/* The buffers of a tensor on one rank. ob_buffers_note stores the buffers of a call. It returns
 * true if a buffer changes after eight calls with the same one: the residual may then belong to
 * another tensor, and has to be reset. */
struct ob_buffers {
  const void *sendbuf, *recvbuf;
  unsigned steady[2]; /* for how many calls each of the two buffers has been the same */
};
bool ob_buffers_note(struct ob_buffers *buffers, const void *sendbuf, const void *recvbuf);

/* Returns the reason why a call without a position is dense. */
enum ob_reason ob_loops_reason(const struct ob_loops *loops);

#endif
