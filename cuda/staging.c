/* Creates the staging of a plan on a device, which is streams and events, and makes the copies
 * between the device's messages and the host's pinned messages. staged.c has a diagram of the
 * streams. */
#include "cuda/device.h"

#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"

/* --- Copies */

/* Returns the address of a chunk's slot for the first member; those for the others follow,
 * peer_stride apart. */
static unsigned char *staging_slot_of(const struct onebit_plan *plan, unsigned char *base,
                                      size_t chunk) {
  return base + chunk % plan->geometry.slots * plan->geometry.stride;
}

onebit_status_t ob_staging_send_state(const struct onebit_plan *plan, size_t index) {
  struct ob_staging *staging = &plan->device->staging;
  OB_TRY_CUDA(cudaMemcpyAsync(&staging->seen[index], plan->device->kernel.state,
                              sizeof *staging->seen, cudaMemcpyDeviceToHost, staging->out));
  OB_TRY_CUDA(cudaEventRecord(staging->ready[index], staging->out));
  return ONEBIT_OK;
}

onebit_status_t ob_staging_mark_computed(struct ob_staging *staging) {
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->out, staging->computed, 0));
  return ONEBIT_OK;
}

static onebit_status_t make_kernels_wait(struct ob_staging *staging) {
  OB_TRY_CUDA(cudaEventRecord(staging->copied_in, staging->in));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->compute, staging->copied_in, 0));
  return ONEBIT_OK;
}

/* Makes copies from the host, on staging->in, wait for earlier kernels, which may still use the
 * memory that the copies write. */
static onebit_status_t make_copies_wait(struct ob_staging *staging) {
  OB_TRY_CUDA(cudaEventRecord(staging->computed, staging->compute));
  OB_TRY_CUDA(cudaStreamWaitEvent(staging->in, staging->computed, 0));
  return ONEBIT_OK;
}

/* Makes copies wait for kernels only if slots are used again: kernels of an earlier chunk may still
 * read them. */
static onebit_status_t make_slot_copies_wait(const struct onebit_plan *plan,
                                             struct ob_staging *staging) {
  return plan->geometry.slots == plan->geometry.chunks ? ONEBIT_OK : make_copies_wait(staging);
}

/* Rows of memory to copy between the host and the device. */
struct rows {
  unsigned char *memory;
  size_t pitch;
};

static cudaError_t staging_copy_rows(const struct onebit_plan *plan, struct rows to,
                                     struct rows from, size_t bytes, size_t count, bool down) {
  const struct ob_staging *staging = &plan->device->staging;
  enum cudaMemcpyKind kind = down ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  cudaStream_t stream = down ? staging->in : staging->out;
  int limit = 0;
  cudaError_t error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxPitch, plan->device->number);
  if (to.pitch <= (size_t)limit && from.pitch <= (size_t)limit)
    return cudaMemcpy2DAsync(to.memory, to.pitch, from.memory, from.pitch, bytes, count, kind,
                             stream);
  for (size_t row = 0; row < count && error == cudaSuccess; row++)
    error = cudaMemcpyAsync(to.memory + row * to.pitch, from.memory + row * from.pitch, bytes, kind,
                            stream);
  return error;
}

/* Copies one slot of all members between the host's messages and the device's. */
static cudaError_t copy_slots(const struct onebit_plan *plan, unsigned char *to,
                              unsigned char *from, size_t chunk, bool down) {
  const struct ob_geometry *geometry = &plan->geometry;
  struct rows rows[] = {{staging_slot_of(plan, to, chunk), geometry->peer_stride},
                        {staging_slot_of(plan, from, chunk), geometry->peer_stride}};
  return staging_copy_rows(plan, rows[0], rows[1], geometry->stride, geometry->members, down);
}

