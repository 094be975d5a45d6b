/*
 * Runs a plan on a device whose transport moves device memory. All steps of a call, kernels and
 * messages, are put on a stream in the order of the plan's list (with several chunks, messages are
 * on a second stream: device.h), and no host takes part: the device stamps and checks headers
 * (state.cu), and decides whether the call ends well. So the host learns the outcome only
 * afterwards, from the last copy of the state.
 *
 * If the host drives the transport (a CUDA-aware MPI), the host waits for the device before a
 * message leaves, and for the transport until one arrives; nothing else differs.
 *
 * A rank that cannot take part puts the same messages on the stream, with headers that say so. If
 * the caller's stream is not usable, the rank uses the plan's own stream.
 */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"
#include "cuda/device.h"

/* --- Creation and destruction */

static onebit_status_t stream_create(struct onebit_plan *plan) {
  OB_ON_DEVICE(plan->device->number);
  struct ob_device *device = plan->device;
  OB_TRY(ob_device_create(plan, false));
  device->kernel.results_stay = true; /* the host does not know which copy is the current one */
  device->kernel.early = ob_cuda_can_be_early();
  OB_TRY(ob_stream_host_create(plan));
  OB_TRY(ob_overlap_create(plan));
  device->kernel.seals = ob_cuda_can_seal(&device->kernel);
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&device->own, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&device->started, cudaEventDisableTiming));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&device->reached, cudaEventDisableTiming));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&device->last, cudaEventDisableTiming));
  device->seen = ob_memory_pinned.allocate(1, sizeof *device->seen);
  return device->seen ? ob_cuda_settle()
                      : ob_error(ONEBIT_ERROR_MEMORY, "out of pinned memory for a plan");
}

static void stream_destroy(struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  if (!device)
    return;
  OB_ON_DEVICE(device->number);
  if (device->seen) /* created last: from here on there may be calls to wait for */
    ob_stream_is_settled(plan, true);
  ob_cuda_destroy_event(device->last);
  ob_cuda_destroy_event(device->reached);
  ob_cuda_destroy_event(device->started);
  ob_cuda_destroy_stream(device->own);
  ob_memory_pinned.release(device->seen);
  ob_overlap_destroy(plan);
  ob_stream_host_destroy(plan);
  ob_device_destroy(plan, false);
}

/* --- Around a call */

static cudaStream_t call_stream_of(const struct onebit_plan *plan) { return plan->device->stream; }

/* Makes a call wait for the last one, which may be on another stream. Captured work does not run
 * yet, so nothing waits for it. */
static onebit_status_t wait_for_last_call(const struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  cudaStream_t stream = plan->flight->call.on_stream ? plan->flight->call.stream : device->own;
  device->stream = device->own; /* until the other stream is known to work */
  device->capturing = ob_cuda_is_capturing(stream);
  if (device->capturing && !plan->comm->transport->put) {
    device->capturing = false;
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "stream is capturing a graph, but over %s the host takes part in each call, so it "
        "cannot be captured",
        plan->comm->transport->name);
  }
  if (!device->capturing) {
    OB_TRY(ob_device_check_stream(plan, stream));
    OB_TRY_CUDA(cudaStreamWaitEvent(stream, device->last, 0));
  }
  device->stream = stream;
  return ONEBIT_OK;
}

/* Begins a call. A call without a stream first reads the outcome of earlier calls, so that its own
 * status does not include them. */
static onebit_status_t stream_begin(const struct onebit_plan *plan) {
  OB_ON_DEVICE(plan->device->number);
  if (!plan->flight->call.on_stream)
    ob_stream_is_settled(plan, true);
  onebit_status_t status = wait_for_last_call(plan);
  plan->device->has_sealed = false;
  plan->device->unopened = NULL;
  if (status == ONEBIT_OK)
    status = ob_comm_health(plan->comm);
  return status;
}

static onebit_status_t stream_publish(const struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  OB_TRY_CUDA(cudaMemcpyAsync(device->seen, device->kernel.state, sizeof *device->seen,
                              cudaMemcpyDeviceToHost, call_stream_of(plan)));
  if (!device->capturing)
    OB_TRY_CUDA(cudaEventRecord(device->last, call_stream_of(plan)));
  return ONEBIT_OK;
}

/* --- Steps */

/* Returns the contents of this rank's headers, and of the headers that are expected. */
static struct ob_cuda_stamp stream_stamp(const struct onebit_plan *plan,
                                         enum ob_message_kind kind) {
  return (struct ob_cuda_stamp){.kind = kind,
                                .agreed = plan->flight->call.agreed,
                                .rate = plan->flight->call.rate,
                                .failed = plan->flight->outcome.status != ONEBIT_OK,
                                .begins = !plan->device->has_sealed};
}

