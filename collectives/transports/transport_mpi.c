/*
 * Batches over MPI: nonblocking sends and receives on the library's own communicator, and the
 * messages that tell ranks of the communicator's end. The MPI library is checked for user-level
 * failure mitigation (ULFM) at run time, since one build serves several versions of MPI.
 */
#ifdef ONEBIT_HAVE_MPI
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/bound_mpi.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/process.h"
#include "collectives/transports/mpi_state.h"
#include "collectives/watch.h"

/* A wait reads the clock after every LOOK_TRIES tries. After SPIN_TRIES tries, most of a
 * millisecond, it yields the processor, since MPI may not do so (MPI_Waitall may spin for ever).
 * CANCEL_SECONDS is the longest wait for a cancelled message. */
#define LOOK_TRIES     16
#define SPIN_TRIES     4096
#define CANCEL_SECONDS 0.1
/* The longest time in seconds for which a rank waits until its messages about the end are sent. */
#define TELL_SECONDS 0.1

struct mpi_batch {
  struct ob_batch base;
  MPI_Request *requests; /* receives come first, so that the number of a receive is that of its
                          * status */
  MPI_Status *statuses;
  int started;
};

onebit_status_t ob_mpi_error(const char *call, int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
    text[0] = '\0';
  return ob_error(ONEBIT_ERROR_TRANSPORT, "%s: %.200s", call, text);
}

bool ob_mpi_is_finalized(void) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

/* --- User-level failure mitigation -------------------------------------------------------------*/

/* True if MPI has ULFM. MPICH's functions of these names end the job ("internal error"). */
bool ob_mpi_has_ulfm(void) {
#ifdef OPEN_MPI
  return MPIX_Comm_revoke && MPIX_Comm_shrink && MPIX_Comm_failure_ack &&
         MPIX_Comm_failure_get_acked;
#else
  return false;
#endif
}

/* Returns the lowest rank of the communicator that is in the group of failed processes. */
static int find_lowest_failed(MPI_Comm comm, int size, MPI_Group failed) {
  MPI_Group all;
  int lowest = -1, count = 0;
  MPI_Group_size(failed, &count);
  if (count == 0 || MPI_Comm_group(comm, &all) != MPI_SUCCESS)
    return -1;
  for (int rank = 0; rank < size && lowest < 0; rank++) {
    int number = MPI_UNDEFINED;
    MPI_Group_translate_ranks(all, 1, &rank, failed, &number);
    lowest = number != MPI_UNDEFINED ? rank : -1;
  }
  MPI_Group_free(&all);
  return lowest;
}

/* Returns the lowest rank that MPI knows to have failed; -1: none, or MPI cannot tell. */
static int mpi_failed_rank(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  MPI_Group failed;
  if (!ob_mpi_has_ulfm() || MPIX_Comm_failure_ack(state->comm) != MPI_SUCCESS ||
      MPIX_Comm_failure_get_acked(state->comm, &failed) != MPI_SUCCESS)
    return -1;
  int rank = find_lowest_failed(state->comm, comm->size, failed);
  MPI_Group_free(&failed);
  return rank;
}

