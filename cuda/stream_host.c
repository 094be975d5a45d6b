/*
 * The inside of a host in a hierarchical plan on a stream: what collectives/schedules/host.c has
 * shared memory for, in messages between its GPUs.
 *
 * The inputs travel as dense messages, each share's to the rank that will send it on: what a
 * reduce-scatter moves. They are added up here and not by ncclReduceScatter, whose order is its
 * own: in the order of the ranks the bits are those of every other hierarchical plan. Results
 * travel as they came from their servers, headers and all. Every rank is a server, so each hears
 * every other's word itself, and all come to the same end; nobody speaks for its host.
 *
 * A chunk of a neighbour's inputs is sealed at once, so its first message says all that they say.
 * Steps follow each other on the stream: nobody waits until memory is free.
 */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/step_parts.h"
#include "collectives/steps.h"
#include "cuda/stream.h"

/* Chunks of inputs in the window: one being added up, one on its way. */
#define WINDOW_CHUNKS 2

/* --- Made and given back -----------------------------------------------------------------------*/

static void *take(struct onebit_plan *plan, size_t count, size_t size) {
  plan->memory_bytes += count * size;
  return ob_memory_cuda.allocate(count, size);
}

/* The window as this rank fills it: a dense message a share. */
static struct ob_cuda_plan describe_window(const struct onebit_plan *plan) {
  struct ob_cuda_plan window = plan->device->kernel;
  size_t bytes = sizeof(struct ob_header) + ob_plan_longest_message(plan) * sizeof(float);
  window.dense = true;
  window.slots = plan->chunks < WINDOW_CHUNKS ? plan->chunks : WINDOW_CHUNKS;
  window.stride = (bytes + OB_ALIGNMENT - 1) / OB_ALIGNMENT * OB_ALIGNMENT;
  window.peer_stride = window.slots * window.stride;
  window.members = plan->shares;
  window.first_share = 0;
  return window;
}

/* As it is added up. Its members are the host's ranks, and the first of the shares that this rank
 * sends is its own among them; the shares of one rank lie next to each other. A rank goes by the
 * number of the share that it serves. */
static struct ob_cuda_plan describe_host(const struct onebit_plan *plan) {
  struct ob_cuda_plan host = plan->device->host.window;
  host.members = plan->host.ranks;
  host.place = plan->host.place;
  host.first_share = plan->first_share - plan->host.place;
  host.peer_stride *= plan->group.size;
  host.witness = plan->group.place;
  host.witness_step = plan->group.size;
  return host;
}

static struct ob_cuda_plan describe_results(const struct onebit_plan *plan) {
  struct ob_cuda_plan results = plan->device->kernel;
  results.members = plan->shares;
  results.first_share = 0;
  results.place = ob_own_share(plan);
  results.witness = 0;
  for (int copy = 0; copy < 2; copy++)
    results.results[copy] = plan->results[copy];
  return results;
}

onebit_status_t ob_stream_host_create(struct onebit_plan *plan) {
  struct ob_device_host *host = &plan->device->host;
  if (!plan->host.ranks)
    return ONEBIT_OK;
  host->window = describe_window(plan);
  size_t share = host->window.peer_stride;
  host->outgoing = host->window.outgoing = take(plan, plan->shares, share);
  host->incoming = host->window.incoming = take(plan, plan->shares, share);
  host->mean = take(plan, plan->group.size * ob_plan_longest_message(plan), sizeof(float));
  if (!host->outgoing || !host->incoming || !host->mean)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the sums of %zu ranks", plan->host.ranks);
  host->host = describe_host(plan);
  host->results = describe_results(plan);
  return plan->comm->transport->batch_create(plan->comm, plan->shares - plan->group.size,
                                             &host->batch);
}

void ob_stream_host_destroy(struct onebit_plan *plan) {
  struct ob_device_host *host = &plan->device->host;
  if (host->batch)
    plan->comm->transport->batch_destroy(host->batch);
  ob_memory_cuda.release(host->outgoing);
  ob_memory_cuda.release(host->incoming);
  ob_memory_cuda.release(host->mean);
}

/* --- Messages ----------------------------------------------------------------------------------*/

/* The rank of this host at a place. */
static int rank_at(const struct onebit_plan *plan, size_t place) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  return hosts->ranks[(size_t)(hosts->host * hosts->each) + place];
}

int ob_stream_witness(const struct onebit_plan *plan, int32_t witness) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  if (!plan->host.ranks)
    return plan->group.ranks[witness];
  return hosts->ranks[witness % hosts->count * hosts->each + witness / hosts->count];
}

static size_t message_bytes(const struct onebit_plan *plan, size_t share, size_t chunk,
                            bool values) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  shape.dense |= values;
  return ob_message_bytes(&shape);
}