/* Seals messages. A launch on which the other ranks depend is repeated if it fails: the call fails,
 * but the other ranks are told, and the next call's messages still have the numbers that they
 * expect. */
void ob_stream_seal(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                    size_t chunk, enum ob_message_kind kind) {
  cudaStream_t stream = call_stream_of(plan);
  if (messages->seals && plan->flight->outcome.status == ONEBIT_OK)
    return;
  cudaError_t error = ob_cuda_seal(*messages, stream_stamp(plan, kind), chunk, stream);
  if (error != cudaSuccess) {
    ob_steps_fail(plan, ob_cuda_error(error, "launching a kernel"));
    ob_cuda_seal(*messages, stream_stamp(plan, kind), chunk, stream);
  }
  plan->device->has_sealed = true;
}

static onebit_status_t stream_open_messages(const struct onebit_plan *plan, bool decides) {
  struct ob_device *device = plan->device;
  const struct ob_cuda_plan *messages = device->unopened;
  struct ob_cuda_stamp stamp = stream_stamp(plan, device->unopened_kind);
  stamp.decides = decides;
  device->unopened = NULL;
  OB_TRY_CUDA(ob_cuda_open(*messages, stamp, device->unopened_chunk, call_stream_of(plan)));
  return ONEBIT_OK;
}

void ob_stream_open(const struct onebit_plan *plan) {
  onebit_status_t status = plan->device->unopened ? stream_open_messages(plan, false) : ONEBIT_OK;
  if (status != ONEBIT_OK)
    ob_steps_fail(plan, status);
}

void ob_stream_note_arrival(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                            size_t chunk, enum ob_message_kind kind) {
  ob_stream_open(plan);
  plan->device->unopened = messages->geometry.members > 1 ? messages : NULL;
  plan->device->unopened_kind = kind;
  plan->device->unopened_chunk = chunk;
}

/* Ends a step of the transport. If the transport failed, the call and the communicator end, since
 * later messages would wait for ever. */
bool ob_stream_end_batch(const struct onebit_plan *plan, onebit_status_t status) {
  if (status == ONEBIT_ERROR_TRANSPORT)
    ob_steps_give_up(plan);
  else if (status < ONEBIT_OK)
    ob_steps_fail(plan, status);
  return status != ONEBIT_IN_PROGRESS;
}

/* Returns true if the host drives the transport. It then waits for the device before a message
 * leaves. */
static bool host_drives_transport(const struct onebit_plan *plan) {
  return !plan->comm->transport->put;
}

/* Waits until the device has the messages ready, or returns ONEBIT_IN_PROGRESS if it does not. The
 * other ranks wait for the messages even if the device has failed. */
static onebit_status_t wait_for_device(const struct onebit_plan *plan, bool wait) {
  cudaError_t error = ob_cuda_reach(plan->device->reached, wait);
  if (error == cudaErrorNotReady)
    return cudaGetLastError(), ONEBIT_IN_PROGRESS;
  plan->device->sealed = false;
  if (error != cudaSuccess)
    ob_steps_fail(plan, ob_cuda_error(error, "waiting for the device"));
  return ONEBIT_OK;
}

static onebit_status_t stream_seal(const struct onebit_plan *plan, size_t chunk,
                                   enum ob_message_kind kind) {
  ob_stream_seal(plan, &plan->device->kernel, chunk, kind);
  if (host_drives_transport(plan))
    OB_TRY_CUDA(cudaEventRecord(plan->device->reached, call_stream_of(plan)));
  plan->device->sealed = host_drives_transport(plan);
  return ONEBIT_OK;
}

/* Sends the messages even if sealing them failed, since the other ranks wait for them. A header
 * depends on the flags that were received before. */
static onebit_status_t stream_send(const struct onebit_plan *plan, struct ob_batch *batch,
                                   size_t chunk, enum ob_message_kind kind, bool wait) {
  ob_stream_open(plan);
  onebit_status_t status = plan->device->sealed ? ONEBIT_OK : stream_seal(plan, chunk, kind);
  if (status != ONEBIT_OK)
    ob_steps_fail(plan, status);
  if (!host_drives_transport(plan))
    return ob_overlap_put(plan, batch, chunk);
  OB_TRY(wait_for_device(plan, wait));
  return ob_comm_begin(batch, plan->tag);
}

static bool stream_send_to_servers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_batch *batch = ob_exchange_batch(plan, chunk);
  return ob_stream_end_batch(plan, stream_send(plan, batch, chunk, OB_MESSAGE_WORKER, wait));
}

static bool stream_send_to_all(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_batch *batch = ob_gather_batch(plan, chunk);
  return ob_stream_end_batch(plan, stream_send(plan, batch, chunk, OB_MESSAGE_SERVER, wait));
}

