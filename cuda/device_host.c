/*
 * The work inside a host of a hierarchical plan on a device: the window of the ranks' inputs, and
 * the kernels that use it. The executor moves inputs and results between the ranks of the host: in
 * messages (stream_messages.c), or through memory that they share (staging.c).
 */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"
#include "cuda/device.h"

static void *device_host_allocate(struct onebit_plan *plan, size_t count, size_t size) {
  plan->memory_bytes += count * size;
  return ob_memory_cuda.allocate(count, size);
}

/* Describes the window as this rank fills it: one dense message per segment. */
static struct ob_cuda_plan describe_window(const struct onebit_plan *plan) {
  struct ob_cuda_plan window = plan->device->kernel;
  struct ob_geometry *geometry = &window.geometry;
  size_t bytes = sizeof(struct ob_header) + ob_plan_longest_message(plan) * sizeof(float);
  geometry->dense = true;
  geometry->slots = geometry->chunks < OB_WINDOW_CHUNKS ? geometry->chunks : OB_WINDOW_CHUNKS;
  geometry->stride = (bytes + OB_ALIGNMENT - 1) / OB_ALIGNMENT * OB_ALIGNMENT;
  geometry->peer_stride = geometry->slots * geometry->stride;
  geometry->members = geometry->segments;
  geometry->first_segment = 0;
  return window;
}

/* Describes the window for adding it up. The members are the host's ranks; the segment of this
 * member is the first segment that this rank sends, and the segments of one rank lie next to each
 * other. The state names a rank by the number of the segment that it reduces. */
static struct ob_cuda_plan describe_host(const struct onebit_plan *plan) {
  struct ob_cuda_plan host = plan->device->host.window;
  host.geometry.members = plan->host.ranks;
  host.geometry.member = plan->host.local_rank;
  host.geometry.first_segment = plan->geometry.first_segment - plan->host.local_rank;
  host.geometry.peer_stride *= plan->geometry.members;
  host.origin = plan->geometry.member;
  host.origin_step = plan->geometry.members;
  return host;
}

static struct ob_cuda_plan describe_results(const struct onebit_plan *plan) {
  struct ob_cuda_plan results = plan->device->kernel;
  results.geometry.members = plan->geometry.segments;
  results.geometry.first_segment = 0;
  results.geometry.member = ob_own_segment(plan);
  results.origin = 0;
  for (int copy = 0; copy < 2; copy++)
    results.geometry.results[copy] -= ob_device_results_offset(plan);
  return results;
}

onebit_status_t ob_device_host_create(struct onebit_plan *plan) {
  struct ob_device_host *host = &plan->device->host;
  host->window = describe_window(plan);
  struct ob_geometry *window = &host->window.geometry;
  host->outgoing = window->outgoing =
      device_host_allocate(plan, window->segments, window->peer_stride);
  host->incoming = window->incoming =
      device_host_allocate(plan, window->segments, window->peer_stride);
  host->mean = device_host_allocate(plan, plan->geometry.members * ob_plan_longest_message(plan),
                                    sizeof(float));
  if (!host->outgoing || !host->incoming || !host->mean)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the sums of %zu ranks",
                    plan->host.ranks);
  host->host = describe_host(plan);
  host->results = describe_results(plan);
  return ONEBIT_OK;
}

void ob_device_host_destroy(const struct onebit_plan *plan) {
  struct ob_device_host *host = &plan->device->host;
  ob_memory_cuda.release(host->outgoing);
  ob_memory_cuda.release(host->incoming);
  ob_memory_cuda.release(host->mean);
}

/* --- A call */

void ob_device_host_begin(const struct onebit_plan *plan) {
  struct ob_device_host *host = &plan->device->host;
  bool half = ob_host_is_half(plan);
  host->window.geometry.half = host->host.geometry.half = half;
}

/* Writes the mean into messages; a dense message is the mean itself. */
static cudaError_t mean_to_messages(const struct onebit_plan *plan, size_t chunk,
                                    cudaStream_t stream) {
  const struct ob_geometry *geometry = &plan->device->kernel.geometry;
  unsigned char *first = ob_message_at(geometry, geometry->outgoing, 0, chunk);
  return ob_cuda_host_mean(plan->device->host.host, plan->flight->call.source.factor,
                           plan->geometry.members,
                           (float *)(void *)(first + sizeof(struct ob_header)),
                           plan->geometry.peer_stride / sizeof(float), chunk, stream);
}

cudaError_t ob_device_host_compress(const struct onebit_plan *plan, size_t chunk,
                                    cudaStream_t stream) {
  const struct ob_device_host *host = &plan->device->host;
  struct ob_cuda_source source = ob_device_source(plan);
  if (plan->geometry.dense)
    return mean_to_messages(plan, chunk, stream);
  source.values = host->mean;
  source.step = ob_plan_longest_message(plan);
  cudaError_t error = ob_cuda_host_mean(host->host, source.factor, plan->geometry.members,
                                        host->mean, source.step, chunk, stream);
  return error == cudaSuccess ? ob_cuda_compress(plan->device->kernel, source, chunk, stream)
                              : error;
}
