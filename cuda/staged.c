/*
 * A plan on a device over a transport of the host. The host walks the steps (collectives/steps.c);
 * kernels read and write messages in memory of the device, and what travels is a copy in pinned
 * memory, where the host stamps and checks headers.
 *
 *   stream out       .        copy 0   copy 1 ...                        result 0
 *   stream compute   kernel 0 kernel 1 kernel 2 ...   .         reduce 0 .       ... apply 0 ...
 *   stream in        .                                incoming 0                     results 0
 *
 * Copies go on streams of their own, so that they overlap with kernels, and both with the network.
 * A message may leave when the event of its slot has come; with it comes the state of the device,
 * whose flags then become the plan's.
 */
#include <string.h>

#include "base/error.h"
#include "collectives/step_parts.h"
#include "collectives/steps.h"
#include "cuda/staging.h"

/* --- Waiting -----------------------------------------------------------------------------------*/

/* As ob_cuda_reach. */
static cudaError_t reach_end(cudaStream_t stream, bool wait) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaError_t error = wait ? cudaStreamSynchronize(stream) : cudaStreamQuery(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

/* --- Around a call -----------------------------------------------------------------------------*/

/* From here on this rank only tells the others that it cannot take part. */
static void fail(struct onebit_plan *plan, onebit_status_t status) {
  if (status != ONEBIT_OK)
    ob_steps_fail(plan, status);
}

static onebit_status_t follow(struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  cudaStream_t stream = plan->call.stream;
  enum cudaStreamCaptureStatus capture;
  OB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "stream is capturing a graph, and over %s the host takes part in a call",
                    plan->comm->transport->name);
  OB_TRY(ob_device_check_stream(plan, stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->compute, plan->device->begun, 0));
  return ONEBIT_OK;
}

/* The call before may have left copies on their way from messages that now are received anew. */
static onebit_status_t begin_call(struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  memset(staging->seen, 0, (plan->slots + 1) * sizeof *staging->seen);
  OB_TRY_CUDA(ob_cuda_reach(staging->copied_in, true));
  if (plan->call.on_stream)
    OB_TRY(follow(plan));
  OB_TRY_CUDA(ob_cuda_begin(plan->device->kernel, staging->compute));
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->in, staging->computed, 0));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->out, staging->computed, 0));
  return ONEBIT_OK;
}

static onebit_status_t begin(struct onebit_plan *plan) {
  int before = ob_cuda_enter(plan->device->number);
  onebit_status_t status = begin_call(plan);
  ob_cuda_leave(before);
  return status;
}

static onebit_status_t lead(struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(plan->call.stream, staging->computed, 0));
  return ONEBIT_OK;
}

static void end(struct onebit_plan *plan) {
  if (!plan->call.on_stream || plan->status != ONEBIT_OK)
    return;
  int before = ob_cuda_enter(plan->device->number);
  fail(plan, lead(plan));
  ob_cuda_leave(before);
}

/* Whether a query or a wait is over. An error ends the waiting too, and fails the call. */
static bool over(struct onebit_plan *plan, cudaError_t error) {
  if (error == cudaErrorNotReady)
    return cudaGetLastError(), false;
  if (error != cudaSuccess)
    fail(plan, ob_cuda_error(error, "waiting for the device"));
  return true;
}

static bool settled(struct onebit_plan *plan, bool wait) {
  cudaStream_t stream = plan->device->staging.compute;
  int before = ob_cuda_enter(plan->device->number);
  bool yes = over(plan, reach_end(stream, wait));
  ob_cuda_leave(before);
  return yes;
}

/* --- What the host learns ----------------------------------------------------------------------*/

/* What the device had met when it sent this. */
static void hear(struct onebit_plan *plan, const struct ob_cuda_state *seen) {
  if (seen->flags & OB_FLAG_NOT_FINITE)
    atomic_store_explicit(&plan->work.not_finite, true, memory_order_relaxed);
  if (seen->flags & OB_FLAG_LARGE)
    atomic_store_explicit(&plan->work.large, true, memory_order_relaxed);
}

static bool arrived(struct onebit_plan *plan, size_t index, bool wait) {
  struct ob_staging *staging = &plan->device->staging;
  cudaEvent_t event = staging->ready[index];
  if (!over(plan, ob_cuda_reach(event, wait)))
    return false;
  hear(plan, &staging->seen[index]);
  return true;
}

static bool arrived_with_scale(struct onebit_plan *plan, size_t slot, bool wait) {
  const struct ob_cuda_state *last = &plan->device->staging.seen[plan->slots];
  if (!arrived(plan, slot, wait))
    return false;
  if (!plan->work.one_scale || plan->status != ONEBIT_OK)
    return true;
  if (!arrived(plan, plan->slots, wait))
    return false;
  plan->worker_scale = last->worker_scale;
  plan->server_scale = last->server_scale;
  return true;
}

static bool ready(struct onebit_plan *plan, size_t chunk, bool wait) {
  int before = ob_cuda_enter(plan->device->number);
  bool yes = arrived_with_scale(plan, chunk % plan->slots, wait);
  ob_cuda_leave(before);
  return yes;
}

static bool all_ready(struct onebit_plan *plan, bool wait) {
  for (size_t slot = 0; slot < plan->slots; slot++)
    if (!ready(plan, slot, wait))
      return false;
  return true;
}

/* --- Steps -------------------------------------------------------------------------------------*/

static onebit_status_t compress_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(ob_device_compress(plan, chunk, staging->compute));
  OB_TRY(ob_staging_computed(staging));
  if (ob_gathers_whole(plan))
    OB_TRY(ob_staging_send_result(plan, chunk));
  else
    OB_TRY(ob_staging_send_outgoing(plan, chunk));
  return ob_staging_send_state(plan, chunk % plan->slots);
}

