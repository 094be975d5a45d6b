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

static unsigned char *message_at(const struct onebit_plan *plan, unsigned char *base, size_t peer,
                                 size_t chunk) {
  return base + (peer * plan->slots + chunk % plan->slots) * plan->stride;
}

static size_t own_rank(const struct onebit_plan *plan) { return (size_t)plan->comm->rank; }

static size_t ranks(const struct onebit_plan *plan) { return (size_t)plan->comm->size; }

/* The rank that is `step` places further: every rank begins with itself or its neighbour, so that
 * they do not all send to the same one. */
static size_t shifted(const struct onebit_plan *plan, size_t step) {
  return (own_rank(plan) + step) % ranks(plan);
}

/* In an allgather there is one share, and everyone's message is about it. */
static size_t share_of(const struct onebit_plan *plan, size_t rank) {
  return plan->shares == 1 ? 0 : rank;
}

static bool dense(const struct onebit_plan *plan) {
  return plan->options.wire == ONEBIT_WIRE_DENSE;
}

static unsigned char *next_results(const struct onebit_plan *plan) {
  return plan->results[!plan->result_now];
}

void ob_steps_fail(struct onebit_plan *plan, onebit_status_t status) {
  if (plan->status != ONEBIT_OK)
    return; /* the first trouble is the one to tell of */
  plan->status = status;
  snprintf(plan->words, sizeof plan->words, "%s", onebit_last_error());
}

/* After a failed transport no message can be trusted to come: the call ends here. */
static void give_up(struct onebit_plan *plan) {
  ob_steps_fail(plan, ONEBIT_ERROR_TRANSPORT);
  plan->broken = true;
  plan->step = plan->stop;
}

/* Fills in the header of a message that is about to leave. */
static void stamp(struct onebit_plan *plan, struct ob_header *header,
                  const struct ob_message_shape *shape, enum ob_message_kind kind, float scale) {
  unsigned flags = dense(plan) ? OB_FLAG_DENSE : 0;
  if (atomic_load_explicit(&plan->work.not_finite, memory_order_relaxed))
    flags |= OB_FLAG_NOT_FINITE;
  if (plan->status != ONEBIT_OK)
    flags |= OB_FLAG_ERROR;
  if (atomic_load_explicit(&plan->work.large, memory_order_relaxed))
    flags |= OB_FLAG_LARGE;
  *header = (struct ob_header){.magic = OB_MESSAGE_MAGIC,
                               .version = OB_MESSAGE_VERSION,
                               .kind = (uint8_t)kind,
                               .flags = (uint16_t)flags,
                               .sequence = plan->sequence,
                               .scale = scale,
                               .elements = plan->layout.elements,
                               .block = shape->first,
                               .agreed = plan->call.agreed};
}

static void compress_message(struct onebit_plan *plan, unsigned char *memory, size_t share,
                             size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  if (plan->status != ONEBIT_OK) {
    memset(memory, 0, ob_message_bytes(&shape));
  } else if (dense(plan)) {
    ob_load_blocks(&plan->work, plan->call.source.inputs, &shape, &out);
  } else {
    unsigned char *last = message_at(plan, plan->results[plan->result_now], share, chunk);
    struct ob_view momentum = ob_message_view(last, &shape);
    ob_compress_blocks(&plan->work, &plan->call.source, &plan->worker, &shape, &momentum, &out,
                       plan->worker_sums);
  }
}

static void compress_chunk(struct onebit_plan *plan, size_t chunk) {
  if (plan->options.operation == ONEBIT_ALLGATHER) {
    unsigned char *own = message_at(plan, next_results(plan), own_rank(plan), chunk);
    compress_message(plan, own, 0, chunk);
    return;
  }
  for (size_t step = 1; step <= ranks(plan); step++) {
    size_t server = shifted(plan, step);
    compress_message(plan, message_at(plan, plan->outgoing, server, chunk), server, chunk);
  }
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
    give_up(plan);
}

