/*
 * Moves an optimizer to another communicator, after a rank was lost or when ranks have joined:
 *
 *   agree       the optimizers are of one kind
 *   merge       the ranks' states become one part of a checkpoint, in memory
 *   strip       the buckets on the old communicator are destroyed
 *   build       buckets are created on the new one
 *   restore     the state is loaded from the part
 *   agree       all ranks have succeeded
 *
 * Up to the merge nothing changes. After the merge the part is the state: after a later failure the
 * optimizer keeps the part (`held`), and the next call begins with it.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"
#include "optimizers/checkpoint/checkpoint.h"
#include "optimizers/moving.h"

/* --- Ranks, and messages between them ----------------------------------------------------------*/

onebit_status_t ob_moving_create(struct ob_moving *moving, onebit_comm_t comm, const char *name) {
  const size_t ranks = (size_t)comm->size;
  *moving = (struct ob_moving){.comm = comm,
                               .name = name,
                               .noted = ob_allocate(ranks, sizeof *moving->noted),
                               .holder = ob_allocate(ranks, sizeof *moving->holder),
                               .wants = ob_allocate(ranks, sizeof *moving->wants)};
  if (!moving->noted || !moving->holder || !moving->wants)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for moving state between %zu ranks", ranks);
  return ob_batch_create(comm, ranks - 1, &moving->batch);
}

bool ob_moving_destroy(struct ob_moving *moving) {
  ob_release(moving->noted);
  ob_release(moving->holder);
  ob_release(moving->wants);
  return ob_batch_destroy(moving->batch);
}

onebit_status_t ob_moving_gather_numbers(struct ob_moving *moving, onebit_status_t status,
                                         uint64_t number) {
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

/* --- Moving an optimizer -----------------------------------------------------------------------*/

/* Makes the checks of this rank that need no message. */
static onebit_status_t check_move(const struct onebit_optimizer *optimizer, onebit_comm_t comm) {
  bool alone = comm->size == 1 && optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
  if (optimizer->options.device != ONEBIT_DEVICE_HOST)
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "optimizer is on a device, from which it cannot be moved: restart from a checkpoint");
  if (alone && optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "comm has one rank, but ONEBIT_PROFILE_DEEPSPEED does not exchange steps on "
                    "one rank: restart from a checkpoint");
  return ONEBIT_OK;
}

static onebit_status_t rebuild_optimizer(onebit_optimizer_t optimizer) {
  OB_TRY(ob_optimizer_build(optimizer, ONEBIT_OK));
  return ob_buckets_share_servers(
      optimizer,
      ob_agree(optimizer->comm, ob_checkpoint_restore(optimizer, optimizer->held), NULL, 0));
}

onebit_status_t onebit_optimizer_move(onebit_optimizer_t optimizer, onebit_comm_t comm) {
  OB_CALL_SCOPE;
  struct ob_part *part;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  ob_step_revoke(optimizer); /* discards the results of an open step */
  ob_optimizer_abandon_plans(optimizer);
  ob_comm_add_user(comm);
  if (optimizer->latest)
    ob_comm_remove_user(optimizer->latest);
  optimizer->latest = comm;
  OB_TRY(ob_optimizer_agree(optimizer, comm, check_move(optimizer, comm)));
  const struct ob_term interval = {"the interval of onebit_optimizer_set_compare_interval",
                                   optimizer->compare_interval};
  OB_TRY(ob_agree(comm, ONEBIT_OK, &interval, 1));
  OB_TRY(ob_merge(optimizer, comm, &part));
  ob_part_release(optimizer->held);
  optimizer->held = part;
  ob_optimizer_strip(optimizer);
  onebit_comm_t before = optimizer->comm;
  optimizer->comm = ob_comm_add_user(comm);
  ob_comm_remove_user(before);
  onebit_status_t status = rebuild_optimizer(optimizer);
  if (status != ONEBIT_OK) {
    ob_optimizer_strip(optimizer);
    return status;
  }
  ob_part_release(optimizer->held);
  optimizer->held = NULL;
  optimizer->constants = 0; /* the ranks' constants are equal and in effect */
  optimizer->constants_wait = false;
  optimizer->tag = 0;
  optimizer->compared = true; /* parameters are equal now; all ranks count from here */
  optimizer->calls = 0;
  return ONEBIT_OK;
}

/* Returns true if the loss of another rank can cause this error. */
static bool may_be_lost_rank(onebit_status_t status) {
  return status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER ||
         status == ONEBIT_ERROR_MESSAGE;
}

onebit_status_t ob_shrink_and_move(onebit_comm_t from, onebit_comm_t *survivors,
                                   onebit_status_t (*move)(void *object, onebit_comm_t comm),
                                   void *object) {
  onebit_comm_t next;
  onebit_status_t status;
  bool fewer;
  do {
    OB_TRY(onebit_comm_shrink(from, &next));
    fewer = next->size < from->size;
    onebit_comm_destroy(*survivors);
    *survivors = from = next;
    status = move(object, next);
  } while (may_be_lost_rank(status) && fewer);
  return status;
}

static onebit_status_t move_optimizer(void *optimizer, onebit_comm_t comm) {
  return onebit_optimizer_move(optimizer, comm);
}

/* If the latest move succeeded on this rank but failed on others, all of them shrink the same
 * communicator: that of the latest move. */
onebit_status_t onebit_optimizer_shrink(onebit_optimizer_t optimizer, onebit_comm_t *survivors) {
  OB_CALL_SCOPE;
  if (survivors)
    *survivors = NULL;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (!survivors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "survivors is NULL");
  onebit_comm_t from = optimizer->latest ? optimizer->latest : optimizer->comm;
  return ob_shrink_and_move(from, survivors, move_optimizer, optimizer);
}
