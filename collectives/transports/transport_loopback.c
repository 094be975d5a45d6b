/*
 * A transport between threads of one process. A send is matched with its receive in the receiver's
 * mailbox, under the group's lock, in the order in which they were begun. The thread that begins
 * the later of the two operations copies the bytes from the sender's buffer to the receiver's.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"

/* --- The group: the state that the ranks of a communicator, threads of one process, share ------*/

struct parcel;

struct mailbox {
  struct parcel *sent, *wanted;
};

/* A rank's state in the group. */
struct member {
  struct mailbox mailbox;
  int host;
  bool gone;               /* its communicator was destroyed */
  bool shrinks;            /* the rank has called onebit_comm_shrink */
  onebit_comm_t successor; /* the survivors' next communicator, until this rank fetches it */
};

struct group {
  pthread_mutex_t lock;
  pthread_cond_t met;
  int size, members; /* members: the number of communicators that are not destroyed yet */
  struct member *member;
  char (*host_names)[OB_HOST_NAME_BYTES];
  bool ended, shrunk; /* shrunk: creating the survivors' communicators has succeeded or failed */
  onebit_status_t shrink_status;
  char end[OB_END_BYTES];
};

static struct timespec loopback_deadline(double seconds);
static void loopback_destroy(onebit_comm_t comm);
static onebit_status_t loopback_shrink(onebit_comm_t comm, onebit_comm_t *survivors);

/* --- Batches -----------------------------------------------------------------------------------*/

struct loopback_batch;

/* A send or a receive that waits for its match. */
struct parcel {
  struct parcel *next;
  struct loopback_batch *batch;
  struct ob_endpoint *endpoint;
  int from, tag;
  bool met;
};

struct loopback_batch {
  struct ob_batch base;
  struct parcel *parcels; /* one for each send and each receive */
  size_t open;            /* number of parcels without a match */
  size_t truncated;       /* bytes of a message that was longer than its receive */
};

static void append_parcel(struct parcel **list, struct parcel *parcel) {
  parcel->next = NULL;
  while (*list)
    list = &(*list)->next;
  *list = parcel;
}

/* Removes the first parcel with this sender and tag from the list. */
static struct parcel *remove_matching(struct parcel **list, int from, int tag) {
  for (; *list; list = &(*list)->next)
    if ((*list)->from == from && (*list)->tag == tag) {
      struct parcel *found = *list;
      *list = found->next;
      return found;
    }
  return NULL;
}

/* Copies a message from its send to its receive; both are then complete. */
static void loopback_copy_message(struct group *group, struct parcel *sent, struct parcel *wanted) {
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
  struct parcel *wanted = remove_matching(&box->wanted, parcel->from, parcel->tag);
  if (wanted)
    loopback_copy_message(group, parcel, wanted);
  else
    append_parcel(&box->sent, parcel);
}

static void post_receive(struct group *group, struct parcel *parcel, int rank) {
  struct mailbox *box = &group->member[rank].mailbox;
  struct parcel *sent = remove_matching(&box->sent, parcel->from, parcel->tag);
  if (sent)
    loopback_copy_message(group, sent, parcel);
  else
    append_parcel(&box->wanted, parcel);
}

static void remove_parcel(struct parcel **list, const struct parcel *parcel) {
  while (*list && *list != parcel)
    list = &(*list)->next;
  if (*list)
    *list = parcel->next;
}

/* Cancels the parcels that have no match yet. */
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

/* Returns the rank of the first parcel without a match; with `gone` only ranks count whose
 * communicator was destroyed. -1: none. The caller holds the lock. */
static int find_awaited_rank(const struct loopback_batch *batch, bool gone) {
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
  return find_awaited_rank((struct loopback_batch *)base, false);
}

/* Returns the time `seconds` from now, for pthread_cond_timedwait on the group. `seconds` is less
 * than 1. */
static struct timespec loopback_deadline(double seconds) {
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
    until = loopback_deadline(seconds);
  int gone = -1;
  OB_LOCKED(&group->lock);
  while (batch->open && !group->ended && (gone = find_awaited_rank(batch, true)) < 0 && wait)
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
    ob_comm_receive_end(comm, group->end);
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

/* The transport has no messages under way: whichever of a send and its receive begins later copies
 * the message at once. */
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
    .shrink = loopback_shrink,
    .destroy = loopback_destroy,
};

/* --- Communicators: creation, destruction, and successors of the surviving ranks ---------------*/

static void group_destroy(struct group *group) {
  if (!group)
    return;
  pthread_mutex_destroy(&group->lock);
  pthread_cond_destroy(&group->met);
  ob_release(group->host_names);
  ob_release(group->member);
  ob_release(group);
}

static void loopback_destroy(onebit_comm_t comm) {
  struct group *group = comm->state;
  comm->host_names = NULL;
  pthread_mutex_lock(&group->lock);
  int left = --group->members;
  group->member[comm->rank].gone = true;
  pthread_cond_broadcast(&group->met);
  pthread_mutex_unlock(&group->lock);
  if (left == 0)
    group_destroy(group);
}

static struct group *group_create(int size) {
  struct group *group = ob_allocate(1, sizeof *group);
  pthread_condattr_t monotonic;
  if (!group)
    return NULL;
  pthread_mutex_init(&group->lock, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&group->met, &monotonic);
  pthread_condattr_destroy(&monotonic);
  group->size = group->members = size;
  group->member = ob_allocate((size_t)size, sizeof *group->member);
  group->host_names = ob_allocate((size_t)size, sizeof *group->host_names);
  if (group->member && group->host_names)
    return group;
  group_destroy(group);
  return NULL;
}

