/* An outer step on another communicator: who has what, and the latest for all. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "optimizers/outer/move.h"
#include "optimizers/outer/state.h"

enum { MESSAGE = 1 << 20 }; /* floats at a time */

onebit_status_t ob_rejoining_pass_on(struct ob_rejoining *moving, float *values, size_t count) {
  struct ob_moving *ranks = &moving->ranks;
  for (int rank = 0; rank < ranks->comm->size; rank++)
    ranks->wants[rank] = ranks->noted[rank] != ranks->noted[ranks->source];
  for (size_t some; count; values += some, count -= some) {
    some = count < MESSAGE ? count : MESSAGE;
    memcpy(moving->message, values, some * sizeof *values);
    OB_TRY(ob_moving_broadcast(ranks, ranks->source, moving->message, some * sizeof *values));
    if (ranks->wants[ranks->comm->rank])
      memcpy(values, moving->message, some * sizeof *values);
  }
  return ONEBIT_OK;
}

/* Returns a fingerprint of the fragment's arrays before the drift, which all ranks have alike. */
static uint64_t move_align_fingerprint(const struct ob_fragment *fragment) {
  const struct ob_codec *codec = fragment->outer->codec;
  uint64_t sums = 0;
  for (int k = 0; k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      sums = sums << 32 | codec->checksum(fragment->array[k], fragment->count);
  return sums;
}

/* A rank that was behind begins at the consensus: its drift so far was in the exchange whose end it
 * did not see. */
static onebit_status_t align_fragment(struct ob_rejoining *moving, struct ob_fragment *fragment) {
  struct ob_moving *ranks = &moving->ranks;
  OB_TRY(ob_moving_learn(ranks, ONEBIT_OK, move_align_fingerprint(fragment)));
  const uint64_t wanted = ranks->noted[ranks->source];
  const bool behind = ranks->noted[ranks->comm->rank] != wanted;
  onebit_status_t status = ONEBIT_OK;
  for (int k = 0; status == ONEBIT_OK && k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      status = ob_rejoining_pass_on(moving, fragment->array[k], fragment->count);
  if (status != ONEBIT_OK) {
    ob_comm_give_up(ranks->comm, onebit_last_error());
    return status;
  }
  if (move_align_fingerprint(fragment) != wanted)
    status = ob_error(ONEBIT_ERROR_MESSAGE, "from rank %d: fragment %zu is not what it has",
                      ranks->source, fragment->number);
  if (!behind || status != ONEBIT_OK)
    return ob_agree(ranks->comm, status, NULL, 0);
  fragment->keeps = false;
  fragment->stage = OB_FRAGMENT_IDLE;
  ob_fragment_set(fragment, 1);
  fragment->weight = 0;
  for (int k = 0; k < 2; k++)
    memset(fragment->held[k], 0, fragment->count * sizeof(float));
  return ob_agree(ranks->comm, ONEBIT_OK, NULL, 0);
}

static size_t next_fragment(const struct onebit_outer *outer) {
  size_t next = 0;
  while (outer->fragments[next].begin_step <= outer->position % outer->options.local_steps)
    next++;
  return next;
}

/* Counts, and which fragment is next. */
static onebit_status_t align_counts(struct ob_rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  struct ob_moving *ranks = &moving->ranks;
  const bool holder = ranks->holder[ranks->comm->rank];
  uint64_t *counts[] = {&outer->started, &outer->exchanges, &outer->skipped, &outer->steps};
  OB_TRY(ob_moving_learn(ranks, ONEBIT_OK, next_fragment(outer)));
  const size_t next = (size_t)ranks->noted[ranks->source];
  OB_TRY(ob_moving_learn(ranks, ONEBIT_OK, outer->options.local_steps));
  const size_t round = (size_t)ranks->noted[ranks->source];
  OB_TRY(ob_moving_learn(ranks, ONEBIT_OK, outer->position % outer->options.local_steps));
  const size_t position = (size_t)ranks->noted[ranks->source];
  if (!outer->options.weighted || !holder || next_fragment(outer) != next)
    outer->position = ob_outer_position(outer, position, round);
  for (size_t k = 0; k < 4; k++) {
    OB_TRY(ob_moving_learn(ranks, ONEBIT_OK, *counts[k]));
    if (counts[k] != &outer->steps || !outer->options.weighted || !holder)
      *counts[k] = ranks->noted[ranks->source];
  }
  return ONEBIT_OK;
}

/* A rank of the same run is behind by no more than the fragments whose exchange was cut short. */
onebit_status_t ob_rejoining_align(struct ob_rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  struct ob_moving *ranks = &moving->ranks;
  onebit_status_t status = ob_moving_create(ranks, ranks->comm, "onebit_outer_move");
  moving->message = ob_allocate(outer->count < MESSAGE ? outer->count : MESSAGE, sizeof(float));
  if (status == ONEBIT_OK && !moving->message)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory to move an outer step");
  if (status == ONEBIT_OK)
    status = ob_outer_to_host(outer);
  OB_TRY(ob_moving_learn(ranks, status, outer->exchanges));
  ob_moving_choose_source(ranks, outer->options.fragments);
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(align_fragment(moving, &outer->fragments[f]));
  return align_counts(moving);
}
