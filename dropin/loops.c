/* Finds loops in the order of a program's calls, and returns the position of each call in its
 * loop. */
#include "dropin/loops.h"

#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"

struct position {
  uint64_t signature, exact; /* hash of the call; hash of the call and the small calls before it */
  int tensor;
};

struct loop {
  int first, length;
  bool ambiguous; /* the same signatures repeat within the loop: its length is known from buffers */
};

/* A call that was made while the program followed no known loop. */
struct seen {
  uint64_t signature, exact;
  const void *sendbuf, *recvbuf;
  int tensor;
};

#define MAX_LOOPS 16
#define NO_LOOP   (-1)

/* The ways to compare two calls: by signatures alone, or also by send buffers or by receive
 * buffers. */
enum { ALONE, SENT, RECEIVED, WAYS };

struct ob_loops {
  ob_loops_allreduce_max *largest;
  void *context;
  size_t repeats;
  size_t learned, next_look; /* calls since learning began; their number when ranks next agree */
  struct seen seen[OB_MAX_POSITIONS];   /* the latest calls, by their numbers */
  unsigned run[WAYS][OB_MAX_POSITIONS]; /* for each way and length: how many latest calls repeat */
  uint64_t before;                      /* hash of the small calls since the latest large call */
  bool is_started;      /* there was a call; the calls before the first are not known */
  int count, positions; /* the number of loops; the sum of their lengths */
  struct loop loop[MAX_LOOPS];
  struct position position[OB_MAX_POSITIONS];
  int current, phase, matched, missed; /* missed: inexact calls since the last whole loop */
  int left;                            /* the loop that was left: its expected call did not come */
};

static void start_learning(struct ob_loops *loops) {
  if (loops->learned)
    memset(loops->run, 0, sizeof loops->run);
  loops->learned = 0;
  loops->next_look = loops->repeats;
}

onebit_status_t ob_loops_create(unsigned repeats, ob_loops_allreduce_max *largest, void *context,
                                struct ob_loops **result) {
  *result = NULL;
  if (repeats < 2)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "repeats is %u, but a loop repeats at least twice",
                    repeats);
  struct ob_loops *loops = ob_allocate(1, sizeof *loops);
  if (!loops)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the record of repeated calls");
  loops->largest = largest;
  loops->context = context;
  loops->repeats = repeats;
  loops->current = loops->left = NO_LOOP;
  start_learning(loops);
  *result = loops;
  return ONEBIT_OK;
}

void ob_loops_destroy(struct ob_loops *loops) { ob_release(loops); }

static uint64_t loops_hash_value(uint64_t hash, uint64_t value) {
  return ob_hash(hash, &value, sizeof value);
}

uint64_t ob_loops_signature(onebit_operation_t operation, onebit_dtype_t dtype, bool sum,
                            size_t count) {
  return (uint64_t)count << 8 | (uint64_t)operation << 4 | (uint64_t)dtype << 1 | (uint64_t)sum;
}

void ob_loops_note(struct ob_loops *loops, uint64_t signature) {
  loops->before = loops_hash_value(loops->before, signature);
}

/* ---- Learning ---- */

static const struct seen *get_call_before(const struct ob_loops *loops, size_t back) {
  return &loops->seen[(loops->learned - back) % OB_MAX_POSITIONS];
}

/* After this many calls even a program with many tensors has repeated its calls. */
#define LONG_STEPS 256

/* Returns the smallest length of a loop that the latest calls have repeated `repeats` times, or 0.
 * The repetitions must be at least half of all calls since learning began, or of the latest 512:
 * two equal calls within a longer loop do not count. */
static size_t find_length(const struct ob_loops *loops, int way) {
  size_t all = loops->learned < 2 * LONG_STEPS ? loops->learned : 2 * LONG_STEPS;
  for (size_t length = 1; length < OB_MAX_POSITIONS && length < loops->learned; length++) {
    size_t run = loops->run[way][length];
    if (run >= (loops->repeats - 1) * length && 2 * (run + length) >= all)
      return length;
  }
  return 0;
}

/* Adds a call to those from which loops are learned. Returns true if the signatures repeat in a
 * loop and the ranks should agree on the loop's length. All ranks get the same result. */
