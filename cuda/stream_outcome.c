/* The outcome of calls on a stream: the host reads it afterwards, and tells the device. */
#include <sched.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/stream.h"

/* Reports the outcome to the caller that waits for this call, or keeps it for
 * onebit_plan_synchronize. */
static void stream_outcome_tell(const struct onebit_plan *plan, onebit_status_t status) {
  if (plan->state->in_flight && !plan->flight->call.on_stream)
    ob_steps_fail(plan, status);
  else
    ob_outcome_add(&plan->state->outcome, status);
}

static void note_outcome(const struct onebit_plan *plan, const struct ob_cuda_outcome *outcome) {
  onebit_status_t status = (onebit_status_t)outcome->status;
  int rank = ob_stream_origin(plan, outcome->origin);
  const char *name =
      plan->flight->call.agreed_name ? plan->flight->call.agreed_name : "an argument";
  if (status == ONEBIT_SKIPPED)
    ob_error(status, "skipped: a value on rank %d is not finite", rank);
  else if (status == ONEBIT_ERROR_PEER)
    ob_error(status, "rank %d could not take part in the call", rank);
  else if (status == ONEBIT_ERROR_ARGUMENT)
    ob_error(status, "%s in memory of the device is %g, not a finite number from 0 on", name,
             (double)ob_float_of(outcome->agreed));
  else if (status == ONEBIT_ERROR_MISMATCH && plan->flight->call.agreed_whole)
    ob_error(status, "from rank %d: %s differs between ranks: there it is %08x", rank, name,
             (unsigned)outcome->agreed);
  else if (status == ONEBIT_ERROR_MISMATCH)
    ob_error(status, "from rank %d: %s differs between ranks: there it is %.9g", rank, name,
             (double)ob_float_of(outcome->agreed));
  else
    ob_error(status, "from rank %d: a damaged or foreign message", rank);
  *plan->refused |= status == ONEBIT_ERROR_MESSAGE;
  stream_outcome_tell(plan, status);
}

static onebit_status_t forget_outcome(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  plan->device->seen->outcome.status = ONEBIT_OK;
  return ob_memory_cuda.clear(&state->outcome.status, sizeof state->outcome.status);
}

/* The stream has come to the end, so the host can look: its view of the plan is the device's. */
static void stream_outcome_look(const struct onebit_plan *plan) {
  struct ob_device *device = plan->device;
  onebit_status_t status = ONEBIT_OK;
  plan->state->worker.now = plan->state->server.now = (int)device->seen->now;
  if (device->seen->outcome.status == ONEBIT_OK)
    return;
  note_outcome(plan, &device->seen->outcome);
  status = forget_outcome(plan);
  if (status != ONEBIT_OK)
    ob_outcome_add(&plan->state->outcome, status);
}

static void stream_outcome_give_up(const struct onebit_plan *plan, onebit_status_t status) {
  plan->state->broken = true;
  stream_outcome_tell(plan, status);
}

/* While NCCL waits for a rank that is gone, the event never comes: then health tells. */
bool ob_stream_settled(const struct onebit_plan *plan, bool wait) {
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
    stream_outcome_give_up(plan, status);
  else if (error == cudaSuccess)
    stream_outcome_look(plan);
  return error != cudaErrorNotReady || plan->state->broken;
}

onebit_status_t ob_stream_imported(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  uint32_t flags = plan->state->server_large ? OB_FLAG_LARGE : 0;
  return ob_memory_cuda.copy(&state->residual_flags, &flags, sizeof flags);
}

onebit_status_t ob_stream_accept(const struct onebit_plan *plan) {
  struct ob_cuda_state *state = plan->device->kernel.state;
  return ob_memory_cuda.clear(&state->refused, sizeof state->refused);
}