/* Copies one message, or only its beginning. */
static cudaError_t copy_message(const struct onebit_plan *plan, unsigned char *to,
                                unsigned char *from, size_t bytes, bool down) {
  const struct ob_staging *staging = &plan->device->staging;
  return cudaMemcpyAsync(to, from, bytes, down ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                         down ? staging->in : staging->out);
}

unsigned char *ob_staging_result(const struct onebit_plan *plan, const struct ob_geometry *geometry,
                                 size_t chunk) {
  return ob_result_at(geometry, !plan->state->result_now, geometry->member, chunk);
}

onebit_status_t ob_staging_send_outgoing(const struct onebit_plan *plan, size_t chunk) {
  OB_TRY_CUDA(copy_slots(plan, plan->geometry.outgoing, plan->device->kernel.geometry.outgoing,
                         chunk, false));
  return ONEBIT_OK;
}

onebit_status_t ob_staging_send_result(const struct onebit_plan *plan, size_t chunk) {
  OB_TRY_CUDA(copy_message(plan, ob_staging_result(plan, &plan->geometry, chunk),
                           ob_staging_result(plan, &plan->device->kernel.geometry, chunk),
                           plan->geometry.stride, false));
  return ONEBIT_OK;
}

/*
 * ---- The inside of a host ----
 *
 * The inside of a host in a hierarchical plan that is staged: the ranks share memory, as on the
 * processor (collectives/schedules/host.c), and a device's inputs and results are copied to and
 * from that memory.
 *
 *   stream compute  load 0    load 1          mean 0 compress 0 ...               apply 0 ...
 *   stream out           inputs 0  inputs 1 ...                outgoing 0 ...
 *   stream in                          inputs 0 of the others  ...          results 0 ...
 *
 * So a rank's bus carries its inputs once, the other ranks' inputs for its segment, and compressed
 * messages. A rank sets its counter in shared memory when the copy that the counter announces is
 * complete.
 */

static struct ob_staged_host *staged_of(const struct onebit_plan *plan) {
  return &plan->device->host.staged;
}

/* --- Creation and destruction */

static onebit_status_t staged_host_create(struct onebit_plan *plan) {
  struct ob_staged_host *staged = staged_of(plan);
  if (!plan->host.ranks)
    return ONEBIT_OK;
  OB_TRY(ob_device_host_create(plan));
  for (int slot = 0; slot < OB_WINDOW_CHUNKS; slot++)
    OB_TRY_CUDA(cudaEventCreateWithFlags(&staged->inputs_copied[slot], cudaEventDisableTiming));
  staged->seen = ob_memory_pinned.allocate(OB_WINDOW_CHUNKS, sizeof *staged->seen);
  return staged->seen ? ONEBIT_OK
                      : ob_error(ONEBIT_ERROR_MEMORY, "out of pinned memory for a plan");
}

/* Registers the shared memory with CUDA, since a copy from or to memory that is not registered
 * would make the host wait for the device. */
onebit_status_t ob_staged_host_register(const struct onebit_plan *plan) {
  const struct ob_shared *shared = &plan->host.shared;
  size_t *registered = &staged_of(plan)->registered;
  OB_ON_DEVICE(plan->device->number);
  for (; *registered < plan->host.ranks; ++*registered)
    OB_TRY_CUDA(
        cudaHostRegister(shared->base[*registered], shared->bytes, cudaHostRegisterPortable));
  return ONEBIT_OK;
}

static void staged_host_destroy(const struct onebit_plan *plan) {
  struct ob_staged_host *staged = staged_of(plan);
  while (staged->registered > 0)
    cudaHostUnregister(plan->host.shared.base[--staged->registered]);
  for (int slot = 0; slot < OB_WINDOW_CHUNKS; slot++)
    ob_cuda_destroy_event(staged->inputs_copied[slot]);
  ob_memory_pinned.release(staged->seen);
  ob_device_host_destroy(plan);
}

/* --- Copies */

/* Copies `count` segments from `segment` on between the window on the device and a rank's block.
 * Both have memory for the longest message; bytes past the end of a shorter one have no meaning. */
