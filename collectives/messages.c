/* The addresses of messages, their transfer between ranks, the checks of received messages, and the
 * end of a call, which is decided from the flags of messages. */
#include "collectives/messages.h"

#include "base/error.h"
#include "collectives/watch.h"

unsigned char *ob_host_result(const struct onebit_plan *plan, int copy, size_t segment,
                              size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  unsigned char *base = plan->host.shared.base[segment / geometry->members];
  return ob_message_at(geometry, base + plan->host.results_at[copy], segment % geometry->members,
                       chunk);
}

unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk) {
  int copy = next ? !plan->state->result_now : plan->state->result_now;
  if (plan->host.shared.base)
    return ob_host_result(plan, copy, source, chunk);
  return ob_result_at(&plan->geometry, copy, source, chunk);
}

const struct ob_geometry *ob_plan_geometry(const struct onebit_plan *plan) {
  return &plan->geometry;
}

const struct ob_layout *ob_plan_layout(const struct onebit_plan *plan) {
  return &plan->geometry.layout;
}

bool ob_plan_is_compressed(const struct onebit_plan *plan) { return !plan->geometry.dense; }

bool ob_plan_is_hierarchical(const struct onebit_plan *plan) { return plan->host.ranks > 0; }

bool ob_plan_is_broken(const struct onebit_plan *plan) { return plan->state->broken; }

uint64_t ob_plan_wire_bytes(const struct onebit_plan *plan) { return plan ? plan->wire_bytes : 0; }

uint64_t ob_plan_memory_bytes(const struct onebit_plan *plan) {
  return plan ? plan->memory_bytes : 0;
}

const struct ob_memory *ob_plan_memory(const struct onebit_plan *plan) {
  return plan->executor->residuals;
}

const struct ob_memory *ob_plan_message_memory(const struct onebit_plan *plan) {
  return plan->executor->messages;
}

struct ob_work *ob_plan_work(const struct onebit_plan *plan) {
  return &plan->state->work;
}

struct ob_residual *ob_plan_residual(const struct onebit_plan *plan, bool server) {
  return server ? &plan->state->server : &plan->state->worker;
}

void ob_plan_segment(const struct onebit_plan *plan, size_t *first, size_t *end) {
  const struct ob_geometry *geometry = &plan->geometry;
  size_t segment = geometry->first_segment + geometry->member;
  *first = geometry->bounds[segment * geometry->chunks];
  *end = geometry->bounds[(segment + 1) * geometry->chunks];
}

void ob_plan_find_compressed(const struct onebit_plan *plan, size_t *first, size_t *end) {
  *first = plan->sizes.compressed_first;
  *end = plan->sizes.compressed_end;
}

void ob_plan_own_results(const struct onebit_plan *plan, size_t *first, size_t *end) {
  const bool shared = plan->host.shared.base != NULL;
  *first = shared ? plan->geometry.first_segment : 0;
  *end = shared ? *first + plan->geometry.members : ob_plan_sources(plan);
}

size_t ob_plan_sources(const struct onebit_plan *plan) {
  return plan->host.ranks ? plan->geometry.segments : plan->geometry.members;
}

struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t segment,
                                        size_t chunk) {
  struct ob_message_shape shape = ob_message_blocks(&plan->geometry, segment, chunk);
  const struct ob_layout *layout = &plan->geometry.layout;
  shape.words = ob_layout_word(layout, shape.first + shape.blocks);
  shape.words -= ob_layout_word(layout, shape.first);
  return shape;
}

struct ob_message_shape ob_plan_result_message(const struct onebit_plan *plan, size_t segment,
                                               size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  shape.width = plan->geometry.result_width;
  return shape;
}

struct ob_message_shape ob_plan_last_message(const struct onebit_plan *plan, size_t segment,
                                             size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  shape.width = plan->state->last_width;
  return shape;
}

