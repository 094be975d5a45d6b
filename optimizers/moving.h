/*
 * The ranks of a communicator to which an object is moved: who has the latest state, and messages
 * between them. The ranks do not agree on failures here: the others get an error while they wait.
 */
#ifndef OB_OPTIMIZERS_MOVING_H
#define OB_OPTIMIZERS_MOVING_H

#include "collectives/communicator.h"

struct ob_moving {
  onebit_comm_t comm;
  const char *name; /* of the call, where a wait is too long */
  struct ob_batch *batch;
  /* By rank: its number in the latest agreement; whether its state is of the latest run; and
   * whether it gets what is broadcast. */
  uint64_t *noted;
  bool *holder, *wants;
  int source, holders;
};

/* Has to be destroyed also after a failure. ob_moving_destroy returns false if messages could not
 * be cancelled, so that their memory must stay. */
onebit_status_t ob_moving_create(struct ob_moving *moving, onebit_comm_t comm, const char *name);
bool ob_moving_destroy(struct ob_moving *moving);

/* Collective: everyone's number. */
onebit_status_t ob_moving_learn(struct ob_moving *moving, onebit_status_t status, uint64_t number);
/* Chooses by these numbers: the source is the first rank with the largest one. Holders are at most
 * `slack` behind it; a rank at 0 is a holder only if all ranks are at 0. */
void ob_moving_choose_source(struct ob_moving *moving, uint64_t slack);

/* Queue a message; it is complete when the exchange returns. */
void ob_moving_send(struct ob_moving *moving, void *data, size_t bytes, int rank);
void ob_moving_receive(struct ob_moving *moving, void *data, size_t bytes, int rank);
onebit_status_t ob_moving_exchange(struct ob_moving *moving);
/* Sends a buffer from one rank to all others that want it. */
onebit_status_t ob_moving_broadcast(struct ob_moving *moving, int from, void *data, size_t bytes);

#endif
