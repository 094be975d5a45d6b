/* Batches over TCP connections of the library (onebit/sockets.h). */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/transports/sockets_state.h"
#include "collectives/watch.h"

/* The default number of connections between two ranks. At 500 Mbit/s and a round trip of 80 ms 5 MB
 * are in flight, which are eight windows of 640 kB. With 0.1 % of packets lost, Mathis's formula
 * gives each connection MSS / (RTT sqrt(loss)): 8 connections do not fill 40 Mbit/s at 80 ms, and
 * 16 do. With more than MANY_RANKS ranks each pair of ranks has fewer connections, to limit the
 * open files of a process. */
#define DEFAULT_STREAMS 16
#define STREAMS_OF_MANY 8
#define MANY_RANKS      32

struct sockets_batch {
  struct ob_batch base;
  struct ob_incoming *incoming;
  struct ob_outgoing *outgoing;
  size_t open; /* number of incomplete messages */
};

/* The requests of all communicators of a process advance together, as over MPI, since they may
 * depend on each other. */
static struct ob_engine process_engine = OB_ENGINE_INIT;

static struct ob_sockets *sockets_state(onebit_comm_t comm) { return comm->state; }

static bool sockets_cancel(struct ob_batch *base) {
  struct sockets_batch *batch = (struct sockets_batch *)base;
  struct ob_sockets *sockets = sockets_state(base->comm);
  if (batch->open == 0 || ob_sockets_is_foreign(sockets))
    return true;
  OB_LOCKED(&sockets->lock);
  for (size_t i = 0; i < batch->base.capacity; i++) {
    if (batch->incoming[i].open)
      ob_sockets_cancel_receive(&sockets->links[batch->base.receive[i].peer], &batch->incoming[i]);
    if (batch->outgoing[i].open)
      ob_sockets_cancel_send(&sockets->links[batch->base.send[i].peer], &batch->outgoing[i]);
  }
  return true;
}

static onebit_status_t sockets_begin_messages(struct sockets_batch *batch, int tag) {
  struct ob_batch *base = &batch->base;
  struct ob_sockets *sockets = sockets_state(base->comm);
  batch->incoming = base->messages;
  batch->outgoing = (struct ob_outgoing *)(batch->incoming + base->capacity);
  batch->open = 0;
  for (size_t i = 0; i < base->receives; i++) {
    struct ob_endpoint *in = &base->receive[i];
    batch->incoming[i] =
        (struct ob_incoming){.data = in->data, .endpoint = in, .open = &batch->open};
    batch->open++;
    OB_TRY(ob_sockets_receive(&sockets->links[in->peer], &batch->incoming[i], tag));
  }
  for (size_t i = 0; i < base->sends; i++) {
    const struct ob_endpoint *out = &base->send[i];
    batch->outgoing[i] =
        (struct ob_outgoing){.data = out->data, .total = out->bytes, .open = &batch->open};
    batch->open++;
    OB_TRY(ob_sockets_send(&sockets->links[out->peer], &batch->outgoing[i], tag));
  }
  return ONEBIT_OK;
}

static onebit_status_t sockets_begin(struct ob_batch *base, int tag) {
  struct ob_sockets *sockets = sockets_state(base->comm);
  if (atomic_load(&base->comm->end.set))
    return ob_error(ONEBIT_ERROR_TRANSPORT, "%s", base->comm->end.text);
  OB_LOCKED(&sockets->lock);
  return sockets_begin_messages((struct sockets_batch *)base, tag);
}

/* Returns the rank of the first incomplete message; with `lost` only messages on lost links count.
 * -1: none. */
