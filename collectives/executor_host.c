/* The host executor: its functions run the steps that compute, with a codec for the CPU. They make
 * messages from inputs, results from messages, and outputs from results. */
#include <string.h>

#include "base/error.h"
#include "collectives/executor.h"
#include "collectives/messages.h"
#include "collectives/plan_private.h"

/* --- Compress ----------------------------------------------------------------------------------*/

/* Returns the result of the last call for a segment's chunk, as it was received in a message. */
static struct ob_view view_last_message(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk) {
  struct ob_message_shape shape = ob_plan_last_message(plan, segment, chunk);
  return ob_message_view(ob_plan_result(plan, false, segment, chunk), &shape);
}

/* Compresses the values of `source` into the message of one chunk of a segment. */
static void compress_message(const struct onebit_plan *plan, unsigned char *memory, size_t segment,
                             size_t chunk, const struct ob_source *source) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  struct ob_view out = ob_message_view(memory, &shape), momentum = {0};
  if (plan->flight->outcome.status != ONEBIT_OK) {
    memset(memory, 0, ob_message_bytes(&shape));
  } else if (plan->geometry.dense) {
    ob_load_blocks(&plan->state->work, source, &shape, &out);
  } else {
    if (source->momentum)
      momentum = view_last_message(plan, segment, chunk);
    ob_compress_blocks(&plan->state->work, source, &plan->state->worker, &shape, &momentum, &out,
                       plan->state->worker_sums);
  }
}

/* Compresses a chunk of the input for every server, in the order of ob_neighbour: first for the
 * next rank, last for this rank itself. */
static bool executor_host_compress(const struct onebit_plan *plan, size_t chunk, bool wait) {
  const struct ob_geometry *geometry = &plan->geometry;
  (void)wait;
  for (size_t distance = 1; distance <= geometry->members; distance++) {
    size_t server = ob_neighbour(geometry, distance);
    compress_message(plan, ob_message_at(geometry, geometry->outgoing, server, chunk),
                     ob_segment_of(geometry, server), chunk, &plan->flight->call.source);
  }
  return true;
}

static bool compress_whole(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  compress_message(plan, ob_result_of(plan, plan->geometry.member, chunk), 0, chunk,
                   &plan->flight->call.source);
  return true;
}

/* Compresses the mean of the inputs of the host's ranks, one message at a time. */
static bool executor_host_compress_host_mean(const struct onebit_plan *plan, size_t chunk,
                                             bool wait) {
  const struct ob_geometry *geometry = &plan->geometry;
  struct ob_source source = plan->flight->call.source;
  (void)wait;
  for (size_t distance = 1; distance <= geometry->members; distance++) {
    size_t server = ob_neighbour(geometry, distance), segment = ob_segment_of(geometry, server);
    unsigned char *memory = ob_message_at(geometry, geometry->outgoing, server, chunk);
    struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
    struct ob_view mean = ob_message_view(memory, &shape);
    if (!plan->geometry.dense)
      source.values = mean.values = plan->host.mean;
    if (plan->flight->outcome.status == ONEBIT_OK)
      ob_host_mean(plan, segment, chunk, &shape, &mean);
    if (plan->flight->outcome.status != ONEBIT_OK || !plan->geometry.dense)
      compress_message(plan, memory, segment, chunk, &source);
  }
  ob_host_mark_used(plan, chunk);
  return true;
}

/* Returns the address of a message's elements in the call's shard, which is this rank's segment. */
static float *shard_at(const struct onebit_plan *plan, const struct ob_message_shape *shape) {
  const struct ob_layout *layout = &plan->geometry.layout;
  size_t first, end;
  ob_plan_segment(plan, &first, &end);
  size_t words = ob_layout_word(layout, shape->first) - ob_layout_word(layout, first);
  return plan->flight->call.shard + words * OB_LANES;
}

/* Compresses a chunk of this rank's segment. Dense values are copied as they are, even if they are
 * not finite. */
static bool compress_segment(const struct onebit_plan *plan, size_t chunk, bool wait) {
  size_t segment = ob_own_segment(plan);
  unsigned char *memory = ob_result_of(plan, plan->geometry.member, chunk);
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  struct ob_source source = plan->flight->call.source;
  struct ob_view out = ob_message_view(memory, &shape);
  (void)wait;
  if (plan->geometry.dense && plan->flight->outcome.status == ONEBIT_OK) {
    ob_copy_blocks(&plan->state->work, source.inputs, &shape, &out);
    return true;
  }
  if (!plan->geometry.dense)
    source.values = shard_at(plan, &shape);
  compress_message(plan, memory, segment, chunk, &source);
  return true;
}