/* Assigns consecutive ranks to hosts. The hosts' numbers of ranks differ by at most one. */
static void assign_hosts(int *host_of, int size, int hosts) {
  for (int rank = 0; rank < size; rank++)
    host_of[rank] = (int)((int64_t)rank * hosts / size);
}

/* Gives names to the hosts, which are simulated. */
static void name_hosts(struct group *group, const int *host_of) {
  for (int rank = 0; rank < group->size; rank++) {
    group->member[rank].host = host_of[rank];
    snprintf(group->host_names[rank], OB_HOST_NAME_BYTES, "h%d", host_of[rank]);
  }
}

static onebit_status_t create_members(struct group *group, const int *host_of, int size,
                                      onebit_comm_t *comms) {
  for (int rank = 0; rank < size; rank++) {
    onebit_status_t status =
        ob_comm_create(&ob_transport_loopback, rank, size, host_of, group, NULL, &comms[rank]);
    if (status == ONEBIT_OK) {
      comms[rank]->host_names = group->host_names;
      ob_comm_log(comms[rank]);
      continue;
    }
    for (int made = 0; made < rank; made++) {
      comms[made]->host_names = NULL;
      ob_comm_release(comms[made]);
    }
    memset(comms, 0, (size_t)size * sizeof *comms);
    return status;
  }
  return ONEBIT_OK;
}

/* Creates a group of ranks, and a communicator for each rank. */
static onebit_status_t loopback_group_create(int size, const int *host_of, onebit_comm_t *comms) {
  struct group *group = group_create(size);
  if (!group)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %d loopback ranks", size);
  name_hosts(group, host_of);
  onebit_status_t status = create_members(group, host_of, size, comms);
  if (status != ONEBIT_OK)
    group_destroy(group);
  return status;
}

onebit_status_t onebit_comm_create_loopback_hosts(int size, int hosts, onebit_comm_t *comms) {
  OB_CALL_SCOPE;
  if (!comms)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comms is NULL");
  if (size < 1 || size > 4096)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "size is %d, not 1 to 4096", size);
  if (hosts < 1 || hosts > size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "hosts is %d, not 1 to size, %d", hosts, size);
  memset(comms, 0, (size_t)size * sizeof *comms);
  int *host_of = ob_allocate((size_t)size, sizeof *host_of);
  if (!host_of)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %d loopback ranks", size);
  assign_hosts(host_of, size, hosts);
  onebit_status_t status = loopback_group_create(size, host_of, comms);
  ob_release(host_of);
  return status;
}

onebit_status_t onebit_comm_create_loopback(int size, onebit_comm_t *comms) {
  OB_CALL_SCOPE;
  return onebit_comm_create_loopback_hosts(size, 1, comms);
}

/* --- Survivors ---------------------------------------------------------------------------------*/

static bool have_all_called_shrink(const struct group *group) {
  for (int rank = 0; rank < group->size; rank++)
    if (!group->member[rank].gone && !group->member[rank].shrinks)
      return false;
  return true;
}

/* Lists the hosts of the ranks that have called onebit_comm_shrink. Returns the number of ranks. */
static int list_survivors(const struct group *group, int *host_of) {
  int count = 0;
  for (int rank = 0; rank < group->size; rank++)
    if (group->member[rank].shrinks)
      host_of[count++] = group->member[rank].host;
  return count;
}

/* Creates the survivors' communicators. The last surviving rank that shrinks calls it; each rank
 * then fetches its own communicator. */
static onebit_status_t create_successors(struct group *group) {
  int *host_of = ob_allocate((size_t)group->size, sizeof *host_of);
  onebit_comm_t *comms = ob_allocate((size_t)group->size, sizeof *comms);
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  if (host_of && comms)
    status = loopback_group_create(list_survivors(group, host_of), host_of, comms);
  for (int rank = 0, next = 0; status == ONEBIT_OK && rank < group->size; rank++)
    if (group->member[rank].shrinks)
      group->member[rank].successor = comms[next++];
  ob_release(host_of);
  ob_release(comms);
  return status;
}

static void wait_for_survivors(struct group *group, double timeout) {
  struct ob_watch watch = {0};
  while (!group->shrunk && !have_all_called_shrink(group) && watch.waited < timeout) {
    struct timespec until = loopback_deadline(OB_WAIT_SLICE);
    pthread_cond_timedwait(&group->met, &group->lock, &until);
    ob_watch_count(&watch);
  }
  if (group->shrunk)
    return;
  group->shrink_status = create_successors(group);
  group->shrunk = true;
  pthread_cond_broadcast(&group->met);
}

/* Creates a communicator of the surviving ranks. A rank that has not called onebit_comm_shrink
 * within the timeout is left out. */
static onebit_status_t loopback_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  struct group *group = comm->state;
  struct member *own = &group->member[comm->rank];
  OB_LOCKED(&group->lock);
  bool late = group->shrunk || own->shrinks;
  if (!late) {
    own->shrinks = true;
    pthread_cond_broadcast(&group->met);
    wait_for_survivors(group, comm->timeout);
    *survivors = own->successor;
    own->successor = NULL;
  }
  onebit_status_t status = group->shrink_status;
  if (late)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "loopback: this rank called onebit_comm_shrink too late: the other ranks have "
                    "already continued without it");
  return status == ONEBIT_OK ? status
                             : ob_error(status, "out of memory for the survivors' communicators");
}