static int find_incomplete_peer(const struct sockets_batch *batch, bool lost) {
  const struct ob_batch *base = &batch->base;
  const struct ob_sockets_link *links = sockets_state(base->comm)->links;
  for (size_t i = 0; i < base->receives; i++)
    if (batch->incoming[i].open && (!lost || links[base->receive[i].peer].lost))
      return base->receive[i].peer;
  for (size_t i = 0; i < base->sends; i++)
    if (batch->outgoing[i].open && (!lost || links[base->send[i].peer].lost))
      return base->send[i].peer;
  return -1;
}

/* Returns the status of a batch. Another rank's note about the communicator's end takes precedence
 * over lost connections. */
static onebit_status_t sockets_batch_status(const struct sockets_batch *batch) {
  onebit_comm_t comm = batch->base.comm;
  const struct ob_sockets *sockets = sockets_state(comm);
  if (batch->open == 0)
    return ONEBIT_OK;
  int lost = sockets->any_lost ? find_incomplete_peer(batch, true) : -1;
  if (atomic_load(&comm->end.set)) /* that rank may itself have waited for another rank */
    return ob_error(ONEBIT_ERROR_TRANSPORT, "%s; this rank waited for rank %d", comm->end.text,
                    find_incomplete_peer(batch, false));
  if (lost < 0)
    return ONEBIT_IN_PROGRESS;
  const char *host = ob_comm_host_name(comm, lost);
  return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank %d%s%s: %s", lost,
                  *host ? " on host " : "", host, sockets->links[lost].why);
}

static onebit_status_t sockets_test(struct ob_batch *base, double seconds) {
  struct sockets_batch *batch = (struct sockets_batch *)base;
  struct ob_sockets *sockets = sockets_state(base->comm);
  OB_LOCKED(&sockets->lock);
  ob_sockets_move(sockets, 0);
  onebit_status_t status = sockets_batch_status(batch);
  if (status == ONEBIT_IN_PROGRESS && seconds > 0) {
    ob_sockets_move(sockets, seconds);
    status = sockets_batch_status(batch);
  }
  return status;
}

static void sockets_await(onebit_comm_t comm, double seconds) {
  struct ob_sockets *sockets = sockets_state(comm);
  OB_LOCKED(&sockets->lock);
  ob_sockets_move(sockets, seconds);
}

static int sockets_peer_awaited(struct ob_batch *base) {
  struct ob_sockets *sockets = sockets_state(base->comm);
  OB_LOCKED(&sockets->lock);
  return find_incomplete_peer((struct sockets_batch *)base, false);
}

static void sockets_progress(onebit_comm_t comm) {
  struct ob_sockets *sockets = sockets_state(comm);
  OB_LOCKED(&sockets->lock);
  ob_sockets_move(sockets, 0);
}

static onebit_status_t sockets_health(onebit_comm_t comm) {
  sockets_progress(comm);
  return ONEBIT_OK; /* a lost link is an error only of calls that wait for its messages */
}

static void sockets_abort_for_all(onebit_comm_t comm, const char *text) {
  struct ob_sockets *sockets = sockets_state(comm);
  OB_LOCKED(&sockets->lock);
  ob_sockets_send_end_note(sockets, text);
}

static void sockets_destroy(onebit_comm_t comm) {
  ob_sockets_destroy(comm->state);
  comm->state = NULL;
}

const struct ob_transport ob_transport_sockets = {
    .name = "sockets",
    .host_messages = true,
    .network = true,
    .batch_bytes = sizeof(struct sockets_batch),
    .message_bytes = sizeof(struct ob_incoming) + sizeof(struct ob_outgoing),
    .cancel = sockets_cancel,
    .begin = sockets_begin,
    .test = sockets_test,
    .await = sockets_await,
    .peer_awaited = sockets_peer_awaited,
    .health = sockets_health,
    .abort = sockets_abort_for_all,
    .progress = sockets_progress,
    .destroy = sockets_destroy,
};

/* --- Creation ----------------------------------------------------------------------------------*/

