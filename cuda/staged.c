/*
 * Runs a plan on a device over a transport of host memory. The host runs the steps
 * (collectives/steps.c); kernels read and write messages in device memory. The messages that are
 * sent are copies in pinned memory, where the host stamps and checks headers.
 *
 *   stream out       .        copy 0   copy 1 ...                        result 0
 *   stream compute   kernel 0 kernel 1 kernel 2 ...   .         reduce 0 .       ... apply 0 ...
 *   stream in        .                                incoming 0                     results 0
 *
 * Copies go on streams of their own, so that they overlap with kernels, and both overlap with the
 * network. A message may leave when the event of its slot is reached. The device's state is copied
 * with it, and its flags then become the plan's.
 */
#include <string.h>

#include "base/error.h"
#include "collectives/messages.h"
#include "cuda/device.h"

/* --- Around a call */

void ob_staged_fail(const struct onebit_plan *plan, onebit_status_t status) {
  if (status != ONEBIT_OK)
    ob_steps_fail(plan, status);
}

static onebit_status_t wait_for_stream(const struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  cudaStream_t stream = plan->flight->call.stream;
  enum cudaStreamCaptureStatus capture;
  OB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone)
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "stream is capturing a graph, but over %s the host takes part in each call, so it "
        "cannot be captured",
        plan->comm->transport->name);
  OB_TRY(ob_device_check_stream(plan, stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->compute, plan->device->started, 0));
  return ONEBIT_OK;
}

/* Begins a call. The last call may have left copies running from messages that are now received
 * again, so the call waits for these copies. */
static onebit_status_t staged_begin(const struct onebit_plan *plan) {
  OB_ON_DEVICE(plan->device->number);
  struct ob_staging *staging = &plan->device->staging;
  memset(staging->seen, 0, (plan->geometry.slots + 1) * sizeof *staging->seen);
  ob_staged_host_begin(plan);
  OB_TRY_CUDA(ob_cuda_reach(staging->copied_in, true));
  if (plan->flight->call.on_stream)
    OB_TRY(wait_for_stream(plan));
  OB_TRY_CUDA(ob_cuda_begin(plan->device->kernel, staging->compute));
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->in, staging->computed, 0));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->out, staging->computed, 0));
  return ONEBIT_OK;
}

static onebit_status_t make_stream_wait(const struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(plan->flight->call.stream, staging->computed, 0));
  return ONEBIT_OK;
}

static void staged_end(const struct onebit_plan *plan) {
  if (!plan->flight->call.on_stream || plan->flight->outcome.status != ONEBIT_OK)
    return;
  OB_ON_DEVICE(plan->device->number);
  ob_staged_fail(plan, make_stream_wait(plan));
}

bool ob_staged_is_over(const struct onebit_plan *plan, cudaError_t error) {
  if (error == cudaErrorNotReady)
    return cudaGetLastError(), false;
  if (error != cudaSuccess)
    ob_staged_fail(plan, ob_cuda_error(error, "waiting for the device"));
  return true;
}

static bool staged_is_settled(const struct onebit_plan *plan, bool wait) {
  cudaStream_t stream = plan->device->staging.compute;
  OB_ON_DEVICE(plan->device->number);
  return ob_staged_is_over(plan, wait ? cudaStreamSynchronize(stream) : cudaStreamQuery(stream));
}

/* --- Results that the host reads */

void ob_staged_read_flags(const struct onebit_plan *plan, const struct ob_cuda_state *seen) {
  if (seen->flags & OB_FLAG_NOT_FINITE)
    atomic_store_explicit(&plan->state->work.not_finite, true, memory_order_relaxed);
  if (seen->flags & OB_FLAG_LARGE)
    atomic_store_explicit(&plan->state->work.large, true, memory_order_relaxed);
}

static bool has_arrived(const struct onebit_plan *plan, size_t index, bool wait) {
  struct ob_staging *staging = &plan->device->staging;
  cudaEvent_t event = staging->ready[index];
  if (!ob_staged_is_over(plan, ob_cuda_reach(event, wait)))
    return false;
  ob_staged_read_flags(plan, &staging->seen[index]);
  return true;
}

static bool has_arrived_with_scale(const struct onebit_plan *plan, size_t slot, bool wait) {
  const struct ob_cuda_state *last = &plan->device->staging.seen[plan->geometry.slots];
  if (!has_arrived(plan, slot, wait))
    return false;
  if (!plan->state->work.one_scale || plan->flight->outcome.status != ONEBIT_OK)
    return true;
  if (!has_arrived(plan, plan->geometry.slots, wait))
    return false;
  plan->flight->worker_scale = last->worker_scale;
  plan->flight->server_scale = last->server_scale;
  return true;
}

/* Returns true if the latest result of a chunk has been copied to the host's messages. */
static bool is_ready(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return has_arrived_with_scale(plan, chunk % plan->geometry.slots, wait);
}

