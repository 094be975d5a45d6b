/*
 * Periods in a sequence of calls.
 *
 * The latest calls lie in one array, oldest first. Looking for a period walks it backwards with the
 * Z algorithm: reach[p] calls, counted from the latest, equal those p earlier. A period p has
 * repeated r times when reach[p] is at least (r - 1) * p. That takes as many steps as there are
 * calls, and it is done after 2, 4, 8, ... of them: a few steps a call.
 */
#include "dropin/sequence.h"

#include <string.h>

#include "base/error.h"
#include "base/memory.h"

struct seen {
  uint64_t signature;
  const void *sendbuf, *recvbuf;
};

struct ob_sequence {
  unsigned repeats;
  size_t learned, next_look; /* calls since learning began, and when to look for a period */
  struct seen *calls;        /* `held` of them, of `capacity`; NULL when memory ran out */
  size_t *reach;             /* `capacity` */
  size_t held, capacity;
  size_t period, phase; /* followed: the period's calls are the first ones of `calls`; 0: none */
};

#define INITIAL_CAPACITY 64

static size_t max_history(const struct ob_sequence *sequence) {
  return (size_t)sequence->repeats * OB_SEQUENCE_MAX_PERIOD;
}

static void drop_history(struct ob_sequence *sequence) {
  ob_release(sequence->calls);
  ob_release(sequence->reach);
  sequence->calls = NULL;
  sequence->reach = NULL;
  sequence->held = sequence->capacity = 0;
}

static void start_learning(struct ob_sequence *sequence) {
  sequence->learned = sequence->held = sequence->period = 0;
  sequence->next_look = sequence->repeats;
}

/* Room for twice as many; without memory this rank remembers nothing until it learns anew. */
static bool grow(struct ob_sequence *sequence) {
  size_t capacity = sequence->capacity ? 2 * sequence->capacity : INITIAL_CAPACITY;
  struct seen *calls = ob_allocate(capacity, sizeof *calls);
  size_t *reach = ob_allocate(capacity, sizeof *reach);
  if (!calls || !reach) {
    ob_release(calls);
    ob_release(reach);
    drop_history(sequence);
    return false;
  }
  if (sequence->held)
    memcpy(calls, sequence->calls, sequence->held * sizeof *calls);
  ob_release(sequence->calls);
  ob_release(sequence->reach);
  sequence->calls = calls;
  sequence->reach = reach;
  sequence->capacity = capacity;
  return true;
}

onebit_status_t ob_sequence_create(unsigned repeats, struct ob_sequence **result) {
  *result = NULL;
  if (repeats < 2)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "repeats is %u, at least 2 show a period", repeats);
  struct ob_sequence *sequence = ob_allocate(1, sizeof *sequence);
  if (!sequence)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a sequence of calls");
  sequence->repeats = repeats;
  start_learning(sequence);
  *result = sequence;
  return ONEBIT_OK;
}

void ob_sequence_destroy(struct ob_sequence *sequence) {
  if (!sequence)
    return;
  drop_history(sequence);
  ob_release(sequence);
}

/* Keeps the latest that a longest period wants; they move to the front once in as many calls. */
static void make_capacity(struct ob_sequence *sequence) {
  size_t max = max_history(sequence);
  if (sequence->held < sequence->capacity)
    return;
  if (sequence->capacity < 2 * max) {
    grow(sequence);
    return;
  }
  memmove(sequence->calls, sequence->calls + sequence->held - max, max * sizeof(struct seen));
  sequence->held = max;
}

/* After a failure to grow nothing is held: what comes later would have a gap before it, which a
 * period does not see, so it may be held again from there on. */
static void hold(struct ob_sequence *sequence, const struct seen *call) {
  make_capacity(sequence);
  if (sequence->held < sequence->capacity)
    sequence->calls[sequence->held++] = *call;
}

bool ob_sequence_learn(struct ob_sequence *sequence, uint64_t signature, const void *sendbuf,
                       const void *recvbuf) {
  const struct seen call = {signature, sendbuf, recvbuf};
  hold(sequence, &call);
  sequence->learned++;
  if (sequence->learned < sequence->next_look)
    return false;
  size_t max = max_history(sequence);
  sequence->next_look += sequence->learned < max ? sequence->learned : max;
  return true;
}

static bool equal(const struct seen *a, const struct seen *b) {
  return a->signature == b->signature && a->sendbuf == b->sendbuf && a->recvbuf == b->recvbuf;
}

/* How far the latest calls equal those `back` earlier, beyond the first `known`. */
static size_t reach_from(const struct ob_sequence *sequence, size_t back, size_t known) {
  const struct seen *last = sequence->calls + sequence->held - 1;
  size_t max = sequence->held - back;
  while (known < max && equal(last - known, last - known - back))
    known++;
  return known;
}

/* The Z algorithm, on the calls read backwards. left, left + reach[left]: the stretch known to
 * repeat the latest calls that ends furthest back. */
static void find_reaches(const struct ob_sequence *sequence, size_t longest) {
  size_t *reach = sequence->reach, left = 0, right = 0;
  for (size_t back = 1; back <= longest; back++) {
    size_t known = 0;
    if (back < right) {
      known = reach[back - left];
      if (known > right - back)
        known = right - back;
    }
    reach[back] = reach_from(sequence, back, known);
    if (back + reach[back] > right) {
      left = back;
      right = back + reach[back];
    }
  }
}

size_t ob_sequence_period(const struct ob_sequence *sequence, size_t at_least) {
  size_t longest = sequence->held / sequence->repeats;
  if (longest > OB_SEQUENCE_MAX_PERIOD)
    longest = OB_SEQUENCE_MAX_PERIOD;
  find_reaches(sequence, longest);
  for (size_t period = at_least ? at_least : 1; period <= longest; period++)
    if (sequence->reach[period] >= (sequence->repeats - 1) * period)
      return period;
  return 0;
}

void ob_sequence_follow(struct ob_sequence *sequence, size_t period) {
  memmove(sequence->calls, sequence->calls + sequence->held - period, period * sizeof(struct seen));
  sequence->held = sequence->period = period;
  sequence->phase = 0;
}

void ob_sequence_expected(const struct ob_sequence *sequence, size_t phase, uint64_t *signature,
                          const void **sendbuf, const void **recvbuf) {
  const struct seen *call = &sequence->calls[phase];
  *signature = call->signature;
  *sendbuf = call->sendbuf;
  *recvbuf = call->recvbuf;
}

ptrdiff_t ob_sequence_phase(struct ob_sequence *sequence, uint64_t signature, const void *sendbuf,
                            const void *recvbuf, bool *same) {
  const struct seen call = {signature, sendbuf, recvbuf};
  size_t phase = sequence->phase;
  struct seen *wanted = sequence->period ? &sequence->calls[phase] : NULL;
  *same = false;
  if (!wanted || wanted->signature != signature) {
    ob_sequence_forget(sequence);
    ob_sequence_learn(sequence, signature, sendbuf, recvbuf);
    return -1;
  }
  *same = equal(wanted, &call);
  *wanted = call;
  sequence->phase = phase + 1 < sequence->period ? phase + 1 : 0;
  return (ptrdiff_t)phase;
}

size_t ob_sequence_next(const struct ob_sequence *sequence) { return sequence->phase; }

void ob_sequence_forget(struct ob_sequence *sequence) {
  if (sequence->period)
    sequence->repeats = 2;
  start_learning(sequence);
}
