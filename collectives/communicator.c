/* Implements the part of communicators that all transports share, and agreements among ranks. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/communicator.h"

#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
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
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a batch of %zu messages", capacity);
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

/* Reads the settings that apply to the whole communicator, from the environment and the file that
 * ONEBIT_CONFIG names. */
static onebit_status_t communicator_read_settings(onebit_comm_t comm) {
  OB_TRY(ob_config_check());
  OB_TRY(ob_log_open(comm->rank));
  return ob_watch_timeout(&comm->timeout);
}

static onebit_status_t begin_progress_thread(onebit_comm_t comm) {
  bool wanted;
  OB_TRY(ob_progress_wanted(&wanted));
  if (wanted && comm->transport->threads && !comm->transport->threads())
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "ONEBIT_PROGRESS=thread needs MPI_THREAD_MULTIPLE, with which MPI was not initialised");
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
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
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
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator of %d ranks", size);
  }
  onebit_status_t status = communicator_read_settings(comm);
  if (status == ONEBIT_OK)
    status = begin_progress_thread(comm);
  if (status != ONEBIT_OK) {
    ob_comm_release(comm);
    return status;
  }
  if (transport->network && size > 1)
    ob_presence_begin(&comm->presence, rank, size, transport->name);
  *result = comm;
  return ONEBIT_OK;
}

/* Closes those parts of a communicator that need the transport's state. */
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

onebit_comm_t ob_comm_add_user(onebit_comm_t comm) {
  comm->users++;
  return comm;
}

/* Drops a user of the communicator. A forked child frees nothing, because the connections belong to
 * the parent. */
void ob_comm_remove_user(onebit_comm_t comm) {
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
  ob_comm_remove_user(comm);
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
             : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the names of %d hosts", comm->size);
}

/* --- Agreement: one small message from each to each --------------------------------------------*/

struct proposal {
  uint32_t magic, version;
  uint64_t checksum; /* hash of all bytes after this member */
  uint64_t number;   /* counts the communicator's agreements */
  int32_t status;
  uint32_t count;
  uint64_t note;
  uint64_t values[OB_TERMS];
};

_Static_assert(sizeof(struct proposal) == OB_AGREE_BYTES, "a proposal fills its slot");

#define PROPOSAL_MAGIC   0x4142314fu /* the bytes "O1BA" */
#define PROPOSAL_VERSION 2

static struct proposal *slot_of_rank(onebit_comm_t comm, int rank) {
  return (struct proposal *)(void *)(comm->control_memory + (size_t)rank * OB_AGREE_BYTES);
}

/* Exchanges values among all ranks: rank k's `bytes` bytes are at `memory` + k * bytes, on every
 * rank afterwards. */
static onebit_status_t exchange_values(onebit_comm_t comm, void *memory, size_t bytes,
                                       const char *what) {
  struct ob_batch *batch = comm->control;
  batch->sends = batch->receives = 0;
  for (int step = 1; step < comm->size; step++) {
    int to = (comm->rank + step) % comm->size;
    struct ob_endpoint out = {(char *)memory + (size_t)comm->rank * bytes, bytes, to};
    struct ob_endpoint in = {(char *)memory + (size_t)to * bytes, bytes, to};
    batch->send[batch->sends++] = out;
    batch->receive[batch->receives++] = in;
  }
  onebit_status_t status = comm->transport->begin(batch, 0);
  if (status == ONEBIT_OK)
    status = ob_watch_batch(batch, what);
  if (status != ONEBIT_OK)
    ob_comm_give_up(comm, onebit_last_error());
  return status;
}

static uint64_t compute_proposal_checksum(const struct proposal *proposal) {
  size_t from = offsetof(struct proposal, number);
  return ob_hash(OB_HASH_START, &proposal->number, sizeof *proposal - from);
}

static void seal_proposal(onebit_comm_t comm, struct proposal *mine) {
  mine->version = PROPOSAL_VERSION;
  mine->number = comm->agreements;
  mine->checksum = compute_proposal_checksum(mine);
}

/* Checks that the message is a proposal by the endpoint's rank for this agreement. */
static onebit_status_t check_proposal(onebit_comm_t comm, const struct ob_endpoint *in) {
  const struct proposal *theirs = in->data;
  if (in->bytes != OB_AGREE_BYTES)
    return ob_error(ONEBIT_ERROR_MESSAGE, "rank %d sent %zu bytes where its options have %d bytes",
                    in->peer, in->bytes, OB_AGREE_BYTES);
  if (theirs->magic != PROPOSAL_MAGIC)
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "rank %d sent a message that is not its options: do all ranks create, load and "
                    "save in the same order?",
                    in->peer);
  if (theirs->version != PROPOSAL_VERSION)
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "rank %d sent its options in protocol version %" PRIu32
                    ", but this library has version %d: install the same onebit on all hosts",
                    in->peer, theirs->version, PROPOSAL_VERSION);
  if (theirs->checksum != compute_proposal_checksum(theirs))
    return ob_error(ONEBIT_ERROR_MESSAGE, "the options that rank %d sent were damaged on the way",
                    in->peer);
  if (theirs->number != comm->agreements || theirs->count > OB_TERMS)
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "rank %d is at its call number %" PRIu64
                    " that creates, loads or saves, this rank at number %" PRIu64
                    ": all ranks must make these calls in the same order",
                    in->peer, theirs->number, (uint64_t)comm->agreements);
  return ONEBIT_OK;
}

static onebit_status_t check_proposals(onebit_comm_t comm) {
  for (size_t i = 0; comm->size > 1 && i < comm->control->receives; i++)
    OB_TRY(check_proposal(comm, &comm->control->receive[i]));
  return ONEBIT_OK;
}