static bool executor_host_finish_worker(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    plan->flight->worker_scale =
        ob_compute_buffer_scale(&plan->state->work, &plan->state->worker, plan->state->worker_sums);
  return true;
}

/* --- Reduce ------------------------------------------------------------------------------------*/

/* Makes views of all members' messages number `k` to this rank, in the order of the members. */
static void view_worker_messages(const struct onebit_plan *plan, size_t k, size_t chunk,
                                 const struct ob_message_shape *shape) {
  const struct ob_geometry *geometry = &plan->geometry;
  const size_t server = ob_server_of(geometry, geometry->member, k);
  for (size_t member = 0; member < geometry->members; member++)
    plan->views[member] = ob_message_view(
        member == geometry->member ? ob_message_at(geometry, geometry->outgoing, server, chunk)
                                   : ob_incoming_at(geometry, member, k, chunk),
        shape);
}

/* Makes views of all members' messages, each of which is about the whole buffer. */
static void view_whole_messages(const struct onebit_plan *plan, size_t chunk,
                                const struct ob_message_shape *shape) {
  for (size_t member = 0; member < plan->geometry.members; member++)
    plan->views[member] = ob_message_view(ob_result_of(plan, member, chunk), shape);
}

/* Reduces the members' messages number `k` to this rank. */
static void reduce_messages(const struct onebit_plan *plan, size_t k, size_t chunk) {
  const size_t server = ob_server_of(&plan->geometry, plan->geometry.member, k);
  const size_t segment = ob_segment_of(&plan->geometry, server);
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk),
                          result = ob_plan_result_message(plan, segment, chunk);
  unsigned char *memory = ob_result_of(plan, server, chunk);
  struct ob_view out = ob_message_view(memory, &result);
  view_worker_messages(plan, k, chunk, &shape);
  if (plan->flight->outcome.status != ONEBIT_OK)
    memset(memory, 0, ob_message_bytes(&result));
  else if (plan->geometry.dense)
    ob_average_values(&plan->state->work, plan->views, plan->geometry.members, 1, &shape, &out);
  else
    ob_reduce_blocks(&plan->state->work, plan->views, &plan->state->server, &shape, &out,
                     plan->state->server_sums);
}

static bool executor_host_reduce(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  for (size_t k = 0; k < ob_messages_each(&plan->geometry); k++)
    reduce_messages(plan, k, chunk);
  return true;
}

static bool executor_host_finish_server(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->flight->outcome.status == ONEBIT_OK)
    plan->flight->server_scale =
        ob_compute_buffer_scale(&plan->state->work, &plan->state->server, plan->state->server_sums);
  return true;
}

/* Averages whole dense messages. The mean is stored in the first message of `outgoing`, which this
 * schedule does not send. */
