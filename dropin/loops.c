/* Loops of calls: found, entered, followed and left. */
#include "dropin/loops.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"

struct position {
  uint64_t signature, exact; /* the call's own; and with what lies before it */
};

struct loop {
  int first, length;
  bool ambiguous; /* its signatures alone would be a shorter one */
};

#define MAX_LOOPS 16
#define NO_LOOP   (-1)

/* Learning: by signatures alone, and with the buffers of one side, which need repeat less. */
enum { ALONE, SENT, RECEIVED, WAYS };
#define BUFFER_REPEATS 3

struct ob_loops {
  ob_loops_largest *largest;
  void *context;
  struct ob_sequence *ways[WAYS];
  size_t learned; /* calls since learning began */
  size_t repeats;
  uint64_t before;      /* the calls since the last one that was looked at */
  bool is_started;      /* there was a call: what lay before the first one says nothing */
  int count, positions; /* loops; their calls together */
  struct loop loop[MAX_LOOPS];
  struct position position[OB_MAX_POSITIONS];
  int current, phase, matched, missed; /* missed: not exact since `matched` was a whole loop */
  int left; /* the loop in which the last call was not what was to come */
};

onebit_status_t ob_loops_create(unsigned repeats, ob_loops_largest *largest, void *context,
                                struct ob_loops **result) {
  *result = NULL;
  struct ob_loops *loops = ob_allocate(1, sizeof *loops);
  onebit_status_t status =
      loops ? ONEBIT_OK : ob_error(ONEBIT_ERROR_MEMORY, "no memory for loops of calls");
  for (int way = 0; way < WAYS && status == ONEBIT_OK; way++)
    status = ob_sequence_create(way == ALONE ? repeats : BUFFER_REPEATS, &loops->ways[way]);
  if (status != ONEBIT_OK) {
    ob_loops_destroy(loops);
    return status;
  }
  loops->largest = largest;
  loops->context = context;
  loops->repeats = repeats;
  loops->current = loops->left = NO_LOOP;
  *result = loops;
  return ONEBIT_OK;
}

void ob_loops_destroy(struct ob_loops *loops) {
  if (!loops)
    return;
  for (int way = 0; way < WAYS; way++)
    ob_sequence_destroy(loops->ways[way]);
  ob_release(loops);
}

static uint64_t mix(uint64_t hash, uint64_t value) { return ob_hash(hash, &value, sizeof value); }

void ob_loops_note(struct ob_loops *loops, uint64_t signature) {
  loops->before = mix(loops->before, signature);
}

/* ---- Learning ---- */

static bool learn(struct ob_loops *loops, uint64_t exact, const void *sendbuf,
                  const void *recvbuf) {
  loops->learned++;
  ob_sequence_learn(loops->ways[SENT], exact, sendbuf, NULL);
  ob_sequence_learn(loops->ways[RECEIVED], exact, NULL, recvbuf);
  return ob_sequence_learn(loops->ways[ALONE], exact, NULL, NULL);
}

/* So many times a period of signatures must have come where buffers show none: one of a single call
 * may be of several tensors. */
static size_t patience(const struct ob_loops *loops, size_t alone) {
  return loops->repeats * alone * (alone == 1 ? 4 : 2);
}

/* The smallest for signatures, which all ranks find alike, or as many of them as some rank's
 * buffers need; 0: none yet. *alone: the first. */
static size_t agree_on_length(struct ob_loops *loops, size_t *alone) {
  size_t length[WAYS];
  for (int way = 0; way < WAYS; way++)
    length[way] = ob_sequence_period(loops->ways[way], 1);
  size_t buffers = length[SENT] > length[RECEIVED] ? length[SENT] : length[RECEIVED];
  int64_t all[] = {(int64_t)length[ALONE], -(int64_t)length[ALONE], (int64_t)buffers,
                   !length[SENT] || !length[RECEIVED]};
  if (!loops->largest(loops->context, all, 4) || all[0] != -all[1] || !all[0])
    return 0;
  *alone = (size_t)all[0];
  if (all[3] && loops->learned < patience(loops, *alone))
    return 0;
  return all[2] > all[0] && all[2] % all[0] == 0 ? (size_t)all[2] : *alone;
}

static uint64_t exact_of(const struct ob_loops *loops, size_t phase) {
  uint64_t exact;
  const void *nothing, *no_more;
  ob_sequence_expected(loops->ways[ALONE], phase, &exact, &nothing, &no_more);
  return exact;
}

/* Whether the calls to follow are those of a loop, from its phase `turn` on. */
static bool is_turned(const struct ob_loops *loops, const struct loop *loop, int turn) {
  for (int i = 0; i < loop->length; i++)
    if (loops->position[loop->first + (turn + i) % loop->length].exact !=
        exact_of(loops, (size_t)i))
      return false;
  return true;
}

static bool enter_known(struct ob_loops *loops, int length) {
  for (int l = 0; l < loops->count; l++)
    for (int turn = 0; turn < length && loops->loop[l].length == length; turn++)
      if (!loops->loop[l].ambiguous && is_turned(loops, &loops->loop[l], turn)) {
        loops->current = l;
        loops->phase = turn;
        return true;
      }
  return false;
}

