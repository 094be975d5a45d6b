/* Which place a plan has. */
#include "collectives/place.h"

#include "base/error.h"
#include "collectives/plan.h"

onebit_status_t ob_place_choose(struct onebit_plan *plan) {
  const struct ob_transport *transport = plan->comm->transport;
  plan->place = &ob_place_host;
  if (plan->options.device == ONEBIT_DEVICE_HOST)
    return transport->host_messages
               ? ONEBIT_OK
               : ob_error(ONEBIT_ERROR_UNSUPPORTED,
                          "device is ONEBIT_DEVICE_HOST: %s moves messages between GPUs only",
                          transport->name);
#ifdef ONEBIT_HAVE_CUDA
  plan->place = transport->put ? &ob_place_stream : &ob_place_staged;
  return plan->place->open(plan);
#else
  return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                  "device is ONEBIT_DEVICE_CUDA: this library was built without CUDA");
#endif
}

onebit_status_t ob_place_check_host(const struct onebit_plan *plan, const char *name,
                                    const void *buffer) {
  (void)plan;
#ifdef ONEBIT_HAVE_CUDA
  int device;
  if (ob_cuda_owns(buffer, &device))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "%s is %p, memory of CUDA device %d, and the device option is "
                    "ONEBIT_DEVICE_HOST",
                    name, buffer, device);
#else
  (void)name, (void)buffer;
#endif
  return ONEBIT_OK;
}