bool ob_mpi_end_is_sent(const struct ob_mpi_state *state, int size) {
  for (double until = ob_seconds() + TELL_SECONDS; ob_seconds() < until; sched_yield()) {
    bool all = true;
    for (int rank = 0; rank < size; rank++) {
      int done = 1;
      if (state->told[rank] != MPI_REQUEST_NULL &&
          MPI_Test(&state->told[rank], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS)
        all = all && done;
    }
    if (all)
      return true;
  }
  return false;
}

/* --- The end -----------------------------------------------------------------------------------*/

/* Sends the message about the communicator's end to all other ranks. With ULFM it also revokes the
 * communicator, which ends waits inside MPI; a revoked communicator receives nothing, so the
 * revocation waits a moment. The caller holds the lock. */
static void mpi_send_end(onebit_comm_t comm) {
  static const struct timespec time_to_hear = {.tv_nsec = (long)(3e9 * OB_WAIT_SLICE)};
  struct ob_mpi_state *state = comm->state;
  if (!atomic_exchange(&state->to_tell, false))
    return;
  for (int rank = 0; rank < comm->size; rank++)
    if (rank != comm->rank && MPI_Isend(state->out, OB_END_BYTES, MPI_BYTE, rank, state->end_tag,
                                        state->comm, &state->told[rank]) != MPI_SUCCESS)
      state->told[rank] = MPI_REQUEST_NULL;
  if (ob_mpi_has_ulfm()) {
    ob_mpi_end_is_sent(state, comm->size);
    nanosleep(&time_to_hear, NULL);
    MPIX_Comm_revoke(state->comm);
  }
}

/* Sends the message about the communicator's end. If this thread may not call MPI now, another
 * thread sends it later. */
static void mpi_abort(onebit_comm_t comm, const char *text) {
  struct ob_mpi_state *state = comm->state;
  int main_thread = 0;
  if (ob_mpi_is_finalized())
    return;
  OB_LOCKED(&state->lock);
  snprintf(state->out, sizeof state->out, "%s", text);
  atomic_store(&state->to_tell, true);
  if (!state->multiple)
    MPI_Is_thread_main(&main_thread);
  if (state->multiple || (main_thread && !atomic_load(&state->inside)))
    mpi_send_end(comm);
}

static void report_failed_rank(onebit_comm_t comm) {
  int rank = mpi_failed_rank(comm);
  char text[OB_END_BYTES];
  if (rank < 0)
    return; /* waiting calls report the error themselves */
  snprintf(text, sizeof text, "the process of rank %d%s%s has failed", rank,
           *ob_comm_host_name(comm, rank) ? " on host " : "", ob_comm_host_name(comm, rank));
  ob_comm_receive_end(comm, text);
}

/* Receives a message about the communicator's end, if one has arrived. */
static void mpi_receive_end(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  MPI_Status status;
  int found = 0;
  mpi_send_end(comm);
  int code = MPI_Iprobe(MPI_ANY_SOURCE, state->end_tag, state->comm, &found, &status);
  if (code == MPI_SUCCESS && found)
    code = MPI_Recv(state->in, OB_END_BYTES, MPI_BYTE, status.MPI_SOURCE, state->end_tag,
                    state->comm, MPI_STATUS_IGNORE);
  state->in[OB_END_BYTES - 1] = '\0';
  if (code == MPI_SUCCESS && found)
    ob_comm_receive_end(comm, state->in);
  else if (code != MPI_SUCCESS)
    report_failed_rank(comm);
}

static onebit_status_t mpi_health(onebit_comm_t comm) {
  struct ob_mpi_state *state = comm->state;
  if (ob_mpi_is_finalized() || pthread_mutex_trylock(&state->lock) != 0)
    return ONEBIT_OK; /* another thread receives the message */
  mpi_receive_end(comm);
  pthread_mutex_unlock(&state->lock);
  return ONEBIT_OK;
}

/* --- Batches -----------------------------------------------------------------------------------*/

static struct ob_mpi_state *mpi_state(onebit_comm_t comm) { return comm->state; }

static MPI_Comm mpi_handle(onebit_comm_t comm) { return mpi_state(comm)->comm; }

/* Waits for CANCEL_SECONDS at most. Returns true if the request has ended: a cancelled receive, or
 * a send that has begun. */
static bool wait_until_ended(MPI_Request *request) {
  int done = 0;
  for (double until = ob_seconds() + CANCEL_SECONDS; !done && ob_seconds() < until;) {
    if (MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
      return *request == MPI_REQUEST_NULL;
    sched_yield();
  }
  return done;
}

/* Ends the requests of a failed call, since a late message would overwrite memory that the program
 * uses again. Receives are cancelled; MPI cannot cancel a send that has begun. */
static bool mpi_cancel(struct ob_batch *base) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  bool all = true;
  if (ob_mpi_is_finalized())
    return true;
  for (int i = 0; i < batch->started; i++) {
    if (batch->requests[i] == MPI_REQUEST_NULL)
      continue;
    if (i < (int)base->receives)
      MPI_Cancel(&batch->requests[i]);
    all = wait_until_ended(&batch->requests[i]) && all;
  }
  return all;
}

static onebit_status_t mpi_begin(struct ob_batch *base, int tag) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  MPI_Comm mpi = mpi_handle(base->comm);
  batch->statuses = base->messages;
  batch->requests = (MPI_Request *)(batch->statuses + 2 * base->capacity);
  batch->started = 0;
  for (size_t i = 0; i < base->receives; i++) {
    const struct ob_endpoint *in = &base->receive[i];
    MPI_TRY(MPI_Irecv, (in->data, (int)in->bytes, MPI_BYTE, in->peer, tag, mpi,
                        &batch->requests[batch->started]));
    batch->started++;
  }
  for (size_t i = 0; i < base->sends; i++) {
    const struct ob_endpoint *out = &base->send[i];
    MPI_TRY(MPI_Isend, (out->data, (int)out->bytes, MPI_BYTE, out->peer, tag, mpi,
                        &batch->requests[batch->started]));
    batch->started++;
  }
  return ONEBIT_OK;
}

/* Returns the peer of the failed request; -1: none. Sets *code to the request's error code: the
 * code that MPI_Testall returned, or if that is MPI_ERR_IN_STATUS, the code in the request's
 * status. */
