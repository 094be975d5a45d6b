/*
 * The group of a loopback communicator: the state that its ranks, threads of one process, share.
 */
#ifndef OB_COLLECTIVES_LOOPBACK_H
#define OB_COLLECTIVES_LOOPBACK_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "collectives/communicator.h"

struct parcel;

struct mailbox {
  struct parcel *sent, *wanted;
};

/* A rank's state in the group. */
struct member {
  struct mailbox mailbox;
  int host;
  bool gone;               /* its communicator was destroyed */
  bool shrinks;            /* it has called onebit_comm_shrink */
  onebit_comm_t successor; /* its communicator of the survivors, until it takes it */
};

struct group {
  pthread_mutex_t lock;
  pthread_cond_t met;
  int size, members; /* communicators made, and not yet destroyed */
  struct member *member;
  char (*host_names)[OB_HOST_NAME_BYTES];
  bool ended, shrunk; /* shrunk: the survivors' communicators were made, or could not be */
  onebit_status_t shrink_status;
  char end[OB_END_BYTES];
};

/* Returns the absolute time, for pthread_cond_timedwait on the group, in `seconds`, less than
 * one. */
struct timespec ob_loopback_time_in(double seconds);

/* The transport's. */
void ob_loopback_destroy(onebit_comm_t comm);
onebit_status_t ob_loopback_shrink(onebit_comm_t comm, onebit_comm_t *survivors);

#endif
