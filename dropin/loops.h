/*
 * Which tensor a call is of, by its position: programs that allocate their buffers anew for each
 * call, and make other numbers of steps each time, repeat their calls in loops. A loop is a period
 * in the order of the calls on a communicator, with their counts, types and operations, and what
 * small sums lie between; several are known at once, and a program goes from one to another. A
 * position, a call of a loop, is a tensor. Buffers serve to find the period where calls are all
 * equal: a side that repeats on some rank is enough.
 *
 * Where a call is not what was to come, the position is not certain before all calls of the loop
 * have come once, as they should: until then they have none. And what was kept of errors in the
 * loop is given up: the calls before may have been those of another loop that begins alike.
 *
 * Everything but what is said of buffers is the same on all ranks, as MPI demands it.
 */
#ifndef OB_DROPIN_LOOPS_H
#define OB_DROPIN_LOOPS_H

#include "dropin/reason.h"
#include "dropin/sequence.h"

/* Positions have numbers below this. */
#define OB_MAX_POSITIONS OB_SEQUENCE_MAX_PERIOD
#define OB_NO_POSITION   (-1)

struct ob_loops;

/* Of the ranks' values the largest, each; collective. False: it has failed. */
typedef bool ob_loops_largest(void *context, int64_t *values, int count);

/* Errors: as ob_sequence_create. */
onebit_status_t ob_loops_create(unsigned repeats, ob_loops_largest *largest, void *context,
                                struct ob_loops **loops);
void ob_loops_destroy(struct ob_loops *loops);

/* A call that is not looked at: it tells those apart that come behind it. */
void ob_loops_note(struct ob_loops *loops, uint64_t signature);

/* Notes a call, and gives its position, or OB_NO_POSITION. *look: it is time for ob_loops_look. */
int ob_loops_position(struct ob_loops *loops, uint64_t signature, const void *sendbuf,
                      const void *recvbuf, bool *look);

/* Of the last call: where it was not what was to come, the positions of the loop that it has left,
 * `count` of them from `first` on, else none. Calls of another loop that begins alike were taken
 * for theirs, so what is kept of their errors may be of other tensors. */
void ob_loops_left(const struct ob_loops *loops, int *first, int *count);

/* Agrees on a loop, if there is one. Collective. True where positions have got new meanings: there
 * was no space for more. */
bool ob_loops_look(struct ob_loops *loops);

/* The position behind this one in the loop, where it has the same signature; or OB_NO_POSITION. */
int ob_loops_next(const struct ob_loops *loops, int position);

/* Equal on ranks that are at the same position. */
int64_t ob_loops_hash(const struct ob_loops *loops, int position);

/* Why a call without a position is dense. */
enum ob_reason ob_loops_reason(const struct ob_loops *loops);

#endif
