/*
 * Ranks are threads of one process. A send and its receive find each other in the receiver's
 * mailbox, under the group's lock, in the order in which they were begun; whoever comes second
 * copies the bytes from the sender's buffer to the receiver's.
 */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"

struct loopback_batch;

/* A send or a receive that has not met its other half. */
struct parcel {
  struct parcel *next;
  struct loopback_batch *batch;
  struct ob_endpoint *endpoint;
  int from, tag;
};

struct loopback_batch {
  struct ob_batch base;
  struct parcel *parcels; /* one a send, one a receive */
  size_t open;            /* parcels that have not met */
  size_t truncated;       /* bytes of a message that found too little room */
};

struct mailbox {
  struct parcel *sent, *wanted;
};

struct group {
  pthread_mutex_t lock;
  pthread_cond_t met;
  int members;             /* communicators not yet destroyed */
  struct mailbox *mailbox; /* one a rank */
};

static void append(struct parcel **list, struct parcel *parcel) {
  parcel->next = NULL;
  while (*list)
    list = &(*list)->next;
  *list = parcel;
}

/* The first parcel with this sender and tag off the list. */
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
  wanted->batch->open--;
  sent->batch->open--;
  pthread_cond_broadcast(&group->met);
}

static void post_send(struct group *group, struct parcel *parcel) {
  struct mailbox *box = &group->mailbox[parcel->endpoint->peer];
  struct parcel *wanted = remove_first(&box->wanted, parcel->from, parcel->tag);
  if (wanted)
    wait_for_all(group, parcel, wanted);
  else
    append(&box->sent, parcel);
}

static void post_receive(struct group *group, struct parcel *parcel, int rank) {
  struct mailbox *box = &group->mailbox[rank];
  struct parcel *sent = remove_first(&box->sent, parcel->from, parcel->tag);
  if (sent)
    wait_for_all(group, sent, parcel);
  else
    append(&box->wanted, parcel);
}

static onebit_status_t batch_create(onebit_comm_t comm, size_t capacity, struct ob_batch **result) {
  struct ob_batch *base = ob_batch_allocate(comm, capacity, sizeof(struct loopback_batch));
  struct loopback_batch *batch = (struct loopback_batch *)base;
  *result = base;
  if (base && (batch->parcels = ob_allocate(2 * capacity, sizeof *batch->parcels)))
    return ONEBIT_OK;
  ob_batch_release(base);
  *result = NULL;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a batch of %zu messages", capacity);
}

static void batch_destroy(struct ob_batch *base) {
  if (base)
    ob_release(((struct loopback_batch *)base)->parcels);
  ob_batch_release(base);
}

static onebit_status_t begin(struct ob_batch *base, int tag) {
  struct loopback_batch *batch = (struct loopback_batch *)base;
  struct group *group = base->comm->state;
  struct parcel *parcel = batch->parcels;
  int rank = base->comm->rank;
  pthread_mutex_lock(&group->lock);
  batch->open = base->sends + base->receives;
  batch->truncated = 0;
  for (size_t i = 0; i < base->receives; i++, parcel++) {
    *parcel = (struct parcel){NULL, batch, &base->receive[i], base->receive[i].peer, tag};
    post_receive(group, parcel, rank);
  }
  for (size_t i = 0; i < base->sends; i++, parcel++) {
    *parcel = (struct parcel){NULL, batch, &base->send[i], rank, tag};
    post_send(group, parcel);
  }
  pthread_mutex_unlock(&group->lock);
  return ONEBIT_OK;
}

static onebit_status_t test(struct ob_batch *base, bool wait) {
  struct loopback_batch *batch = (struct loopback_batch *)base;
  struct group *group = base->comm->state;
  pthread_mutex_lock(&group->lock);
  while (wait && batch->open)
    pthread_cond_wait(&group->met, &group->lock);
  size_t open = batch->open, truncated = batch->truncated;
  pthread_mutex_unlock(&group->lock);
  if (open)
    return ONEBIT_IN_PROGRESS;
  if (truncated)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "loopback: a message of %zu bytes is longer than expected", truncated);
  return ONEBIT_OK;
}

static bool threads(void) { return true; }

/* Messages are copied by whoever comes second: nothing is ever under way. */
static void progress(onebit_comm_t comm) { (void)comm; }

static void group_destroy(struct group *group) {
  if (!group)
    return;
  pthread_mutex_destroy(&group->lock);
  pthread_cond_destroy(&group->met);
  ob_release(group->mailbox);
  ob_release(group);
}

static void destroy(onebit_comm_t comm) {
  struct group *group = comm->state;
  pthread_mutex_lock(&group->lock);
  int left = --group->members;
  pthread_mutex_unlock(&group->lock);
  if (left == 0)
    group_destroy(group);
}

const struct ob_transport ob_transport_loopback = {
    .threads = threads,
    .name = "loopback",
    .host_messages = true,
    .batch_create = batch_create,
    .batch_destroy = batch_destroy,
    .begin = begin,
    .test = test,
    .progress = progress,
    .destroy = destroy,
};

static struct group *group_create(int size) {
  struct group *group = ob_allocate(1, sizeof *group);
  if (!group)
    return NULL;
  pthread_mutex_init(&group->lock, NULL);
  pthread_cond_init(&group->met, NULL);
  group->members = size;
  group->mailbox = ob_allocate((size_t)size, sizeof *group->mailbox);
  if (group->mailbox)
    return group;
  group_destroy(group);
  return NULL;
}

/* Consecutive ranks share a host; the numbers of ranks differ by one at most. */
static void assign_hosts(int *host_of, int size, int hosts) {
  for (int rank = 0; rank < size; rank++)
    host_of[rank] = (int)((int64_t)rank * hosts / size);
}

static onebit_status_t create_members(struct group *group, const int *host_of, int size,
                                      onebit_comm_t *comms) {
  for (int rank = 0; rank < size; rank++) {
    onebit_status_t status =
        ob_comm_create(&ob_transport_loopback, rank, size, host_of, group, NULL, &comms[rank]);
    if (status == ONEBIT_OK)
      continue;
    for (int made = 0; made < rank; made++)
      ob_comm_release(comms[made]);
    memset(comms, 0, (size_t)size * sizeof *comms);
    return status;
  }
  return ONEBIT_OK;
}

onebit_status_t onebit_comm_create_loopback_hosts(int size, int hosts, onebit_comm_t *comms) {
  if (!comms)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comms is NULL");
  if (size < 1 || size > 4096)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "size is %d, not 1 to 4096", size);
  if (hosts < 1 || hosts > size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "hosts is %d, not 1 to size, %d", hosts, size);
  memset(comms, 0, (size_t)size * sizeof *comms);
  struct group *group = group_create(size);
  int *host_of = ob_allocate((size_t)size, sizeof *host_of);
  onebit_status_t status = ONEBIT_OK;
  if (group && host_of) {
    assign_hosts(host_of, size, hosts);
    status = create_members(group, host_of, size, comms);
  } else {
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d loopback ranks", size);
  }
  if (status != ONEBIT_OK)
    group_destroy(group);
  ob_release(host_of);
  return status;
}

onebit_status_t onebit_comm_create_loopback(int size, onebit_comm_t *comms) {
  return onebit_comm_create_loopback_hosts(size, 1, comms);
}
