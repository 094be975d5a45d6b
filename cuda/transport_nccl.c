/*
 * The transport over NCCL. Plans put their messages on streams, with one group of sends and
 * receives for each batch. Messages in host memory are copied through device memory. Only calls
 * that create an object send such messages, for agreements of the ranks.
 *
 * Two threads must not call NCCL on one communicator at once, and no thread may call it after an
 * abort, which frees the communicator. So a caller holds a lock, and checks `aborted` first.
 */
#define _DEFAULT_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/communicator.h"
#include "collectives/watch.h"
#include "cuda/nccl_state.h"

/* A batch of messages in host memory. `memory`, on the device, has the sent messages, followed by
 * the received ones; it is copied from and to `pinned`. A copy from or to memory that is not pinned
 * could make the driver wait for messages that have not arrived, without a time limit. */
struct nccl_batch {
  struct ob_batch batch;
  unsigned char *memory, *pinned;
  size_t capacity;
  bool undelivered; /* the received message has not been given to the caller yet */
};

static onebit_status_t nccl_error(const struct nccl_state *state, ncclResult_t result,
                                  const char *call) {
  return ob_error(ONEBIT_ERROR_TRANSPORT, "NCCL: %s (%s): %.150s", ncclGetErrorString(result), call,
                  state->aborted ? "" : ncclGetLastError(state->comm));
}