static onebit_status_t read_environment_number(const char *name, int *value) {
  const char *text = getenv(name);
  char *end = NULL;
  long number = text ? strtol(text, &end, 10) : -1;
  if (!text || end == text || *end || number < 0 || number > 1 << 20)
    return ob_error(
        ONEBIT_ERROR_ARGUMENT,
        "options->ranks is 0, but the environment variable %s is \"%.40s\", not a number of ranks",
        name, text ? text : "");
  *value = (int)number;
  return ONEBIT_OK;
}

/* Fills in options that the caller has not set; `memory` then has the text of the address. */
static onebit_status_t complete_options(onebit_sockets_options_t *options, char memory[256]) {
  const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  if (options->ranks == 0 && options->rank == 0) {
    OB_TRY(read_environment_number("WORLD_SIZE", &options->ranks));
    OB_TRY(read_environment_number("RANK", &options->rank));
  }
  if (options->streams == 0)
    options->streams = options->ranks > MANY_RANKS ? STREAMS_OF_MANY : DEFAULT_STREAMS;
  if (options->rendezvous || options->ranks == 1)
    return ONEBIT_OK;
  if (!host || !port)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->rendezvous is NULL, but the environment "
                                           "variable MASTER_ADDR or MASTER_PORT is not set");
  snprintf(memory, 256, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
  options->rendezvous = memory;
  return ONEBIT_OK;
}

static onebit_status_t check_sockets_options(const onebit_sockets_options_t *options) {
  if (options->ranks < 1)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->ranks is %d, not 1 or more", options->ranks);
  if (options->rank < 0 || options->rank >= options->ranks)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->rank is %d, not 0 to ranks - 1, %d",
                    options->rank, options->ranks - 1);
  if (options->streams < 1 || options->streams > ONEBIT_SOCKETS_STREAMS)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->streams is %d, not 1 to %d", options->streams,
                    ONEBIT_SOCKETS_STREAMS);
  if (!(options->timeout >= 0))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "options->timeout is %g seconds: it must be at least 0",
                    options->timeout);
  return ONEBIT_OK;
}

static onebit_status_t sockets_create(const onebit_sockets_options_t *options, double timeout,
                                      struct ob_sockets *sockets, onebit_comm_t *comm) {
  onebit_status_t status = ob_comm_create(&ob_transport_sockets, options->rank, options->ranks,
                                          NULL, sockets, &process_engine, comm);
  if (status == ONEBIT_OK)
    status = ob_comm_make_names(*comm);
  if (status != ONEBIT_OK)
    return status; /* the other ranks notice that the connections end */
  (*comm)->timeout = timeout;
  sockets->comm = *comm;
  const struct ob_term terms[] = {{"size", (uint64_t)options->ranks}};
  return ob_comm_exchange_setup(*comm, ONEBIT_OK, terms, 1, options->host);
}

onebit_status_t onebit_comm_create_sockets(const onebit_sockets_options_t *options,
                                           onebit_comm_t *result) {
  OB_CALL_SCOPE;
  onebit_sockets_options_t own = ONEBIT_SOCKETS_OPTIONS_INIT;
  struct ob_sockets *sockets;
  onebit_comm_t comm = NULL;
  char memory[256];
  double timeout;
  if (!result)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  *result = NULL;
  if (options)
    OB_TRY(ob_size_check("options", options, sizeof own));
  own = options ? *options : own;
  OB_TRY(complete_options(&own, memory));
  OB_TRY(check_sockets_options(&own));
  OB_TRY(ob_watch_timeout(&timeout));
  timeout = own.timeout > 0 ? own.timeout : timeout;
  OB_TRY(ob_sockets_connect(&own, timeout, &sockets));
  sockets->use_all = options && options->streams > 0;
  onebit_status_t status = sockets_create(&own, timeout, sockets, &comm);
  if (status == ONEBIT_OK) {
    *result = comm;
    return ONEBIT_OK;
  }
  ob_comm_release(comm);
  ob_sockets_destroy(sockets);
  return status;
}