static void exchange_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->exchange[chunk % plan->slots];
  struct ob_message_shape mine = ob_plan_message(plan, own_rank(plan), chunk);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step <= ranks(plan); step++) {
    size_t peer = shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, peer, chunk);
    unsigned char *out = message_at(plan, plan->outgoing, peer, chunk);
    stamp(plan, ob_message_view(out, &shape).header, &shape, OB_MESSAGE_WORKER, plan->worker_scale);
    if (peer == own_rank(plan))
      continue;
    unsigned char *in = message_at(plan, plan->incoming, peer, chunk);
    batch->send[batch->sends++] = (struct ob_endpoint){out, ob_message_bytes(&shape), (int)peer};
    batch->receive[batch->receives++] =
        (struct ob_endpoint){in, ob_message_bytes(&mine), (int)peer};
  }
  begin(plan, batch);
}

static void gather_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->gather[chunk % plan->slots];
  bool from_worker = plan->options.operation == ONEBIT_ALLGATHER;
  struct ob_message_shape mine = ob_plan_message(plan, share_of(plan, own_rank(plan)), chunk);
  unsigned char *out = message_at(plan, next_results(plan), own_rank(plan), chunk);
  stamp(plan, ob_message_view(out, &mine).header, &mine, OB_MESSAGE_SERVER,
        from_worker ? plan->worker_scale : plan->server_scale);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < ranks(plan); step++) {
    size_t peer = shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, share_of(plan, peer), chunk);
    unsigned char *in = message_at(plan, next_results(plan), peer, chunk);
    batch->send[batch->sends++] = (struct ob_endpoint){out, ob_message_bytes(&mine), (int)peer};
    batch->receive[batch->receives++] =
        (struct ob_endpoint){in, ob_message_bytes(&shape), (int)peer};
  }
  begin(plan, batch);
}

/* A rank that can take part must have called with the same argument. */
static onebit_status_t check_agreed(const struct onebit_plan *plan,
                                    const struct ob_header *header) {
  if (header->flags & OB_FLAG_ERROR || header->agreed == plan->call.agreed)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MISMATCH, "%s differs between ranks: here it is %.9g, there %.9g",
                  plan->call.agreed_name ? plan->call.agreed_name : "an argument",
                  (double)ob_float_of(plan->call.agreed), (double)ob_float_of(header->agreed));
}

/* Looks at a message that came, and takes note of its flags. */
static void check_message(struct onebit_plan *plan, const struct ob_endpoint *in, size_t chunk,
                          enum ob_message_kind kind) {
  const struct ob_message_expected expected = {kind, plan->sequence, plan->layout.elements};
  size_t share = kind == OB_MESSAGE_WORKER ? own_rank(plan) : share_of(plan, (size_t)in->peer);
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  const struct ob_header *header = in->data;
  onebit_status_t status = ob_message_check(in->data, in->bytes, &shape, &expected);
  if (status == ONEBIT_OK)
    status = check_agreed(plan, header);
  if (status != ONEBIT_OK) {
    ob_error(status, "from rank %d: %.200s", in->peer, onebit_last_error());
    ob_steps_fail(plan, status);
    return;
  }
  if (header->flags & OB_FLAG_ERROR && plan->failed_rank < 0)
    plan->failed_rank = in->peer;
  if (header->flags & OB_FLAG_NOT_FINITE && plan->not_finite_rank < 0)
    plan->not_finite_rank = in->peer;
  plan->large_heard |= (header->flags & OB_FLAG_LARGE) != 0;
}

/* False when the batch is not complete. */
static bool receive(struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                    enum ob_message_kind kind, bool wait) {
  onebit_status_t status = plan->comm->transport->test(batch, wait);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status != ONEBIT_OK)
    give_up(plan);
  for (size_t i = 0; status == ONEBIT_OK && i < batch->receives; i++)
    check_message(plan, &batch->receive[i], chunk, kind);
  return true;
}

