/*
 * Following the period that all ranks' calls on a communicator have (dropin/sequence.h): which
 * tensor a call is of, once they do. Knows neither MPI nor NCCL, but asks those who do.
 */
#ifndef OB_DROPIN_FOLLOW_H
#define OB_DROPIN_FOLLOW_H

#include "dropin/reason.h"
#include "dropin/sequence.h"
#include "onebit/plan.h"

/* Tensors have numbers below this, which all ranks give alike. */
#define OB_MAX_TENSORS OB_SEQUENCE_MAX_PERIOD

#define OB_NO_TENSOR     (-1)
#define OB_FAILED_TENSOR (-2) /* no memory for it, on some rank: the phase stays dense */

struct ob_follower;

struct ob_follower_ranks {
  void *context;
  /* Of the ranks' values the largest, each; collective. False: it has failed. */
  bool (*largest)(void *context, int64_t *values, int count);
  /* The first tensor of the signature, from number `first` on, that this rank knows by these
   * buffers; or OB_NO_TENSOR. */
  int (*find)(void *context, int first, uint64_t signature, const void *sendbuf,
              const void *recvbuf);
  /* Whether the tensor is not what ranks took it for. All of them find alike. NULL: never. */
  bool (*is_lost)(void *context, int tensor);
};

/* Errors: as ob_sequence_create. */
onebit_status_t ob_follower_create(unsigned repeats, const struct ob_follower_ranks *ranks,
                                   struct ob_follower **follower);
void ob_follower_destroy(struct ob_follower *follower);

/* Equal for calls with the same operation, count, type and kind of result. */
uint64_t ob_follower_signature(onebit_operation_t operation, onebit_dtype_t dtype, bool sum,
                               size_t count);

/* Notes a call, and gives its phase, or -1: not followed, or not any more. *look: it is time for
 * ob_follower_look, once the call has its tensor. *same: as ob_sequence_phase has it; true where
 * there is no phase. */
ptrdiff_t ob_follower_phase(struct ob_follower *follower, uint64_t signature, const void *sendbuf,
                            const void *recvbuf, bool *look, bool *same);

/* Agrees on a period and follows it, if there is one. Collective. */
void ob_follower_look(struct ob_follower *follower);

/* Goes back to learning: what all ranks have decided to do. */
void ob_follower_forget(struct ob_follower *follower);

/* The length of the period that is followed; 0: none. */
size_t ob_follower_period(const struct ob_follower *follower);

/* Of a call that is not to be noted, such as one that a graph captures: the first phase that has
 * its signature, beginning with `from`, or with OB_FOLLOWER_NEXT at the call that is to come; -1:
 * none, or nothing is followed. All ranks find alike. */
#define OB_FOLLOWER_NEXT ((size_t)-1)
ptrdiff_t ob_follower_find(const struct ob_follower *follower, uint64_t signature, size_t from);

/* Why a call without a phase is dense. */
enum ob_reason ob_follower_reason(const struct ob_follower *follower);

/* The tensor of a phase that is followed; which it is from now on; and that there is none of this
 * number any more. */
int ob_follower_tensor(const struct ob_follower *follower, size_t phase);
void ob_follower_set(struct ob_follower *follower, size_t phase, int tensor);
void ob_follower_drop(struct ob_follower *follower, int tensor);

#endif
