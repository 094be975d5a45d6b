/* What the steps compute on the host: from inputs to messages, from messages to messages, to
 * outputs. */
#include <string.h>

#include "collectives/step_parts.h"
#include "collectives/steps.h"

/* Where the message is in the call's share. */
static float *share_at(const struct onebit_plan *plan, const struct ob_message_shape *shape) {
  size_t first, end;
  ob_plan_share(plan, &first, &end);
  size_t words = ob_layout_word(&plan->layout, shape->first) - ob_layout_word(&plan->layout, first);
  return plan->call.share + words * OB_LANES;
}

/* The caller's own input, or the mean of the host's. */
static void load_message(struct onebit_plan *plan, const struct ob_message_shape *shape,
                         struct ob_view *out, size_t share, size_t chunk) {
  if (plan->host.ranks)
    ob_host_mean(plan, share, chunk, shape, out);
  else if (plan->of_shares && plan->options.operation == ONEBIT_ALLGATHER)
    ob_copy_blocks(&plan->work, plan->call.source.inputs, shape, out);
  else
    ob_load_blocks(&plan->work, &plan->call.source, shape, out);
}

static void compress_bits(struct onebit_plan *plan, const struct ob_message_shape *shape,
                          struct ob_view *out, size_t share, size_t chunk) {
  struct ob_source source = plan->call.source;
  struct ob_view momentum = {0};
  if (source.momentum)
    momentum = ob_message_view(ob_plan_result(plan, false, share, chunk), shape);
  if (plan->of_shares && plan->options.operation == ONEBIT_ALLGATHER)
    source.values = share_at(plan, shape);
  if (plan->host.ranks) {
    struct ob_view mean = {.values = plan->host.mean};
    ob_host_mean(plan, share, chunk, shape, &mean);
    source.values = mean.values;
  }
  ob_compress_blocks(&plan->work, &source, &plan->worker, shape, &momentum, out, plan->worker_sums);
}

static void compress_message(struct onebit_plan *plan, unsigned char *memory, size_t share,
                             size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  if (plan->status != ONEBIT_OK)
    memset(memory, 0, ob_message_bytes(&shape));
  else if (ob_is_dense(plan))
    load_message(plan, &shape, &out, share, chunk);
  else
    compress_bits(plan, &shape, &out, share, chunk);
}

static void compress_chunk(struct onebit_plan *plan, size_t chunk) {
  if (ob_gathers_whole(plan) || plan->options.operation == ONEBIT_ALLGATHER) {
    compress_message(plan, ob_result_of(plan, plan->group.place, chunk), ob_own_share(plan), chunk);
    return;
  }
  for (size_t step = 1; step <= plan->group.size; step++) {
    size_t server = ob_shifted(plan, step);
    compress_message(plan, ob_message_at(plan, plan->outgoing, server, chunk),
                     ob_share_of(plan, server), chunk);
  }
  if (plan->host.ranks)
    ob_host_taken(plan, chunk);
}

static void finish_worker(struct onebit_plan *plan) {
  if (plan->status == ONEBIT_OK)
    plan->worker_scale = ob_finish(&plan->work, &plan->worker, plan->worker_sums);
}

static void finish_server(struct onebit_plan *plan) {
  if (plan->status == ONEBIT_OK)
    plan->server_scale = ob_finish(&plan->work, &plan->server, plan->server_sums);
}

/* All members' messages for this rank's share, in their order. */
static void view_workers(struct onebit_plan *plan, size_t chunk,
                         const struct ob_message_shape *shape) {
  for (size_t member = 0; member < plan->group.size; member++) {
    unsigned char *base = member == plan->group.place ? plan->outgoing : plan->incoming;
    plan->views[member] = ob_message_view(ob_message_at(plan, base, member, chunk), shape);
  }
}

/* Everyone's message about everything. */
static void view_results(struct onebit_plan *plan, size_t chunk,
                         const struct ob_message_shape *shape) {
  for (size_t member = 0; member < plan->group.size; member++)
    plan->views[member] = ob_message_view(ob_result_of(plan, member, chunk), shape);
}