/* Fails if the rank's proposal has an error. */
static onebit_status_t check_peer_status(onebit_comm_t comm, int rank) {
  const struct proposal *theirs = slot_of_rank(comm, rank);
  if (theirs->status == ONEBIT_OK)
    return ONEBIT_OK;
  onebit_status_t status = (onebit_status_t)theirs->status;
  return ob_error(status == ONEBIT_ERROR_MEMORY ? status : ONEBIT_ERROR_PEER,
                  "rank %d failed with %s: read its error message", rank,
                  onebit_status_string(status));
}

static onebit_status_t refuse_term(const char *name, uint64_t first, uint64_t theirs, int rank) {
  char texts[2][64];
  double numbers[2];
  if (*name != *OB_TERM_DOUBLE)
    return ob_error(ONEBIT_ERROR_MISMATCH,
                    "%s differs between ranks: %" PRIu64 " on rank 0, %" PRIu64 " on rank %d", name,
                    first, theirs, rank);
  memcpy(&numbers[0], &first, sizeof first);
  memcpy(&numbers[1], &theirs, sizeof theirs);
  int digits = 15; /* 17 digits show any difference, and 15 read better */
  do {
    snprintf(texts[0], sizeof texts[0], "%.*g", digits, numbers[0]);
    snprintf(texts[1], sizeof texts[1], "%.*g", digits, numbers[1]);
    digits += 2;
  } while (digits <= 17 && strcmp(texts[0], texts[1]) == 0);
  return ob_error(ONEBIT_ERROR_MISMATCH, "%s differs between ranks: %s on rank 0, %s on rank %d",
                  name + 1, texts[0], texts[1], rank);
}

/* Compares a rank's terms with those of rank 0. Every rank compares all ranks, so all ranks return
 * the same error message. */
static onebit_status_t compare_terms(onebit_comm_t comm, int rank, const struct ob_term *terms,
                                     size_t count) {
  const struct proposal *first = slot_of_rank(comm, 0), *theirs = slot_of_rank(comm, rank);
  if (first->count != theirs->count)
    return ob_error(ONEBIT_ERROR_MISMATCH, "rank 0 and rank %d create objects of different kinds",
                    rank);
  for (size_t i = 0; i < count && i < first->count; i++)
    if (first->values[i] != theirs->values[i])
      return refuse_term(terms[i].name, first->values[i], theirs->values[i], rank);
  return ONEBIT_OK;
}

bool ob_agree_differed_only(onebit_comm_t comm, size_t term) {
  const struct proposal *first = slot_of_rank(comm, 0);
  for (int rank = 0; rank < comm->size; rank++) {
    const struct proposal *theirs = slot_of_rank(comm, rank);
    if (theirs->status != ONEBIT_OK || theirs->count != first->count)
      return false;
    for (size_t i = 0; i < first->count; i++)
      if (i != term && theirs->values[i] != first->values[i])
        return false;
  }
  return true;
}

onebit_status_t ob_agree_check(onebit_comm_t comm, const struct ob_term *terms, size_t count) {
  OB_TRY(check_proposals(comm));
  for (int rank = 0; rank < comm->size; rank++)
    OB_TRY(check_peer_status(comm, rank));
  for (int rank = 1; rank < comm->size; rank++)
    OB_TRY(compare_terms(comm, rank, terms, count));
  return ONEBIT_OK;
}

onebit_status_t ob_agree(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                         size_t count) {
  return ob_agree_noting(comm, status, terms, count, 0);
}

uint64_t ob_agree_note(onebit_comm_t comm, int rank) { return slot_of_rank(comm, rank)->note; }

onebit_status_t ob_agree_noting(onebit_comm_t comm, onebit_status_t status,
                                const struct ob_term *terms, size_t count, uint64_t note) {
  struct proposal *mine = slot_of_rank(comm, comm->rank);
  char what[64];
  /* This check comes before `mine` is written: after a failed agreement a message may still be in
   * flight from the same memory. */
  OB_TRY(ob_comm_check(comm));
  snprintf(what, sizeof what, "collective creation, loading or saving, number %" PRIu32,
           ++comm->agreements);
  *mine = (struct proposal){
      .magic = PROPOSAL_MAGIC, .status = status, .count = (uint32_t)count, .note = note};
  for (size_t i = 0; i < count; i++)
    mine->values[i] = terms[i].value;
  seal_proposal(comm, mine);
  if (comm->size > 1)
    OB_TRY(exchange_values(comm, comm->control_memory, OB_AGREE_BYTES, what));
  return status == ONEBIT_OK ? ob_agree_check(comm, terms, count) : status;
}

onebit_status_t ob_agree_names(onebit_comm_t comm, const char *name) {
  char *own = comm->host_names[comm->rank];
  if (name)
    snprintf(own, OB_HOST_NAME_BYTES, "%s", name);
  else if (gethostname(own, OB_HOST_NAME_BYTES - 1) != 0)
    own[0] = '\0';
  if (comm->size > 1)
    OB_TRY(exchange_values(comm, comm->host_names, OB_HOST_NAME_BYTES, "exchange of host names"));
  for (int rank = 0; rank < comm->size; rank++)
    comm->host_names[rank][OB_HOST_NAME_BYTES - 1] = '\0';
  ob_comm_log(comm);
  return ONEBIT_OK;
}

void ob_comm_log(onebit_comm_t comm) {
  ob_log(OB_LOG_INFO, comm->rank, "communicator of %d ranks on %d hosts over %s", comm->size,
         comm->hosts.count, comm->transport->name);
}
