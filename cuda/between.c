/*
 * Work that a program puts on a stream between the calls of a plan. It follows the plan's last
 * call, and the plan's next call follows it.
 */
#include "base/call_scope.h"
#include "base/error.h"
#include "cuda/device.h"
#include "onebit/cuda.h"

/* Elements of a result. */
static size_t result_count(const struct onebit_plan *plan) {
  size_t parts = plan->options.operation == ONEBIT_ALLGATHER ? (size_t)plan->comm->size : 1;
  return plan->count * parts;
}

static onebit_status_t check_plan(const struct onebit_plan *plan) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  if (plan->state->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  if (plan->options.device != ONEBIT_DEVICE_CUDA)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "the plan is on the host");
  if (plan->executor != &ob_executor_stream)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "over %s the host runs the call, and has its outcome at once",
                    plan->comm->transport->name);
  if (plan->state->broken)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "the plan's transport has failed before");
  return ONEBIT_OK;
}

/* Calls on two streams follow each other. What is captured has no place in time yet. */
static onebit_status_t between_follow(const struct onebit_plan *plan, cudaStream_t stream,
                                      bool capturing) {
  if (capturing)
    return ONEBIT_OK;
  OB_TRY(ob_device_check_stream(plan, stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(stream, plan->device->last, 0));
  return ONEBIT_OK;
}

static onebit_status_t between_lead(const struct onebit_plan *plan, cudaStream_t stream,
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
  OB_TRY(between_follow(plan, stream, capturing));
  OB_TRY_CUDA(ob_cuda_forget(plan->device->kernel, stream));
  return between_lead(plan, stream, capturing);
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
  OB_TRY(between_follow(plan, stream, capturing));
  OB_TRY_CUDA(ob_cuda_scale(plan->device->kernel.state, recvbuf, plan->options.dtype,
                            result_count(plan), factor, stream));
  return between_lead(plan, stream, capturing);
}
