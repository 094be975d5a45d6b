/* Puts the messages of calls on streams: messages that overlap with kernels (device.h has a
 * diagram), and messages inside a host. */
#include "base/error.h"
#include "base/memory.h"
#include "collectives/messages.h"
#include "cuda/device.h"

/* ---- Beside kernels ---- */

/* Creates an event for each slot. One event per slot is enough, since kernels wait for a batch
 * before the next one of its slot is put. */
static onebit_status_t create_events(const struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  OB_TRY_CUDA(cudaEventCreateWithFlags(&overlap->computed, cudaEventDisableTiming));
  overlap->moved = ob_allocate(plan->geometry.slots, sizeof *overlap->moved);
  if (!overlap->moved)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu messages in flight",
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
    ob_cuda_destroy_event(overlap->moved[i]);
  ob_release(overlap->moved);
  ob_cuda_destroy_event(overlap->computed);
}

static onebit_status_t overlap_follow_kernels(const struct onebit_plan *plan) {
  struct ob_overlap *overlap = &plan->device->overlap;
  OB_TRY_CUDA(cudaEventRecord(overlap->computed, plan->device->stream));
  OB_TRY_CUDA(cudaStreamWaitEvent(overlap->stream, overlap->computed, 0));
  return ONEBIT_OK;
}

/* Puts messages on the second stream. If that stream cannot wait for the kernels, the messages are
 * put on the call's stream, since the other ranks wait for the messages. */
onebit_status_t ob_overlap_put(const struct onebit_plan *plan, struct ob_batch *batch,
                               size_t chunk) {
  struct ob_overlap *overlap = &plan->device->overlap;
  cudaStream_t stream = plan->device->stream;
  if (!overlap->stream)
    return ob_comm_put(batch, stream);
  onebit_status_t forked = overlap_follow_kernels(plan);
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

/*
 * ---- Inside a host ----
 *
 * Inside a host, the GPUs of a hierarchical plan on a stream send each other messages, while plans
 * on the processor use shared memory (collectives/schedules/host.c).
 *
 * Inputs are sent as dense messages, each segment to the rank that sends it on to other hosts, as
 * in a reduce-scatter; inputs of 16 bits are sent in their own type. They are added up here in the
 * order of the ranks, so results have the bits of every other hierarchical plan; ncclReduceScatter
 * has an order of its own. Results are sent on as they came from their servers, with headers. Every
 * rank is a server, so each rank reads the header of every other, and all make the same decision.
 *
 * All messages of a chunk of inputs are sealed together, so a rank's first message has the flags of
 * all its messages. Kernels are in order on one stream, and messages on another (device.h). No step
 * waits until memory is free, since the kernel that reads a message comes before the message that
 * overwrites it.
 */

/* --- Creation and destruction */

onebit_status_t ob_stream_host_create(struct onebit_plan *plan) {
  if (!plan->host.ranks)
    return ONEBIT_OK;
  OB_TRY(ob_device_host_create(plan));
  return ob_batch_create(plan->comm, plan->geometry.segments - plan->geometry.members,
                         &plan->device->host.batch);
}

void ob_stream_host_destroy(const struct onebit_plan *plan) {
  ob_batch_destroy(plan->device->host.batch);
  ob_device_host_destroy(plan);
}

/* --- Messages */

/* Returns the rank of this host at a location, its number among the host's ranks. */
static int rank_at(const struct onebit_plan *plan, size_t location) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  return hosts->ranks[(size_t)(hosts->host * hosts->each) + location];
}

int ob_stream_origin(const struct onebit_plan *plan, int32_t origin) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  if (!plan->host.ranks)
    return plan->member_ranks[origin];
  return hosts->ranks[origin % hosts->count * hosts->each + origin / hosts->count];
}

static size_t stream_host_message_bytes(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk, bool values) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  shape.dense |= values;
  shape.half |= values && plan->device->host.window.geometry.half;
  return ob_message_bytes(&shape);
}

/* Returns the address of the message with inputs of a segment, in `base`: outgoing or incoming. */
static unsigned char *window_at(const struct onebit_plan *plan, unsigned char *base, size_t segment,
                                size_t chunk) {
  const struct ob_geometry *window = &plan->device->host.window.geometry;
  return base + segment * window->peer_stride + chunk % window->slots * window->stride;
}

/* Adds a message to the rank at `location` and a message from that rank. With `values` the messages
 * are inputs: those that the other rank sends on to other hosts, and those that this rank sends on.
 * Otherwise they are results: those that this rank has collected, and those that the other rank
 * has. */
static void add_messages(const struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                         size_t location, size_t member, bool values) {
  struct ob_device_host *host = &plan->device->host;
  const size_t own = plan->geometry.first_segment + member,
               other = location * plan->geometry.members + member;
  const size_t out = values ? other : own, in = values ? own : other;
  const int rank = rank_at(plan, location);
  batch->send[batch->sends++] = (struct ob_endpoint){
      values ? window_at(plan, host->outgoing, out, chunk) : ob_plan_result(plan, true, out, chunk),
      stream_host_message_bytes(plan, out, chunk, values), rank};
  batch->receive[batch->receives++] = (struct ob_endpoint){
      values ? window_at(plan, host->incoming, out, chunk) : ob_plan_result(plan, true, in, chunk),
      stream_host_message_bytes(plan, in, chunk, values), rank};
}

/* Sends and receives one group of messages between this rank and all others of the host, beginning
 * with its neighbour: puts it on the stream. */
static onebit_status_t stream_host_put(const struct onebit_plan *plan, size_t chunk, bool values) {
  struct ob_batch *batch = plan->device->host.batch;
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < plan->host.ranks; step++)
    for (size_t member = 0; member < plan->geometry.members; member++)
      add_messages(plan, batch, chunk, (plan->host.local_rank + step) % plan->host.ranks, member,
                   values);
  return ob_overlap_put(plan, batch, chunk);
}

/* --- Steps */

/* Puts inputs on the stream. After a failure this rank still sends the messages that others wait
 * for. */
bool ob_stream_host_put(const struct onebit_plan *plan, size_t chunk, bool wait) {
  const struct ob_cuda_plan *window = &plan->device->host.window;
  cudaStream_t stream = plan->device->stream;
  cudaError_t error = cudaSuccess;
  (void)wait;
  ob_device_host_begin(plan);
  if (plan->flight->outcome.status == ONEBIT_OK)
    error = ob_cuda_host_put(*window, ob_device_source(plan), chunk, stream);
  if (error != cudaSuccess)
    ob_steps_fail(plan, ob_cuda_error(error, "launching a kernel"));
  ob_stream_open(plan);
  ob_stream_seal(plan, window, chunk, OB_MESSAGE_WORKER);
  return ob_stream_end_batch(plan, stream_host_put(plan, chunk, true));
}

static bool stream_note_chunk(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                              size_t chunk, enum ob_message_kind kind) {
  onebit_status_t joined = ob_overlap_join(plan, chunk);
  if (joined == ONEBIT_OK)
    ob_stream_note_arrival(plan, messages, chunk, kind);
  return ob_stream_end_batch(plan, joined);
}

bool ob_stream_host_barrier(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return stream_note_chunk(plan, &plan->device->host.host, chunk, OB_MESSAGE_WORKER);
}

bool ob_stream_host_publish(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  ob_stream_open(plan);
  return ob_stream_end_batch(plan, stream_host_put(plan, chunk, false));
}

bool ob_stream_host_wait(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  return stream_note_chunk(plan, &plan->device->host.results, chunk, OB_MESSAGE_SERVER);
}
