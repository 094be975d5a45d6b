/*
 * The steps of a collective. Each does one thing to one chunk; the order is the schedule's.
 *
 * A rank in trouble (a wrong argument, a bad message) does not stop: it goes on through the same
 * steps and sends messages that say so in their flags, so that all ranks come to the end of the
 * same call and none waits for ever. Flags add up: a message carries what its sender knows when it
 * leaves, so the last message of a phase tells all.
 */
#include "collectives/steps.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"

static unsigned char *message_at(const struct onebit_plan *plan, unsigned char *base, size_t member,
                                 size_t chunk) {
  return base + member * plan->peer_stride + chunk % plan->slots * plan->stride;
}

unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk) {
  int copy = next ? !plan->result_now : plan->result_now;
  unsigned char *base = plan->results[copy];
  size_t member = source;
  if (plan->host.ranks) {
    member = source % plan->group.size;
    base = plan->host.shared.base[source / plan->group.size] + plan->host.results_at[copy];
  }
  return message_at(plan, base, member, chunk);
}

size_t ob_plan_sources(const struct onebit_plan *plan) {
  return plan->host.ranks ? plan->shares : plan->group.size;
}

/* Everyone's message is about everything: an allgather, or the schedule of that name. */
static bool gathers_whole(const struct onebit_plan *plan) {
  return plan->options.operation == ONEBIT_ALLGATHER || plan->schedule == ONEBIT_SCHEDULE_ALLGATHER;
}

static size_t share_of(const struct onebit_plan *plan, size_t member) {
  return gathers_whole(plan) ? 0 : plan->first_share + member;
}

static size_t own_share(const struct onebit_plan *plan) {
  return share_of(plan, plan->group.place);
}

/* Where the result of a member of the group lies, this call's. */
static unsigned char *result_of(const struct onebit_plan *plan, size_t member, size_t chunk) {
  return ob_plan_result(plan, true, plan->first_share + member, chunk);
}

/* The member that is `step` places further: every rank begins with its neighbour, so that they do
 * not all send to the same one. */
static size_t shifted(const struct onebit_plan *plan, size_t step) {
  return (plan->group.place + step) % plan->group.size;
}

static bool dense(const struct onebit_plan *plan) {
  return plan->options.wire == ONEBIT_WIRE_DENSE;
}

static bool is_set(const atomic_bool *flag) {
  return atomic_load_explicit(flag, memory_order_relaxed);
}

void ob_steps_fail(struct onebit_plan *plan, onebit_status_t status) {
  if (plan->status != ONEBIT_OK)
    return; /* the first trouble is the one to tell of */
  plan->status = status;
  snprintf(plan->words, sizeof plan->words, "%s", onebit_last_error());
}

void ob_steps_give_up(struct onebit_plan *plan) {
  ob_steps_fail(plan, ONEBIT_ERROR_TRANSPORT);
  plan->broken = true;
  plan->step = plan->stop;
  if (plan->host.ranks)
    ob_host_give_up(plan);
}

