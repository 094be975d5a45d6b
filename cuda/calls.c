/*
 * Implements the public calls on streams, the work between two calls, and the reading of the calls'
 * outcome, which the host learns afterwards.
 */
#include <sched.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/plan_private.h"
#include "cuda/device.h"
#include "onebit/cuda.h"

onebit_status_t onebit_allreduce_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream) {
  OB_CALL_SCOPE;
  return ob_collective_put(sendbuf, recvbuf, plan, ONEBIT_ALLREDUCE, stream);
}

onebit_status_t onebit_allgather_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                        cudaStream_t stream) {
  OB_CALL_SCOPE;
  return ob_collective_put(sendbuf, recvbuf, plan, ONEBIT_ALLGATHER, stream);
}

onebit_status_t onebit_reduce_scatter_stream(const void *sendbuf, void *recvbuf, onebit_plan_t plan,
                                             cudaStream_t stream) {
  OB_CALL_SCOPE;
  return ob_collective_put(sendbuf, recvbuf, plan, ONEBIT_REDUCE_SCATTER, stream);
}

onebit_status_t onebit_plan_synchronize(onebit_plan_t plan) {
  OB_CALL_SCOPE_OF(plan, OB_HANDLE_PLAN);
  OB_TRY(ob_plan_check_idle(plan));
  return ob_plan_settle(plan);
}

/* Reads the counts that the device publishes in host memory. */
onebit_status_t onebit_plan_get_calls(onebit_plan_t plan, uint64_t *made, uint64_t *skipped) {
  OB_CALL_SCOPE_OF(plan, OB_HANDLE_PLAN);
  if (!made || !skipped)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", made ? "skipped" : "made");
  if (plan->options.device != ONEBIT_DEVICE_CUDA)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "the plan is for host memory: create it with device ONEBIT_DEVICE_CUDA");
  if (plan->executor != &ob_executor_stream)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "over %s the host runs the calls, so the device does not count them: use the "
                    "status that each call returns",
                    plan->comm->transport->name);
  *made = plan->device->seen->outcome.calls;
  *skipped = plan->device->seen->outcome.skipped;
  return ONEBIT_OK;
}

/* ---- Work between two calls ---- */

/* Returns the number of elements in a result. */
static size_t result_count(const struct onebit_plan *plan) {
  size_t parts = plan->options.operation == ONEBIT_ALLGATHER ? (size_t)plan->comm->size : 1;
  return plan->count * parts;
}

static onebit_status_t check_plan(const struct onebit_plan *plan) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  OB_TRY(ob_plan_check_idle(plan));
  if (plan->options.device != ONEBIT_DEVICE_CUDA)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "the plan is for host memory: create it with device ONEBIT_DEVICE_CUDA");
  if (plan->executor != &ob_executor_stream)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "over %s the host runs the calls, so functions that work on the stream between "
                    "two calls are not supported",
                    plan->comm->transport->name);
  if (plan->state->broken)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "the plan's transport failed in an earlier call");
  return ONEBIT_OK;
}

/* Makes the stream wait for the plan's last call, which may be on another stream. Captured work
 * does not run yet, so nothing waits for it. */
