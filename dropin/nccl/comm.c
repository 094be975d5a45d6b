/*
 * Stores the states of NCCL's communicators in a list, by their handles. All ranks of a
 * communicator agree on the settings when it is created. Its state is destroyed before NCCL
 * destroys the communicator.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/lock.h"
#include "base/memory.h"
#include "collectives/watch.h"
#include "dropin/nccl/preload.h"

static void agreement_destroy(struct ob_agreement *agreement) {
  if (agreement->stream)
    cudaStreamDestroy(agreement->stream);
  if (agreement->done)
    cudaEventDestroy(agreement->done);
  if (agreement->on_device)
    cudaFree(agreement->on_device);
  if (agreement->on_host)
    cudaFreeHost(agreement->on_host);
  memset(agreement, 0, sizeof *agreement);
}

static bool agreement_create(struct ob_agreement *agreement) {
  void *on_device = NULL, *on_host = NULL;
  const size_t bytes = OB_MAX_AGREED * sizeof(int64_t);
  memset(agreement, 0, sizeof *agreement);
  bool good = cudaStreamCreateWithFlags(&agreement->stream, cudaStreamNonBlocking) == cudaSuccess &&
              cudaEventCreateWithFlags(&agreement->done, cudaEventDisableTiming) == cudaSuccess &&
              cudaMalloc(&on_device, bytes) == cudaSuccess &&
              cudaMallocHost(&on_host, bytes) == cudaSuccess;
  agreement->on_device = on_device;
  agreement->on_host = on_host;
  if (!good)
    agreement_destroy(agreement);
  return good;
}

/* ---- Agreements ---- */

/* Begins an agreement: copies the values to the device. The caller then calls
 * agreement_send_values, which may be in a group, agreement_copy_out, and ob_nccl_wait_for_answer,
 * which waits. */
static bool agreement_copy_in(struct ob_nccl_comm *comm, const int64_t *values, int count,
                              cudaStream_t stream) {
  if (comm->failed)
    return false;
  const struct ob_agreement *to = &comm->agreement;
  const size_t bytes = (size_t)count * sizeof *values;
  OB_ON_DEVICE(comm->device);
  memcpy(to->on_host, values, bytes);
  return cudaMemcpyAsync(to->on_device, to->on_host, bytes, cudaMemcpyHostToDevice, stream) ==
         cudaSuccess;
}

static bool agreement_send_values(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  return ob_next_ncclAllReduce(to->on_device, to->on_device, (size_t)count, ncclInt64, ncclMax,
                               comm->comm, stream) == ncclSuccess;
}