/* In a hierarchical plan a rank speaks for its host: the others hear of its neighbours from it. */
unsigned ob_steps_flags(const struct onebit_plan *plan) {
  bool heard = plan->host.ranks > 0;
  unsigned flags = dense(plan) ? OB_FLAG_DENSE : 0;
  if (is_set(&plan->work.not_finite) || (heard && plan->not_finite_rank >= 0))
    flags |= OB_FLAG_NOT_FINITE;
  if (plan->status != ONEBIT_OK || (heard && plan->failed_rank >= 0))
    flags |= OB_FLAG_ERROR;
  if (is_set(&plan->work.large) || (heard && plan->large_heard))
    flags |= OB_FLAG_LARGE;
  if (plan->status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  return flags;
}

/* Fills in the header of a message that is about to leave. */
static void stamp(struct onebit_plan *plan, struct ob_header *header,
                  const struct ob_message_shape *shape, enum ob_message_kind kind, float scale) {
  *header = (struct ob_header){.magic = OB_MESSAGE_MAGIC,
                               .version = OB_MESSAGE_VERSION,
                               .kind = (uint8_t)kind,
                               .flags = (uint16_t)ob_steps_flags(plan),
                               .sequence = plan->sequence,
                               .scale = scale,
                               .elements = plan->layout.elements,
                               .block = shape->first,
                               .agreed = plan->call.agreed};
}

/* The caller's own input, or the mean of the host's. */
static void load_message(struct onebit_plan *plan, const struct ob_message_shape *shape,
                         struct ob_view *out, size_t share, size_t chunk) {
  if (plan->host.ranks)
    ob_host_mean(plan, share, chunk, shape, out);
  else
    ob_load_blocks(&plan->work, plan->call.source.inputs, shape, out);
}

static void compress_bits(struct onebit_plan *plan, const struct ob_message_shape *shape,
                          struct ob_view *out, size_t share, size_t chunk) {
  struct ob_source source = plan->call.source;
  struct ob_view momentum = {0};
  if (source.momentum)
    momentum = ob_message_view(ob_plan_result(plan, false, share, chunk), shape);
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
  else if (dense(plan))
    load_message(plan, &shape, &out, share, chunk);
  else
    compress_bits(plan, &shape, &out, share, chunk);
}

static void compress_chunk(struct onebit_plan *plan, size_t chunk) {
  if (gathers_whole(plan)) {
    compress_message(plan, result_of(plan, plan->group.place, chunk), 0, chunk);
    return;
  }
  for (size_t step = 1; step <= plan->group.size; step++) {
    size_t server = shifted(plan, step);
    compress_message(plan, message_at(plan, plan->outgoing, server, chunk), share_of(plan, server),
                     chunk);
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

static void begin(struct onebit_plan *plan, struct ob_batch *batch) {
  if (ob_comm_begin(batch, plan->tag) != ONEBIT_OK)
    ob_steps_give_up(plan);
}

static void add_endpoints(struct onebit_plan *plan, struct ob_batch *batch, size_t member,
                          unsigned char *out, size_t out_bytes, unsigned char *in,
                          size_t in_bytes) {
  int rank = plan->group.ranks[member];
  batch->send[batch->sends++] = (struct ob_endpoint){out, out_bytes, rank};
  batch->receive[batch->receives++] = (struct ob_endpoint){in, in_bytes, rank};
}

static void exchange_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->exchange[chunk % plan->slots];
  struct ob_message_shape mine = ob_plan_message(plan, own_share(plan), chunk);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step <= plan->group.size; step++) {
    size_t member = shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, share_of(plan, member), chunk);
    unsigned char *out = message_at(plan, plan->outgoing, member, chunk);
    stamp(plan, ob_message_view(out, &shape).header, &shape, OB_MESSAGE_WORKER, plan->worker_scale);
    if (member != plan->group.place)
      add_endpoints(plan, batch, member, out, ob_message_bytes(&shape),
                    message_at(plan, plan->incoming, member, chunk), ob_message_bytes(&mine));
  }
  begin(plan, batch);
}

static void gather_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->gather[chunk % plan->slots];
  struct ob_message_shape mine = ob_plan_message(plan, own_share(plan), chunk);
  unsigned char *out = result_of(plan, plan->group.place, chunk);
  stamp(plan, ob_message_view(out, &mine).header, &mine, OB_MESSAGE_SERVER,
        gathers_whole(plan) ? plan->worker_scale : plan->server_scale);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < plan->group.size; step++) {
    size_t member = shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, share_of(plan, member), chunk);
    add_endpoints(plan, batch, member, out, ob_message_bytes(&mine), result_of(plan, member, chunk),
                  ob_message_bytes(&shape));
  }
  begin(plan, batch);
}

/* A rank that can take part must have called with the same argument. In a hierarchical plan ranks
 * of different places hear of each other's only from those in between. */
static onebit_status_t check_agreed(const struct onebit_plan *plan, unsigned flags,
                                    uint32_t agreed) {
  const char *name = plan->call.agreed_name ? plan->call.agreed_name : "an argument";
  if ((flags & OB_FLAG_MISMATCH || !(flags & OB_FLAG_ERROR)) && agreed != plan->call.agreed)
    return ob_error(ONEBIT_ERROR_MISMATCH, "%s differs between ranks: here it is %.9g, there %.9g",
                    name, (double)ob_float_of(plan->call.agreed), (double)ob_float_of(agreed));
  if (flags & OB_FLAG_MISMATCH)
    return ob_error(ONEBIT_ERROR_MISMATCH, "%s differs between ranks that it has heard of", name);
  return ONEBIT_OK;
}

static void refuse(struct onebit_plan *plan, int rank, onebit_status_t status) {
  ob_error(status, "from rank %d: %.200s", rank, onebit_last_error());
  ob_steps_fail(plan, status);
}

void ob_steps_hear(struct onebit_plan *plan, int rank, unsigned flags, uint32_t agreed) {
  onebit_status_t status = check_agreed(plan, flags, agreed);
  if (status != ONEBIT_OK) {
    refuse(plan, rank, status);
    return;
  }
  if (flags & OB_FLAG_ERROR && plan->failed_rank < 0)
    plan->failed_rank = rank;
  if (flags & OB_FLAG_NOT_FINITE && plan->not_finite_rank < 0)
    plan->not_finite_rank = rank;
  plan->large_heard |= (flags & OB_FLAG_LARGE) != 0;
}