size_t ob_plan_message_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  return ob_message_bytes(&shape);
}

size_t ob_plan_result_bytes(const struct onebit_plan *plan, size_t segment, size_t chunk) {
  struct ob_message_shape shape = ob_plan_result_message(plan, segment, chunk);
  return ob_message_bytes(&shape);
}

size_t ob_plan_longest_message(const struct onebit_plan *plan) {
  size_t words = 0;
  for (size_t segment = 0; segment < plan->geometry.segments; segment++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      size_t mine = ob_plan_message(plan, segment, chunk).words;
      words = mine > words ? mine : words;
    }
  return words * OB_LANES;
}

size_t ob_own_segment(const struct onebit_plan *plan) {
  return ob_segment_of(&plan->geometry, plan->geometry.member);
}

unsigned char *ob_result_of(const struct onebit_plan *plan, size_t member, size_t chunk) {
  return ob_plan_result(plan, true, plan->geometry.first_segment + member, chunk);
}

/* --- Sending -----------------------------------------------------------------------------------*/

void ob_write_header(const struct onebit_plan *plan, unsigned char *memory,
                     const struct ob_message_shape *shape, enum ob_message_kind kind, float scale) {
  const struct ob_message_call call = {kind, plan->state->sequence, plan->geometry.layout.elements,
                                       plan->flight->call.agreed};
  if (!plan->geometry.one_scale)
    scale = plan->host.ranks ? plan->state->ladder.max_rms : plan->state->ladder.rms;
  const unsigned flags =
      ob_steps_flags(plan) | ob_payload_flags(shape->dense, shape->half, shape->width);
  *(struct ob_header *)(void *)memory = ob_header_make(shape, &call, (uint16_t)flags, scale);
  ob_message_seal(memory, shape, plan->state->work.codec);
}

static void count_bytes(const struct ob_batch *batch) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < batch->sends; i++)
    bytes += batch->send[i].bytes;
  atomic_fetch_add_explicit(&batch->comm->bytes_sent, bytes, memory_order_relaxed);
}

onebit_status_t ob_comm_begin(struct ob_batch *batch, int tag) {
  count_bytes(batch);
  return batch->comm->transport->begin(batch, tag);
}

onebit_status_t ob_comm_put(struct ob_batch *batch, void *stream) {
  count_bytes(batch);
  return batch->comm->transport->put(batch, stream);
}

void ob_begin_batch(const struct onebit_plan *plan, struct ob_batch *batch) {
  count_bytes(batch);
  if (plan->comm->transport->begin(batch, plan->tag) != ONEBIT_OK)
    ob_steps_give_up(plan);
}

/* Adds to the batch a send to a member and a receive from it. */
static void add_message_endpoints(const struct onebit_plan *plan, struct ob_batch *batch,
                                  size_t member, unsigned char *out, size_t out_bytes,
                                  unsigned char *in, size_t in_bytes) {
  int rank = plan->member_ranks[member];
  batch->send[batch->sends++] = (struct ob_endpoint){out, out_bytes, rank};
  batch->receive[batch->receives++] = (struct ob_endpoint){in, in_bytes, rank};
}

struct ob_batch *ob_exchange_batch(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  struct ob_batch *batch = plan->exchange[chunk % geometry->slots];
  batch->sends = batch->receives = 0;
  for (size_t distance = 1; distance < geometry->members; distance++)
    for (size_t k = 0; k < ob_messages_each(geometry); k++) {
      const size_t member = ob_neighbour(geometry, distance);
      const size_t server = ob_server_of(geometry, member, k);
      const size_t mine = ob_segment_of(geometry, ob_server_of(geometry, geometry->member, k));
      add_message_endpoints(
          plan, batch, member, ob_message_at(geometry, geometry->outgoing, server, chunk),
          ob_plan_message_bytes(plan, ob_segment_of(geometry, server), chunk),
          ob_incoming_at(geometry, member, k, chunk),
          ob_ladder_max_bytes(&plan->state->ladder, 1, ob_plan_message_bytes(plan, mine, chunk)));
    }
  return batch;
}

