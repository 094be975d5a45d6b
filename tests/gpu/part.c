/* Implements struct part: one rank's plan, its buffers, and calls on it. */
#include "tests/gpu/plans.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "compression/numerics.h"
#include "tests/codec_cases.h"

/* --- Memory of the host or of a device */

/* A byte pattern that no element has. Bytes that still have it were not written. */
enum { UNTOUCHED = 0x5a };

static void *allocate_buffer(bool device, size_t bytes) {
  void *memory = NULL;
  if (!device)
    return memset(gpu_allocate(bytes, 1), UNTOUCHED, bytes);
  if (CHECK_CUDA(cudaMalloc(&memory, bytes)) && CHECK_CUDA(cudaMemset(memory, UNTOUCHED, bytes)))
    CHECK_CUDA(cudaStreamSynchronize(NULL));
  return memory;
}

static void free_buffer(bool device, void *memory) {
  if (device)
    CHECK_CUDA(cudaFree(memory));
  else
    free(memory);
}

static void *allocate_pinned(size_t bytes) {
  void *memory = NULL;
  CHECK_CUDA(cudaHostAlloc(&memory, bytes + 1, cudaHostAllocDefault));
  return memory;
}

/* Sets the buffer addresses. For an in-place call the shorter buffer is this rank's part of the
 * longer one. */
static void place_buffers(struct part *part) {
  const size_t element = ob_dtype_size(part->what.options.dtype);
  const size_t offset = part->what.offset * element;
  const size_t own = part->what.count * element * (size_t)part->rank;
  const onebit_operation_t operation = part->what.options.operation;
  const bool apart = !part->what.in_place;
  part->memory[0] =
      allocate_buffer(part->device, offset + part->sent_bytes + part->received_bytes + 1);
  part->memory[1] =
      apart ? allocate_buffer(part->device, 3 * offset + part->received_bytes + 1) : NULL;
  char *both = (char *)part->memory[0] + offset;
  part->in = both + (!apart && operation == ONEBIT_ALLGATHER ? own : 0);
  part->out = apart ? (char *)part->memory[1] + 3 * offset
                    : both + (operation == ONEBIT_REDUCE_SCATTER ? own : 0);
}

bool part_create(struct part *part, onebit_comm_t comm, const struct plan_case *what, bool device) {
  onebit_plan_options_t options = what->options;
  *part = (struct part){.what = *what, .device = device, .info.size = sizeof part->info};
  part->rank = onebit_comm_rank(comm);
  part->size = onebit_comm_size(comm);
  const size_t bytes = what->count * ob_dtype_size(options.dtype), ranks = (size_t)part->size;
  part->sent_bytes = bytes * (options.operation == ONEBIT_REDUCE_SCATTER ? ranks : 1);
  part->received_bytes = bytes * (options.operation == ONEBIT_ALLGATHER ? ranks : 1);
  options.device = device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  if (!CHECK_STATUS(onebit_plan_create(comm, what->count, &options, &part->plan), ONEBIT_OK))
    return false;
  CHECK_STATUS(onebit_plan_get_info(part->plan, &part->info), ONEBIT_OK);
  part->sent = allocate_pinned(part->sent_bytes);
  part->received = allocate_pinned(part->received_bytes);
  place_buffers(part);
  return true;
}

void part_destroy(struct part *part) {
  if (!part->sent)
    return;
  if (part->plan) /* a test may have destroyed the plan */
    CHECK_STATUS(onebit_plan_destroy(part->plan), ONEBIT_OK);
  free_buffer(part->device, part->memory[0]);
  free_buffer(part->device, part->memory[1]);
  CHECK_CUDA(cudaFreeHost(part->sent));
  CHECK_CUDA(cudaFreeHost(part->received));
  part->plan = NULL;
  part->sent = NULL;
}

/* --- Input and result */

void part_write_input(struct part *part, unsigned step, bool not_finite) {
  const onebit_dtype_t dtype = part->what.options.dtype;
  const size_t count = part->sent_bytes / ob_dtype_size(dtype);
  const uint32_t salt = part->what.salt + 977u * (uint32_t)part->rank + 7919u * step;
  const float magnitude = part->what.magnitude != 0 ? part->what.magnitude : 1;
  for (size_t i = 0; i < count; i++)
    ob_store(part->sent, i, dtype, value_at(i, salt, VALUES_GRADIENTS) * magnitude);
  if (not_finite && count)
    ob_store(part->sent, count / 2, dtype, NAN);
}

void part_load_on(struct part *part, cudaStream_t stream) {
  CHECK_CUDA(cudaMemcpyAsync(part->in, part->sent, part->sent_bytes, cudaMemcpyDefault, stream));
}

void part_load(struct part *part) {
  if (!part->device)
    memcpy(part->in, part->sent, part->sent_bytes);
  else
    CHECK_CUDA(cudaMemcpy(part->in, part->sent, part->sent_bytes, cudaMemcpyHostToDevice));
}

void part_load_input(struct part *part, unsigned step, bool not_finite) {
  part_write_input(part, step, not_finite);
  part_load(part);
}

void part_fetch_on(struct part *part, cudaStream_t stream) {
  CHECK_CUDA(
      cudaMemcpyAsync(part->received, part->out, part->received_bytes, cudaMemcpyDefault, stream));
}

void part_fetch(struct part *part) {
  if (!part->device)
    memcpy(part->received, part->out, part->received_bytes);
  else
    CHECK_CUDA(cudaMemcpy(part->received, part->out, part->received_bytes, cudaMemcpyDeviceToHost));
}