/* Looks at a message that came from a member, and takes note of its flags. */
static void check_message(struct onebit_plan *plan, const struct ob_endpoint *in, size_t member,
                          size_t chunk, enum ob_message_kind kind) {
  const struct ob_message_expected expected = {kind, plan->sequence, plan->layout.elements};
  size_t share = kind == OB_MESSAGE_WORKER ? own_share(plan) : share_of(plan, member);
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  const struct ob_header *header = in->data;
  onebit_status_t status = ob_message_check(in->data, in->bytes, &shape, &expected);
  if (status == ONEBIT_OK)
    ob_steps_hear(plan, in->peer, header->flags, header->agreed);
  else
    refuse(plan, in->peer, status);
}

/* False when the batch is not complete. */
static bool receive(struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                    enum ob_message_kind kind, bool wait) {
  onebit_status_t status = plan->comm->transport->test(batch, wait);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status != ONEBIT_OK)
    ob_steps_give_up(plan);
  for (size_t i = 0; status == ONEBIT_OK && i < batch->receives; i++)
    check_message(plan, &batch->receive[i], shifted(plan, i + 1), chunk, kind);
  return true;
}

/* All members' messages for this rank's share, in their order. */
static void view_workers(struct onebit_plan *plan, size_t chunk,
                         const struct ob_message_shape *shape) {
  for (size_t member = 0; member < plan->group.size; member++) {
    unsigned char *base = member == plan->group.place ? plan->outgoing : plan->incoming;
    plan->views[member] = ob_message_view(message_at(plan, base, member, chunk), shape);
  }
}

/* Everyone's message about everything. */
static void view_results(struct onebit_plan *plan, size_t chunk,
                         const struct ob_message_shape *shape) {
  for (size_t member = 0; member < plan->group.size; member++)
    plan->views[member] = ob_message_view(result_of(plan, member, chunk), shape);
}

static void reduce_chunk(struct onebit_plan *plan, size_t chunk) {
  bool whole = gathers_whole(plan);
  struct ob_message_shape shape = ob_plan_message(plan, own_share(plan), chunk);
  unsigned char *memory = whole ? message_at(plan, plan->outgoing, 0, chunk)
                                : result_of(plan, plan->group.place, chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  if (plan->status != ONEBIT_OK) {
    memset(memory, 0, ob_message_bytes(&shape));
    return;
  }
  if (whole)
    view_results(plan, chunk, &shape);
  else
    view_workers(plan, chunk, &shape);
  if (dense(plan))
    ob_mean_blocks(&plan->work, plan->views, plan->group.size, &shape, &out);
  else
    ob_reduce_blocks(&plan->work, plan->views, &plan->server, &shape, &out, plan->server_sums);
}

/* One message of the result. */
static void apply_message(struct onebit_plan *plan, unsigned char *memory, size_t share,
                          size_t chunk, void *const *outputs) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view in = ob_message_view(memory, &shape);
  if (dense(plan))
    ob_convert_blocks(&plan->work, &in, &shape, outputs);
  else if (plan->call.adam)
    ob_adam_blocks(&plan->work, &in, &shape, plan->call.adam);
  else
    ob_store_blocks(&plan->work, &in, &shape, outputs);
}

/* The mean of all ranks' messages, at once. */
static void apply_mean(struct onebit_plan *plan, size_t share, size_t chunk, bool of_results) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  if (of_results)
    view_results(plan, chunk, &shape);
  else
    view_workers(plan, chunk, &shape);
  ob_sum_blocks(&plan->work, plan->views, &shape, plan->call.outputs);
}

static void apply_chunk(struct onebit_plan *plan, size_t chunk) {
  bool gathered = plan->options.operation == ONEBIT_ALLGATHER;
  if (plan->status != ONEBIT_OK)
    return; /* in a window, or after a message that was damaged */
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    apply_mean(plan, own_share(plan), chunk, false);
  else if (plan->schedule == ONEBIT_SCHEDULE_ALLGATHER && dense(plan))
    apply_message(plan, message_at(plan, plan->outgoing, 0, chunk), 0, chunk, plan->call.outputs);
  else if (plan->schedule == ONEBIT_SCHEDULE_ALLGATHER)
    apply_mean(plan, 0, chunk, true);
  else
    for (size_t source = 0; source < ob_plan_sources(plan); source++)
      apply_message(plan, ob_plan_result(plan, true, source, chunk), gathered ? 0 : source, chunk,
                    plan->call.outputs + (gathered ? source : 0));
}