/* All ranks' messages for this rank's share, in rank order. */
static void view_workers(struct onebit_plan *plan, size_t chunk,
                         const struct ob_message_shape *shape) {
  for (size_t rank = 0; rank < ranks(plan); rank++) {
    unsigned char *base = rank == own_rank(plan) ? plan->outgoing : plan->incoming;
    plan->views[rank] = ob_message_view(message_at(plan, base, rank, chunk), shape);
  }
}

static void reduce_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, own_rank(plan), chunk);
  unsigned char *memory = message_at(plan, next_results(plan), own_rank(plan), chunk);
  struct ob_view out = ob_message_view(memory, &shape);
  if (plan->status != ONEBIT_OK) {
    memset(memory, 0, ob_message_bytes(&shape));
    return;
  }
  view_workers(plan, chunk, &shape);
  if (dense(plan))
    ob_mean_blocks(&plan->work, plan->views, &shape, &out);
  else
    ob_reduce_blocks(&plan->work, plan->views, &plan->server, &shape, &out, plan->server_sums);
}

static void apply_message(struct onebit_plan *plan, size_t rank, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, share_of(plan, rank), chunk);
  struct ob_view in = ob_message_view(message_at(plan, next_results(plan), rank, chunk), &shape);
  bool gathered = plan->options.operation == ONEBIT_ALLGATHER;
  if (plan->call.adam && !dense(plan))
    ob_adam_blocks(&plan->work, &in, &shape, plan->call.adam);
  else if (dense(plan))
    ob_convert_blocks(&plan->work, &in, &shape, plan->call.outputs);
  else
    ob_store_blocks(&plan->work, &in, &shape, plan->call.outputs + (gathered ? rank : 0));
}

static void apply_chunk(struct onebit_plan *plan, size_t chunk) {
  if (plan->status != ONEBIT_OK)
    return; /* in a window, or after a message that was damaged */
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER) {
    struct ob_message_shape shape = ob_plan_message(plan, own_rank(plan), chunk);
    view_workers(plan, chunk, &shape);
    ob_sum_blocks(&plan->work, plan->views, &shape, plan->call.outputs);
    return;
  }
  for (size_t rank = 0; rank < ranks(plan); rank++)
    apply_message(plan, rank, chunk);
}

static bool is_set(const atomic_bool *flag) {
  return atomic_load_explicit(flag, memory_order_relaxed);
}

/* Every worker's message is in, so no input can spoil the call any more. What a server makes of
 * finite numbers that are not large is finite. Only a message damaged on its way is left to go
 * wrong, and that the other ranks would not learn of anyway. */
static void foresee(struct onebit_plan *plan) {
  plan->foreseen = !plan->call.hold && plan->status == ONEBIT_OK && plan->failed_rank < 0 &&
                   plan->not_finite_rank < 0 && !is_set(&plan->work.not_finite) &&
                   !plan->large_heard && !is_set(&plan->work.large);
}

/* Every rank's flags are in: all ranks come to the same end. */
static void decide(struct onebit_plan *plan) {
  if (atomic_load_explicit(&plan->work.not_finite, memory_order_relaxed))
    plan->not_finite_rank = plan->comm->rank;
  if (plan->failed_rank >= 0) {
    ob_error(ONEBIT_ERROR_PEER, "rank %d could not take part in the call", plan->failed_rank);
    ob_steps_fail(plan, ONEBIT_ERROR_PEER);
  } else if (plan->not_finite_rank >= 0) {
    ob_error(ONEBIT_SKIPPED, "skipped: a value on rank %d is not finite", plan->not_finite_rank);
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
  case OB_STEP_FORESEE:
    foresee(plan);
    return true;
  case OB_STEP_APPLY_EARLY:
    if (plan->foreseen)
      apply_chunk(plan, chunk);
    return true;
  case OB_STEP_DECIDE:
    decide(plan);
    return true;
  case OB_STEP_APPLY:
    if (!plan->foreseen)
      apply_chunk(plan, chunk);
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
