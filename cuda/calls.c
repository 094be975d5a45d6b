/* The public calls on streams. */
#include "base/call_scope.h"
#include "base/error.h"
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
  if (plan->state->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  return ob_plan_settle(plan);
}

/* Reads the counts that the device publishes in memory of the host. */
onebit_status_t onebit_plan_get_calls(onebit_plan_t plan, uint64_t *made, uint64_t *skipped) {
  OB_CALL_SCOPE_OF(plan, OB_HANDLE_PLAN);
  if (!made || !skipped)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", made ? "skipped" : "made");
  if (plan->options.device != ONEBIT_DEVICE_CUDA)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "the plan is on the host");
  if (plan->executor != &ob_executor_stream)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "over %s the host runs the calls: the device counts none",
                    plan->comm->transport->name);
  *made = plan->device->seen->outcome.calls;
  *skipped = plan->device->seen->outcome.skipped;
  return ONEBIT_OK;
}
