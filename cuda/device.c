/* Creates and destroys the device part of a plan, and describes the plan for kernels. */
#include "cuda/device.h"

#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"

onebit_status_t ob_device_open(struct onebit_plan *plan) {
  const struct ob_transport *transport = plan->comm->transport;
  int number;
  OB_TRY(ob_cuda_current_device(&number));
  if (transport->check_current)
    OB_TRY(transport->check_current(plan->comm));
  plan->device = ob_allocate(1, sizeof *plan->device);
  if (!plan->device)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a plan");
  plan->device->number = number;
  return ONEBIT_OK;
}

static onebit_status_t device_out_of_memory(const struct onebit_plan *plan) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory on CUDA device %d for a plan of %zu elements",
                  plan->device->number, plan->count);
}

static void *device_copy_array(struct onebit_plan *plan, const void *values, size_t count,
                               size_t size) {
  plan->memory_bytes += count * size;
  return ob_cuda_copy_array(values, count, size);
}

static struct ob_cuda_residual describe_residual(const struct ob_residual *residual,
                                                 const struct ob_layout *layout, double *sums) {
  return (struct ob_cuda_residual){.first = residual->first,
                                   .first_word = residual->first_word,
                                   .blocks = residual->blocks,
                                   .elements = ob_residual_elements(residual, layout),
                                   .values = {residual->values[0], residual->values[1]},
                                   .scales = {residual->scales[0], residual->scales[1]},
                                   .result_dtype = residual->result_dtype,
                                   .moments = {residual->moments[0], residual->moments[1]},
                                   .serving = residual->serving,
                                   .sums = sums};
}

static size_t max_blocks(const struct ob_geometry *geometry) {
  const size_t *bounds = geometry->bounds;
  size_t max = 0;
  for (size_t i = 0; i < geometry->segments * geometry->chunks; i++)
    if (bounds[i + 1] - bounds[i] > max)
      max = bounds[i + 1] - bounds[i];
  return max;
}

static struct ob_cuda_plan describe_plan(const struct onebit_plan *plan) {
  const struct ob_layout *layout = &plan->geometry.layout;
  struct ob_cuda_plan kernel = {
      .geometry = plan->geometry,
      .max_blocks = max_blocks(&plan->geometry),
      .gathered = plan->options.operation == ONEBIT_ALLGATHER,
      .rule = plan->state->work.rule,
      .dtype = plan->state->work.dtype,
      .output_dtype = plan->state->work.output_dtype,
      .worker = describe_residual(&plan->state->worker, layout, plan->state->worker_sums),
      .server = describe_residual(&plan->state->server, layout, plan->state->server_sums),
      .origin = plan->geometry.first_segment,
      .origin_step = 1,
  };
  struct ob_geometry *geometry = &kernel.geometry;
  geometry->bounds = plan->device->bounds;
  geometry->layout.piece = plan->device->pieces;
  for (int copy = 0; copy < 2; copy++)
    if (geometry->results[copy])
      geometry->results[copy] += ob_device_results_offset(plan);
  return kernel;
}

size_t ob_device_results_offset(const struct onebit_plan *plan) {
  return plan->geometry.first_segment * plan->geometry.peer_stride;
}

static onebit_status_t allocate_mirror(struct onebit_plan *plan, size_t members,
                                       unsigned char **memory) {
  const size_t each = plan->geometry.peer_stride;
  plan->memory_bytes += members * each;
  *memory = ob_memory_cuda.allocate(members, each);
  return *memory ? ONEBIT_OK : device_out_of_memory(plan);
}

/* Allocates the results of all ranks; most kernels get only the results of their own group. */
static onebit_status_t mirror_results(struct onebit_plan *plan, unsigned char **memory) {
  const struct ob_geometry *geometry = &plan->geometry;
  OB_TRY(allocate_mirror(plan, plan->host.ranks ? geometry->segments : geometry->members, memory));
  *memory += ob_device_results_offset(plan);
  return ONEBIT_OK;
}

static void release_results(const struct onebit_plan *plan, unsigned char *memory) {
  if (memory)
    ob_memory_cuda.release(memory - ob_device_results_offset(plan));
}

static onebit_status_t mirror_messages(struct onebit_plan *plan) {
  const struct ob_geometry *host = &plan->geometry;
  struct ob_geometry *device = &plan->device->kernel.geometry;
  device->outgoing = device->incoming = device->results[0] = device->results[1] = NULL;
  if (host->outgoing)
    OB_TRY(allocate_mirror(plan, plan->sizes.outgoing, &device->outgoing));
  if (host->incoming)
    OB_TRY(allocate_mirror(plan, host->members, &device->incoming));
  if (host->results[0])
    OB_TRY(mirror_results(plan, &device->results[0]));
  if (host->results[1] != host->results[0])
    return mirror_results(plan, &device->results[1]);
  device->results[1] = device->results[0];
  return ONEBIT_OK;
}