static cudaError_t copy_values(const struct onebit_plan *plan, unsigned char *there, size_t rank,
                               size_t segment, size_t count, size_t chunk, bool down) {
  const struct ob_geometry *window = &plan->device->host.window.geometry;
  size_t bytes = ob_plan_longest_message(plan) * (window->half ? sizeof(uint16_t) : sizeof(float));
  there += chunk % window->slots * window->stride + sizeof(struct ob_header);
  struct rows here = {ob_host_window(plan, rank, segment, chunk), plan->host.segment_bytes},
              device = {there, window->peer_stride};
  return staging_copy_rows(plan, down ? device : here, down ? here : device, bytes, count, down);
}

static onebit_status_t load_inputs(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_device_host *host = &plan->device->host;
  size_t members = plan->geometry.members;
  OB_TRY(make_copies_wait(&plan->device->staging)); /* chunk - 2 used the same memory */
  for (size_t rank = 0; rank < plan->host.ranks; rank++)
    if (rank != plan->host.local_rank)
      OB_TRY_CUDA(copy_values(plan,
                              host->incoming + rank * members * host->window.geometry.peer_stride,
                              rank, plan->geometry.first_segment, members, chunk, true));
  return make_kernels_wait(&plan->device->staging);
}

/* Copies a chunk of all ranks' results to the device. A rank's results are next to each other, in
 * its block and on the device. */
static onebit_status_t load_host_results(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *all = &plan->device->host.results.geometry;
  struct ob_staging *staging = &plan->device->staging;
  int next = !plan->state->result_now;
  OB_TRY(make_copies_wait(staging));
  for (size_t segment = 0; segment < all->segments; segment += plan->geometry.members)
    OB_TRY_CUDA(staging_copy_rows(
        plan, (struct rows){ob_result_at(all, next, segment, chunk), all->peer_stride},
        (struct rows){ob_host_result(plan, next, segment, chunk), all->peer_stride}, all->stride,
        plan->geometry.members, true));
  return make_kernels_wait(staging);
}

/* --- Steps */

void ob_staged_host_begin(const struct onebit_plan *plan) {
  staged_of(plan)->applied = 0;
  if (plan->host.ranks)
    ob_device_host_begin(plan);
}

static size_t staged_host_slot_of(const struct onebit_plan *plan, size_t chunk) {
  return chunk % plan->device->host.window.geometry.slots;
}

/* Copies a chunk of inputs to shared memory. Its slot in the window is free, since the chunk before
 * the last has left it. */
static onebit_status_t staged_host_put(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_device_host *host = &plan->device->host;
  struct ob_staging *staging = &plan->device->staging;
  size_t slot = staged_host_slot_of(plan, chunk);
  OB_TRY_CUDA(ob_cuda_host_put(host->window, ob_device_source(plan), chunk, staging->compute));
  OB_TRY(ob_staging_mark_computed(staging));
  OB_TRY_CUDA(copy_values(plan, host->outgoing, plan->host.local_rank, 0, plan->geometry.segments,
                          chunk, false));
  OB_TRY_CUDA(cudaMemcpyAsync(&host->staged.seen[slot], plan->device->kernel.state,
                              sizeof *host->staged.seen, cudaMemcpyDeviceToHost, staging->out));
  OB_TRY_CUDA(cudaEventRecord(host->staged.inputs_copied[slot], staging->out));
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
    if (!ob_staged_is_over(plan, ob_cuda_reach(staged->inputs_copied[slot], wait)))
      return false;
    ob_staged_read_flags(plan, &staged->seen[slot]);
  }
  ob_host_mark_loaded(plan, chunk);
  return ob_host_barrier(plan, chunk, wait);
}