static bool learn_call(struct ob_loops *loops, const struct seen *call) {
  for (size_t back = 1; back <= loops->learned && back < OB_MAX_POSITIONS; back++) {
    const struct seen *then = get_call_before(loops, back);
    bool same = then->exact ? then->exact == call->exact : then->signature == call->signature;
    const bool alike[WAYS] = {same, same && then->sendbuf == call->sendbuf,
                              same && then->recvbuf == call->recvbuf};
    for (int way = 0; way < WAYS; way++)
      loops->run[way][back] = alike[way] ? loops->run[way][back] + 1 : 0;
  }
  loops->seen[loops->learned++ % OB_MAX_POSITIONS] = *call;
  return loops->learned >= loops->next_look && find_length(loops, ALONE);
}

/* Returns the number of calls to wait for if the buffers do not show the length of the loop. Calls
 * that look like a loop of one call may be calls for several tensors. */
static size_t required_calls(const struct ob_loops *loops, size_t alone) {
  return alone == 1 ? 8 * loops->repeats : (loops->repeats + 1) * alone;
}

/* Returns the length of the loop; 0 if no loop is found yet. It is the smallest length after which
 * signatures repeat, which is the same on all ranks, or a multiple of this length if some rank's
 * buffers repeat only after that many calls. *alone: the length by signatures alone. */
static size_t agree_on_length(struct ob_loops *loops, size_t *alone) {
  size_t length[WAYS];
  for (int way = 0; way < WAYS; way++)
    length[way] = find_length(loops, way);
  size_t buffers = length[SENT] > length[RECEIVED] ? length[SENT] : length[RECEIVED];
  int64_t all[] = {(int64_t)length[ALONE], -(int64_t)length[ALONE], (int64_t)buffers,
                   !length[SENT] || !length[RECEIVED]};
  if (!loops->largest(loops->context, all, 4) || all[0] != -all[1] || !all[0])
    return 0;
  *alone = (size_t)all[0];
  if (all[3] && loops->learned < required_calls(loops, *alone))
    return 0;
  return all[2] > all[0] && all[2] % all[0] == 0 ? (size_t)all[2] : *alone;
}

/* Returns the call at position `phase` of the loop that will be followed next. The next call has
 * phase 0. */
static const struct seen *get_call_in_phase(const struct ob_loops *loops, int length, int phase) {
  return get_call_before(loops, (size_t)(length - phase));
}

/* Returns true if the next calls will be those of a known loop, beginning at its phase `turn`. */
static bool matches_loop(const struct ob_loops *loops, const struct loop *loop, int turn) {
  for (int i = 0; i < loop->length; i++)
    if (loops->position[loop->first + (turn + i) % loop->length].exact !=
        get_call_in_phase(loops, loop->length, i)->exact)
      return false;
  return true;
}

static bool enter_known_loop(struct ob_loops *loops, int length) {
  for (int l = 0; l < loops->count; l++)
    for (int turn = 0; turn < length && loops->loop[l].length == length; turn++)
      if (!loops->loop[l].ambiguous && matches_loop(loops, &loops->loop[l], turn)) {
        loops->current = l;
        loops->phase = turn;
        return true;
      }
  return false;
}

static bool enter_new_loop(struct ob_loops *loops, int length, bool ambiguous) {
  bool full = loops->count == MAX_LOOPS || loops->positions + length > OB_MAX_POSITIONS;
  if (full)
    loops->count = loops->positions = 0;
  loops->loop[loops->count] = (struct loop){loops->positions, length, ambiguous};
  for (int i = 0; i < length; i++) {
    const struct seen *call = get_call_in_phase(loops, length, i);
    loops->position[loops->positions + i] =
        (struct position){call->signature, call->exact, call->tensor};
  }
  loops->positions += length;
  loops->current = loops->count++;
  loops->phase = 0;
  return full;
}

bool ob_loops_find_loop(struct ob_loops *loops) {
  bool full = false;
  size_t alone = 0, length = agree_on_length(loops, &alone);
  loops->next_look = loops->learned + loops->learned / 2;
  if (!length)
    return false;
  if (length != alone || !enter_known_loop(loops, (int)length))
    full = enter_new_loop(loops, (int)length, length != alone);
  loops->matched = (int)length;
  loops->missed = 0;
  loops->repeats = 2; /* the program is known to repeat its calls */
  return full;
}

/* ---- Following ---- */

/* Enters the loop that contains such a call. If the call fits more than one position in all loops
 * together, no loop is entered. */