/* --- Steps */

/* Sends a chunk that is ready. The inputs in the host's shared memory from which it was made are
 * not needed any more. */
static bool staged_send_to_servers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  if (!is_ready(plan, chunk, wait))
    return false;
  if (plan->host.ranks)
    ob_host_mark_used(plan, chunk);
  return ob_send_to_servers(plan, chunk, wait);
}

static bool staged_send_to_all(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return is_ready(plan, chunk, wait) && ob_send_to_all(plan, chunk, wait);
}

static bool staged_begin_round(const struct onebit_plan *plan, size_t round, bool wait) {
  return is_ready(plan, 0, wait) && ob_begin_round(plan, round, wait);
}

static bool staged_decide(const struct onebit_plan *plan, size_t chunk, bool wait) {
  for (size_t slot = 0; slot < plan->geometry.slots; slot++)
    if (!is_ready(plan, slot, wait))
      return false;
  return ob_steps_decide(plan, chunk, wait);
}

static onebit_status_t compress_chunk(const struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  if (plan->host.ranks)
    OB_TRY(ob_staged_host_compress(plan, chunk));
  else
    OB_TRY_CUDA(ob_device_compress(plan, chunk, staging->compute));
  OB_TRY(ob_staging_mark_computed(staging));
  if (plan->geometry.whole)
    OB_TRY(ob_staging_send_result(plan, chunk));
  else
    OB_TRY(ob_staging_send_outgoing(plan, chunk));
  return ob_staging_send_state(plan, chunk % plan->geometry.slots);
}

/* Clears the messages of a rank that cannot take part, so that it sends nothing of an earlier
 * call. */
static void clear_outgoing(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  if (geometry->whole)
    memset(ob_staging_result(plan, geometry, chunk), 0, geometry->stride);
  else
    for (size_t member = 0; member < geometry->members; member++)
      memset(ob_message_at(geometry, geometry->outgoing, member, chunk), 0, geometry->stride);
}

/* Waits for copies to the host: they could overwrite messages that are cleared next. */
static void finish_copies(const struct onebit_plan *plan) {
  ob_staged_is_over(plan, cudaStreamSynchronize(plan->device->staging.out));
}

static bool staged_compress(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, compress_chunk(plan, chunk));
  if (plan->flight->outcome.status != ONEBIT_OK) {
    finish_copies(plan);
    clear_outgoing(plan, chunk);
  }
  return true;
}

static onebit_status_t staged_finish(const struct onebit_plan *plan, bool server) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(ob_cuda_finish(plan->device->kernel, server, staging->compute));
  OB_TRY(ob_staging_mark_computed(staging));
  return ob_staging_send_state(plan, plan->geometry.slots);
}

static bool staged_finish_worker(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, staged_finish(plan, false));
  return true;
}

static bool staged_finish_server(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, staged_finish(plan, true));
  return true;
}

static onebit_status_t reduce_chunk(const struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY(ob_staging_load_incoming(plan, chunk));
  OB_TRY_CUDA(ob_device_reduce(plan, chunk, staging->compute));
  OB_TRY(ob_staging_mark_computed(staging));
  OB_TRY(ob_staging_send_result(plan, chunk));
  return ob_staging_send_state(plan, chunk % plan->geometry.slots);
}

static bool staged_reduce(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, reduce_chunk(plan, chunk));
  if (plan->flight->outcome.status != ONEBIT_OK) {
    finish_copies(plan);
    memset(ob_staging_result(plan, &plan->geometry, chunk), 0, plan->geometry.stride);
  }
  return true;
}

/* Computes a mean that is sent to no other rank. */
static onebit_status_t reduce_whole_chunk(const struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY(ob_staging_load_results(plan, chunk));
  OB_TRY_CUDA(ob_device_reduce(plan, chunk, staging->compute));
  OB_TRY(ob_staging_mark_computed(staging));
  return ob_staging_send_state(plan, chunk % plan->geometry.slots);
}

static bool staged_reduce_whole(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, reduce_whole_chunk(plan, chunk));
  return true;
}

/* Launches the kernel that applies messages, which were copied to the device with the status
 * `loaded`. */
static void staged_apply_results(const struct onebit_plan *plan, size_t chunk,
                                 onebit_status_t loaded,
                                 cudaError_t (*launch)(const struct onebit_plan *plan, size_t chunk,
                                                       cudaStream_t stream)) {
  cudaError_t error = cudaSuccess;
  if (loaded == ONEBIT_OK)
    error = launch(plan, chunk, plan->device->staging.compute);
  ob_staged_fail(plan, error == cudaSuccess ? loaded : ob_cuda_error(error, "launching a kernel"));
}

/* Applies a chunk. Results in memory that ranks share may be overwritten after this step, so the
 * step ends when the results have been copied to the device. */
