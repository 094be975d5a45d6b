/* Messages beside kernels. */
#include "cuda/overlap.h"

#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"

/* Kernels wait for a batch before the next one of the same slot is put: an event a slot will do. */
static onebit_status_t create_events(const struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  OB_TRY_CUDA(cudaEventCreateWithFlags(&overlap->computed, cudaEventDisableTiming));
  overlap->moved = ob_allocate(plan->geometry.slots, sizeof *overlap->moved);
  if (!overlap->moved)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu messages on their way",
                    plan->geometry.slots);
  for (size_t i = 0; i < plan->geometry.slots; i++)
    OB_TRY_CUDA(cudaEventCreateWithFlags(&overlap->moved[i], cudaEventDisableTiming));
  return ONEBIT_OK;
}

onebit_status_t ob_overlap_create(struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  if (!plan->comm->transport->stream || plan->comm->size == 1 || plan->geometry.chunks == 1)
    return ONEBIT_OK;
  overlap->stream = plan->comm->transport->stream(plan->comm);
  return create_events(plan);
}

void ob_overlap_destroy(const struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  for (size_t i = 0; overlap->moved && i < plan->geometry.slots; i++)
    if (overlap->moved[i])
      cudaEventDestroy(overlap->moved[i]);
  ob_release(overlap->moved);
  if (overlap->computed)
    cudaEventDestroy(overlap->computed);
}

static onebit_status_t branch(const struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  OB_TRY_CUDA(cudaEventRecord(overlap->computed, plan->device->stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(overlap->stream, overlap->computed, 0));
  return ONEBIT_OK;
}

/* The others wait for the messages: where they cannot go beside, they go behind the kernels. */
onebit_status_t ob_overlap_put(const struct onebit_plan *plan, struct ob_batch *batch,
                               size_t chunk) {
  struct ob_overlap *overlap = &plan->device->overlap;
  cudaStream_t stream = plan->device->stream;
  if (!overlap->stream)
    return ob_comm_put(batch, stream);
  onebit_status_t forked = branch(plan);
  if (forked == ONEBIT_OK)
    stream = overlap->stream;
  else
    ob_steps_fail(plan, forked);
  OB_TRY(ob_comm_put(batch, stream));
  OB_TRY_CUDA(cudaEventRecord(overlap->moved[chunk % plan->geometry.slots], stream));
  return ONEBIT_OK;
}

onebit_status_t ob_overlap_join(const struct onebit_plan *plan, size_t chunk) {
  struct ob_overlap *overlap = &plan->device->overlap;
  if (overlap->stream)
    OB_TRY_CUDA(
        cudaStreamWaitEvent(plan->device->stream, overlap->moved[chunk % plan->geometry.slots], 0));
  return ONEBIT_OK;
}
