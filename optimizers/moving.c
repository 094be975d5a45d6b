/* Ranks to which an object is moved: who has the latest state, and messages between them. */
#include "optimizers/moving.h"

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"

onebit_status_t ob_moving_create(struct ob_moving *moving, onebit_comm_t comm, const char *name) {
  const size_t ranks = (size_t)comm->size;
  *moving = (struct ob_moving){.comm = comm,
                               .name = name,
                               .noted = ob_allocate(ranks, sizeof *moving->noted),
                               .holder = ob_allocate(ranks, sizeof *moving->holder),
                               .wants = ob_allocate(ranks, sizeof *moving->wants)};
  if (!moving->noted || !moving->holder || !moving->wants)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to move state between %zu ranks", ranks);
  return ob_batch_create(comm, ranks - 1, &moving->batch);
}

bool ob_moving_destroy(struct ob_moving *moving) {
  ob_release(moving->noted);
  ob_release(moving->holder);
  ob_release(moving->wants);
  return ob_batch_destroy(moving->batch);
}

onebit_status_t ob_moving_learn(struct ob_moving *moving, onebit_status_t status, uint64_t number) {
  OB_TRY(ob_agree_noting(moving->comm, status, NULL, 0, number));
  for (int rank = 0; rank < moving->comm->size; rank++)
    moving->noted[rank] = ob_agree_note(moving->comm, rank);
  return ONEBIT_OK;
}

void ob_moving_choose_source(struct ob_moving *moving, uint64_t slack) {
  uint64_t max = 0;
  for (int rank = 0; rank < moving->comm->size; rank++)
    if (moving->noted[rank] > max) {
      max = moving->noted[rank];
      moving->source = rank;
    }
  for (int rank = 0; rank < moving->comm->size; rank++) {
    const uint64_t number = moving->noted[rank];
    moving->holder[rank] = number == max || (number && max - number <= slack);
    moving->holders += moving->holder[rank];
  }
}

void ob_moving_send(struct ob_moving *moving, void *data, size_t bytes, int rank) {
  moving->batch->send[moving->batch->sends++] = (struct ob_endpoint){data, bytes, rank};
}

void ob_moving_receive(struct ob_moving *moving, void *data, size_t bytes, int rank) {
  moving->batch->receive[moving->batch->receives++] = (struct ob_endpoint){data, bytes, rank};
}

onebit_status_t ob_moving_exchange(struct ob_moving *moving) {
  struct ob_batch *batch = moving->batch;
  if (batch->sends + batch->receives == 0)
    return ONEBIT_OK;
  OB_TRY(ob_comm_check(moving->comm));
  OB_TRY(ob_comm_begin(batch, ob_comm_tag(moving->comm)));
  OB_TRY(ob_watch_batch(batch, moving->name));
  batch->sends = batch->receives = 0;
  return ONEBIT_OK;
}

onebit_status_t ob_moving_broadcast(struct ob_moving *moving, int from, void *data, size_t bytes) {
  const int me = moving->comm->rank;
  for (int rank = 0; me == from && rank < moving->comm->size; rank++)
    if (rank != me && moving->wants[rank])
      ob_moving_send(moving, data, bytes, rank);
  if (me != from && moving->wants[me])
    ob_moving_receive(moving, data, bytes, from);
  return ob_moving_exchange(moving);
}
