/*
 * The ranks of a communicator to which an object is moved: finds those with the latest state, and
 * sends messages between them. Ranks do not agree on failures of these functions: the other ranks
 * get an error while they wait for a message.
 */
#ifndef OB_OPTIMIZERS_MOVING_H
#define OB_OPTIMIZERS_MOVING_H

#include "collectives/communicator.h"

struct ob_moving {
  onebit_comm_t comm;
  const char *name; /* the name of the call, for the error message of a wait that is too long */
  struct ob_batch *batch;
  /* For each rank: its number in the latest agreement; whether it has the latest state (a holder);
   * whether it receives broadcasts. */
  uint64_t *noted;
  bool *holder, *wants;
  int source, holders;
};

/* ob_moving_destroy must be called also after a failure of ob_moving_create. It returns false if
 * messages could not be cancelled, so that their memory must stay. */
onebit_status_t ob_moving_create(struct ob_moving *moving, onebit_comm_t comm, const char *name);
bool ob_moving_destroy(struct ob_moving *moving);

/* Sends every rank's number to all ranks. Collective. */
onebit_status_t ob_moving_gather_numbers(struct ob_moving *moving, onebit_status_t status,
                                         uint64_t number);
/* Chooses source and holders by these numbers. The source is the first rank with the largest
 * number. Holders have a number at most `slack` smaller; a rank with number 0 is a holder only if
 * all numbers are 0. */
void ob_moving_choose_source(struct ob_moving *moving, uint64_t slack);

/* Queue a message. ob_moving_exchange sends and receives all queued messages. */
void ob_moving_send(struct ob_moving *moving, void *data, size_t bytes, int rank);
void ob_moving_receive(struct ob_moving *moving, void *data, size_t bytes, int rank);
onebit_status_t ob_moving_exchange(struct ob_moving *moving);
/* Sends a buffer from rank `from` to all other ranks whose `wants` is set. */
onebit_status_t ob_moving_broadcast(struct ob_moving *moving, int from, void *data, size_t bytes);

#endif