onebit_status_t ob_staged_host_compress(const struct onebit_plan *plan, size_t chunk) {
  OB_TRY(load_inputs(plan, chunk));
  OB_TRY_CUDA(ob_device_host_compress(plan, chunk, plan->device->staging.compute));
  return ONEBIT_OK;
}

/* --- Copies from the host */

onebit_status_t ob_staging_load_results(const struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  int next = !plan->state->result_now;
  if (plan->host.ranks)
    return load_host_results(plan, chunk);
  OB_TRY(make_slot_copies_wait(plan, staging));
  OB_TRY_CUDA(copy_slots(plan, plan->device->kernel.geometry.results[next],
                         plan->geometry.results[next], chunk, true));
  return make_kernels_wait(staging);
}

/* Copies the others' messages to the device. This rank's own message never left it; but with one
 * scale its header, which holds the scale, was stamped on the host. */
onebit_status_t ob_staging_load_incoming(const struct onebit_plan *plan, size_t chunk) {
  struct ob_staging *staging = &plan->device->staging;
  const struct ob_geometry *host = &plan->geometry, *device = &plan->device->kernel.geometry;
  OB_TRY(make_slot_copies_wait(plan, staging));
  OB_TRY_CUDA(copy_slots(plan, device->incoming, host->incoming, chunk, true));
  if (plan->state->work.one_scale)
    OB_TRY_CUDA(copy_message(plan, ob_message_at(device, device->outgoing, device->member, chunk),
                             ob_message_at(host, host->outgoing, host->member, chunk),
                             sizeof(struct ob_header), true));
  return make_kernels_wait(staging);
}

/* --- Creation and destruction of the staging */

static onebit_status_t staging_create_streams(struct ob_staging *staging) {
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&staging->compute, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&staging->out, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&staging->in, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&staging->computed, cudaEventDisableTiming));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&staging->copied_in, cudaEventDisableTiming));
  return ONEBIT_OK;
}

static onebit_status_t create_ready(const struct onebit_plan *plan) {
  struct ob_staging *staging = &plan->device->staging;
  staging->ready = ob_allocate(plan->geometry.slots + 1, sizeof *staging->ready);
  staging->seen = ob_memory_pinned.allocate(plan->geometry.slots + 1, sizeof *staging->seen);
  if (!staging->ready || !staging->seen)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu messages in flight",
                    plan->geometry.slots);
  for (size_t i = 0; i <= plan->geometry.slots; i++)
    OB_TRY_CUDA(cudaEventCreateWithFlags(&staging->ready[i], cudaEventDisableTiming));
  return ONEBIT_OK;
}

onebit_status_t ob_staging_create(struct onebit_plan *plan) {
  OB_ON_DEVICE(plan->device->number);
  OB_TRY(ob_device_create(plan, true));
  OB_TRY(staging_create_streams(&plan->device->staging));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&plan->device->started, cudaEventDisableTiming));
  OB_TRY(create_ready(plan));
  OB_TRY(staged_host_create(plan));
  return ob_cuda_settle();
}

static void destroy_stream(cudaStream_t stream) {
  if (!stream)
    return;
  cudaStreamSynchronize(stream); /* the memory that it uses is freed next */
  cudaStreamDestroy(stream);
}

void ob_staging_destroy(struct onebit_plan *plan) {
  if (!plan->device)
    return;
  OB_ON_DEVICE(plan->device->number);
  struct ob_staging *staging = &plan->device->staging;
  destroy_stream(staging->out);
  destroy_stream(staging->in);
  destroy_stream(staging->compute);
  for (size_t i = 0; staging->ready && i <= plan->geometry.slots; i++)
    ob_cuda_destroy_event(staging->ready[i]);
  ob_cuda_destroy_event(plan->device->started);
  ob_cuda_destroy_event(staging->computed);
  ob_cuda_destroy_event(staging->copied_in);
  ob_release(staging->ready);
  ob_memory_pinned.release(staging->seen);
  staged_host_destroy(plan);
  ob_device_destroy(plan, true);
}