static void apply_and_tell(struct onebit_plan *plan, size_t chunk) {
  apply_chunk(plan, chunk);
  if (plan->host.ranks)
    ob_host_applied(plan, chunk);
}

/* Every worker's message is in, so no input can spoil the call any more. What a server makes of
 * finite numbers that are not large is finite; dense messages do not say whether theirs are. Only a
 * message damaged on its way is left to go wrong, and that the other ranks would not learn of
 * anyway. */
static void foresee(struct onebit_plan *plan) {
  plan->foreseen = !plan->call.hold && !dense(plan) && !ob_steps_flags(plan) &&
                   plan->failed_rank < 0 && plan->not_finite_rank < 0 && !plan->large_heard;
}

/* Every rank's flags are in: all ranks come to the same end. */
static void decide(struct onebit_plan *plan) {
  if (atomic_load_explicit(&plan->work.not_finite, memory_order_relaxed))
    plan->not_finite_rank = plan->comm->rank;
  if (plan->failed_rank >= 0) {
    ob_error(ONEBIT_ERROR_PEER, "rank %d%s could not take part in the call", plan->failed_rank,
             plan->host.ranks ? " or another that it has heard of" : "");
    ob_steps_fail(plan, ONEBIT_ERROR_PEER);
  } else if (plan->not_finite_rank >= 0) {
    ob_error(ONEBIT_SKIPPED, "skipped: a value on rank %d%s is not finite", plan->not_finite_rank,
             plan->host.ranks ? " or another that it has heard of" : "");
    ob_steps_fail(plan, ONEBIT_SKIPPED);
  }
  if (plan->status != ONEBIT_OK)
    plan->step = plan->stop;
}

static void commit(struct onebit_plan *plan) {
  if (dense(plan))
    return;
  ob_kept_commit(&plan->worker);
  ob_kept_commit(&plan->server);
  plan->result_now = !plan->result_now;
  plan->server_large = is_set(&plan->work.large);
  if (plan->options.no_error_feedback) {
    ob_kept_reset(&plan->worker);
    ob_kept_reset(&plan->server);
  }
}

/* False when the step has to wait for a message. plan->step already points to the step after. */
static bool take(struct onebit_plan *plan, const struct ob_step *step, bool wait) {
  const size_t chunk = step->chunk, slot = chunk % plan->slots;
  switch (step->kind) {
  case OB_STEP_SHARE:
    return ob_host_share(plan, chunk);
  case OB_STEP_MEET:
    return ob_host_meet(plan, chunk);
  case OB_STEP_COMPRESS:
    compress_chunk(plan, chunk);
    return true;
  case OB_STEP_FINISH_WORKER:
    finish_worker(plan);
    return true;
  case OB_STEP_EXCHANGE:
    exchange_chunk(plan, chunk);
    return true;
  case OB_STEP_RECEIVE:
    return receive(plan, plan->exchange[slot], chunk, OB_MESSAGE_WORKER, wait);
  case OB_STEP_CLEAR:
    return ob_host_clear(plan, chunk);
  case OB_STEP_REDUCE:
    reduce_chunk(plan, chunk);
    return true;
  case OB_STEP_FINISH_SERVER:
    finish_server(plan);
    return true;
  case OB_STEP_GATHER:
    gather_chunk(plan, chunk);
    return true;
  case OB_STEP_COLLECT:
    return receive(plan, plan->gather[slot], chunk, OB_MESSAGE_SERVER, wait);
  case OB_STEP_SPREAD:
    ob_host_spread(plan, chunk);
    return true;
  case OB_STEP_FETCH:
    return ob_host_fetch(plan, chunk);
  case OB_STEP_FORESEE:
    foresee(plan);
    return true;
  case OB_STEP_APPLY_EARLY:
    if (plan->foreseen)
      apply_and_tell(plan, chunk);
    return true;
  case OB_STEP_DECIDE:
    decide(plan);
    return true;
  case OB_STEP_APPLY:
    if (!plan->foreseen)
      apply_and_tell(plan, chunk);
    return true;
  case OB_STEP_COMMIT:
    commit(plan);
    return true;
  }
  return true;
}

bool ob_steps_done(const struct onebit_plan *plan) { return plan->step >= plan->stop; }

bool ob_steps_walk(struct onebit_plan *plan, bool wait) {
  bool moved = false;
  while (!ob_steps_done(plan)) {
    const struct ob_step *step = &plan->steps[plan->step++];
    if (plan->trace.room)
      ob_trace_begin(plan, step);
    if (!take(plan, step, wait)) {
      plan->step--;
      break;
    }
    if (plan->trace.room)
      ob_trace_end(plan);
    moved = true;
  }
  return moved;
}