static bool enter_loop(struct ob_loops *loops, uint64_t exact) {
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

static struct position *expected_position(struct ob_loops *loops) {
  return &loops->position[loops->loop[loops->current].first + loops->phase];
}

static int loops_advance(struct ob_loops *loops, uint64_t signature, bool exact) {
  const struct loop *loop = &loops->loop[loops->current];
  int position = loop->first + loops->phase;
  loops->position[position].signature = signature;
  loops->phase = (loops->phase + 1) % loop->length;
  loops->matched = exact ? loops->matched + 1 : 0;
  loops->missed = loops->matched >= loop->length ? 0 : loops->missed + !exact;
  return loops->matched >= loop->length ? position : OB_NO_POSITION;
}

/* Returns true if the call differs from the expected one only by the small calls before it. One
 * such call continues the loop, but gets no position; a second one before the loop is complete ends
 * it. */
static bool continues_without_position(struct ob_loops *loops, uint64_t signature) {
  return loops->current != NO_LOOP && expected_position(loops)->signature == signature &&
         !loops->missed && !loops->loop[loops->current].ambiguous;
}

/* Returns the call's position in the known loops, or OB_NO_POSITION if it is not certain. */
static int follow_loop(struct ob_loops *loops, uint64_t signature, uint64_t exact) {
  bool follows = loops->current != NO_LOOP && expected_position(loops)->exact == exact;
  loops->left = follows ? NO_LOOP : loops->current;
  if (follows || enter_loop(loops, exact))
    return loops_advance(loops, signature, true);
  if (continues_without_position(loops, signature))
    return loops_advance(loops, signature, false);
  loops->current = NO_LOOP;
  return OB_NO_POSITION;
}

int ob_loops_position(struct ob_loops *loops, uint64_t signature, const void *sendbuf,
                      const void *recvbuf, bool *look) {
  uint64_t exact = loops->is_started ? loops_hash_value(loops->before, signature) : 0;
  const struct seen call = {signature, exact, sendbuf, recvbuf, 0};
  int position = follow_loop(loops, signature, exact);
  loops->before = 0;
  loops->is_started = true;
  *look = false;
  if (position == OB_NO_POSITION)
    *look = learn_call(loops, &call);
  else
    start_learning(loops);
  return position;
}

int *ob_loops_tensor(struct ob_loops *loops, int position) {
  return &loops->position[position].tensor;
}

void ob_loops_set_last_tensor(struct ob_loops *loops, int tensor) {
  if (loops->learned)
    loops->seen[(loops->learned - 1) % OB_MAX_POSITIONS].tensor = tensor;
}

void ob_loops_remove_tensor(struct ob_loops *loops, int tensor) {
  for (int i = 0; i < OB_MAX_POSITIONS; i++) {
    if (loops->position[i].tensor == tensor)
      loops->position[i].tensor = 0;
    if (loops->seen[i].tensor == tensor)
      loops->seen[i].tensor = 0;
  }
}

void ob_loops_read_left_positions(const struct ob_loops *loops, int *first, int *count) {
  const struct loop *loop = loops->left == NO_LOOP ? NULL : &loops->loop[loops->left];
  *first = loop ? loop->first : 0;
  *count = loop ? loop->length : 0;
}

int ob_loops_find(const struct ob_loops *loops, uint64_t signature, int after) {
  if (loops->current == NO_LOOP)
    return OB_NO_POSITION;
  const struct loop *loop = &loops->loop[loops->current];
  int from = after == OB_NO_POSITION ? loops->phase : after + 1 - loop->first;
  for (int i = 0; i < loop->length; i++) {
    int position = loop->first + (from + i) % loop->length;
    if (from >= 0 && loops->position[position].signature == signature)
      return position;
  }
  return OB_NO_POSITION;
}

#define STEADY_CALLS 8

bool ob_buffers_note(struct ob_buffers *buffers, const void *sendbuf, const void *recvbuf) {
  const bool same[2] = {buffers->sendbuf == sendbuf, buffers->recvbuf == recvbuf};
  bool moved = false;
  for (int side = 0; side < 2; side++) {
    moved = moved || (!same[side] && buffers->steady[side] >= STEADY_CALLS);
    buffers->steady[side] = same[side] ? buffers->steady[side] + 1 : 0;
  }
  buffers->sendbuf = sendbuf;
  buffers->recvbuf = recvbuf;
  return moved;
}

enum ob_reason ob_loops_reason(const struct ob_loops *loops) {
  return loops->learned > LONG_STEPS * loops->repeats ? OB_REASON_UNSTABLE : OB_REASON_LEARNING;
}