/* What a rank sends that cannot take part: nothing of an earlier call. */
static void clear_outgoing(struct onebit_plan *plan, size_t chunk) {
  if (ob_gathers_whole(plan))
    memset(ob_staging_result(plan, plan->results, chunk), 0, plan->stride);
  else
    for (size_t member = 0; member < plan->group.size; member++)
      memset(ob_message_at(plan, plan->outgoing, member, chunk), 0, plan->stride);
}

static void compress(struct onebit_plan *plan, size_t chunk) {
  int before = ob_cuda_enter(plan->device->number);
  if (plan->status == ONEBIT_OK)
    fail(plan, compress_chunk(plan, chunk));
  if (plan->status != ONEBIT_OK) {
    over(plan, reach_end(plan->device->staging.out, true)); /* what began may still write */
    clear_outgoing(plan, chunk);
  }
  ob_cuda_leave(before);
}

static onebit_status_t finish(struct onebit_plan *plan, bool server) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(ob_cuda_finish(plan->device->kernel, server, staging->compute));
  OB_TRY(ob_staging_computed(staging));
  return ob_staging_send_state(plan, plan->slots);
}

static void finish_on(struct onebit_plan *plan, bool server) {
  int before = ob_cuda_enter(plan->device->number);
  if (plan->status == ONEBIT_OK)
    fail(plan, finish(plan, server));
  ob_cuda_leave(before);
}

static void finish_worker(struct onebit_plan *plan) { finish_on(plan, false); }

static void finish_server(struct onebit_plan *plan) { finish_on(plan, true); }

static onebit_status_t reduce_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  bool whole = ob_gathers_whole(plan);
  OB_TRY(whole ? ob_staging_bring_results(plan, chunk) : ob_staging_bring_incoming(plan, chunk));
  OB_TRY_CUDA(ob_device_reduce(plan, chunk, staging->compute));
  OB_TRY(ob_staging_computed(staging));
  if (!whole) /* of a mean of results nobody else hears */
    OB_TRY(ob_staging_send_result(plan, chunk));
  return ob_staging_send_state(plan, chunk % plan->slots);
}

static void reduce(struct onebit_plan *plan, size_t chunk) {
  int before = ob_cuda_enter(plan->device->number);
  if (plan->status == ONEBIT_OK)
    fail(plan, reduce_chunk(plan, chunk));
  if (plan->status != ONEBIT_OK && !ob_gathers_whole(plan)) {
    over(plan, reach_end(plan->device->staging.out, true));
    memset(ob_staging_result(plan, plan->results, chunk), 0, plan->stride);
  }
  ob_cuda_leave(before);
}

static onebit_status_t apply_chunk(struct onebit_plan *plan, size_t chunk) {
  bool averaged = ob_is_dense(plan) && ob_gathers_whole(plan); /* and so here already */
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    OB_TRY(ob_staging_bring_incoming(plan, chunk));
  else if (!averaged)
    OB_TRY(ob_staging_bring_results(plan, chunk));
  OB_TRY_CUDA(ob_device_apply(plan, chunk, plan->device->staging.compute));
  return ONEBIT_OK;
}

static void apply(struct onebit_plan *plan, size_t chunk) {
  int before = ob_cuda_enter(plan->device->number);
  if (plan->status == ONEBIT_OK)
    fail(plan, apply_chunk(plan, chunk));
  ob_cuda_leave(before);
}

static onebit_status_t commit_kept(struct onebit_plan *plan) {
  bool forget = plan->options.no_error_feedback;
  OB_TRY_CUDA(ob_cuda_commit(plan->device->kernel, forget, plan->device->staging.compute));
  return ONEBIT_OK;
}

/* The last state that came has what all of the server's kernels met. */
static bool server_is_large(const struct onebit_plan *plan) {
  for (size_t slot = 0; slot <= plan->slots; slot++)
    if (plan->device->staging.seen[slot].server_flags & OB_FLAG_LARGE)
      return true;
  return false;
}

static void commit(struct onebit_plan *plan) {
  int before = ob_cuda_enter(plan->device->number);
  if (plan->status == ONEBIT_OK)
    fail(plan, commit_kept(plan));
  if (plan->status == ONEBIT_OK) { /* else the device goes on with what it had */
    ob_kept_commit(&plan->worker);
    ob_kept_commit(&plan->server);
    plan->server_large = server_is_large(plan);
  }
  ob_cuda_leave(before);
}

/* --- The row -----------------------------------------------------------------------------------*/

static onebit_status_t create_here(struct onebit_plan *plan) {
  int before = ob_cuda_enter(plan->device->number);
  onebit_status_t status = ob_staging_create(plan);
  ob_cuda_leave(before);
  return status;
}

static void destroy_there(struct onebit_plan *plan) {
  if (!plan->device)
    return;
  int before = ob_cuda_enter(plan->device->number);
  ob_staging_destroy(plan);
  ob_cuda_leave(before);
}

const struct ob_place ob_place_staged = {
    .codec = "cuda",
    .kept = &ob_memory_cuda,
    .messages = &ob_memory_pinned,
    .open = ob_device_open,
    .create = create_here,
    .destroy = destroy_there,
    .check = ob_device_check,
    .begin = begin,
    .end = end,
    .take = ob_steps_take,
    .settled = settled,
    .compress = compress,
    .finish_worker = finish_worker,
    .reduce = reduce,
    .finish_server = finish_server,
    .apply = apply,
    .commit = commit,
    .ready = ready,
    .all_ready = all_ready,
};
