/*
 * The group of a loopback communicator: what its ranks, threads of one process, have in common.
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

/* The group's state of a rank. */
struct member {
  struct mailbox mailbox;
  int host;
  bool gone;               /* its communicator was destroyed */
  bool shrinks;            /* it is in onebit_comm_shrink, or was */
  onebit_comm_t successor; /* its communicator among the survivors, until it takes it */
};

struct group {
  pthread_mutex_t lock;
  pthread_cond_t met;
  int size, members; /* communicators made, and not yet destroyed */
  struct member *member;
  char (*host_names)[OB_HOST_NAME_BYTES];
  bool ended, shrunk; /* shrunk: the survivors' communicators are made, or could not be */
  onebit_status_t shrink_status;
  char end[OB_END_BYTES];
};

/* The time of pthread_cond_timedwait on the group, in so many seconds: less than one. */
struct timespec ob_loopback_time_in(double seconds);

/* The transport's. */
void ob_loopback_destroy(onebit_comm_t comm);
onebit_status_t ob_loopback_shrink(onebit_comm_t comm, onebit_comm_t *survivors);

#endif
