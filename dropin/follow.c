/* Agreeing on a period, and on the tensors of its phases. */
#include "dropin/follow.h"

#include <string.h>

#include "base/error.h"
#include "base/memory.h"

struct ob_follower {
  struct ob_sequence *sequence;
  struct ob_follower_ranks ranks;
  bool has_looked;
  size_t period;               /* 0: learning */
  int tensors[OB_MAX_TENSORS]; /* of each phase */
};

onebit_status_t ob_follower_create(unsigned repeats, const struct ob_follower_ranks *ranks,
                                   struct ob_follower **result) {
  *result = NULL;
  struct ob_follower *follower = ob_allocate(1, sizeof *follower);
  if (!follower)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
  follower->ranks = *ranks;
  onebit_status_t status = ob_sequence_create(repeats, &follower->sequence);
  if (status == ONEBIT_OK)
    *result = follower;
  else
    ob_release(follower);
  return status;
}

void ob_follower_destroy(struct ob_follower *follower) {
  if (!follower)
    return;
  ob_sequence_destroy(follower->sequence);
  ob_release(follower);
}

uint64_t ob_follower_signature(onebit_operation_t operation, onebit_dtype_t dtype, bool sum,
                               size_t count) {
  return (uint64_t)count << 8 | (uint64_t)operation << 4 | (uint64_t)dtype << 1 | (uint64_t)sum;
}

/* ---- Agreeing ---- */

#define MAX_TURNS 8 /* of agreeing on a period: each asks for a longer one */

static bool largest(const struct ob_follower *follower, int64_t *values, int count) {
  return follower->ranks.largest(follower->ranks.context, values, count);
}

/* The smallest that is one for all ranks, or 0. */
static size_t agree_on_period(struct ob_follower *follower) {
  size_t at_least = 1;
  for (int turn = 0; turn < MAX_TURNS; turn++) {
    int64_t mine = (int64_t)ob_sequence_period(follower->sequence, at_least);
    int64_t all[] = {mine, -mine, mine == 0};
    if (!largest(follower, all, 3) || all[2])
      return 0;
    if (all[0] == -all[1])
      return (size_t)all[0];
    at_least = (size_t)all[0];
  }
  return 0;
}

/* The tensor that this rank knows by the buffers of a phase, and that no phase before it has. */
static int known_of_phase(const struct ob_follower *follower, const bool *used, size_t phase) {
  const struct ob_follower_ranks *ranks = &follower->ranks;
  uint64_t signature;
  const void *sendbuf, *recvbuf;
  ob_sequence_expected(follower->sequence, phase, &signature, &sendbuf, &recvbuf);
  int tensor = ranks->find(ranks->context, 0, signature, sendbuf, recvbuf);
  while (tensor != OB_NO_TENSOR && used[tensor])
    tensor = ranks->find(ranks->context, tensor + 1, signature, sendbuf, recvbuf);
  return tensor;
}

enum { TOGETHER = 64 }; /* phases in a message */

/* Phases whose tensor all ranks know, and know as the same, go on with it. */
static bool agree_on_phases(struct ob_follower *follower, size_t period) {
  bool used[OB_MAX_TENSORS];
  memset(used, 0, sizeof used);
  for (size_t first = 0; first < period; first += TOGETHER) {
    size_t phases = period - first < TOGETHER ? period - first : TOGETHER;
    int64_t all[2 * TOGETHER];
    for (size_t i = 0; i < phases; i++) {
      int tensor = known_of_phase(follower, used, first + i);
      if (tensor != OB_NO_TENSOR)
        used[tensor] = true;
      all[2 * i] = tensor;
      all[2 * i + 1] = -tensor;
    }
    if (!largest(follower, all, (int)(2 * phases)))
      return false;
    for (size_t i = 0; i < phases; i++)
      follower->tensors[first + i] = all[2 * i] == -all[2 * i + 1] ? (int)all[2 * i] : OB_NO_TENSOR;
  }
  return true;
}

void ob_follower_look(struct ob_follower *follower) {
  size_t period = agree_on_period(follower);
  follower->has_looked = true;
  if (!period)
    return;
  ob_sequence_follow(follower->sequence, period);
  if (agree_on_phases(follower, period))
    follower->period = period;
  else
    ob_sequence_forget(follower->sequence);
}

/* ---- Following ---- */

void ob_follower_forget(struct ob_follower *follower) {
  ob_sequence_forget(follower->sequence);
  follower->period = 0;
}

static bool is_lost(const struct ob_follower *follower, ptrdiff_t phase) {
  int tensor = phase >= 0 ? follower->tensors[phase] : OB_NO_TENSOR;
  return tensor >= 0 && follower->ranks.is_lost &&
         follower->ranks.is_lost(follower->ranks.context, tensor);
}

ptrdiff_t ob_follower_phase(struct ob_follower *follower, uint64_t signature, const void *sendbuf,
                            const void *recvbuf, bool *look, bool *same) {
  *look = false;
  *same = true;
  if (!follower->period) {
    *look = ob_sequence_learn(follower->sequence, signature, sendbuf, recvbuf);
    return -1;
  }
  ptrdiff_t phase = ob_sequence_phase(follower->sequence, signature, sendbuf, recvbuf, same);
  if (is_lost(follower, phase)) {
    ob_sequence_forget(follower->sequence);
    ob_sequence_learn(follower->sequence, signature, sendbuf, recvbuf);
    phase = -1;
  }
  if (phase < 0)
    follower->period = 0;
  return phase;
}

ptrdiff_t ob_follower_find(const struct ob_follower *follower, uint64_t signature, size_t from) {
  if (from == OB_FOLLOWER_NEXT && follower->period)
    from = ob_sequence_next(follower->sequence);
  for (size_t i = 0; i < follower->period; i++) {
    size_t phase = (from + i) % follower->period;
    uint64_t expected;
    const void *sendbuf, *recvbuf;
    ob_sequence_expected(follower->sequence, phase, &expected, &sendbuf, &recvbuf);
    if (expected == signature)
      return (ptrdiff_t)phase;
  }
  return -1;
}

size_t ob_follower_period(const struct ob_follower *follower) { return follower->period; }

enum ob_reason ob_follower_reason(const struct ob_follower *follower) {
  return follower->has_looked && !follower->period ? OB_REASON_UNSTABLE : OB_REASON_LEARNING;
}

int ob_follower_tensor(const struct ob_follower *follower, size_t phase) {
  return follower->tensors[phase];
}

void ob_follower_set(struct ob_follower *follower, size_t phase, int tensor) {
  follower->tensors[phase] = tensor;
}

void ob_follower_drop(struct ob_follower *follower, int tensor) {
  for (size_t phase = 0; phase < follower->period; phase++)
    if (follower->tensors[phase] == tensor)
      follower->tensors[phase] = OB_NO_TENSOR;
}