struct ob_batch *ob_gather_batch(const struct onebit_plan *plan, size_t chunk) {
  const struct ob_geometry *geometry = &plan->geometry;
  struct ob_batch *batch = plan->gather[chunk % geometry->slots];
  size_t mine = ob_plan_result_bytes(plan, ob_own_segment(plan), chunk);
  unsigned char *out = ob_result_of(plan, geometry->member, chunk);
  batch->sends = batch->receives = 0;
  for (size_t distance = 1; distance < geometry->members; distance++) {
    size_t member = ob_neighbour(geometry, distance);
    size_t theirs = ob_plan_result_bytes(plan, ob_segment_of(geometry, member), chunk);
    add_message_endpoints(plan, batch, member, out, mine, ob_result_of(plan, member, chunk),
                          ob_ladder_max_bytes(&plan->state->ladder, 1, theirs));
  }
  return batch;
}

bool ob_send_to_servers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  const struct ob_geometry *geometry = &plan->geometry;
  (void)wait;
  ob_steps_note_own(plan);
  for (size_t member = 0; member < geometry->members; member++) {
    struct ob_message_shape shape = ob_plan_message(plan, ob_segment_of(geometry, member), chunk);
    ob_write_header(plan, ob_message_at(geometry, geometry->outgoing, member, chunk), &shape,
                    OB_MESSAGE_WORKER, plan->flight->worker_scale);
  }
  ob_begin_batch(plan, ob_exchange_batch(plan, chunk));
  return true;
}

bool ob_send_to_all(const struct onebit_plan *plan, size_t chunk, bool wait) {
  struct ob_message_shape shape = ob_plan_result_message(plan, ob_own_segment(plan), chunk);
  bool reduced = plan->options.operation == ONEBIT_ALLREDUCE && !plan->geometry.whole;
  (void)wait;
  ob_steps_note_own(plan);
  ob_write_header(plan, ob_result_of(plan, plan->geometry.member, chunk), &shape, OB_MESSAGE_SERVER,
                  reduced ? plan->flight->server_scale : plan->flight->worker_scale);
  ob_begin_batch(plan, ob_gather_batch(plan, chunk));
  return true;
}

/* --- Receiving ---------------------------------------------------------------------------------*/

/* Fails if another rank, which has no error itself, has made the call with another value of
 * `agreed`. In a hierarchical plan the value of a rank on another host may arrive through a third
 * rank. */
static onebit_status_t check_agreed(const struct onebit_plan *plan, unsigned flags,
                                    uint32_t agreed) {
  const char *name =
      plan->flight->call.agreed_name ? plan->flight->call.agreed_name : "an argument";
  if (!ob_header_disagrees(flags, agreed, plan->flight->call.agreed))
    return ONEBIT_OK;
  if (agreed == plan->flight->call.agreed)
    return ob_error(ONEBIT_ERROR_MISMATCH,
                    "%s differs between two other ranks: read their error messages", name);
  if (plan->flight->call.agreed_whole)
    return ob_error(ONEBIT_ERROR_MISMATCH,
                    "%s differs between ranks: %08x on this rank, %08x on another rank", name,
                    (unsigned)plan->flight->call.agreed, (unsigned)agreed);
  return ob_error(ONEBIT_ERROR_MISMATCH,
                  "%s differs between ranks: %.9g on this rank, %.9g on another rank", name,
                  (double)ob_float_of(plan->flight->call.agreed), (double)ob_float_of(agreed));
}

void ob_refuse_message(const struct onebit_plan *plan, int rank, onebit_status_t status) {
  ob_error(status, "from rank %d: %.200s", rank, onebit_last_error());
  if (status == ONEBIT_ERROR_MESSAGE) /* another thread may advance this plan and call this */
    __atomic_store_n(plan->refused, true, __ATOMIC_RELAXED);
  ob_steps_fail(plan, status);
}

