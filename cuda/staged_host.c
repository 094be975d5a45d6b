/*
 * The inside of a host in a hierarchical plan that is staged: the ranks share memory, as on the
 * processor (collectives/schedules/host.c), and a device's inputs and results are copied to it and
 * from it.
 *
 *   stream compute  load 0    load 1          mean 0 compress 0 ...               apply 0 ...
 *   stream out           inputs 0  inputs 1 ...                outgoing 0 ...
 *   stream in                          inputs 0 of the others  ...          results 0 ...
 *
 * So a rank's bus carries its inputs once, the others' inputs about its share, and bits. A counter
 * of a rank is set when the copy is over that it tells of.
 */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"
#include "cuda/staging.h"

static struct ob_staged_host *staged_of(const struct onebit_plan *plan) {
  return &plan->device->host.staged;
}

/* --- Made and given back -----------------------------------------------------------------------*/

onebit_status_t ob_staged_host_create(struct onebit_plan *plan) {
  struct ob_staged_host *staged = staged_of(plan);
  if (!plan->host.ranks)
    return ONEBIT_OK;
  OB_TRY(ob_device_host_create(plan));
  for (int slot = 0; slot < OB_WINDOW_CHUNKS; slot++)
    OB_TRY_CUDA(cudaEventCreateWithFlags(&staged->there[slot], cudaEventDisableTiming));
  staged->seen = ob_memory_pinned.allocate(OB_WINDOW_CHUNKS, sizeof *staged->seen);
  return staged->seen ? ONEBIT_OK : ob_error(ONEBIT_ERROR_MEMORY, "no pinned memory for a plan");
}

/* A copy from or to memory that is not registered would make the host wait for the device. */
onebit_status_t ob_staged_host_attached(const struct onebit_plan *plan) {
  const struct ob_shared *shared = &plan->host.shared;
  size_t *registered = &staged_of(plan)->registered;
  for (; *registered < plan->host.ranks; ++*registered)
    OB_TRY_CUDA(
        cudaHostRegister(shared->base[*registered], shared->bytes, cudaHostRegisterPortable));
  return ONEBIT_OK;
}

void ob_staged_host_destroy(const struct onebit_plan *plan) {
  struct ob_staged_host *staged = staged_of(plan);
  while (staged->registered > 0)
    cudaHostUnregister(plan->host.shared.base[--staged->registered]);
  for (int slot = 0; slot < OB_WINDOW_CHUNKS; slot++)
    if (staged->there[slot])
      cudaEventDestroy(staged->there[slot]);
  ob_memory_pinned.release(staged->seen);
  ob_device_host_destroy(plan);
}

/* --- Copies ------------------------------------------------------------------------------------*/

/* The values of `count` segments from `segment` on, between the window on the device and a rank's
 * block. Both have room for the longest message; what is behind a shorter one means nothing. */
static cudaError_t copy_values(const struct onebit_plan *plan, unsigned char *there, size_t rank,
                               size_t segment, size_t count, size_t chunk, bool down) {
  const struct ob_geometry *window = &plan->device->host.window.geometry;
  size_t bytes = ob_plan_longest_message(plan) * (window->half ? sizeof(uint16_t) : sizeof(float));
  there += chunk % window->slots * window->stride + sizeof(struct ob_header);
  struct ob_rows here = {ob_host_window(plan, rank, segment, chunk), plan->host.segment_bytes},
                 device = {there, window->peer_stride};
  return ob_staging_copy_rows(plan, down ? device : here, down ? here : device, bytes, count, down);
}

static onebit_status_t bring_inputs(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_device_host *host = &plan->device->host;
  size_t members = plan->geometry.members;
  OB_TRY(ob_staging_in_follows(&plan->device->staging)); /* two chunks ago they lay there too */
  for (size_t rank = 0; rank < plan->host.ranks; rank++)
    if (rank != plan->host.local_rank)
      OB_TRY_CUDA(copy_values(plan,
                              host->incoming + rank * members * host->window.geometry.peer_stride,
                              rank, plan->geometry.first_segment, members, chunk, true));
  return ob_staging_compute_follows(&plan->device->staging);
}

/* A rank's results lie next to each other, in its block and on the device. */
onebit_status_t ob_staged_host_bring_results(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *all = &plan->device->host.results.geometry;
  struct ob_staging *staging = &plan->device->staging;
  int next = !plan->state->result_now;
  OB_TRY(ob_staging_in_follows(staging));
  for (size_t segment = 0; segment < all->segments; segment += plan->geometry.members)
    OB_TRY_CUDA(ob_staging_copy_rows(
        plan, (struct ob_rows){ob_result_at(all, next, segment, chunk), all->peer_stride},
        (struct ob_rows){ob_host_result(plan, next, segment, chunk), all->peer_stride}, all->stride,
        plan->geometry.members, true));
  return ob_staging_compute_follows(staging);
}

/* --- Steps -------------------------------------------------------------------------------------*/

void ob_staged_host_begin(const struct onebit_plan *plan) {
  staged_of(plan)->applied = 0;
  if (plan->host.ranks)
    ob_device_host_begin(plan);
}

static size_t staged_host_slot_of(const struct onebit_plan *plan, size_t chunk) {
  return chunk % plan->device->host.window.geometry.slots;
}

/* A slot of the window is free: before a chunk is put, that of two before is in shared memory. */
static onebit_status_t staged_host_put(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_device_host *host = &plan->device->host;
  struct ob_staging *staging = &plan->device->staging;
  size_t slot = staged_host_slot_of(plan, chunk);
  OB_TRY_CUDA(ob_cuda_host_put(host->window, ob_device_source(plan), chunk, staging->compute));
  OB_TRY(ob_staging_computed(staging));
  OB_TRY_CUDA(copy_values(plan, host->outgoing, plan->host.local_rank, 0, plan->geometry.segments,
                          chunk, false));
  OB_TRY_CUDA(cudaMemcpyAsync(&host->staged.seen[slot], plan->device->kernel.state,
                              sizeof *host->staged.seen, cudaMemcpyDeviceToHost, staging->out));
  OB_TRY_CUDA(cudaEventRecord(host->staged.there[slot], staging->out));
  return ONEBIT_OK;
}

bool ob_staged_host_put(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (!ob_host_is_free(plan, chunk))
    return false;
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_staged_fail(plan, staged_host_put(plan, chunk));
  return true;
}

bool ob_staged_host_barrier(const struct onebit_plan *plan, size_t chunk, bool wait) {
  const struct ob_staged_host *staged = staged_of(plan);
  size_t slot = staged_host_slot_of(plan, chunk);
  if (plan->flight->outcome.status == ONEBIT_OK) {
    if (!ob_staged_over(plan, ob_cuda_reach(staged->there[slot], wait)))
      return false;
    ob_staged_hear(plan, &staged->seen[slot]);
  }
  ob_host_loaded(plan, chunk);
  return ob_host_barrier(plan, chunk, wait);
}

onebit_status_t ob_staged_host_compress(const struct onebit_plan *plan, size_t chunk) {
  OB_TRY(bring_inputs(plan, chunk));
  OB_TRY_CUDA(ob_device_host_compress(plan, chunk, plan->device->staging.compute));
  return ONEBIT_OK;
}