/* The inputs' message about a share, sent or received. */
static unsigned char *window_at(const struct onebit_plan *plan, unsigned char *base, size_t share,
                                size_t chunk) {
  const struct ob_cuda_plan *window = &plan->device->host.window;
  return base + share * window->peer_stride + chunk % window->slots * window->stride;
}

/* To the rank at `place`: what it is to send on. From it: what this rank is. */
static void add_inputs(const struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                       size_t place, size_t member) {
  struct ob_device_host *host = &plan->device->host;
  size_t out = place * plan->group.size + member, in = plan->first_share + member;
  int rank = rank_at(plan, place);
  batch->send[batch->sends++] = (struct ob_endpoint){window_at(plan, host->outgoing, out, chunk),
                                                     message_bytes(plan, out, chunk, true), rank};
  batch->receive[batch->receives++] = (struct ob_endpoint){
      window_at(plan, host->incoming, out, chunk), message_bytes(plan, in, chunk, true), rank};
}

/* To the rank at `place`: what this rank has collected. From it: what that has. */
static void add_results(const struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                        size_t place, size_t member) {
  size_t out = plan->first_share + member, in = place * plan->group.size + member;
  int rank = rank_at(plan, place);
  batch->send[batch->sends++] = (struct ob_endpoint){ob_plan_result(plan, true, out, chunk),
                                                     message_bytes(plan, out, chunk, false), rank};
  batch->receive[batch->receives++] = (struct ob_endpoint){
      ob_plan_result(plan, true, in, chunk), message_bytes(plan, in, chunk, false), rank};
}

/* One group of messages between this rank and all others of the host, beginning with its neighbour.
 */
static onebit_status_t put(struct onebit_plan *plan, size_t chunk,
                           void (*add)(const struct onebit_plan *plan, struct ob_batch *batch,
                                       size_t chunk, size_t place, size_t member)) {
  struct ob_batch *batch = plan->device->host.batch;
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < plan->host.ranks; step++)
    for (size_t member = 0; member < plan->group.size; member++)
      add(plan, batch, chunk, (plan->host.place + step) % plan->host.ranks, member);
  return ob_comm_put(batch, plan->device->stream);
}

/* --- Steps -------------------------------------------------------------------------------------*/

/* A rank that fails here still sends what the others wait for. */
onebit_status_t ob_stream_host_share(struct onebit_plan *plan, size_t chunk) {
  const struct ob_cuda_plan *window = &plan->device->host.window;
  cudaStream_t stream = plan->device->stream;
  cudaError_t error = cudaSuccess;
  if (plan->status == ONEBIT_OK)
    error = ob_cuda_load(*window, ob_device_source(plan), chunk, stream);
  if (error != cudaSuccess)
    ob_steps_fail(plan, ob_cuda_error(error, "launching a kernel"));
  ob_stream_seal(plan, window, chunk, OB_MESSAGE_WORKER);
  return put(plan, chunk, add_inputs);
}

onebit_status_t ob_stream_host_meet(struct onebit_plan *plan, size_t chunk) {
  OB_TRY_CUDA(ob_cuda_open(plan->device->host.host, ob_stream_stamp(plan, OB_MESSAGE_WORKER), chunk,
                           plan->device->stream));
  return ONEBIT_OK;
}

onebit_status_t ob_stream_host_spread(struct onebit_plan *plan, size_t chunk) {
  return put(plan, chunk, add_results);
}

onebit_status_t ob_stream_host_fetch(struct onebit_plan *plan, size_t chunk) {
  OB_TRY_CUDA(ob_cuda_open(plan->device->host.results, ob_stream_stamp(plan, OB_MESSAGE_SERVER),
                           chunk, plan->device->stream));
  return ONEBIT_OK;
}

/* What is dense travels as it is. */
static cudaError_t mean_to_messages(const struct onebit_plan *plan, size_t chunk,
                                    cudaStream_t stream) {
  unsigned char *first = ob_message_at(plan, plan->outgoing, 0, chunk);
  return ob_cuda_host_mean(plan->device->host.host, plan->group.size,
                           (float *)(void *)(first + sizeof(struct ob_header)),
                           plan->peer_stride / sizeof(float), chunk, stream);
}

cudaError_t ob_stream_host_compress(const struct onebit_plan *plan, size_t chunk,
                                    cudaStream_t stream) {
  const struct ob_device_host *host = &plan->device->host;
  struct ob_cuda_source source = ob_device_source(plan);
  if (ob_is_dense(plan))
    return mean_to_messages(plan, chunk, stream);
  source.values = host->mean;
  source.step = ob_plan_longest_message(plan);
  cudaError_t error =
      ob_cuda_host_mean(host->host, plan->group.size, host->mean, source.step, chunk, stream);
  return error == cudaSuccess ? ob_cuda_compress(plan->device->kernel, source, chunk, stream)
                              : error;
}
