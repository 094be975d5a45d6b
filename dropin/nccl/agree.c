/* Agreements among the ranks of an NCCL communicator. */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/lock.h"
#include "collectives/watch.h"
#include "dropin/nccl/preload.h"

bool ob_agreement_create(struct ob_agreement *agreement) {
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
    ob_agreement_destroy(agreement);
  return good;
}

void ob_agreement_destroy(struct ob_agreement *agreement) {
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

/* ---- Asking ---- */

bool ob_nccl_ask_begin(struct ob_nccl_comm *comm, const int64_t *values, int count,
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

bool ob_nccl_ask_send(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  return ob_next_ncclAllReduce(to->on_device, to->on_device, (size_t)count, ncclInt64, ncclMax,
                               comm->comm, stream) == ncclSuccess;
}

bool ob_nccl_ask_end(struct ob_nccl_comm *comm, int count, cudaStream_t stream) {
  const struct ob_agreement *to = &comm->agreement;
  OB_ON_DEVICE(comm->device);
  return cudaMemcpyAsync(to->on_host, to->on_device, (size_t)count * sizeof *to->on_host,
                         cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
         cudaEventRecord(to->done, stream) == cudaSuccess;
}

/* True unless a rank is gone: while NCCL waits for one, the event never comes. */
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
  return ob_nccl_ask_begin(comm, values, count, stream) && ob_nccl_ask_send(comm, count, stream) &&
         ob_nccl_ask_end(comm, count, stream) && ob_nccl_answer(comm, values, count);
}
