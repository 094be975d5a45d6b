/*
 * Finds the tensor of a call: its position in the order of calls. A call names buffers, which are
 * one rank's, and may be others each time; what all ranks see alike is the order of the calls on a
 * communicator, with their counts, types and operations, and the small sums between them. A program
 * that trains repeats its calls in loops. Several loops are known at once, and a program goes from
 * one to another. Buffers serve to find a loop's length where its calls are all equal: a side that
 * repeats on some rank is enough.
 *
 * After an unexpected call positions are uncertain until all calls of the loop have come once in
 * order: until then calls have none. The residuals of the loop that was left are given up: the
 * calls before may have been those of another loop that begins alike.
 *
 * Everything but the use of buffers is the same on all ranks, as MPI and NCCL demand it.
 */
#ifndef OB_DROPIN_LOOPS_H
#define OB_DROPIN_LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dropin/counters.h"
#include "onebit/plan.h"
#include "onebit/status.h"

/* Positions have numbers below this; no loop is longer. */
#define OB_MAX_POSITIONS 4096
#define OB_NO_POSITION   (-1)

struct ob_loops;

/* Replaces each value by the largest of all ranks; collective. False: it failed. */
typedef bool ob_loops_largest(void *context, int64_t *values, int count);

/* Creates loops. repeats: the number of times that a loop must have come whole before it is
 * followed, 2 or more. Errors: ONEBIT_ERROR_ARGUMENT (repeats), ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_loops_create(unsigned repeats, ob_loops_largest *largest, void *context,
                                struct ob_loops **loops);
void ob_loops_destroy(struct ob_loops *loops);

/* Returns a number that is equal for calls with the same operation, count, type and kind of
 * result. */
uint64_t ob_loops_signature(onebit_operation_t operation, onebit_dtype_t dtype, bool sum,
                            size_t count);

/* Notes a call that gets no position: it distinguishes the calls that follow it. */
void ob_loops_note(struct ob_loops *loops, uint64_t signature);

/* Notes a call, and returns its position, or OB_NO_POSITION. *look: ob_loops_look should be
 * called. */
int ob_loops_position(struct ob_loops *loops, uint64_t signature, const void *sendbuf,
                      const void *recvbuf, bool *look);

/* Agrees on a loop, if there is one. Collective. True if positions have new meanings, since there
 * was no space for more. */
bool ob_loops_look(struct ob_loops *loops);

/* Returns the caller's entry for a position: its tensor's number plus one; 0: none yet. */
int *ob_loops_tensor(struct ob_loops *loops, int position);

/* Sets the tensor of the last call, which had no position, as the ranks have agreed on it
 * otherwise. A loop that is found later has it for the position. */
void ob_loops_set_last(struct ob_loops *loops, int tensor);

/* Removes the tensor of this number from all positions. */
void ob_loops_drop(struct ob_loops *loops, int tensor);

/* The positions of the loop that the last call has left because it was not the expected one:
 * `count` of them from `first` on, else none. */
void ob_loops_read_left(const struct ob_loops *loops, int *first, int *count);

/* Finds the position of a call that is not to be noted, such as one that a graph captures: the
 * first that has its signature in the loop that is followed, behind `after`, or from the next call
 * on where that is OB_NO_POSITION. OB_NO_POSITION: there is none. All ranks find the same. */
int ob_loops_find(const struct ob_loops *loops, uint64_t signature, int after);

/* One rank's buffers of a tensor. ob_buffers_move is true when a buffer changes after eight equal
 * calls: the residual may then belong to another tensor, and has to be dropped. */
struct ob_buffers {
  const void *sendbuf, *recvbuf;
  unsigned steady[2]; /* calls for which they have been the same */
};
bool ob_buffers_move(struct ob_buffers *buffers, const void *sendbuf, const void *recvbuf);

/* The reason why a call without a position is dense. */
enum ob_reason ob_loops_reason(const struct ob_loops *loops);

#endif