static onebit_status_t stream_receive(const struct onebit_plan *plan, struct ob_batch *batch,
                                      size_t chunk, enum ob_message_kind kind, bool wait) {
  if (host_drives_transport(plan))
    OB_TRY(plan->comm->transport->test(batch, wait ? OB_WAIT_SLICE : 0));
  OB_TRY(ob_overlap_join(plan, chunk));
  ob_stream_note_arrival(plan, &plan->device->kernel, chunk, kind);
  return ONEBIT_OK;
}

static bool receive_from_workers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_batch *batch = plan->exchange[chunk % plan->geometry.slots];
  return ob_stream_end_batch(plan, stream_receive(plan, batch, chunk, OB_MESSAGE_WORKER, wait));
}

static bool receive_from_servers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_batch *batch = plan->gather[chunk % plan->geometry.slots];
  return ob_stream_end_batch(plan, stream_receive(plan, batch, chunk, OB_MESSAGE_SERVER, wait));
}

/* Begins a round of doubling, which is used only if the host drives the transport: later rounds
 * send received messages on, and all messages are checked after the last round. */
static bool stream_begin_round(const struct onebit_plan *plan, size_t round, bool wait) {
  struct ob_batch *batch = ob_round_batch(plan, round);
  return ob_stream_end_batch(plan, round > 0
                                       ? ob_comm_begin(batch, plan->tag)
                                       : stream_send(plan, batch, 0, OB_MESSAGE_SERVER, wait));
}

static bool end_round(const struct onebit_plan *plan, size_t round, bool wait) {
  bool last = (size_t)2 << round >= plan->geometry.members;
  onebit_status_t status = plan->comm->transport->test(plan->gather[0], wait ? OB_WAIT_SLICE : 0);
  if (status == ONEBIT_OK && last)
    ob_stream_note_arrival(plan, &plan->device->kernel, 0, OB_MESSAGE_SERVER);
  return ob_stream_end_batch(plan, status);
}

/* Notes the outcome of a launch of this rank's own work; a rank that does not take part has
 * none. */
static bool note_launch(const struct onebit_plan *plan, cudaError_t error) {
  if (error != cudaSuccess)
    ob_steps_fail(plan, ob_cuda_error(error, "launching a kernel"));
  return true;
}

#define LAUNCHED(plan, launch)                                                                     \
  ((plan)->flight->outcome.status != ONEBIT_OK || note_launch(plan, launch))

/* Notes the outcome of a launch of kernels that make messages and may also seal them. */
static bool note_sealing_launch(const struct onebit_plan *plan, cudaError_t error) {
  plan->device->has_sealed |= plan->device->kernel.seals && error == cudaSuccess;
  return note_launch(plan, error);
}

static bool launch_compress(const struct onebit_plan *plan, size_t chunk,
                            cudaError_t (*launch)(const struct onebit_plan *plan, size_t chunk,
                                                  cudaStream_t stream)) {
  enum ob_message_kind kind = plan->geometry.whole ? OB_MESSAGE_SERVER : OB_MESSAGE_WORKER;
  ob_stream_open(plan);
  plan->device->kernel.opens = false;
  plan->device->kernel.stamp = stream_stamp(plan, kind);
  return plan->flight->outcome.status != ONEBIT_OK ||
         note_sealing_launch(plan, launch(plan, chunk, call_stream_of(plan)));
}

static bool stream_compress(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return launch_compress(plan, chunk, ob_device_compress);
}

static bool stream_compress_host_mean(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return launch_compress(plan, chunk, ob_device_host_compress);
}

static bool stream_finish_worker(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  return LAUNCHED(plan, ob_cuda_finish(plan->device->kernel, false, call_stream_of(plan)));
}

/* Reduces a chunk, and opens its messages in the same kernel: the sum does not depend on the
 * headers. */
static bool stream_reduce(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_device *device = plan->device;
  (void)wait;
  device->kernel.opens = plan->flight->outcome.status == ONEBIT_OK && device->unopened &&
                         ob_cuda_is_short(&device->kernel);
  if (!device->kernel.opens)
    ob_stream_open(plan);
  device->unopened = NULL;
  device->kernel.stamp = stream_stamp(plan, OB_MESSAGE_SERVER);
  return LAUNCHED(plan, ob_device_reduce(plan, chunk, call_stream_of(plan)));
}

static bool stream_finish_server(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  return LAUNCHED(plan, ob_cuda_finish(plan->device->kernel, true, call_stream_of(plan)));
}

static bool stream_apply(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return LAUNCHED(plan, ob_device_apply(plan, chunk, call_stream_of(plan)));
}