#define NCCL_TRY(state, call)                                                                      \
  do {                                                                                             \
    ncclResult_t try_result = (call);                                                              \
    if (try_result != ncclSuccess && try_result != ncclInProgress)                                 \
      return nccl_error(state, try_result, #call);                                                 \
  } while (0)

static onebit_status_t aborted_error(void) {
  return ob_error(ONEBIT_ERROR_TRANSPORT, "NCCL: the communicator was aborted");
}

/* --- Batches */

static bool nccl_cancel(struct ob_batch *batch) {
  struct nccl_batch *own = (struct nccl_batch *)batch;
  ob_memory_cuda.release(own->memory);
  ob_memory_pinned.release(own->pinned);
  return true;
}

static onebit_status_t add_to_group(struct nccl_state *state, const struct ob_batch *batch,
                                    cudaStream_t stream) {
  for (size_t i = 0; i < batch->sends; i++)
    NCCL_TRY(state, ncclSend(batch->send[i].data, batch->send[i].bytes, ncclUint8,
                             batch->send[i].peer, state->comm, stream));
  for (size_t i = 0; i < batch->receives; i++)
    NCCL_TRY(state, ncclRecv(batch->receive[i].data, batch->receive[i].bytes, ncclUint8,
                             batch->receive[i].peer, state->comm, stream));
  return ONEBIT_OK;
}

onebit_status_t ob_nccl_finish(onebit_comm_t comm, ncclResult_t result, const char *what) {
  struct nccl_state *state = state_of(comm);
  struct ob_watch watch = {0};
  while (result == ncclInProgress && !state->aborted &&
         ncclCommGetAsyncError(state->comm, &result) == ncclSuccess && result == ncclInProgress) {
    ob_watch_count(&watch);
    if (watch.waited >= comm->timeout)
      return ob_error(ONEBIT_ERROR_TRANSPORT, "NCCL: waited %.3g s to %s", watch.waited, what);
    sched_yield();
  }
  if (result != ncclSuccess && result != ncclInProgress)
    return nccl_error(state, result, what);
  return ONEBIT_OK;
}

/* Puts a group of messages on the stream, and waits until NCCL has done so, which may connect the
 * ranks first: kernels follow the messages on the stream. */
static onebit_status_t put_group(struct nccl_state *state, const struct ob_batch *batch,
                                 cudaStream_t stream) {
  NCCL_TRY(state, ncclGroupStart());
  onebit_status_t status = add_to_group(state, batch, stream);
  ncclResult_t ended = ncclGroupEnd(); /* also after an error, since the thread is in the group */
  onebit_status_t finished = ob_nccl_finish(batch->comm, ended, "begin to send to the other ranks");
  return status == ONEBIT_OK ? finished : status;
}

/* After NCCL has failed, its kernels wait until the communicator is aborted; so do streams, and
 * calls that free memory. */
static onebit_status_t give_up_after_failure(onebit_comm_t comm, onebit_status_t status) {
  if (status == ONEBIT_ERROR_TRANSPORT)
    ob_comm_give_up(comm, onebit_last_error());
  return status;
}

static onebit_status_t nccl_put(struct ob_batch *batch, void *stream) {
  struct nccl_state *state = state_of(batch->comm);
  if (batch->sends + batch->receives == 0)
    return ONEBIT_OK;
  pthread_mutex_lock(&state->lock);
  onebit_status_t status = state->aborted ? aborted_error() : put_group(state, batch, stream);
  pthread_mutex_unlock(&state->lock);
  return give_up_after_failure(batch->comm, status);
}

static void *message_stream(onebit_comm_t comm) { return state_of(comm)->messages; }

static onebit_status_t check_health(struct nccl_state *state) {
  ncclResult_t found = ncclSuccess;
  if (state->aborted)
    return aborted_error();
  NCCL_TRY(state, ncclCommGetAsyncError(state->comm, &found));
  NCCL_TRY(state, found);
  return ONEBIT_OK;
}

static onebit_status_t nccl_health(onebit_comm_t comm) {
  struct nccl_state *state = state_of(comm);
  pthread_mutex_lock(&state->lock);
  onebit_status_t status = check_health(state);
  pthread_mutex_unlock(&state->lock);
  return give_up_after_failure(comm, status);
}

/* --- Messages of the host */

static size_t nccl_count_bytes(const struct ob_endpoint *endpoints, size_t count) {
  size_t bytes = 0;
  for (size_t i = 0; i < count; i++)
    bytes += endpoints[i].bytes;
  return bytes;
}

/* Allocates memory for messages of the host. The memory is kept from the first agreement on: a rank
 * without memory in a later agreement could not tell the other ranks, which would wait. */
static onebit_status_t allocate_groups(struct nccl_batch *own, size_t bytes) {
  if (bytes <= own->capacity)
    return ONEBIT_OK;
  ob_memory_cuda.release(own->memory);
  ob_memory_pinned.release(own->pinned);
  own->memory = ob_memory_cuda.allocate(1, bytes);
  own->pinned = ob_memory_pinned.allocate(1, bytes);
  own->capacity = own->memory && own->pinned ? bytes : 0;
  return own->capacity ? ob_cuda_settle()
                       : ob_error(ONEBIT_ERROR_MEMORY, "out of device memory for a message");
}

/* Copies between endpoints and the batch's pinned memory, from *at on. */
static void stage_messages(const struct ob_endpoint *endpoints, size_t count, unsigned char **at,
                           bool out) {
  for (size_t i = 0; i < count; i++) {
    memcpy(out ? *at : endpoints[i].data, out ? endpoints[i].data : *at, endpoints[i].bytes);
    *at += endpoints[i].bytes;
  }
}

/* Makes the endpoints point to device memory instead. */
static void place_endpoints(struct ob_endpoint *endpoints, size_t count, unsigned char **at) {
  for (size_t i = 0; i < count; i++) {
    endpoints[i].data = *at;
    *at += endpoints[i].bytes;
  }
}

static void deliver_received(struct nccl_batch *own) {
  struct ob_batch *batch = &own->batch;
  unsigned char *at = own->pinned + nccl_count_bytes(batch->send, batch->sends);
  if (own->undelivered)
    stage_messages(batch->receive, batch->receives, &at, false);
  own->undelivered = false;
}

static onebit_status_t nccl_begin(struct ob_batch *batch, int tag) {
  (void)tag; /* NCCL matches in order, and agreements are in the same order on all ranks */
  OB_ON_DEVICE(state_of(batch->comm)->device);
  struct nccl_batch *own = (struct nccl_batch *)batch;
  struct nccl_state *state = state_of(batch->comm);
  size_t sent = nccl_count_bytes(batch->send, batch->sends);
  size_t received = nccl_count_bytes(batch->receive, batch->receives);
  OB_TRY(allocate_groups(own, sent + received));
  unsigned char *at = own->pinned;
  stage_messages(batch->send, batch->sends, &at, true);
  OB_TRY_CUDA(cudaMemcpyAsync(own->memory, own->pinned, sent, cudaMemcpyDefault, state->stream));
  struct ob_batch on_device = *batch;
  on_device.send = batch->messages;
  on_device.receive = on_device.send + batch->capacity;
  memcpy(on_device.send, batch->send, batch->sends * sizeof *on_device.send);
  memcpy(on_device.receive, batch->receive, batch->receives * sizeof *on_device.receive);
  at = own->memory;
  place_endpoints(on_device.send, on_device.sends, &at);
  place_endpoints(on_device.receive, on_device.receives, &at);
  own->undelivered = true;
  OB_TRY(nccl_put(&on_device, state->stream));
  OB_TRY_CUDA(cudaMemcpyAsync(own->pinned + sent, own->memory + sent, received, cudaMemcpyDefault,
                              state->stream));
  return ONEBIT_OK;
}

static onebit_status_t nccl_test(struct ob_batch *batch, double seconds) {
  struct nccl_state *state = state_of(batch->comm);
  OB_ON_DEVICE(state->device);
  onebit_status_t status = ONEBIT_OK;
  double until = seconds > 0 ? ob_seconds() + seconds : 0;
  cudaError_t error;
  while ((error = cudaStreamQuery(state->stream)) == cudaErrorNotReady &&
         (status = nccl_health(batch->comm)) == ONEBIT_OK && ob_seconds() < until)
    sched_yield();
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  if (status == ONEBIT_OK && error == cudaErrorNotReady)
    status = ONEBIT_IN_PROGRESS;
  else if (status == ONEBIT_OK && error != cudaSuccess)
    status = ob_cuda_error(error, "waiting for NCCL");
  else if (status == ONEBIT_OK)
    deliver_received((struct nccl_batch *)batch);
  return status;
}

/* --- A communicator */

static onebit_status_t check_current(onebit_comm_t comm) {
  const struct nccl_state *state = state_of(comm);
  int current;
  OB_TRY(ob_cuda_current_device(&current));
  if (current != state->device)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "nccl_comm belongs to CUDA device %d, but device %d is the current one",
                    state->device, current);
  return ONEBIT_OK;
}

