/* An outer step on another communicator: who has what, and the latest for all. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "collectives/watch.h"
#include "optimizers/outer/move.h"
#include "optimizers/outer/state.h"

enum { MESSAGE = 1 << 20 }; /* floats at a time */

/* --- Who has what ------------------------------------------------------------------------------*/

onebit_status_t ob_moving_learn(struct ob_moving *moving, onebit_status_t status, uint64_t number) {
  OB_TRY(ob_agree_noting(moving->comm, status, NULL, 0, number));
  for (int rank = 0; rank < moving->comm->size; rank++)
    moving->noted[rank] = ob_agree_note(moving->comm, rank);
  return ONEBIT_OK;
}

/* A rank of the same run is behind by no more than the fragments whose exchange was cut short. */
static void choose_source(struct ob_moving *moving) {
  const uint64_t slack = moving->outer->options.fragments;
  uint64_t max = 0;
  for (int rank = 0; rank < moving->comm->size; rank++)
    if (moving->noted[rank] > max) {
      max = moving->noted[rank];
      moving->source = rank;
    }
  for (int rank = 0; rank < moving->comm->size; rank++) {
    const uint64_t made = moving->noted[rank];
    const bool holder = made + slack >= max && (made > 0 || max == 0);
    moving->holders += holder;
    if (rank == moving->comm->rank)
      moving->holder = holder;
  }
}

/* --- The source's ------------------------------------------------------------------------------*/

static onebit_status_t exchange(struct ob_moving *moving) {
  struct ob_batch *batch = moving->batch;
  if (batch->sends + batch->receives == 0)
    return ONEBIT_OK;
  OB_TRY(ob_comm_check(moving->comm));
  OB_TRY(ob_comm_begin(batch, ob_comm_tag(moving->comm)));
  OB_TRY(ob_watch_batch(batch, "onebit_outer_move"));
  batch->sends = batch->receives = 0;
  return ONEBIT_OK;
}

onebit_status_t ob_moving_pass_on(struct ob_moving *moving, float *values, size_t count) {
  const int me = moving->comm->rank, source = moving->source;
  const bool behind = moving->noted[me] != moving->noted[source];
  for (size_t some; count; values += some, count -= some) {
    struct ob_batch *batch = moving->batch;
    some = count < MESSAGE ? count : MESSAGE;
    const size_t bytes = some * sizeof *values;
    memcpy(moving->message, values, bytes);
    for (int rank = 0; rank < moving->comm->size; rank++) {
      if (moving->noted[rank] == moving->noted[source])
        continue;
      if (me == source)
        batch->send[batch->sends++] = (struct ob_endpoint){moving->message, bytes, rank};
      if (me == rank)
        batch->receive[batch->receives++] = (struct ob_endpoint){moving->message, bytes, source};
    }
    OB_TRY(exchange(moving));
    if (behind)
      memcpy(values, moving->message, bytes);
  }
  return ONEBIT_OK;
}

/* What all ranks have alike of a fragment is its arrays before the drift. */
static uint64_t fingerprint(const struct ob_fragment *fragment) {
  const struct ob_codec *codec = fragment->outer->codec;
  uint64_t sums = 0;
  for (int k = 0; k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      sums = sums << 32 | codec->checksum(fragment->array[k], fragment->count);
  return sums;
}

/* A rank that was behind begins at the consensus: what it has done since was in the exchange that
 * it did not see the end of. */
static onebit_status_t align_fragment(struct ob_moving *moving, struct ob_fragment *fragment) {
  OB_TRY(ob_moving_learn(moving, ONEBIT_OK, fingerprint(fragment)));
  const uint64_t wanted = moving->noted[moving->source];
  const bool behind = moving->noted[moving->comm->rank] != wanted;
  onebit_status_t status = ONEBIT_OK;
  for (int k = 0; status == ONEBIT_OK && k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      status = ob_moving_pass_on(moving, fragment->array[k], fragment->count);
  if (status != ONEBIT_OK) {
    ob_comm_give_up(moving->comm, onebit_last_error());
    return status;
  }
  if (fingerprint(fragment) != wanted)
    status = ob_error(ONEBIT_ERROR_MESSAGE, "from rank %d: fragment %zu is not what it has",
                      moving->source, fragment->number);
  if (!behind || status != ONEBIT_OK)
    return ob_agree(moving->comm, status, NULL, 0);
  fragment->keeps = false;
  fragment->stage = OB_FRAGMENT_IDLE;
  ob_fragment_set(fragment, 1);
  fragment->weight = 0;
  for (int k = 0; k < 2; k++)
    memset(fragment->held[k], 0, fragment->count * sizeof(float));
  return ob_agree(moving->comm, ONEBIT_OK, NULL, 0);
}

static size_t next_fragment(const struct onebit_outer *outer) {
  size_t next = 0;
  while (outer->fragments[next].begin_step <= outer->position % outer->options.local_steps)
    next++;
  return next;
}

/* Counts, and which fragment is next. */
static onebit_status_t align_counts(struct ob_moving *moving) {
  struct onebit_outer *outer = moving->outer;
  uint64_t *counts[] = {&outer->started, &outer->exchanges, &outer->skipped, &outer->steps};
  OB_TRY(ob_moving_learn(moving, ONEBIT_OK, next_fragment(outer)));
  const size_t next = (size_t)moving->noted[moving->source];
  OB_TRY(ob_moving_learn(moving, ONEBIT_OK, outer->options.local_steps));
  const size_t round = (size_t)moving->noted[moving->source];
  OB_TRY(ob_moving_learn(moving, ONEBIT_OK, outer->position % outer->options.local_steps));
  const size_t position = (size_t)moving->noted[moving->source];
  if (!outer->options.weighted || !moving->holder || next_fragment(outer) != next)
    outer->position = ob_outer_position(outer, position, round);
  for (size_t k = 0; k < 4; k++) {
    OB_TRY(ob_moving_learn(moving, ONEBIT_OK, *counts[k]));
    if (counts[k] != &outer->steps || !outer->options.weighted || !moving->holder)
      *counts[k] = moving->noted[moving->source];
  }
  return ONEBIT_OK;
}

onebit_status_t ob_moving_align(struct ob_moving *moving) {
  struct onebit_outer *outer = moving->outer;
  const size_t others = (size_t)moving->comm->size - 1;
  moving->noted = ob_allocate(others + 1, sizeof *moving->noted);
  moving->message = ob_allocate(outer->count < MESSAGE ? outer->count : MESSAGE, sizeof(float));
  onebit_status_t status = moving->noted && moving->message
                               ? ONEBIT_OK
                               : ob_error(ONEBIT_ERROR_MEMORY, "no memory to move an outer step");
  if (status == ONEBIT_OK)
    status = moving->comm->transport->batch_create(moving->comm, others, &moving->batch);
  if (status == ONEBIT_OK)
    status = ob_outer_to_host(outer);
  OB_TRY(ob_moving_learn(moving, status, outer->exchanges));
  choose_source(moving);
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(align_fragment(moving, &outer->fragments[f]));
  return align_counts(moving);
}
