/* Makes and destroys loopback communicators, and makes new ones of the remaining ranks. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "collectives/transports/loopback.h"
#include "collectives/watch.h"

static void group_destroy(struct group *group) {
  if (!group)
    return;
  pthread_mutex_destroy(&group->lock);
  pthread_cond_destroy(&group->met);
  ob_release(group->host_names);
  ob_release(group->member);
  ob_release(group);
}

void ob_loopback_destroy(onebit_comm_t comm) {
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

/* Assigns consecutive ranks to hosts; the numbers of ranks differ by one at most. */
static void assign_hosts(int *host_of, int size, int hosts) {
  for (int rank = 0; rank < size; rank++)
    host_of[rank] = (int)((int64_t)rank * hosts / size);
}

/* Names the hosts, which are imaginary. */
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

/* Makes a group of ranks and their communicators. */
static onebit_status_t loopback_group_create(int size, const int *host_of, onebit_comm_t *comms) {
  struct group *group = group_create(size);
  if (!group)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d loopback ranks", size);
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
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d loopback ranks", size);
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

static bool all_are_here(const struct group *group) {
  for (int rank = 0; rank < group->size; rank++)
    if (!group->member[rank].gone && !group->member[rank].shrinks)
      return false;
  return true;
}

/* Fills the lists of the ranks that called it; comms has an entry for each. */
static int list_survivors(const struct group *group, int *host_of) {
  int count = 0;
  for (int rank = 0; rank < group->size; rank++)
    if (group->member[rank].shrinks)
      host_of[count++] = group->member[rank].host;
  return count;
}

/* Called by the last of the remaining ranks; each rank then takes its own communicator. */
static onebit_status_t make_successors(struct group *group) {
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

static void await_survivors(struct group *group, double timeout) {
  struct ob_watch watch = {0};
  while (!group->shrunk && !all_are_here(group) && watch.waited < timeout) {
    struct timespec until = ob_loopback_time_in(OB_WAIT_SLICE);
    pthread_cond_timedwait(&group->met, &group->lock, &until);
    ob_watch_count(&watch);
  }
  if (group->shrunk)
    return;
  group->shrink_status = make_successors(group);
  group->shrunk = true;
  pthread_cond_broadcast(&group->met);
}

/* Leaves out the ranks that have not called it within the timeout. */
onebit_status_t ob_loopback_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  struct group *group = comm->state;
  struct member *own = &group->member[comm->rank];
  OB_LOCKED(&group->lock);
  bool late = group->shrunk || own->shrinks;
  if (!late) {
    own->shrinks = true;
    pthread_cond_broadcast(&group->met);
    await_survivors(group, comm->timeout);
    *survivors = own->successor;
    own->successor = NULL;
  }
  onebit_status_t status = group->shrink_status;
  if (late)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "loopback: the other ranks have gone on without this one");
  return status == ONEBIT_OK ? status
                             : ob_error(status, "no memory for the survivors' communicators");
}