static onebit_status_t order_after_last_call(const struct onebit_plan *plan, cudaStream_t stream,
                                             bool capturing) {
  if (capturing)
    return ONEBIT_OK;
  OB_TRY(ob_device_check_stream(plan, stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(stream, plan->device->last, 0));
  return ONEBIT_OK;
}

static onebit_status_t record_last_call(const struct onebit_plan *plan, cudaStream_t stream,
                                        bool capturing) {
  if (!capturing)
    OB_TRY_CUDA(cudaEventRecord(plan->device->last, stream));
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_reset_residual_stream(onebit_plan_t plan, cudaStream_t stream) {
  OB_CALL_SCOPE;
  OB_TRY(check_plan(plan));
  OB_ON_DEVICE(plan->device->number);
  bool capturing = ob_cuda_is_capturing(stream);
  if (plan->options.wire == ONEBIT_WIRE_DENSE)
    return ONEBIT_OK;
  OB_TRY(order_after_last_call(plan, stream, capturing));
  OB_TRY_CUDA(ob_cuda_forget(plan->device->kernel, stream));
  return record_last_call(plan, stream, capturing);
}

onebit_status_t onebit_scale_result_stream(void *recvbuf, float factor, onebit_plan_t plan,
                                           cudaStream_t stream) {
  OB_CALL_SCOPE;
  OB_TRY(check_plan(plan));
  if (result_count(plan) == 0)
    return ONEBIT_OK;
  if (!recvbuf)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "recvbuf is NULL");
  OB_ON_DEVICE(plan->device->number);
  bool capturing = ob_cuda_is_capturing(stream);
  OB_TRY(ob_device_check(plan, "recvbuf", recvbuf));
  OB_TRY(order_after_last_call(plan, stream, capturing));
  OB_TRY_CUDA(ob_cuda_scale(plan->device->kernel.state, recvbuf, plan->options.dtype,
                            result_count(plan), factor, stream));
  return record_last_call(plan, stream, capturing);
}

/* ---- The outcome of calls ---- */

/* Reports the outcome to a caller that waits for this call, or stores it for
 * onebit_plan_synchronize. */
static void report_outcome(const struct onebit_plan *plan, onebit_status_t status) {
  if (plan->state->in_flight && !plan->flight->call.on_stream)
    ob_steps_fail(plan, status);
  else
    ob_outcome_add(&plan->state->outcome, status);
}

static void describe_outcome(const struct onebit_plan *plan,
                             const struct ob_cuda_outcome *outcome) {
  onebit_status_t status = (onebit_status_t)outcome->status;
  int rank = ob_stream_origin(plan, outcome->origin);
  const char *name =
      plan->flight->call.agreed_name ? plan->flight->call.agreed_name : "an argument";
  if (status == ONEBIT_SKIPPED)
    ob_error(status, "skipped: rank %d has a value that is not finite", rank);
  else if (status == ONEBIT_ERROR_PEER)
    ob_error(status, "rank %d failed in this call: read its error message", rank);
  else if (status == ONEBIT_ERROR_ARGUMENT)
    ob_error(status, "%s in device memory is %g: it must be finite and at least 0", name,
             (double)ob_float_of(outcome->agreed));
  else if (status == ONEBIT_ERROR_MISMATCH && plan->flight->call.agreed_whole)
    ob_error(status, "from rank %d: %s differs between ranks: %08x on another rank", rank, name,
             (unsigned)outcome->agreed);
  else if (status == ONEBIT_ERROR_MISMATCH)
    ob_error(status, "from rank %d: %s differs between ranks: %.9g on another rank", rank, name,
             (double)ob_float_of(outcome->agreed));
  else
    ob_error(status, "from rank %d: the message is damaged or not from onebit", rank);
  *plan->refused |= status == ONEBIT_ERROR_MESSAGE;
  report_outcome(plan, status);
}

static onebit_status_t forget_outcome(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  plan->device->seen->outcome.status = ONEBIT_OK;
  return ob_memory_cuda.clear(&state->outcome.status, sizeof state->outcome.status);
}

/* Reads the outcome when the stream has reached the end of the call: copies the device's state of
 * the plan to the plan. */
static void read_outcome(const struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  onebit_status_t status = ONEBIT_OK;
  plan->state->worker.now = plan->state->server.now = (int)device->seen->now;
  if (device->seen->outcome.status == ONEBIT_OK)
    return;
  describe_outcome(plan, &device->seen->outcome);
  status = forget_outcome(plan);
  if (status != ONEBIT_OK)
    ob_outcome_add(&plan->state->outcome, status);
}

static void give_up_plan(const struct onebit_plan *plan, onebit_status_t status) {
  plan->state->broken = true;
  report_outcome(plan, status);
}

/* While NCCL waits for a lost rank, the call's event is not reached: ob_comm_health then reports
 * the error. */
bool ob_stream_is_settled(const struct onebit_plan *plan, bool wait) {
  OB_ON_DEVICE(plan->device->number);
  onebit_status_t status = ONEBIT_OK;
  cudaError_t error = cudaErrorNotReady;
  while (!plan->state->broken && status == ONEBIT_OK && error == cudaErrorNotReady) {
    error = cudaEventQuery(plan->device->last);
    if (error == cudaErrorNotReady)
      status = ob_comm_health(plan->comm);
    if (error == cudaErrorNotReady && status == ONEBIT_OK)
      status = ob_steps_watch(plan);
    if (!wait)
      break;
    if (error == cudaErrorNotReady)
      sched_yield();
  }
  if (error == cudaErrorNotReady)
    cudaGetLastError();
  else if (error != cudaSuccess)
    status = ob_cuda_error(error, "waiting for the device");
  if (error == cudaSuccess)
    plan->flight->watch = (struct ob_watch){0};
  if (status != ONEBIT_OK)
    give_up_plan(plan, status);
  else if (error == cudaSuccess)
    read_outcome(plan);
  return error != cudaErrorNotReady || plan->state->broken;
}

onebit_status_t ob_stream_note_import(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  uint32_t flags = plan->state->server_large ? OB_FLAG_LARGE : 0;
  return ob_memory_cuda.copy(&state->residual_flags, &flags, sizeof flags);
}

onebit_status_t ob_stream_accept(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  return ob_memory_cuda.clear(&state->refused, sizeof state->refused);
}
