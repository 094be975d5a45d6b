/*
 * A transport between threads of one process. A send and its receive meet in the receiver's
 * mailbox, under the group's lock, in the order in which they were begun; the second one copies the
 * bytes from the sender's buffer to the receiver's.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/transports/loopback.h"

struct loopback_batch;

/* A send or receive whose other half has not been begun. */
struct parcel {
  struct parcel *next;
  struct loopback_batch *batch;
  struct ob_endpoint *endpoint;
  int from, tag;
  bool met;
};

struct loopback_batch {
  struct ob_batch base;
  struct parcel *parcels; /* one a send, one a receive */
  size_t open;            /* parcels that have not met their other half */
  size_t truncated;       /* bytes of a message that did not fit */
};

static void loopback_append(struct parcel **list, struct parcel *parcel) {
  parcel->next = NULL;
  while (*list)
    list = &(*list)->next;
  *list = parcel;
}

/* Removes the first parcel with this sender and tag from the list. */
static struct parcel *remove_first(struct parcel **list, int from, int tag) {
  for (; *list; list = &(*list)->next)
    if ((*list)->from == from && (*list)->tag == tag) {
      struct parcel *found = *list;
      *list = found->next;
      return found;
    }
  return NULL;
}

static void wait_for_all(struct group *group, struct parcel *sent, struct parcel *wanted) {
  size_t bytes = sent->endpoint->bytes;
  if (bytes > wanted->endpoint->bytes)
    wanted->batch->truncated = bytes;
  else if (bytes)
    memcpy(wanted->endpoint->data, sent->endpoint->data, bytes);
  wanted->endpoint->bytes = bytes;
  sent->met = wanted->met = true;
  wanted->batch->open--;
  sent->batch->open--;
  pthread_cond_broadcast(&group->met);
}

static void post_send(struct group *group, struct parcel *parcel) {
  struct mailbox *box = &group->member[parcel->endpoint->peer].mailbox;
  struct parcel *wanted = remove_first(&box->wanted, parcel->from, parcel->tag);
  if (wanted)
    wait_for_all(group, parcel, wanted);
  else
    loopback_append(&box->sent, parcel);
}

static void post_receive(struct group *group, struct parcel *parcel, int rank) {
  struct mailbox *box = &group->member[rank].mailbox;
  struct parcel *sent = remove_first(&box->sent, parcel->from, parcel->tag);
  if (sent)
    wait_for_all(group, sent, parcel);
  else
    loopback_append(&box->wanted, parcel);
}

static void remove_parcel(struct parcel **list, const struct parcel *parcel) {
  while (*list && *list != parcel)
    list = &(*list)->next;
  if (*list)
    *list = parcel->next;
}

/* Cancels the parcels that have not met their other half. */
static bool loopback_cancel(struct ob_batch *base) {
  struct loopback_batch *batch = (struct loopback_batch *)base;
  struct group *group = base->comm->state;
  OB_LOCKED(&group->lock);
  for (size_t i = 0; batch->open && i < base->receives + base->sends; i++) {
    bool receives = i < base->receives;
    int rank = receives ? base->comm->rank : base->send[i - base->receives].peer;
    struct mailbox *box = &group->member[rank].mailbox;
    remove_parcel(receives ? &box->wanted : &box->sent, &batch->parcels[i]);
  }
  return true;
}

static onebit_status_t loopback_begin(struct ob_batch *base, int tag) {
  struct loopback_batch *batch = (struct loopback_batch *)base;
  struct group *group = base->comm->state;
  struct parcel *parcel = batch->parcels = base->messages;
  int rank = base->comm->rank;
  OB_LOCKED(&group->lock);
  batch->open = base->sends + base->receives;
  batch->truncated = 0;
  for (size_t i = 0; i < base->receives; i++, parcel++) {
    *parcel = (struct parcel){NULL, batch, &base->receive[i], base->receive[i].peer, tag, false};
    post_receive(group, parcel, rank);
  }
  for (size_t i = 0; i < base->sends; i++, parcel++) {
    *parcel = (struct parcel){NULL, batch, &base->send[i], rank, tag, false};
    post_send(group, parcel);
  }
  return ONEBIT_OK;
}

/* Returns the first rank whose half of a parcel is missing, with `gone` only of ranks that cannot
 * send it any more; -1: none. The lock is held. */
static int first_awaited(const struct loopback_batch *batch, bool gone) {
  const struct group *group = batch->base.comm->state;
  for (size_t i = 0; batch->open && i < batch->base.receives + batch->base.sends; i++) {
    int peer = batch->parcels[i].endpoint->peer;
    if (!batch->parcels[i].met && (!gone || group->member[peer].gone))
      return peer;
  }
  return -1;
}

static int loopback_peer_awaited(struct ob_batch *base) {
  struct group *group = base->comm->state;
  OB_LOCKED(&group->lock);
  return first_awaited((struct loopback_batch *)base, false);
}

struct timespec ob_loopback_time_in(double seconds) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  time.tv_nsec += (long)(seconds * 1e9); /* less than a second */
  time.tv_sec += time.tv_nsec / 1000000000;
  time.tv_nsec %= 1000000000;
  return time;
}

static onebit_status_t loopback_test(struct ob_batch *base, double seconds) {
  struct loopback_batch *batch = (struct loopback_batch *)base;
  struct group *group = base->comm->state;
  bool wait = seconds > 0;
  struct timespec until = {0};
  if (wait)
    until = ob_loopback_time_in(seconds);
  int gone = -1;
  OB_LOCKED(&group->lock);
  while (batch->open && !group->ended && (gone = first_awaited(batch, true)) < 0 && wait)
    wait = pthread_cond_timedwait(&group->met, &group->lock, &until) == 0;
  size_t open = batch->open, truncated = batch->truncated;
  if (open && gone >= 0)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "loopback: rank %d has destroyed its communicator",
                    gone);
  if (open)
    return ONEBIT_IN_PROGRESS;
  if (truncated)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "loopback: a message of %zu bytes is longer than expected", truncated);
  return ONEBIT_OK;
}

static onebit_status_t loopback_health(onebit_comm_t comm) {
  struct group *group = comm->state;
  pthread_mutex_lock(&group->lock);
  bool ended = group->ended;
  pthread_mutex_unlock(&group->lock);
  if (ended)
    ob_comm_hear_end(comm, group->end);
  return ONEBIT_OK;
}

static void loopback_abort_for_all(onebit_comm_t comm, const char *text) {
  struct group *group = comm->state;
  OB_LOCKED(&group->lock);
  if (!group->ended)
    snprintf(group->end, sizeof group->end, "%s", text);
  group->ended = true;
  pthread_cond_broadcast(&group->met);
}

/* The second half of a message copies it, so nothing is ever under way. */
const struct ob_transport ob_transport_loopback = {
    .name = "loopback",
    .host_messages = true,
    .batch_bytes = sizeof(struct loopback_batch),
    .message_bytes = 2 * sizeof(struct parcel),
    .cancel = loopback_cancel,
    .begin = loopback_begin,
    .test = loopback_test,
    .peer_awaited = loopback_peer_awaited,
    .health = loopback_health,
    .abort = loopback_abort_for_all,
    .shrink = ob_loopback_shrink,
    .destroy = ob_loopback_destroy,
};