static bool executor_host_reduce_whole(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_message_shape shape = ob_plan_message(plan, 0, chunk);
  unsigned char *memory = ob_message_at(&plan->geometry, plan->geometry.outgoing, 0, chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  (void)wait;
  view_whole_messages(plan, chunk, &shape);
  if (plan->flight->outcome.status == ONEBIT_OK)
    ob_average_values(&plan->state->work, plan->views, plan->geometry.members, 1, &shape, &out);
  return true;
}

/* --- Apply. A call that fails late has applied some chunks already: in a window, or if the last
 * message is damaged --- */

/* Runs an optimizer's pass on a result. If the pass reads the last call's result, it gets that
 * too. */
static void executor_host_update(const struct onebit_plan *plan, const struct ob_view *in,
                                 const struct ob_message_shape *shape, size_t segment,
                                 size_t chunk) {
  const struct ob_pass_sink *sink = plan->flight->call.sink;
  bool wanted = ob_pass_reads(sink->kind) & OB_MASK(OB_LAST) && !sink->last_values;
  struct ob_view last = {0};
  if (wanted)
    last = view_last_message(plan, segment, chunk);
  ob_pass_blocks(&plan->state->work, in, wanted ? &last : NULL, shape, sink);
}

/* Applies the result messages: each is one segment of the result, or in an allgather the whole
 * output of one rank. */
static bool executor_host_apply(const struct onebit_plan *plan, size_t chunk, bool wait) {
  bool whole = plan->geometry.whole;
  (void)wait;
  for (size_t source = 0;
       plan->flight->outcome.status == ONEBIT_OK && source < ob_plan_sources(plan); source++) {
    size_t segment = whole ? 0 : source;
    struct ob_message_shape shape = ob_plan_result_message(plan, segment, chunk);
    struct ob_view in = ob_message_view(ob_plan_result(plan, true, source, chunk), &shape);
    void *const *outputs = whole ? plan->flight->call.outputs + source : plan->flight->call.outputs;
    if (plan->geometry.dense)
      ob_convert_blocks(&plan->state->work, &in, &shape, outputs);
    else if (plan->flight->call.sink)
      executor_host_update(plan, &in, &shape, segment, chunk);
    else
      ob_store_blocks(&plan->state->work, &in, &shape, outputs);
  }
  return true;
}

static bool executor_host_apply_whole(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_message_shape shape = ob_plan_message(plan, 0, chunk);
  (void)wait;
  if (plan->flight->outcome.status != ONEBIT_OK)
    return true;
  if (plan->geometry.dense) {
    unsigned char *mean = ob_message_at(&plan->geometry, plan->geometry.outgoing, 0, chunk);
    struct ob_view view = ob_message_view(mean, &shape);
    ob_convert_blocks(&plan->state->work, &view, &shape, plan->flight->call.outputs);
    return true;
  }
  view_whole_messages(plan, chunk, &shape);
  ob_sum_blocks(&plan->state->work, plan->views, &shape, plan->flight->call.outputs);
  return true;
}

/* Stores the result in the caller's buffer, or in an optimizer's shard of the gradients. */
static bool executor_host_apply_segment(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_message_shape shape = ob_plan_message(plan, ob_own_segment(plan), chunk);
  float factor = plan->flight->call.source.factor;
  bool to_shard = plan->flight->call.shard;
  struct ob_view out = {.values = to_shard ? shard_at(plan, &shape) : NULL};
  (void)wait;
  if (plan->flight->outcome.status != ONEBIT_OK)
    return true;
  view_worker_messages(plan, 0, chunk, &shape);
  if (plan->geometry.dense && to_shard)
    ob_average_values(&plan->state->work, plan->views, plan->geometry.members, factor, &shape,
                      &out);
  else if (plan->geometry.dense)
    ob_average_blocks(&plan->state->work, plan->views, factor, &shape, plan->flight->call.outputs);
  else if (to_shard)
    ob_sum_values(&plan->state->work, plan->views, &shape, &out);
  else
    ob_sum_blocks(&plan->state->work, plan->views, &shape, plan->flight->call.outputs);
  return true;
}

static void undo_compress(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  for (size_t member = 0; member < (geometry->whole ? 1 : geometry->members); member++) {
    const size_t segment = ob_segment_of(geometry, member);
    struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
    struct ob_view momentum = {0};
    if (plan->flight->call.source.momentum)
      momentum = view_last_message(plan, segment, chunk);
    ob_undo_compress(&plan->state->work, &plan->flight->call.source, &plan->state->worker, &shape,
                     &momentum);
  }
}

static void undo_reduce(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  for (size_t k = 0; k < ob_messages_each(geometry); k++) {
    const size_t server = ob_server_of(geometry, geometry->member, k);
    struct ob_message_shape shape = ob_plan_message(plan, ob_segment_of(geometry, server), chunk);
    view_worker_messages(plan, k, chunk, &shape);
    ob_undo_reduce(&plan->state->work, plan->views, &plan->state->server, &shape);
  }
}

static void undo_residual(const struct onebit_plan *plan, struct ob_residual *residual,
                          void (*of_chunk)(const struct onebit_plan *plan, size_t chunk)) {
  if (!ob_residual_has_changed(residual))
    return;
  for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++)
    of_chunk(plan, chunk);
  ob_residual_end_undo(residual);
}

static void executor_host_undo(const struct onebit_plan *plan) {
  undo_residual(plan, &plan->state->worker, undo_compress);
  undo_residual(plan, &plan->state->server, undo_reduce);
}

static bool executor_host_commit(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  if (plan->geometry.dense)
    return true;
  ob_residual_commit(&plan->state->worker);
  ob_residual_commit(&plan->state->server);
  plan->state->server_large = ob_residual_has_large_scale(&plan->state->server);
  if (plan->options.no_error_feedback) {
    ob_residual_forget(&plan->state->worker); /* never fails in host memory */
    ob_residual_forget(&plan->state->server);
  }
  plan->state->result_now = !plan->state->result_now;
  plan->state->last_width = plan->geometry.result_width;
  if (ob_ladder_is_used(&plan->state->ladder))
    ob_ladder_commit(plan);
  return true;
}