static bool staged_apply(const struct onebit_plan *plan, size_t chunk, bool wait) {
  size_t *applied = &plan->device->host.staged.applied;
  if (plan->flight->outcome.status == ONEBIT_OK && !(plan->host.ranks && *applied > chunk))
    staged_apply_results(plan, chunk, ob_staging_load_results(plan, chunk), ob_device_apply);
  *applied = chunk + 1;
  return !plan->host.ranks || plan->flight->outcome.status != ONEBIT_OK ||
         ob_staged_is_over(plan, ob_cuda_reach(plan->device->staging.copied_in, wait));
}

/* Applies the mean of a whole chunk. A dense mean is on the device already. */
static bool staged_apply_whole(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    staged_apply_results(plan, chunk,
                         plan->geometry.dense ? ONEBIT_OK : ob_staging_load_results(plan, chunk),
                         ob_device_apply_sum);
  return true;
}

static bool staged_apply_segment(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    staged_apply_results(plan, chunk, ob_staging_load_incoming(plan, chunk), ob_device_apply_sum);
  return true;
}

static onebit_status_t staged_commit_residual(const struct onebit_plan *plan) {
  bool forget = plan->options.no_error_feedback;
  OB_TRY_CUDA(ob_cuda_commit(plan->device->kernel, forget, plan->device->staging.compute));
  return ONEBIT_OK;
}

/* Returns true if a scale of the server is large. The state received last has the flags of all
 * kernels of the server. */
static bool server_is_large(const struct onebit_plan *plan) {
  for (size_t slot = 0; slot <= plan->geometry.slots; slot++)
    if (plan->device->staging.seen[slot].server_flags & OB_FLAG_LARGE)
      return true;
  return false;
}

/* Commits the call. After a failure the device keeps its state. */
static bool staged_commit(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->geometry.dense)
    return true;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, staged_commit_residual(plan));
  if (plan->flight->outcome.status == ONEBIT_OK) {
    ob_residual_commit(&plan->state->worker);
    ob_residual_commit(&plan->state->server);
    plan->state->server_large = server_is_large(plan);
  }
  plan->state->result_now = !plan->state->result_now;
  return true;
}

/* --- The executor */

const struct ob_executor ob_executor_staged = {
    .codec = "cuda",
    .residuals = &ob_memory_cuda,
    .messages = &ob_memory_pinned,
    .shares_memory = true,
    .open = ob_device_open,
    .chunks = ob_device_chunks,
    .create = ob_staging_create,
    .destroy = ob_staging_destroy,
    .attached = ob_staged_host_register,
    .check = ob_device_check,
    .begin = staged_begin,
    .end = staged_end,
    .enter = ob_device_enter,
    .leave = ob_cuda_leave,
    .settled = staged_is_settled,
    .run = {[OB_STEP_HOST_PUT] = ob_staged_host_put,
            [OB_STEP_HOST_BARRIER] = ob_staged_host_barrier,
            [OB_STEP_HOST_COMPRESS] = staged_compress,
            [OB_STEP_COMPRESS] = staged_compress,
            [OB_STEP_COMPRESS_WHOLE] = staged_compress,
            [OB_STEP_FINISH_WORKER] = staged_finish_worker,
            [OB_STEP_EXCHANGE] = staged_send_to_servers,
            [OB_STEP_RECEIVE] = ob_receive_from_workers,
            [OB_STEP_HOST_WAIT_FREE] = ob_host_wait_free,
            [OB_STEP_REDUCE] = staged_reduce,
            [OB_STEP_FINISH_SERVER] = staged_finish_server,
            [OB_STEP_REDUCE_WHOLE] = staged_reduce_whole,
            [OB_STEP_GATHER] = staged_send_to_all,
            [OB_STEP_COLLECT] = ob_receive_from_servers,
            [OB_STEP_BEGIN_ROUND] = staged_begin_round,
            [OB_STEP_END_ROUND] = ob_end_round,
            [OB_STEP_HOST_PUBLISH] = ob_host_publish,
            [OB_STEP_HOST_WAIT] = ob_host_wait,
            [OB_STEP_CHECK_EARLY] = ob_steps_check_early,
            [OB_STEP_APPLY_EARLY] = ob_steps_apply_early,
            [OB_STEP_HOST_APPLY_EARLY] = ob_host_apply_early,
            [OB_STEP_DECIDE] = staged_decide,
            [OB_STEP_APPLY] = staged_apply,
            [OB_STEP_APPLY_LATE] = ob_steps_apply_late,
            [OB_STEP_HOST_APPLY_LATE] = ob_host_apply_late,
            [OB_STEP_APPLY_WHOLE] = staged_apply_whole,
            [OB_STEP_APPLY_SEGMENT] = staged_apply_segment,
            [OB_STEP_COMMIT] = staged_commit},
};
