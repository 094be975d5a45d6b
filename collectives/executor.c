/* The choice of a plan's executor. */
#include "collectives/executor.h"

#include "base/error.h"
#include "collectives/plan_private.h"

const struct ob_executor *ob_executor_for(onebit_comm_t comm, onebit_device_t device) {
#ifdef ONEBIT_HAVE_CUDA
  const struct ob_transport *transport = comm->transport;
  if (device == ONEBIT_DEVICE_CUDA)
    return transport->put || (transport->device_messages && transport->device_messages())
               ? &ob_executor_stream
               : &ob_executor_staged;
#else
  (void)comm;
#endif
  return device == ONEBIT_DEVICE_HOST ? &ob_executor_host : NULL;
}

onebit_status_t ob_executor_choose(struct onebit_plan *plan) {
  const struct ob_transport *transport = plan->comm->transport;
  plan->executor = ob_executor_for(plan->comm, plan->options.device);
  if (!plan->executor)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA: this library was built without CUDA");
  if (plan->executor == &ob_executor_host && !transport->host_messages)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_HOST: %s moves messages between GPUs only",
                    transport->name);
  return plan->executor->open ? plan->executor->open(plan) : ONEBIT_OK;
}