static bool apply_sum(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return LAUNCHED(plan, ob_device_apply_sum(plan, chunk, call_stream_of(plan)));
}

static bool stream_decide(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  onebit_status_t status =
      plan->device->unopened ? stream_open_messages(plan, true) : ONEBIT_IN_PROGRESS;
  if (status == ONEBIT_OK)
    return true;
  if (status < ONEBIT_OK)
    ob_steps_fail(plan, status);
  struct ob_cuda_stamp stamp = stream_stamp(plan, OB_MESSAGE_SERVER);
  return note_launch(plan, ob_cuda_decide(plan->device->kernel, stamp, call_stream_of(plan)));
}

/* Ends a call. A windowed call is applied before it is decided, and has no residual. If the kernel
 * cannot be launched, the flags are cleared here, since the next call must not inherit them. */
static onebit_status_t stream_conclude(const struct onebit_plan *plan) {
  const struct ob_cuda_plan *kernel = ob_device_results(plan);
  struct ob_cuda_stamp stamp = stream_stamp(plan, OB_MESSAGE_SERVER);
  cudaError_t error = ob_cuda_conclude(*kernel, stamp, !plan->geometry.dense,
                                       plan->options.no_error_feedback, call_stream_of(plan));
  if (error != cudaSuccess)
    cudaMemsetAsync(&kernel->state->flags, 0, sizeof kernel->state->flags, call_stream_of(plan));
  OB_TRY_CUDA(error);
  return stream_publish(plan);
}

/* Ends a call, unless it is held: then it ends when all calls that are held together have been
 * decided. */
static bool stream_commit(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  return plan->flight->call.hold || ob_stream_end_batch(plan, stream_conclude(plan));
}

static void stream_end(const struct onebit_plan *plan) {
  if (!plan->flight->call.hold || plan->state->broken)
    return;
  OB_ON_DEVICE(plan->device->number);
  ob_outcome_add(&plan->state->outcome, stream_conclude(plan));
}

/* In a graph no event is recorded: the caller waits for replayed calls, and the device's state has
 * their outcome. Nothing is applied early, since the host does not know the other ranks' flags. */
const struct ob_executor ob_executor_stream = {
    .codec = "cuda",
    .residuals = &ob_memory_cuda,
    .messages = &ob_memory_cuda,
    .deferred = true,
    .open = ob_device_open,
    .chunks = ob_device_chunks,
    .create = stream_create,
    .destroy = stream_destroy,
    .check = ob_device_check,
    .imported = ob_stream_note_import,
    .accept = ob_stream_accept,
    .begin = stream_begin,
    .end = stream_end,
    .enter = ob_device_enter,
    .leave = ob_cuda_leave,
    .settled = ob_stream_is_settled,
    .run = {[OB_STEP_HOST_PUT] = ob_stream_host_put,
            [OB_STEP_HOST_BARRIER] = ob_stream_host_barrier,
            [OB_STEP_HOST_COMPRESS] = stream_compress_host_mean,
            [OB_STEP_COMPRESS] = stream_compress,
            [OB_STEP_COMPRESS_WHOLE] = stream_compress,
            [OB_STEP_FINISH_WORKER] = stream_finish_worker,
            [OB_STEP_EXCHANGE] = stream_send_to_servers,
            [OB_STEP_RECEIVE] = receive_from_workers,
            [OB_STEP_HOST_WAIT_FREE] = ob_steps_do_nothing,
            [OB_STEP_REDUCE] = stream_reduce,
            [OB_STEP_FINISH_SERVER] = stream_finish_server,
            [OB_STEP_REDUCE_WHOLE] = stream_reduce,
            [OB_STEP_GATHER] = stream_send_to_all,
            [OB_STEP_COLLECT] = receive_from_servers,
            [OB_STEP_BEGIN_ROUND] = stream_begin_round,
            [OB_STEP_END_ROUND] = end_round,
            [OB_STEP_HOST_PUBLISH] = ob_stream_host_publish,
            [OB_STEP_HOST_WAIT] = ob_stream_host_wait,
            [OB_STEP_CHECK_EARLY] = ob_steps_do_nothing,
            [OB_STEP_APPLY_EARLY] = ob_steps_do_nothing,
            [OB_STEP_HOST_APPLY_EARLY] = ob_steps_do_nothing,
            [OB_STEP_DECIDE] = stream_decide,
            [OB_STEP_APPLY] = stream_apply,
            [OB_STEP_APPLY_LATE] = stream_apply,
            [OB_STEP_HOST_APPLY_LATE] = stream_apply,
            [OB_STEP_APPLY_WHOLE] = apply_sum,
            [OB_STEP_APPLY_SEGMENT] = apply_sum,
            [OB_STEP_COMMIT] = stream_commit},
};