static void release_state(struct nccl_state *state) {
  OB_ON_DEVICE(state->device);
  ob_cuda_destroy_stream(state->stream);
  ob_cuda_destroy_stream(state->messages);
  ob_nccl_state_release(state);
}

/* Frees the state. The communicator destroys its control batch, with that batch's memory. */
static void nccl_destroy(onebit_comm_t comm) { release_state(state_of(comm)); }

const struct ob_transport ob_transport_nccl = {
    .name = "nccl",
    .batch_bytes = sizeof(struct nccl_batch),
    .message_bytes = 2 * sizeof(struct ob_endpoint), /* endpoints of the messages on the device */
    .cancel = nccl_cancel,
    .begin = nccl_begin,
    .test = nccl_test,
    .put = nccl_put,
    .stream = message_stream,
    .window_create = ob_nccl_window_create,
    .window_register = ob_nccl_window_register,
    .window_destroy = ob_nccl_window_destroy,
    .check_current = check_current,
    .health = nccl_health,
    .abort = ob_nccl_abort,
    .destroy = nccl_destroy,
};

/* Returns the name of this host as a number. It uses the names that NCCL uses: NCCL_HOSTID
 * first. */
static uint64_t nccl_host_number(void) {
  char name[256] = "";
  const char *given = getenv("NCCL_HOSTID");
  gethostname(name, sizeof name - 1);
  const char *host = given && *given ? given : name;
  return ob_hash(OB_HASH_START, host, strlen(host));
}

/* Finds the ranks' hosts: each rank sends the others its status and its host, which is identified
 * by the first rank on it. */
static onebit_status_t nccl_find_hosts(onebit_comm_t comm, onebit_status_t status) {
  OB_TRY(ob_agree_noting(comm, status, NULL, 0, nccl_host_number()));
  int *host_of = ob_allocate((size_t)comm->size, sizeof *host_of);
  if (!host_of)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the hosts of %d ranks", comm->size);
  for (int r = 0; r < comm->size; r++) {
    host_of[r] = 0;
    while (ob_agree_note(comm, host_of[r]) != ob_agree_note(comm, r))
      host_of[r]++;
  }
  ob_hosts_destroy(&comm->hosts);
  status = ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size);
  ob_release(host_of);
  OB_TRY(ob_agree(comm, status == ONEBIT_OK ? ob_comm_make_names(comm) : status, NULL, 0));
  return ob_agree_names(comm, getenv("NCCL_HOSTID"));
}

/* Messages have the highest priority: a kernel of NCCL is a few thread blocks, which would
 * otherwise wait behind a kernel that fills the device. All plans use one stream: the device has
 * few queues, and NCCL orders a communicator's messages anyway. */
static onebit_status_t nccl_create_streams(struct nccl_state *state) {
  int lowest, highest;
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  OB_TRY_CUDA(cudaStreamCreateWithPriority(&state->messages, cudaStreamNonBlocking, highest));
  return ONEBIT_OK;
}

static onebit_status_t open_state(struct nccl_state *state, int *rank, int *size) {
  NCCL_TRY(state, ncclCommUserRank(state->comm, rank));
  NCCL_TRY(state, ncclCommCount(state->comm, size));
  NCCL_TRY(state, ncclCommCuDevice(state->comm, &state->device));
  OB_ON_DEVICE(state->device);
  onebit_status_t status = ob_cuda_load_kernels();
  if (status == ONEBIT_OK)
    status = nccl_create_streams(state);
  return status;
}

onebit_status_t onebit_comm_create_nccl(ncclComm_t nccl_comm, onebit_comm_t *result) {
  OB_CALL_SCOPE;
  int rank, size;
  if (result)
    *result = NULL;
  if (!nccl_comm || !result)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", nccl_comm ? "comm" : "nccl_comm");
  struct nccl_state *state = ob_allocate(1, sizeof *state);
  if (!state)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
  state->comm = nccl_comm;
  state->users = 1;
  pthread_mutex_init(&state->lock, NULL);
  onebit_comm_t comm = NULL;
  onebit_status_t status = open_state(state, &rank, &size);
  if (status == ONEBIT_OK)
    status = ob_comm_create(&ob_transport_nccl, rank, size, NULL, state, NULL, &comm);
  if (status != ONEBIT_OK) {
    release_state(state);
    return status;
  }
  status = nccl_find_hosts(comm, check_current(comm));
  if (status != ONEBIT_OK)
    onebit_comm_destroy(comm);
  else
    *result = comm;
  return status;
}