void ob_steps_add_flags(const struct onebit_plan *plan, int rank, unsigned flags, uint32_t agreed) {
  onebit_status_t status = check_agreed(plan, flags, agreed);
  if (status != ONEBIT_OK) {
    ob_refuse_message(plan, rank, status);
    return;
  }
  if (flags & OB_FLAG_ERROR && plan->flight->failed_rank < 0)
    plan->flight->failed_rank = rank;
  if (flags & OB_FLAG_NOT_FINITE && plan->flight->not_finite_rank < 0)
    plan->flight->not_finite_rank = rank;
  plan->flight->large_elsewhere |= (flags & OB_FLAG_LARGE) != 0;
}

void ob_check_message(const struct onebit_plan *plan, const struct ob_endpoint *in, size_t segment,
                      size_t chunk, enum ob_message_kind kind) {
  const struct ob_message_call call = {kind, plan->state->sequence, plan->geometry.layout.elements,
                                       plan->flight->call.agreed};
  struct ob_message_shape shape = kind == OB_MESSAGE_SERVER
                                      ? ob_plan_result_message(plan, segment, chunk)
                                      : ob_plan_message(plan, segment, chunk);
  const struct ob_header *header = in->data;
  if (in->bytes >= sizeof *header && header->flags & OB_FLAG_ERROR)
    shape.width = ob_ladder_width_of(&plan->state->ladder, header->flags, shape.width);
  onebit_status_t status =
      ob_message_check(in->data, in->bytes, &shape, &call, plan->state->work.codec);
  if (status != ONEBIT_OK) {
    ob_refuse_message(plan, in->peer, status);
    return;
  }
  ob_ladder_add_flags(&plan->state->ladder, header->flags, header->scale);
  ob_steps_add_flags(plan, in->peer, header->flags, header->agreed);
}

static bool receive_messages(const struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                             enum ob_message_kind kind, bool wait) {
  onebit_status_t status = plan->comm->transport->test(batch, wait ? OB_WAIT_SLICE : 0);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status != ONEBIT_OK)
    ob_steps_give_up(plan);
  const struct ob_geometry *geometry = &plan->geometry;
  const bool worker = kind == OB_MESSAGE_WORKER;
  const size_t each = worker ? ob_messages_each(geometry) : 1;
  for (size_t i = 0; status == ONEBIT_OK && i < batch->receives; i++) {
    const size_t sender = ob_neighbour(geometry, i / each + 1);
    const size_t server = worker ? ob_server_of(geometry, geometry->member, i % each) : sender;
    const size_t segment = ob_segment_of(geometry, server);
    ob_check_message(plan, &batch->receive[i], segment, chunk, kind);
  }
  return true;
}

bool ob_receive_from_workers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return receive_messages(plan, plan->exchange[chunk % plan->geometry.slots], chunk,
                          OB_MESSAGE_WORKER, wait);
}

bool ob_receive_from_servers(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return receive_messages(plan, plan->gather[chunk % plan->geometry.slots], chunk,
                          OB_MESSAGE_SERVER, wait);
}

/* --- This rank's own state ---------------------------------------------------------------------*/

static bool is_set(const atomic_bool *flag) {
  return atomic_load_explicit(flag, memory_order_relaxed);
}

void ob_steps_fail(const struct onebit_plan *plan, onebit_status_t status) {
  ob_outcome_add(&plan->flight->outcome, status);
}

