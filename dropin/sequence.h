/*
 * The tensor of a call. A call names buffers, not tensors, and what one rank sees of its buffers
 * says nothing of another's, while plans are made and used by all ranks together. What all ranks
 * see alike is the order of the calls on a communicator, with their counts, types and operations
 * (MPI demands it): the signatures. A program that trains repeats its calls step by step, so once
 * all ranks have found that their signatures and their buffers repeat with the same period, the
 * place of a call in that period, its phase, is its tensor's number, and nobody needs to ask.
 *
 * Pure bookkeeping: no MPI, no messages. Everything but what is said of buffers is the same on all
 * ranks, as long as they add the same signatures.
 */
#ifndef OB_DROPIN_SEQUENCE_H
#define OB_DROPIN_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

#define OB_SEQUENCE_MAX_PERIOD 4096 /* calls in a period, at most */

struct ob_sequence;

/* repeats: how often all calls of a period must have been seen before it is followed, 2 or more;
 * after it has followed one and lost it, 2 are enough.
 * Errors: ONEBIT_ERROR_ARGUMENT (repeats), ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_sequence_create(unsigned repeats, struct ob_sequence **sequence);
void ob_sequence_destroy(struct ob_sequence *sequence);

/* Learning: notes a call. True when it is time that ranks agree whether to follow, which they find
 * alike: after `repeats` calls first, then after twice as many each time, and in the end whenever
 * all calls of a longest period have passed by anew. Where memory runs out the rank finds no
 * period. */
bool ob_sequence_learn(struct ob_sequence *sequence, uint64_t signature, const void *sendbuf,
                       const void *recvbuf);

/* The smallest period, at_least or more, with which this rank's latest calls have repeated,
 * `repeats` times each, in signatures and buffers; 0: none. Ranks agree on the largest of theirs,
 * then on whether that is one for all, and then follow it. */
size_t ob_sequence_period(const struct ob_sequence *sequence, size_t at_least);
void ob_sequence_follow(struct ob_sequence *sequence, size_t period);

/* The call of a phase, as this rank makes it. */
void ob_sequence_expected(const struct ob_sequence *sequence, size_t phase, uint64_t *signature,
                          const void **sendbuf, const void **recvbuf);

/* Following: the phase of this call, 0 to period - 1. -1: the signature is not what was to come;
 * all ranks see that alike and learn anew, this call first. *same: whether the buffers are those of
 * the last period. Where not, this rank withdraws, and the new ones are noted. */
ptrdiff_t ob_sequence_phase(struct ob_sequence *sequence, uint64_t signature, const void *sendbuf,
                            const void *recvbuf, bool *same);

/* Following: the phase of the call that is to come. */
size_t ob_sequence_next(const struct ob_sequence *sequence);

/* Back to learning: what all ranks have decided to do. */
void ob_sequence_forget(struct ob_sequence *sequence);

#endif
