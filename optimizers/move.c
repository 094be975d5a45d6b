/*
 * An optimizer on another communicator: after a rank was lost, or with ranks that have come.
 *
 *   agree       the optimizers are of one kind
 *   merge       what the ranks have becomes one part in memory, as a checkpoint has it
 *   strip       the buckets on the old communicator are given back
 *   build       and made on the new one
 *   restore     from the part
 *   agree
 *
 * Up to the merge nothing changes. From then on the part is the state: what fails later leaves it
 * with the optimizer (`held`), and the next call begins from there.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "collectives/communicator.h"
#include "optimizers/checkpoint/checkpoint.h"

/* Checks what this rank knows before any message. */
static onebit_status_t move_check(const struct onebit_optimizer *optimizer, onebit_comm_t comm) {
  bool alone = comm->size == 1 && optimizer->options.profile == ONEBIT_PROFILE_DEEPSPEED;
  if (optimizer->options.device != ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "optimizer is on a device: restart from a checkpoint");
  if (alone && optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "comm has one rank, which in profile ONEBIT_PROFILE_DEEPSPEED has no exchange "
                    "of steps: restart from a checkpoint");
  return ONEBIT_OK;
}

static onebit_status_t rebuild(onebit_optimizer_t optimizer) {
  OB_TRY(ob_optimizer_build(optimizer, ONEBIT_OK));
  return ob_agree(optimizer->comm, ob_checkpoint_restore(optimizer, optimizer->held), NULL, 0);
}

onebit_status_t onebit_optimizer_move(onebit_optimizer_t optimizer, onebit_comm_t comm) {
  OB_CALL_SCOPE;
  struct ob_part *part;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  ob_step_revoke(optimizer); /* of a step that was open */
  ob_optimizer_abandon_plans(optimizer);
  ob_comm_keep(comm);
  if (optimizer->latest)
    ob_comm_drop(optimizer->latest);
  optimizer->latest = comm;
  OB_TRY(ob_optimizer_agree(optimizer, comm, move_check(optimizer, comm)));
  const struct ob_term interval = {"the interval of onebit_optimizer_set_compare_interval",
                                   optimizer->compare_interval};
  OB_TRY(ob_agree(comm, ONEBIT_OK, &interval, 1));
  OB_TRY(ob_merge(optimizer, comm, &part));
  ob_part_release(optimizer->held);
  optimizer->held = part;
  ob_optimizer_strip(optimizer);
  onebit_comm_t before = optimizer->comm;
  optimizer->comm = ob_comm_keep(comm);
  ob_comm_drop(before);
  onebit_status_t status = rebuild(optimizer);
  if (status != ONEBIT_OK) {
    ob_optimizer_strip(optimizer);
    return status;
  }
  ob_part_release(optimizer->held);
  optimizer->held = NULL;
  optimizer->constants = 0; /* the lists are equal, and in force */
  optimizer->constants_wait = false;
  optimizer->tag = 0;
  optimizer->compared = true; /* they are equal now; and all ranks count from here */
  optimizer->calls = 0;
  return ONEBIT_OK;
}

/* True if the error can come from a rank that was lost meanwhile. */
static bool may_be_loss(onebit_status_t status) {
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
  } while (may_be_loss(status) && fewer);
  return status;
}

static onebit_status_t move(void *optimizer, onebit_comm_t comm) {
  return onebit_optimizer_move(optimizer, comm);
}

/* A rank whose move succeeded while others' failed shrinks the same communicator as these: the
 * latest one. */
onebit_status_t onebit_optimizer_shrink(onebit_optimizer_t optimizer, onebit_comm_t *survivors) {
  OB_CALL_SCOPE;
  if (survivors)
    *survivors = NULL;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (!survivors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "survivors is NULL");
  onebit_comm_t from = optimizer->latest ? optimizer->latest : optimizer->comm;
  return ob_shrink_and_move(from, survivors, move, optimizer);
}