static void reduce_chunk(struct onebit_plan *plan, size_t chunk) {
  bool whole = ob_gathers_whole(plan);
  struct ob_message_shape shape = ob_plan_message(plan, ob_own_share(plan), chunk);
  unsigned char *memory = whole ? ob_message_at(plan, plan->outgoing, 0, chunk)
                                : ob_result_of(plan, plan->group.place, chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  if (plan->status != ONEBIT_OK) {
    memset(memory, 0, ob_message_bytes(&shape));
    return;
  }
  if (whole)
    view_results(plan, chunk, &shape);
  else
    view_workers(plan, chunk, &shape);
  if (ob_is_dense(plan))
    ob_mean_blocks(&plan->work, plan->views, plan->group.size, 1, &shape, &out);
  else
    ob_reduce_blocks(&plan->work, plan->views, &plan->server, &shape, &out, plan->server_sums);
}

/* To an optimizer, with the last call's message beside it where that is wanted. */
static void pass_message(struct onebit_plan *plan, const struct ob_view *in,
                         const struct ob_message_shape *shape, size_t share, size_t chunk) {
  const struct ob_pass_sink *sink = plan->call.sink;
  bool wanted = ob_pass_reads(sink->kind) & OB_MASK(OB_LAST) && !sink->last_values;
  struct ob_view last = {0};
  if (wanted)
    last = ob_message_view(ob_plan_result(plan, false, share, chunk), shape);
  ob_pass_blocks(&plan->work, in, wanted ? &last : NULL, shape, sink);
}

/* One message of the result. */
static void apply_message(struct onebit_plan *plan, unsigned char *memory, size_t share,
                          size_t chunk, void *const *outputs) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view in = ob_message_view(memory, &shape);
  if (ob_is_dense(plan))
    ob_convert_blocks(&plan->work, &in, &shape, outputs);
  else if (plan->call.sink)
    pass_message(plan, &in, &shape, share, chunk);
  else
    ob_store_blocks(&plan->work, &in, &shape, outputs);
}

/* The mean of all ranks' messages, at once. */
static void apply_mean(struct onebit_plan *plan, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, 0, chunk);
  view_results(plan, chunk, &shape);
  ob_sum_blocks(&plan->work, plan->views, &shape, plan->call.outputs);
}

/* A reduce-scatter: the mean of all ranks' messages about this rank's share. */
static void apply_share(struct onebit_plan *plan, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, ob_own_share(plan), chunk);
  struct ob_view out = {0};
  view_workers(plan, chunk, &shape);
  if (plan->call.share)
    out.values = share_at(plan, &shape);
  if (ob_is_dense(plan) && plan->call.share)
    ob_mean_blocks(&plan->work, plan->views, plan->group.size, plan->call.source.factor, &shape,
                   &out);
  else if (ob_is_dense(plan))
    ob_average_blocks(&plan->work, plan->views, plan->call.source.factor, &shape,
                      plan->call.outputs);
  else if (plan->call.share)
    ob_sum_values(&plan->work, plan->views, &shape, &out);
  else
    ob_sum_blocks(&plan->work, plan->views, &shape, plan->call.outputs);
}

static void apply_chunk(struct onebit_plan *plan, size_t chunk) {
  bool whole = ob_gathers_whole(plan); /* each to an output of its own */
  if (plan->status != ONEBIT_OK)
    return; /* in a window, or after a message that was damaged */
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    apply_share(plan, chunk);
  else if (plan->schedule == ONEBIT_SCHEDULE_ALLGATHER && ob_is_dense(plan))
    apply_message(plan, ob_message_at(plan, plan->outgoing, 0, chunk), 0, chunk,
                  plan->call.outputs);
  else if (plan->schedule == ONEBIT_SCHEDULE_ALLGATHER)
    apply_mean(plan, chunk);
  else
    for (size_t source = 0; source < ob_plan_sources(plan); source++)
      apply_message(plan, ob_plan_result(plan, true, source, chunk), whole ? 0 : source, chunk,
                    plan->call.outputs + (whole ? source : 0));
}

static void commit(struct onebit_plan *plan) {
  ob_kept_commit(&plan->worker);
  ob_kept_commit(&plan->server);
  plan->server_large = ob_kept_large(&plan->server);
  if (plan->options.no_error_feedback) {
    ob_kept_forget(&plan->worker); /* which cannot fail in memory of the host */
    ob_kept_forget(&plan->server);
  }
}

static onebit_status_t nothing_to_do(struct onebit_plan *plan) {
  (void)plan;
  return ONEBIT_OK;
}

static void nothing(struct onebit_plan *plan) { (void)plan; }

static bool ready(struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)plan, (void)chunk, (void)wait;
  return true;
}

static bool all_ready(struct onebit_plan *plan, bool wait) {
  (void)plan, (void)wait;
  return true;
}

const struct ob_place ob_place_host = {
    .kept = &ob_memory_host,
    .messages = &ob_memory_host,
    .shares_memory = true,
    .create = nothing_to_do,
    .destroy = nothing,
    .check = ob_place_check_host,
    .begin = nothing_to_do,
    .end = nothing,
    .take = ob_steps_take,
    .settled = all_ready,
    .compress = compress_chunk,
    .finish_worker = finish_worker,
    .reduce = reduce_chunk,
    .finish_server = finish_server,
    .apply = apply_chunk,
    .commit = commit,
    .ready = ready,
    .all_ready = all_ready,
};