static int find_failed_request(const struct mpi_batch *batch, int *code) {
  for (int i = 0; i < batch->started; i++) {
    int own = batch->statuses[i].MPI_ERROR;
    if (own == MPI_SUCCESS || own == MPI_ERR_PENDING ||
        (*code != MPI_ERR_IN_STATUS && *code != own))
      continue;
    *code = own;
    return ob_batch_peer(&batch->base, (size_t)i);
  }
  return -1;
}

static onebit_status_t make_batch_error(const struct mpi_batch *batch, int code) {
  onebit_comm_t comm = batch->base.comm;
  int peer = find_failed_request(batch, &code), failed = mpi_failed_rank(comm);
  onebit_status_t status = ob_mpi_error("MPI_Testall", code);
  if (failed >= 0)
    return ob_error(status, "the process of rank %d on host %s has failed: %.150s", failed,
                    ob_comm_host_name(comm, failed), onebit_last_error());
  return peer < 0 ? status
                  : ob_error(status, "a message from or to rank %d on host %s failed: %.150s", peer,
                             ob_comm_host_name(comm, peer), onebit_last_error());
}

static onebit_status_t mpi_read_sizes(struct mpi_batch *batch) {
  for (size_t i = 0; i < batch->base.receives; i++) {
    int bytes;
    MPI_TRY(MPI_Get_count, (&batch->statuses[i], MPI_BYTE, &bytes));
    batch->base.receive[i].bytes = (size_t)bytes;
  }
  return ONEBIT_OK;
}

static onebit_status_t mpi_test_requests(struct mpi_batch *batch, double seconds) {
  double until = 0;
  for (unsigned tries = 1;; tries++) {
    int done;
    int code = MPI_Testall(batch->started, batch->requests, &done, batch->statuses);
    if (code != MPI_SUCCESS)
      return make_batch_error(batch, code);
    if (done)
      return mpi_read_sizes(batch);
    if (seconds <= 0)
      return ONEBIT_IN_PROGRESS;
    if (tries % LOOK_TRIES == 0) {
      double now = ob_seconds();
      if (until > 0 && now >= until)
        return ONEBIT_IN_PROGRESS;
      until = until > 0 ? until : now + seconds;
    }
    if (tries > SPIN_TRIES)
      sched_yield();
  }
}

static onebit_status_t mpi_test(struct ob_batch *base, double seconds) {
  struct ob_mpi_state *state = mpi_state(base->comm);
  atomic_store_explicit(&state->inside, true, memory_order_relaxed);
  onebit_status_t status = mpi_test_requests((struct mpi_batch *)base, seconds);
  atomic_store_explicit(&state->inside, false, memory_order_relaxed);
  return status;
}

static int mpi_peer_awaited(struct ob_batch *base) {
  struct mpi_batch *batch = (struct mpi_batch *)base;
  for (int i = 0; i < batch->started; i++) {
    int done = 1;
    if (batch->requests[i] != MPI_REQUEST_NULL)
      MPI_Request_get_status(batch->requests[i], &done, MPI_STATUS_IGNORE);
    if (!done)
      return ob_batch_peer(base, (size_t)i);
  }
  return -1;
}

static bool mpi_is_threaded(void) {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

/* Makes MPI advance its messages, by probing for a message. */
static void mpi_progress(onebit_comm_t comm) {
  int found;
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi_handle(comm), &found, MPI_STATUS_IGNORE);
}

/* Returns true if MPI can transfer messages in device memory. Asks the MPI library at run time,
 * since a library that is built for devices can be configured not to use them. */
static bool mpi_moves_device_messages(void) {
#if defined(MPIX_CUDA_AWARE_SUPPORT) && MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support && MPIX_Query_cuda_support() == 1;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int yes = 0;
  return MPIX_GPU_query_support &&
         MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &yes) == MPI_SUCCESS && yes;
#else
  return false;
#endif
}

const struct ob_transport ob_transport_mpi = {
    .threads = mpi_is_threaded,
    .name = "mpi",
    .host_messages = true,
    .device_messages = mpi_moves_device_messages,
    .network = true,
    .batch_bytes = sizeof(struct mpi_batch),
    .message_bytes = 2 * (sizeof(MPI_Status) + sizeof(MPI_Request)),
    .cancel = mpi_cancel,
    .begin = mpi_begin,
    .test = mpi_test,
    .peer_awaited = mpi_peer_awaited,
    .progress = mpi_progress,
    .health = mpi_health,
    .abort = mpi_abort,
    .shrink = ob_mpi_shrink,
    .destroy = ob_mpi_state_destroy,
};

#else
typedef int ob_no_mpi_here; /* ISO C requires a declaration in every file */
#endif