static bool agreement_copy_out(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  OB_ON_DEVICE(comm->device);
  return cudaMemcpyAsync(to->on_host, to->on_device, (size_t)count * sizeof *to->on_host,
                         cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
         cudaEventRecord(to->done, stream) == cudaSuccess;
}

/* Returns true unless NCCL has an error. If a rank is lost, the event of the agreement never
 * completes. */
static bool has_no_error(struct ob_nccl_comm *comm) {
  ncclResult_t found = ncclSuccess;
  OB_LOCKED(&comm->lock);
  return !comm->aborted && ob_next_ncclCommGetAsyncError(comm->comm, &found) == ncclSuccess &&
         (found == ncclSuccess || found == ncclInProgress);
}

/* Returns true if the wait has timed out; prints the error. NCCL does not say which rank is
 * missing: it is the rank that prints no message. */
static bool has_timed_out(struct ob_nccl_comm *comm, struct ob_watch *watch) {
  char what[96];
  double timeout;
  snprintf(what, sizeof what, "rank %d of %d: agreement on what to compress", comm->rank,
           comm->size);
  if (ob_watch_timeout(&timeout) == ONEBIT_OK && ob_watch_alone(watch, timeout, what) == ONEBIT_OK)
    return false;
  fprintf(stderr, "onebit: %s\n", onebit_last_error());
  comm->failed = true;
  return true;
}

bool ob_nccl_wait_for_answer(struct ob_nccl_comm *comm, int64_t *values, int count) {
  OB_ON_DEVICE(comm->device);
  struct ob_watch watch = {0};
  cudaError_t error;
  while ((error = cudaEventQuery(comm->agreement.done)) == cudaErrorNotReady &&
         has_no_error(comm) && !has_timed_out(comm, &watch))
    sched_yield();
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  else if (error == cudaSuccess)
    memcpy(values, comm->agreement.on_host, (size_t)count * sizeof *values);
  return error == cudaSuccess;
}

bool ob_nccl_allreduce_max(struct ob_nccl_comm *comm, int64_t *values, int count) {
  cudaStream_t stream = comm->agreement.stream;
  return agreement_copy_in(comm, values, count, stream) &&
         agreement_send_values(comm, count, stream) && agreement_copy_out(comm, count, stream) &&
         ob_nccl_wait_for_answer(comm, values, count);
}

/* ---- The list of communicators ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ob_nccl_comm *comms;

static void add_comm(struct ob_nccl_comm *comm) {
  OB_LOCKED(&lock);
  comm->users = 1;
  comm->next = comms;
  comms = comm;
}

/* Removes the state from the list. The caller takes over the list's reference. */
static struct ob_nccl_comm *remove_comm(ncclComm_t handle) {
  OB_LOCKED(&lock);
  struct ob_nccl_comm **at = &comms;
  while (*at && (*at)->comm != handle)
    at = &(*at)->next;
  struct ob_nccl_comm *comm = *at;
  if (comm)
    *at = comm->next;
  return comm;
}

struct ob_nccl_comm *ob_nccl_comm_acquire(ncclComm_t handle) {
  OB_LOCKED(&lock);
  struct ob_nccl_comm *comm = comms;
  while (comm && comm->comm != handle)
    comm = comm->next;
  if (comm)
    comm->users++;
  return comm;
}

static void comm_destroy(struct ob_nccl_comm *comm) {
  OB_ON_DEVICE(comm->device);
  ob_nccl_timers_destroy(comm);
  ob_nccl_tensors_destroy(comm);
  agreement_destroy(&comm->agreement);
  ob_loops_destroy(comm->loops);
  pthread_mutex_destroy(&comm->lock);
  ob_release(comm);
}

void ob_nccl_comm_release(struct ob_nccl_comm *comm) {
  if (!comm)
    return;
  pthread_mutex_lock(&lock);
  bool last = --comm->users == 0;
  pthread_mutex_unlock(&lock);
  if (last)
    comm_destroy(comm);
}

/* ---- Creating states ---- */

static bool comm_read_properties(struct ob_nccl_comm *comm) {
  return ob_next_ncclCommUserRank(comm->comm, &comm->rank) == ncclSuccess &&
         ob_next_ncclCommCount(comm->comm, &comm->size) == ncclSuccess &&
         ob_next_ncclCommCuDevice(comm->comm, &comm->device) == ncclSuccess;
}

/* Agrees on a loop, as an ob_loops_allreduce_max. */
static bool agree_on_loop(void *comm, int64_t *values, int count) {
  return ob_nccl_allreduce_max(comm, values, count);
}

static bool create_agreement_and_loops(struct ob_nccl_comm *comm) {
  unsigned repeats = ob_nccl_wrong_settings() ? 2 : ob_preload.rules.warmup;
  OB_ON_DEVICE(comm->device);
  return agreement_create(&comm->agreement) &&
         ob_loops_create(repeats, agree_on_loop, comm, &comm->loops) == ONEBIT_OK;
}

/* The values on which the ranks agree. The ranks take the largest of each value. A number is the
 * same on all ranks if its largest value equals minus the largest value of its negative. */
enum { HASH, HASH_NEGATED, WRONG_SETTINGS, SAME_THREAD, REQUIRED, VALUES };

static void fill_values(const struct ob_nccl_comm *comm, int64_t values[VALUES]) {
  values[HASH] = ob_nccl_wrong_settings() ? 0 : (int64_t)(ob_preload_hash() >> 1);
  values[HASH_NEGATED] = -values[HASH];
  values[WRONG_SETTINGS] =
      ob_nccl_wrong_settings() ? comm->size - comm->rank : 0; /* the lowest such rank prints them */
  values[SAME_THREAD] = comm->same_thread;
  values[REQUIRED] = ob_preload.required;
}

/* Returns the reason why nothing is compressed on the communicator; NULL if calls may be
 * compressed. */
static const char *find_refusal(const struct ob_nccl_comm *comm, const int64_t values[VALUES]) {
  if (values[WRONG_SETTINGS])
    return values[WRONG_SETTINGS] == comm->size - comm->rank ? ob_nccl_wrong_settings() : "";
  if (values[HASH] != -values[HASH_NEGATED])
    return "the rules (ONEBIT_RULES) or the versions of onebit differ between ranks";
  if (values[SAME_THREAD])
    return "one thread has several ranks, but compressed calls need a thread for each rank";
  return NULL;
}

/* Agrees with the other ranks of new communicators. A thread that drives several ranks sends the
 * values of all its ranks before it waits for one of them. */
static ncclResult_t agree_on_comms(struct ob_nccl_comm **made, size_t count) {
  ncclResult_t result = ncclSuccess;
  int64_t values[VALUES];
  for (size_t i = 0; i < count; i++) {
    fill_values(made[i], values);
    agreement_copy_in(made[i], values, VALUES, made[i]->agreement.stream);
  }
  ob_next_ncclGroupStart();
  for (size_t i = 0; i < count; i++)
    agreement_send_values(made[i], VALUES, made[i]->agreement.stream);
  ob_next_ncclGroupEnd();
  for (size_t i = 0; i < count; i++)
    agreement_copy_out(made[i], VALUES, made[i]->agreement.stream);
  for (size_t i = 0; i < count; i++) {
    if (!ob_nccl_wait_for_answer(made[i], values, VALUES)) {
      result = made[i]->failed ? ncclRemoteError : result; /* NCCL reports other errors */
      continue;
    }
    const char *refused = find_refusal(made[i], values);
    made[i]->settled = refused == NULL;
    if (values[REQUIRED])
      atomic_store(&ob_preload.required, true);
    ob_nccl_print_start(made[i], refused);
  }
  return result;
}

/* Returns true if this thread creates another rank of the same communicator. */
static bool makes_another_rank(const struct ob_nccl_made *made, size_t count, size_t which) {
  static const ncclUniqueId none;
  if (!memcmp(&made[which].id, &none, sizeof none))
    return false;
  for (size_t i = 0; i < count; i++)
    if (i != which && !memcmp(&made[i].id, &made[which].id, sizeof none))
      return true;
  return false;
}

static struct ob_nccl_comm *create_comm(ncclComm_t handle, bool same_thread) {
  struct ob_nccl_comm *comm = ob_allocate(1, sizeof *comm);
  if (!comm)
    return NULL;
  comm->comm = handle;
  comm->same_thread = same_thread;
  pthread_mutex_init(&comm->lock, NULL);
  if (comm_read_properties(comm)) {
    add_comm(comm);
    return comm;
  }
  pthread_mutex_destroy(&comm->lock);
  ob_release(comm);
  return NULL;
}

/* The largest number of communicators that one call or one group creates. */
enum { AT_ONCE = 64 };

/* Creates the states of new communicators. If this fails on a rank, the other ranks wait for it as
 * if NCCL had failed on it. */
ncclResult_t ob_nccl_add_comms(const struct ob_nccl_made *made, size_t count) {
  OB_CALL_SCOPE;
  struct ob_nccl_comm *asked[AT_ONCE];
  size_t several = 0;
  ob_nccl_start();
  for (size_t i = 0; i < count && several < AT_ONCE; i++) {
    if (!made[i].blocking || !*made[i].comm) /* no handle yet, or this rank is not in the split */
      continue;
    struct ob_nccl_comm *comm =
        create_comm(*made[i].comm, made[i].same_thread || makes_another_rank(made, count, i));
    if (!comm)
      return ncclSystemError;
    if (comm->size < 2)
      continue;
    if (ob_nccl_unusable_reason()) {
      ob_nccl_print_start(comm, ob_nccl_unusable_reason());
      continue;
    }
    if (!create_agreement_and_loops(comm))
      return ncclSystemError;
    asked[several++] = comm;
  }
  return several ? agree_on_comms(asked, several) : ncclSuccess;
}

/* ---- Functions that replace NCCL's ---- */

/* Returns true unless the config asks for a nonblocking communicator. The default,
 * NCCL_CONFIG_UNDEF_INT, is a blocking one. */
static bool is_blocking(const ncclConfig_t *config, ncclResult_t result) {
  return result != ncclInProgress && !(config && config->blocking == 0);
}

/* Adds the state of a new communicator. Returns NCCL's result, or the error of adding the state. */
static ncclResult_t register_comm(ncclResult_t result, ncclComm_t *comm, const ncclUniqueId *id,
                                  bool same_thread, const ncclConfig_t *config) {
  struct ob_nccl_made made = {.comm = comm, .same_thread = same_thread};
  if (result != ncclSuccess && result != ncclInProgress)
    return result;
  made.blocking = is_blocking(config, result);
  if (id)
    made.id = *id;
  if (ob_nccl_in_group())
    return ob_nccl_group_add_comm(&made) ? result : ncclInvalidUsage;
  ncclResult_t settled = ob_nccl_add_comms(&made, 1);
  return settled == ncclSuccess ? result : settled;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id,
                                                 int rank) {
  return register_comm(ob_next_ncclCommInitRank(comm, nranks, id, rank), comm, &id, false, NULL);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks,
                                                       ncclUniqueId id, int rank,
                                                       ncclConfig_t *config) {
  return register_comm(ob_next_ncclCommInitRankConfig(comm, nranks, id, rank, config), comm, &id,
                       false, config);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank,
                                                         int ids, ncclUniqueId *id,
                                                         ncclConfig_t *config) {
  return register_comm(ob_next_ncclCommInitRankScalable(comm, nranks, rank, ids, id, config), comm,
                       id, false, config);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitAll(ncclComm_t *made, int ndev, const int *devices) {
  ncclResult_t result = ob_next_ncclCommInitAll(made, ndev, devices);
  struct ob_nccl_made each[AT_ONCE];
  if (result != ncclSuccess)
    return result;
  if (ndev > AT_ONCE)
    return ncclInvalidUsage;
  for (int i = 0; i < ndev; i++)
    each[i] = (struct ob_nccl_made){.comm = &made[i], .same_thread = ndev > 1, .blocking = true};
  return ob_nccl_add_comms(each, (size_t)ndev);
}

/* Returns true if a thread drives several ranks of this communicator, and thus of those created
 * from it. */
static bool has_same_thread(ncclComm_t handle) {
  struct ob_nccl_comm *comm = ob_nccl_comm_acquire(handle);
  bool same_thread = comm && comm->same_thread;
  ob_nccl_comm_release(comm);
  return same_thread;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                                              ncclComm_t *newcomm, ncclConfig_t *config) {
  bool same_thread = has_same_thread(comm);
  return register_comm(ob_next_ncclCommSplit(comm, color, key, newcomm, config), newcomm, NULL,
                       same_thread, config);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count,
                                               ncclComm_t *newcomm, ncclConfig_t *config,
                                               int flags) {
  bool same_thread = has_same_thread(comm);
  return register_comm(ob_next_ncclCommShrink(comm, excluded, count, newcomm, config, flags),
                       newcomm, NULL, same_thread, config);
}

/* Completes the library's calls in flight and frees its plans before NCCL ends the communicator. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ob_nccl_comm_release(remove_comm(comm));
  return ob_next_ncclCommFinalize(comm);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ob_nccl_comm_release(remove_comm(comm));
  return ob_next_ncclCommDestroy(comm);
}

/* Aborts the library's calls on the communicator. Afterwards the library makes no more calls of
 * NCCL to query it. */
static void abort_comm(struct ob_nccl_comm *comm) {
  if (!comm)
    return;
  pthread_mutex_lock(&comm->lock);
  comm->aborted = true;
  pthread_mutex_unlock(&comm->lock);
  if (comm->onebit)
    onebit_comm_abort(comm->onebit);
}

/* Aborts a communicator, from any thread. Another thread may be waiting for lost ranks: it sees
 * that the communicator is aborted, and releases the state. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommAbort(ncclComm_t handle) {
  struct ob_nccl_comm *comm = remove_comm(handle);
  abort_comm(comm);
  ncclResult_t result = ob_next_ncclCommAbort(handle);
  ob_nccl_comm_release(comm);
  return result;
}

/* Aborts the library's calls as ncclCommAbort does. The program keeps the communicator, which it
 * may split, shrink or destroy. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  struct ob_nccl_comm *comm = ob_nccl_comm_acquire(handle);
  abort_comm(comm);
  ncclResult_t result = ob_next_ncclCommRevoke(handle, flags);
  ob_nccl_comm_release(comm);
  return result;
}

/* Does nothing. The library leaves a failed communicator to the program. The program still queries
 * NCCL, which reports the error to it. */
ncclResult_t ob_nccl_leave_to_program(ncclComm_t comm) {
  (void)comm;
  return ncclSuccess;
}