static bool enter_new(struct ob_loops *loops, int length, bool ambiguous) {
  bool full = loops->count == MAX_LOOPS || loops->positions + length > OB_MAX_POSITIONS;
  if (full)
    loops->count = loops->positions = 0;
  loops->loop[loops->count] = (struct loop){loops->positions, length, ambiguous};
  for (int i = 0; i < length; i++)
    loops->position[loops->positions + i] = (struct position){0, exact_of(loops, (size_t)i)};
  loops->positions += length;
  loops->current = loops->count++;
  loops->phase = 0;
  return full;
}

bool ob_loops_look(struct ob_loops *loops) {
  bool full = false;
  size_t alone = 0, length = agree_on_length(loops, &alone);
  if (!length)
    return false;
  ob_sequence_follow(loops->ways[ALONE], length);
  if (length != alone || !enter_known(loops, (int)length))
    full = enter_new(loops, (int)length, length != alone);
  loops->matched = (int)length;
  loops->missed = 0;
  loops->repeats = 2; /* as a sequence has it that has been followed */
  return full;
}

/* ---- Following ---- */

/* The only position of such calls in all loops; ambiguous ones have none. */
static bool enter(struct ob_loops *loops, uint64_t exact) {
  int found = 0, loop = 0, phase = 0;
  for (int l = 0; l < loops->count; l++)
    for (int i = 0; i < loops->loop[l].length; i++)
      if (loops->position[loops->loop[l].first + i].exact == exact) {
        found += loops->loop[l].ambiguous ? 2 : 1;
        loop = l;
        phase = i;
      }
  if (found != 1)
    return false;
  loops->current = loop;
  loops->phase = phase;
  loops->matched = loops->missed = 0;
  return true;
}

static struct position *expected(struct ob_loops *loops) {
  return &loops->position[loops->loop[loops->current].first + loops->phase];
}

static int advance(struct ob_loops *loops, uint64_t signature, bool exact) {
  const struct loop *loop = &loops->loop[loops->current];
  int position = loop->first + loops->phase;
  loops->position[position].signature = signature;
  loops->phase = (loops->phase + 1) % loop->length;
  loops->matched = exact ? loops->matched + 1 : 0;
  loops->missed = loops->matched >= loop->length ? 0 : loops->missed + !exact;
  return loops->matched >= loop->length ? position : OB_NO_POSITION;
}

/* One that only small sums before it tell from what was to come keeps the order once, without a
 * position; a second one before the loop has come whole does not. */
static bool may_miss(struct ob_loops *loops, uint64_t signature) {
  return loops->current != NO_LOOP && expected(loops)->signature == signature && !loops->missed &&
         !loops->loop[loops->current].ambiguous;
}

/* Where the call is in the loops that are known; none where it is not certain. */
static int follow(struct ob_loops *loops, uint64_t signature, uint64_t exact) {
  bool follows = loops->current != NO_LOOP && expected(loops)->exact == exact;
  loops->left = follows ? NO_LOOP : loops->current;
  if (follows || enter(loops, exact))
    return advance(loops, signature, true);
  if (may_miss(loops, signature))
    return advance(loops, signature, false);
  loops->current = NO_LOOP;
  return OB_NO_POSITION;
}

static void forget(struct ob_loops *loops) {
  for (int way = 0; way < WAYS && loops->learned; way++)
    ob_sequence_forget(loops->ways[way]);
  loops->learned = 0;
}

int ob_loops_position(struct ob_loops *loops, uint64_t signature, const void *sendbuf,
                      const void *recvbuf, bool *look) {
  uint64_t exact = mix(loops->before, signature);
  int position = follow(loops, signature, exact);
  loops->before = 0;
  *look = false;
  if (position == OB_NO_POSITION && loops->is_started)
    *look = learn(loops, exact, sendbuf, recvbuf);
  else
    forget(loops);
  loops->is_started = true;
  return position;
}

void ob_loops_left(const struct ob_loops *loops, int *first, int *count) {
  const struct loop *loop = loops->left == NO_LOOP ? NULL : &loops->loop[loops->left];
  *first = loop ? loop->first : 0;
  *count = loop ? loop->length : 0;
}

/* ---- What is asked of positions ---- */

int ob_loops_next(const struct ob_loops *loops, int position) {
  for (int l = 0; l < loops->count; l++) {
    const struct loop *loop = &loops->loop[l];
    int next = loop->first + (position - loop->first + 1) % loop->length;
    if (position >= loop->first && position < loop->first + loop->length)
      return next != position &&
                     loops->position[next].signature == loops->position[position].signature
                 ? next
                 : OB_NO_POSITION;
  }
  return OB_NO_POSITION;
}

int64_t ob_loops_hash(const struct ob_loops *loops, int position) {
  return (int64_t)(mix(loops->position[position].exact, (uint64_t)position) >> 1);
}

/* After so many steps a program of many tensors has repeated its calls, too. */
#define LONG_STEPS 256

enum ob_reason ob_loops_reason(const struct ob_loops *loops) {
  return loops->learned > LONG_STEPS * loops->repeats ? OB_REASON_UNSTABLE : OB_REASON_LEARNING;
}