onebit_status_t ob_device_create(struct onebit_plan *plan, bool mirrors) {
  struct ob_device *device = plan->device;
  const struct ob_geometry *geometry = &plan->geometry;
  const struct ob_layout *layout = &geometry->layout;
  device->pieces =
      device_copy_array(plan, layout->piece, layout->pieces + 1, sizeof *device->pieces);
  device->bounds = device_copy_array(
      plan, geometry->bounds, geometry->segments * geometry->chunks + 1, sizeof *device->bounds);
  if (!device->pieces || !device->bounds)
    return device_out_of_memory(plan);
  device->kernel = describe_plan(plan);
  device->kernel.checks =
      ob_memory_cuda.allocate(OB_CUDA_CHECKS(plan->comm->size), sizeof(uint32_t));
  if (!device->kernel.checks)
    return device_out_of_memory(plan);
  device->kernel.state = ob_memory_cuda.allocate(1, sizeof *device->kernel.state);
  if (!device->kernel.state)
    return device_out_of_memory(plan);
  return mirrors ? mirror_messages(plan) : ONEBIT_OK;
}

void ob_device_destroy(struct onebit_plan *plan, bool mirrors) {
  struct ob_device *device = plan->device;
  struct ob_geometry *geometry = &device->kernel.geometry;
  ob_memory_cuda.release(device->pieces);
  ob_memory_cuda.release(device->bounds);
  ob_memory_cuda.release(device->kernel.checks);
  ob_memory_cuda.release(device->kernel.state);
  /* Until the state exists, these pointers point to the plan's own memory, which is not released
   * here. */
  if (mirrors && device->kernel.state) {
    ob_memory_cuda.release(geometry->outgoing);
    ob_memory_cuda.release(geometry->incoming);
    if (geometry->results[1] != geometry->results[0])
      release_results(plan, geometry->results[1]);
    release_results(plan, geometry->results[0]);
  }
  ob_release(device);
  plan->device = NULL;
}

int ob_device_enter(const struct onebit_plan *plan) { return ob_cuda_enter(plan->device->number); }

onebit_status_t ob_device_check(const struct onebit_plan *plan, const char *name,
                                const void *buffer) {
  return ob_cuda_check(plan->device->number, name, buffer);
}

bool ob_cuda_is_capturing(cudaStream_t stream) {
  enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess)
    cudaGetLastError(); /* an error of the stream will be found when work is put on it */
  return error == cudaSuccess && capture != cudaStreamCaptureStatusNone;
}

onebit_status_t ob_device_check_stream(const struct onebit_plan *plan, cudaStream_t stream) {
  cudaError_t error = cudaEventRecord(plan->device->started, stream);
  if (error == cudaErrorInvalidResourceHandle)
    return cudaGetLastError(),
           ob_error(ONEBIT_ERROR_ARGUMENT, "stream is %p, not a stream of CUDA device %d",
                    (void *)stream, plan->device->number);
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, "stream");
}

/* Describes a buffer's parts, which have the same size, by the first one that is not NULL. */
static struct ob_cuda_pieces describe_parts(const void *const *each, size_t count, size_t step) {
  for (size_t k = 0; k < count; k++)
    if (each[k])
      return (struct ob_cuda_pieces){.base = (char *)(uintptr_t)each[k] - k * step, .step = step};
  return (struct ob_cuda_pieces){.step = step};
}

struct ob_cuda_source ob_device_source(const struct onebit_plan *plan) {
  const struct ob_call *call = &plan->flight->call;
  size_t step = plan->geometry.layout.piece[0].count * ob_dtype_size(plan->options.dtype);
  struct ob_cuda_source source = {.factor = call->source.factor,
                                  .momentum = call->source.momentum,
                                  .momentum_in_residual = call->source.momentum_in_residual,
                                  .only_at_first = call->only_at_first,
                                  .decay = call->source.decay,
                                  .weight = call->source.weight,
                                  .scalings = call->source.scalings,
                                  .reciprocals = call->source.reciprocals,
                                  .limit = call->source.limit,
                                  .moment_rule = call->source.moment_rule,
                                  .moment = call->source.moment,
                                  .floors = call->source.floors,
                                  .own = call->source.own,
                                  .counted = call->counted,
                                  .float32 = call->source.float32};
  if (call->device_inputs)
    source.inputs.each = call->device_inputs;
  else
    source.inputs = describe_parts(call->source.inputs, plan->geometry.layout.pieces, step);
  return source;
}

