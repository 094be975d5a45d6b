/*
 * The state of NCCL's communicators: found by their handles, settled by an agreement of all ranks
 * when they are made, given up before NCCL gives them up.
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

/* ---- Asking ---- */

/* Asks in parts: sending may be in a group, and ob_nccl_answer waits. */
static bool ask_begin(struct ob_nccl_comm *comm, const int64_t *values, int count,
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

static bool ask_send(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  return ob_next_ncclAllReduce(to->on_device, to->on_device, (size_t)count, ncclInt64, ncclMax,
                               comm->comm, stream) == ncclSuccess;
}

static bool ask_end(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  OB_ON_DEVICE(comm->device);
  return cudaMemcpyAsync(to->on_host, to->on_device, (size_t)count * sizeof *to->on_host,
                         cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
         cudaEventRecord(to->done, stream) == cudaSuccess;
}

/* True unless a rank is lost: the event never comes while NCCL waits for it. */
static bool is_well(struct ob_nccl_comm *comm) {
  ncclResult_t found = ncclSuccess;
  OB_LOCKED(&comm->lock);
  return !comm->aborted && ob_next_ncclCommGetAsyncError(comm->comm, &found) == ncclSuccess &&
         (found == ncclSuccess || found == ncclInProgress);
}

/* Prints that it waits. NCCL does not say for which rank: the one that does not print this. */
static bool is_late(struct ob_nccl_comm *comm, struct ob_watch *watch) {
  char what[96];
  double timeout;
  snprintf(what, sizeof what, "rank %d of %d, to agree on what to compress", comm->rank,
           comm->size);
  if (ob_watch_timeout(&timeout) == ONEBIT_OK && ob_watch_alone(watch, timeout, what) == ONEBIT_OK)
    return false;
  fprintf(stderr, "onebit: %s\n", onebit_last_error());
  comm->failed = true;
  return true;
}

bool ob_nccl_answer(struct ob_nccl_comm *comm, int64_t *values, int count) {
  OB_ON_DEVICE(comm->device);
  struct ob_watch watch = {0};
  cudaError_t error;
  while ((error = cudaEventQuery(comm->agreement.done)) == cudaErrorNotReady && is_well(comm) &&
         !is_late(comm, &watch))
    sched_yield();
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  else if (error == cudaSuccess)
    memcpy(values, comm->agreement.on_host, (size_t)count * sizeof *values);
  return error == cudaSuccess;
}

bool ob_nccl_largest(struct ob_nccl_comm *comm, int64_t *values, int count) {
  cudaStream_t stream = comm->agreement.stream;
  return ask_begin(comm, values, count, stream) && ask_send(comm, count, stream) &&
         ask_end(comm, count, stream) && ob_nccl_answer(comm, values, count);
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

/* Removes the state from the list; the list's reference is now the caller's. */
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

struct ob_nccl_comm *ob_nccl_comm_use(ncclComm_t handle) {
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

/* ---- Making ---- */

static bool comm_describe(struct ob_nccl_comm *comm) {
  return ob_next_ncclCommUserRank(comm->comm, &comm->rank) == ncclSuccess &&
         ob_next_ncclCommCount(comm->comm, &comm->size) == ncclSuccess &&
         ob_next_ncclCommCuDevice(comm->comm, &comm->device) == ncclSuccess;
}

/* Agreement for the loops. */
static bool agree_on_loop(void *comm, int64_t *values, int count) {
  return ob_nccl_largest(comm, values, count);
}

static bool comm_prepare(struct ob_nccl_comm *comm) {
  unsigned repeats = ob_nccl_wrong_settings() ? 2 : ob_preload.rules.warmup;
  OB_ON_DEVICE(comm->device);
  return agreement_create(&comm->agreement) &&
         ob_loops_create(repeats, agree_on_loop, comm, &comm->loops) == ONEBIT_OK;
}

/* The values that ranks agree on. A number is the same on all ranks if its largest value is minus
 * the largest value of its negative. */
enum { HASH, HASH_NEGATED, WRONG_SETTINGS, SAME_THREAD, REQUIRED, VALUES };

static void fill_values(const struct ob_nccl_comm *comm, int64_t values[VALUES]) {
  values[HASH] = ob_nccl_wrong_settings() ? 0 : (int64_t)(ob_preload_hash() >> 1);
  values[HASH_NEGATED] = -values[HASH];
  values[WRONG_SETTINGS] =
      ob_nccl_wrong_settings() ? comm->size - comm->rank : 0; /* the lowest rank counts */
  values[SAME_THREAD] = comm->same_thread;
  values[REQUIRED] = ob_preload.required;
}

/* The reason why nothing is compressed on it; NULL: something may be. */
static const char *comm_judge(const struct ob_nccl_comm *comm, const int64_t values[VALUES]) {
  if (values[WRONG_SETTINGS])
    return values[WRONG_SETTINGS] == comm->size - comm->rank ? ob_nccl_wrong_settings() : "";
  if (values[HASH] != -values[HASH_NEGATED])
    return "the ranks' rules (ONEBIT_RULES) or versions of onebit differ";
  if (values[SAME_THREAD])
    return "a thread drives several ranks, which could not wait for each other";
  return NULL;
}

/* Settles communicators. A thread that drives several ranks asks for all of them before it waits
 * for one. */
static ncclResult_t comm_settle(struct ob_nccl_comm **made, size_t count) {
  ncclResult_t result = ncclSuccess;
  int64_t values[VALUES];
  for (size_t i = 0; i < count; i++) {
    fill_values(made[i], values);
    ask_begin(made[i], values, VALUES, made[i]->agreement.stream);
  }
  ob_next_ncclGroupStart();
  for (size_t i = 0; i < count; i++)
    ask_send(made[i], VALUES, made[i]->agreement.stream);
  ob_next_ncclGroupEnd();
  for (size_t i = 0; i < count; i++)
    ask_end(made[i], VALUES, made[i]->agreement.stream);
  for (size_t i = 0; i < count; i++) {
    if (!ob_nccl_answer(made[i], values, VALUES)) {
      result = made[i]->failed ? ncclRemoteError : result; /* otherwise the program learns of it */
      continue;
    }
    const char *refused = comm_judge(made[i], values);
    made[i]->settled = refused == NULL;
    if (values[REQUIRED])
      atomic_store(&ob_preload.required, true);
    ob_nccl_print_start(made[i], refused);
  }
  return result;
}

/* True if this thread makes another rank of the same communicator. */
static bool makes_another_rank(const struct ob_nccl_made *made, size_t count, size_t which) {
  static const ncclUniqueId none;
  if (!memcmp(&made[which].id, &none, sizeof none))
    return false;
  for (size_t i = 0; i < count; i++)
    if (i != which && !memcmp(&made[i].id, &made[which].id, sizeof none))
      return true;
  return false;
}

static struct ob_nccl_comm *comm_create_comm(ncclComm_t handle, bool same_thread) {
  struct ob_nccl_comm *comm = ob_allocate(1, sizeof *comm);
  if (!comm)
    return NULL;
  comm->comm = handle;
  comm->same_thread = same_thread;
  pthread_mutex_init(&comm->lock, NULL);
  if (comm_describe(comm)) {
    add_comm(comm);
    return comm;
  }
  pthread_mutex_destroy(&comm->lock);
  ob_release(comm);
  return NULL;
}

/* The most communicators of one call, or of one group. */
enum { AT_ONCE = 64 };

/* Makes the state of new communicators. A rank that cannot be asked is missing to the others, as if
 * NCCL itself had failed. */
ncclResult_t ob_nccl_note_comms(const struct ob_nccl_made *made, size_t count) {
  OB_CALL_SCOPE;
  struct ob_nccl_comm *asked[AT_ONCE];
  size_t several = 0;
  ob_nccl_start();
  for (size_t i = 0; i < count && several < AT_ONCE; i++) {
    if (!made[i].blocking || !*made[i].comm) /* not there yet; a split that this rank is not in */
      continue;
    struct ob_nccl_comm *comm =
        comm_create_comm(*made[i].comm, made[i].same_thread || makes_another_rank(made, count, i));
    if (!comm)
      return ncclSystemError;
    if (comm->size < 2)
      continue;
    if (ob_nccl_why_unusable()) {
      ob_nccl_print_start(comm, ob_nccl_why_unusable());
      continue;
    }
    if (!comm_prepare(comm))
      return ncclSystemError;
    asked[several++] = comm;
  }
  return several ? comm_settle(asked, several) : ncclSuccess;
}

/* ---- In NCCL's place ---- */

/* True unless the config asks for a communicator that does not block; NCCL_CONFIG_UNDEF_INT, the
 * default, is one that does. */
static bool is_blocking(const ncclConfig_t *config, ncclResult_t result) {
  return result != ncclInProgress && !(config && config->blocking == 0);
}

/* Keeps the new communicator. Returns NCCL's result, unless that is good and keeping fails. */
static ncclResult_t keep_comm(ncclResult_t result, ncclComm_t *comm, const ncclUniqueId *id,
                              bool same_thread, const ncclConfig_t *config) {
  struct ob_nccl_made made = {.comm = comm, .same_thread = same_thread};
  if (result != ncclSuccess && result != ncclInProgress)
    return result;
  made.blocking = is_blocking(config, result);
  if (id)
    made.id = *id;
  if (ob_nccl_in_group())
    return ob_nccl_group_make(&made) ? result : ncclInvalidUsage;
  ncclResult_t settled = ob_nccl_note_comms(&made, 1);
  return settled == ncclSuccess ? result : settled;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id,
                                                 int rank) {
  return keep_comm(ob_next_ncclCommInitRank(comm, nranks, id, rank), comm, &id, false, NULL);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks,
                                                       ncclUniqueId id, int rank,
                                                       ncclConfig_t *config) {
  return keep_comm(ob_next_ncclCommInitRankConfig(comm, nranks, id, rank, config), comm, &id, false,
                   config);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank,
                                                         int ids, ncclUniqueId *id,
                                                         ncclConfig_t *config) {
  return keep_comm(ob_next_ncclCommInitRankScalable(comm, nranks, rank, ids, id, config), comm, id,
                   false, config);
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
  return ob_nccl_note_comms(each, (size_t)ndev);
}

/* True if a thread drives several ranks of this communicator, and so of those made of it. */
static bool has_same_thread(ncclComm_t handle) {
  struct ob_nccl_comm *comm = ob_nccl_comm_use(handle);
  bool same_thread = comm && comm->same_thread;
  ob_nccl_comm_release(comm);
  return same_thread;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                                              ncclComm_t *newcomm, ncclConfig_t *config) {
  bool same_thread = has_same_thread(comm);
  return keep_comm(ob_next_ncclCommSplit(comm, color, key, newcomm, config), newcomm, NULL,
                   same_thread, config);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count,
                                               ncclComm_t *newcomm, ncclConfig_t *config,
                                               int flags) {
  bool same_thread = has_same_thread(comm);
  return keep_comm(ob_next_ncclCommShrink(comm, excluded, count, newcomm, config, flags), newcomm,
                   NULL, same_thread, config);
}

/* Completes the library's calls in flight and frees its plans before NCCL looks. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ob_nccl_comm_release(remove_comm(comm));
  return ob_next_ncclCommFinalize(comm);
}

OB_PRELOAD_VISIBLE ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ob_nccl_comm_release(remove_comm(comm));
  return ob_next_ncclCommDestroy(comm);
}

/* Ends the library's calls on it. From here on the library does not ask NCCL about it. */
static void abort_comm(struct ob_nccl_comm *comm) {
  if (!comm)
    return;
  pthread_mutex_lock(&comm->lock);
  comm->aborted = true;
  pthread_mutex_unlock(&comm->lock);
  if (comm->onebit)
    onebit_comm_abort(comm->onebit);
}

/* Aborts from any thread, while another may be waiting for ranks that are gone: that one finds it
 * aborted, and is the last to let go. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommAbort(ncclComm_t handle) {
  struct ob_nccl_comm *comm = remove_comm(handle);
  abort_comm(comm);
  ncclResult_t result = ob_next_ncclCommAbort(handle);
  ob_nccl_comm_release(comm);
  return result;
}

/* Does the same, and the program still has the communicator, to split, shrink or destroy it. */
OB_PRELOAD_VISIBLE ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  struct ob_nccl_comm *comm = ob_nccl_comm_use(handle);
  abort_comm(comm);
  ncclResult_t result = ob_next_ncclCommRevoke(handle, flags);
  ob_nccl_comm_release(comm);
  return result;
}

/* Leaves a failed communicator to the program, which goes on asking NCCL about it and would
 * otherwise find it gone: NCCL reports the error to the program. */
ncclResult_t ob_nccl_leave_to_program(ncclComm_t comm) {
  (void)comm;
  return ncclSuccess;
}