void ob_steps_give_up(const struct onebit_plan *plan) {
  const struct ob_comm_end *end = &plan->comm->end;
  if (atomic_load(&end->set) && !strstr(onebit_last_error(), end->text))
    ob_comm_health(plan->comm); /* sets this thread's error message to the communicator's */
  ob_steps_fail(plan, ONEBIT_ERROR_TRANSPORT);
  plan->state->broken = true;
  plan->flight->step = plan->flight->stop;
  /* A call on a stream fails on that stream only, and the program has to abort the communicator. */
  if (!plan->comm->transport->put)
    ob_comm_give_up(plan->comm, plan->flight->outcome.error);
  if (plan->host.shared.base)
    ob_host_give_up(plan);
}

/* Returns this rank's flags. In a hierarchical plan they include those of the other ranks of its
 * host. */
unsigned ob_steps_flags(const struct onebit_plan *plan) {
  const bool hierarchical = plan->host.ranks > 0;
  unsigned flags = 0;
  if (is_set(&plan->state->work.not_finite) || (hierarchical && plan->flight->not_finite_rank >= 0))
    flags |= OB_FLAG_NOT_FINITE;
  if (plan->flight->outcome.status != ONEBIT_OK || (hierarchical && plan->flight->failed_rank >= 0))
    flags |= OB_FLAG_ERROR;
  if (is_set(&plan->state->work.large) || (hierarchical && plan->flight->large_elsewhere))
    flags |= OB_FLAG_LARGE;
  if (plan->flight->outcome.status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  flags |= hierarchical ? plan->state->ladder.flags : (unsigned)plan->state->ladder.state.wish;
  return flags;
}

void ob_steps_note_own(const struct onebit_plan *plan) {
  if (is_set(&plan->state->work.not_finite) && plan->flight->not_finite_rank < 0)
    plan->flight->not_finite_rank = plan->comm->rank;
}

/* --- The end of a call -------------------------------------------------------------------------*/

/* Checks whether results may be applied before the end of the call. Every worker's message has
 * arrived, so no input can cause the call to be skipped any more. A server's result is finite if it
 * comes from finite values that are not large; dense messages have no flag for large values, so
 * they are never applied early. The only error that can still occur is a message that is damaged on
 * its way, of which the other ranks would not learn in any case. */
bool ob_steps_check_early(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  struct ob_flight *flight = plan->flight;
  const unsigned flags = ob_steps_flags(plan) & ~(unsigned)OB_LADDER_FLAGS;
  flight->apply_early_ok = !flight->call.hold && !plan->geometry.dense && !flags &&
                           flight->failed_rank < 0 && flight->not_finite_rank < 0 &&
                           !flight->large_elsewhere;
  return true;
}

bool ob_steps_apply_early(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return !plan->flight->apply_early_ok || plan->executor->run[OB_STEP_APPLY](plan, chunk, wait);
}

bool ob_steps_apply_late(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return plan->flight->apply_early_ok || plan->executor->run[OB_STEP_APPLY](plan, chunk, wait);
}

static void report_verdict(const struct onebit_plan *plan, onebit_status_t status) {
  const char *or_other = plan->host.ranks ? " (or a rank whose status it passed on)" : "";
  if (status == ONEBIT_SKIPPED)
    ob_error(status, "skipped: rank %d%s has a value that is not finite",
             plan->flight->not_finite_rank, or_other);
  else
    ob_error(status, "rank %d%s failed in this call: read its error message",
             plan->flight->failed_rank, or_other);
  ob_steps_fail(plan, status);
}

/* Decides the status of the call. Every rank's flags are known, so all ranks decide on the same
 * status. */
bool ob_steps_decide(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  ob_steps_note_own(plan);
  onebit_status_t status = ob_call_verdict(plan->flight->outcome.status, plan->flight->failed_rank,
                                           plan->flight->not_finite_rank);
  if (plan->flight->outcome.status == ONEBIT_OK && status != ONEBIT_OK)
    report_verdict(plan, status);
  if (plan->flight->outcome.status != ONEBIT_OK)
    plan->flight->step = plan->flight->stop;
  return true;
}

bool ob_steps_do_nothing(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)plan, (void)chunk, (void)wait;
  return true;
}