static struct ob_cuda_pieces describe_outputs(const struct onebit_plan *plan) {
  const struct ob_call *call = &plan->flight->call;
  bool gathered = plan->options.operation == ONEBIT_ALLGATHER;
  size_t count = gathered ? plan->geometry.members : plan->geometry.layout.pieces;
  size_t step =
      plan->geometry.layout.piece[0].count * ob_dtype_size(plan->state->work.output_dtype);
  if (call->device_outputs)
    return (struct ob_cuda_pieces){.each = call->device_outputs};
  /* A rank has a buffer for its own segment only. */
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    return (struct ob_cuda_pieces){.base = call->outputs[plan->comm->rank]};
  return describe_parts((const void *const *)call->outputs, count, step);
}

const struct ob_cuda_plan *ob_device_results(const struct onebit_plan *plan) {
  return plan->host.ranks ? &plan->device->host.results : &plan->device->kernel;
}

cudaError_t ob_device_compress(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream) {
  struct ob_cuda_source source = ob_device_source(plan);
  if (plan->geometry.dense)
    return ob_cuda_load(plan->device->kernel, source, chunk, stream);
  return ob_cuda_compress(plan->device->kernel, source, chunk, stream);
}

cudaError_t ob_device_reduce(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream) {
  if (plan->geometry.dense)
    return ob_cuda_mean(plan->device->kernel, chunk, stream);
  return ob_cuda_reduce(plan->device->kernel, chunk, stream);
}

cudaError_t ob_device_apply(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream) {
  const struct ob_cuda_plan *kernel = ob_device_results(plan);
  if (plan->flight->call.sink)
    return ob_cuda_apply(*kernel, ob_device_pass(plan->flight->call.sink), chunk, stream);
  if (plan->geometry.dense)
    return ob_cuda_convert(*kernel, describe_outputs(plan), chunk, stream);
  return ob_cuda_store(*kernel, describe_outputs(plan), chunk, stream);
}

cudaError_t ob_device_apply_sum(const struct onebit_plan *plan, size_t chunk, cudaStream_t stream) {
  const struct ob_cuda_plan *kernel = &plan->device->kernel;
  if (plan->geometry.dense)
    return ob_cuda_convert(*kernel, describe_outputs(plan), chunk, stream);
  return ob_cuda_sum(*kernel, describe_outputs(plan), chunk, stream);
}

/*
 * ---- Chunks ----
 *
 * Chooses the number of messages into which a plan on a device cuts each segment, unless the plan's
 * options set it. The processor's choice suits its caches and the messages that MPI sends eagerly;
 * a device launches kernels over all segments at once, and each launch and each message costs a few
 * microseconds.
 *
 * No bit of a result depends on the number of chunks.
 */

#define MI ((size_t)1 << 20)

/* Elements in a chunk. A further chunk costs a stream about 12 us: the latency of an NCCL exchange,
 * and gaps between its kernels. With n elements in c chunks, 1 / c of the shorter of compressing
 * and exchanging overlaps with nothing, and compressing takes n / 354 G/s (docs/cuda.md, H200). The
 * sum of both costs is smallest at c = sqrt(n / (354 G/s * 12 us)). */
#define ELEMENTS_A_CHUNK (4 * MI)

/* With 8 chunks, a further chunk hides less than an eighth of the shorter of compressing and
 * exchanging. */
#define MAX_STREAMED 8

/* The host launches 3 kernels, 6 copies and as many events per chunk, about 30 us: less than the 84
 * us that 1 MiB of bits takes at 100 Gbit/s. */
#define ELEMENTS_STAGED (8 * MI)

/* Dense messages have 32 times the bytes: 8 MiB take 18 us at 450 GB/s. */
#define ELEMENTS_DENSE (2 * MI)

/* The limit also holds for a host's window, which has memory for two chunks, with three times 4
 * bytes for each of their elements: 24 / 16 bytes per element of the plan. */
#define MAX_STAGED 16

static size_t limit_chunks(size_t chunks, size_t max) {
  return chunks < 1 ? 1 : chunks < max ? chunks : max;
}

static size_t choose_stream_chunks(size_t elements) {
  size_t chunks = 1;
  while (chunks < MAX_STREAMED && (chunks + 1) * (chunks + 1) * ELEMENTS_A_CHUNK <= elements)
    chunks++;
  return chunks;
}

/* With one scale for all blocks, nothing can be sent until everything is compressed; only reducing
 * a segment could overlap, and that saves less than another chunk costs. */
size_t ob_device_chunks(const struct onebit_plan *plan, size_t elements) {
  const bool in_window =
      plan->schedule->window || plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  if (plan->comm->size == 1)
    return 1;
  if (in_window)
    return limit_chunks(elements / ELEMENTS_DENSE, MAX_STAGED);
  if (!plan->comm->transport->put)
    return limit_chunks(elements / ELEMENTS_STAGED, MAX_STAGED);
  return plan->geometry.one_scale ? 1 : choose_stream_chunks(elements);
}