onebit_status_t ob_executor_check_host(const struct onebit_plan *plan, const char *name,
                                       const void *buffer) {
  (void)plan;
#ifdef ONEBIT_HAVE_CUDA
  int device;
  if (ob_cuda_owns(buffer, &device))
    return ob_error(
        ONEBIT_ERROR_ARGUMENT,
        "%s is %p in memory of CUDA device %d, but the device option is ONEBIT_DEVICE_HOST", name,
        buffer, device);
#else
  (void)name, (void)buffer;
#endif
  return ONEBIT_OK;
}

const struct ob_executor ob_executor_host = {
    .residuals = &ob_memory_host,
    .messages = &ob_memory_host,
    .shares_memory = true,
    .check = ob_executor_check_host,
    .undo = executor_host_undo,
    .run = {[OB_STEP_HOST_PUT] = ob_host_put,
            [OB_STEP_HOST_BARRIER] = ob_host_barrier,
            [OB_STEP_HOST_COMPRESS] = executor_host_compress_host_mean,
            [OB_STEP_COMPRESS] = executor_host_compress,
            [OB_STEP_COMPRESS_WHOLE] = compress_whole,
            [OB_STEP_COMPRESS_SEGMENT] = compress_segment,
            [OB_STEP_FINISH_WORKER] = executor_host_finish_worker,
            [OB_STEP_EXCHANGE] = ob_send_to_servers,
            [OB_STEP_RECEIVE] = ob_receive_from_workers,
            [OB_STEP_HOST_WAIT_FREE] = ob_host_wait_free,
            [OB_STEP_REDUCE] = executor_host_reduce,
            [OB_STEP_FINISH_SERVER] = executor_host_finish_server,
            [OB_STEP_REDUCE_WHOLE] = executor_host_reduce_whole,
            [OB_STEP_GATHER] = ob_send_to_all,
            [OB_STEP_COLLECT] = ob_receive_from_servers,
            [OB_STEP_BEGIN_ROUND] = ob_begin_round,
            [OB_STEP_END_ROUND] = ob_end_round,
            [OB_STEP_HOST_PUBLISH] = ob_host_publish,
            [OB_STEP_HOST_WAIT] = ob_host_wait,
            [OB_STEP_CHECK_EARLY] = ob_steps_check_early,
            [OB_STEP_APPLY_EARLY] = ob_steps_apply_early,
            [OB_STEP_HOST_APPLY_EARLY] = ob_host_apply_early,
            [OB_STEP_DECIDE] = ob_steps_decide,
            [OB_STEP_APPLY] = executor_host_apply,
            [OB_STEP_APPLY_LATE] = ob_steps_apply_late,
            [OB_STEP_HOST_APPLY_LATE] = ob_host_apply_late,
            [OB_STEP_APPLY_WHOLE] = executor_host_apply_whole,
            [OB_STEP_APPLY_SEGMENT] = executor_host_apply_segment,
            [OB_STEP_COMMIT] = executor_host_commit},
};

/* --- The choice of a plan's executor -----------------------------------------------------------*/

const struct ob_executor *ob_executor_for(onebit_comm_t comm, onebit_device_t device) {
#ifdef ONEBIT_HAVE_CUDA
  const struct ob_transport *transport = comm->transport;
  if (device == ONEBIT_DEVICE_CUDA)
    return transport->put || (transport->device_messages && transport->device_messages())
               ? &ob_executor_stream
               : &ob_executor_staged;
#else
  (void)comm;
#endif
  return device == ONEBIT_DEVICE_HOST ? &ob_executor_host : NULL;
}

onebit_status_t ob_executor_choose(struct onebit_plan *plan) {
  const struct ob_transport *transport = plan->comm->transport;
  plan->executor = ob_executor_for(plan->comm, plan->options.device);
  if (!plan->executor)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_CUDA, but this library was built without CUDA");
  if (plan->executor == &ob_executor_host && !transport->host_messages)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "device is ONEBIT_DEVICE_HOST, but %s moves messages only between GPUs",
                    transport->name);
  return plan->executor->open ? plan->executor->open(plan) : ONEBIT_OK;
}