/* --- Calls */

onebit_status_t part_call(struct part *part) {
  static onebit_status_t (*const calls[])(const void *, void *, onebit_plan_t) = {
      [ONEBIT_ALLREDUCE] = onebit_allreduce,
      [ONEBIT_ALLGATHER] = onebit_allgather,
      [ONEBIT_REDUCE_SCATTER] = onebit_reduce_scatter};
  return calls[part->what.options.operation](part->in, part->out, part->plan);
}

onebit_status_t part_start(struct part *part, onebit_request_t *request) {
  static onebit_status_t (*const starts[])(const void *, void *, onebit_plan_t,
                                           onebit_request_t *) = {
      [ONEBIT_ALLREDUCE] = onebit_iallreduce,
      [ONEBIT_ALLGATHER] = onebit_iallgather,
      [ONEBIT_REDUCE_SCATTER] = onebit_ireduce_scatter};
  return starts[part->what.options.operation](part->in, part->out, part->plan, request);
}

onebit_status_t part_enqueue(struct part *part, cudaStream_t stream) {
  static onebit_status_t (*const calls[])(const void *, void *, onebit_plan_t, cudaStream_t) = {
      [ONEBIT_ALLREDUCE] = onebit_allreduce_stream,
      [ONEBIT_ALLGATHER] = onebit_allgather_stream,
      [ONEBIT_REDUCE_SCATTER] = onebit_reduce_scatter_stream};
  return calls[part->what.options.operation](part->in, part->out, part->plan, stream);
}

onebit_status_t part_enqueue_and_wait(struct part *part, cudaStream_t stream) {
  onebit_status_t put = part_enqueue(part, stream);
  onebit_status_t ended = onebit_plan_synchronize(part->plan);
  return put != ONEBIT_OK ? put : ended;
}

cudaGraphExec_t part_capture(struct part *part, cudaStream_t stream) {
  cudaGraph_t graph = NULL;
  cudaGraphExec_t runs = NULL;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK_STATUS(part_enqueue(part, stream), ONEBIT_OK);
  if (CHECK_CUDA(cudaStreamEndCapture(stream, &graph)))
    CHECK_CUDA(cudaGraphInstantiate(&runs, graph, 0));
  if (graph)
    CHECK_CUDA(cudaGraphDestroy(graph));
  return runs;
}

/* --- Traces of calls */

uint64_t hash_bytes(const void *bytes, size_t count) {
  uint64_t number = OB_HASH_START, word = 0;
  const char *at = bytes;
  for (; count >= sizeof word; count -= sizeof word, at += sizeof word) {
    memcpy(&word, at, sizeof word);
    number = (number ^ word) * 0x9e3779b97f4a7c15u;
    number ^= number >> 32;
  }
  return ob_hash(number, at, count);
}

static float *allocate_floats(size_t count) { return gpu_allocate(count, sizeof(float)); }

struct traces part_hash_traces(struct part *part) {
  const size_t workers = part->info.worker_residual_count,
               servers = part->info.server_residual_count;
  float *worker = allocate_floats(workers), *server = allocate_floats(servers);
  CHECK_STATUS(onebit_plan_export_residual(part->plan, worker, server), ONEBIT_OK);
  part_fetch(part);
  struct traces traces = {.result = hash_bytes(part->received, part->received_bytes),
                          .worker = hash_bytes(worker, workers * sizeof *worker),
                          .server = hash_bytes(server, servers * sizeof *server)};
  if (!part->what.in_place) {
    if (part->device)
      CHECK_CUDA(cudaMemcpy(part->sent, part->in, part->sent_bytes, cudaMemcpyDeviceToHost));
    traces.input = hash_bytes(part->device ? part->sent : part->in, part->sent_bytes);
  }
  free(worker);
  free(server);
  return traces;
}

bool traces_equal(const struct traces *a, const struct traces *b) {
  return memcmp(a, b, sizeof *a) == 0;
}

void part_scale_errors(struct part *part, float factor) {
  const size_t workers = part->info.worker_residual_count,
               servers = part->info.server_residual_count;
  float *worker = allocate_floats(workers), *server = allocate_floats(servers);
  CHECK_STATUS(onebit_plan_export_residual(part->plan, worker, server), ONEBIT_OK);
  for (size_t i = 0; i < workers; i++)
    worker[i] *= factor;
  for (size_t i = 0; i < servers; i++)
    server[i] *= factor;
  CHECK_STATUS(onebit_plan_import_residual(part->plan, worker, server), ONEBIT_OK);
  free(worker);
  free(server);
}

/* The hash leaves out three kinds of field: fields that depend on the plan's device, the bytes of
 * messages that a rank forwards for other ranks, and the number of messages if the plan chose
 * it. */
uint64_t part_hash_info(const struct part *part) {
  const onebit_plan_info_t *info = &part->info;
  const bool passed_on = info->schedule == ONEBIT_SCHEDULE_ALLGATHER && part->size >= 4;
  const bool cut = part->what.options.chunk_size != 0;
  const uint64_t numbers[] = {info->worker_residual_start,
                              info->worker_residual_count,
                              info->server_residual_start,
                              info->server_residual_count,
                              info->block_size,
                              cut ? info->chunks : 0,
                              passed_on || !cut ? 0 : info->wire_bytes,
                              info->schedule,
                              info->wire,
                              cut ? info->chunk_size : 0};
  return hash_bytes(numbers, sizeof numbers);
}
