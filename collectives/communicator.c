/* Communicators, and what is common to all transports. */
#include "collectives/communicator.h"

#include <limits.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/watch.h"

onebit_status_t ob_batch_create(onebit_comm_t comm, size_t capacity, struct ob_batch **result) {
  const struct ob_transport *transport = comm->transport;
  struct ob_batch *batch = ob_allocate(1, transport->batch_bytes);
  *result = batch;
  if (batch) {
    batch->comm = comm;
    batch->capacity = capacity;
    batch->send = ob_allocate(2 * capacity, sizeof *batch->send);
    if (transport->message_bytes)
      batch->messages = ob_allocate(capacity, transport->message_bytes);
    if (batch->send && (batch->messages || !transport->message_bytes)) {
      batch->receive = batch->send + capacity;
      return ONEBIT_OK;
    }
  }
  ob_batch_destroy(batch);
  *result = NULL;
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a batch of %zu messages", capacity);
}

bool ob_batch_destroy(struct ob_batch *batch) {
  if (!batch)
    return true;
  const struct ob_transport *transport = batch->comm->transport;
  const bool all = !transport->cancel || transport->cancel(batch);
  ob_release(batch->messages);
  ob_release(batch->send);
  ob_release(batch);
  return all;
}

/* Reads the settings of the environment and the file of ONEBIT_CONFIG for the whole
 * communicator. */
static onebit_status_t communicator_read_settings(onebit_comm_t comm) {
  OB_TRY(ob_config_check());
  OB_TRY(ob_log_open(comm->rank));
  return ob_watch_timeout(&comm->timeout);
}

static onebit_status_t begin_progress(onebit_comm_t comm) {
  bool wanted;
  OB_TRY(ob_progress_wanted(&wanted));
  if (wanted && comm->transport->threads && !comm->transport->threads())
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "ONEBIT_PROGRESS=thread: MPI was not initialised with MPI_THREAD_MULTIPLE");
  if (wanted)
    OB_TRY(ob_progress_begin(comm->engine));
  comm->progress = wanted;
  return ONEBIT_OK;
}

onebit_status_t ob_comm_create(const struct ob_transport *transport, int rank, int size,
                               const int *host_of, void *state, struct ob_engine *engine,
                               onebit_comm_t *result) {
  onebit_comm_t comm = ob_handle_create(OB_HANDLE_COMM, sizeof *comm);
  *result = NULL;
  if (!comm)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
  comm->transport = transport;
  comm->users = 1;
  comm->forks = ob_forks();
  comm->rank = rank;
  comm->size = size;
  comm->state = state;
  comm->largest_tag = INT_MAX;
  ob_costs_default(NULL, &comm->costs);
  pthread_mutex_init(&comm->end.lock, NULL);
  pthread_mutex_init(&comm->own_engine.lock, NULL);
  pthread_cond_init(&comm->own_engine.work, NULL);
  comm->engine = engine ? engine : &comm->own_engine;
  comm->control_memory = ob_allocate((size_t)size, OB_AGREE_BYTES);
  if (!comm->control_memory || ob_hosts_create(&comm->hosts, host_of, rank, size) != ONEBIT_OK ||
      ob_batch_create(comm, (size_t)size - 1, &comm->control) != ONEBIT_OK) {
    ob_comm_release(comm);
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator of %d ranks", size);
  }
  onebit_status_t status = communicator_read_settings(comm);
  if (status == ONEBIT_OK)
    status = begin_progress(comm);
  if (status != ONEBIT_OK) {
    ob_comm_release(comm);
    return status;
  }
  if (transport->network && size > 1)
    ob_presence_begin(&comm->presence, rank, size, transport->name);
  if (rank == 0)
    ob_config_warn(rank);
  *result = comm;
  return ONEBIT_OK;
}

/* Closes the parts that still need the transport's state. */
static void close_comm(onebit_comm_t comm) {
  if (comm->progress)
    ob_progress_end(comm->engine);
  comm->progress = false;
  if (!ob_batch_destroy(comm->control))
    ob_memory_keep(comm->control_memory);
  else
    ob_release(comm->control_memory);
  comm->control = NULL;
  comm->control_memory = NULL;
}

void ob_comm_release(onebit_comm_t comm) {
  if (!comm)
    return;
  close_comm(comm);
  ob_presence_end(&comm->presence);
  ob_release(comm->host_names);
  ob_hosts_destroy(&comm->hosts);
  pthread_mutex_destroy(&comm->end.lock);
  pthread_mutex_destroy(&comm->own_engine.lock);
  pthread_cond_destroy(&comm->own_engine.work);
  ob_handle_release(comm);
}

onebit_comm_t ob_comm_keep(onebit_comm_t comm) {
  comm->users++;
  return comm;
}

/* In a forked child the memory stays: what is the parent's is not closed here. */
void ob_comm_drop(onebit_comm_t comm) {
  if (--comm->users > 0 || ob_comm_is_foreign(comm))
    return;
  close_comm(comm);
  if (comm->transport->destroy)
    comm->transport->destroy(comm);
  ob_comm_release(comm);
}

static bool is_comm(onebit_comm_t comm) {
  return ob_handle_check(comm, OB_HANDLE_COMM, "comm") == ONEBIT_OK;
}

void onebit_comm_destroy(onebit_comm_t comm) {
  OB_CALL_SCOPE;
  if (!comm || !is_comm(comm))
    return;
  ob_handle_retire(comm);
  ob_comm_drop(comm);
}

int ob_comm_tag(onebit_comm_t comm) {
  return 1 + (int)(comm->agreements % (uint32_t)comm->largest_tag);
}

int onebit_comm_rank(onebit_comm_t comm) { return is_comm(comm) ? comm->rank : -1; }

int onebit_comm_size(onebit_comm_t comm) { return is_comm(comm) ? comm->size : 0; }

int onebit_comm_hosts(onebit_comm_t comm) { return is_comm(comm) ? comm->hosts.count : 0; }

uint64_t onebit_comm_bytes_sent(onebit_comm_t comm) {
  if (!is_comm(comm))
    return 0;
  return atomic_load_explicit(&comm->bytes_sent, memory_order_relaxed);
}

onebit_status_t ob_comm_make_names(onebit_comm_t comm) {
  comm->host_names = ob_allocate((size_t)comm->size, sizeof *comm->host_names);
  return comm->host_names
             ? ONEBIT_OK
             : ob_error(ONEBIT_ERROR_MEMORY, "no memory for the names of %d hosts", comm->size);
}
