/* Where messages lie, and how they travel between ranks. */
#include "base/error.h"
#include "collectives/step_parts.h"
#include "collectives/steps.h"

unsigned char *ob_message_at(const struct onebit_plan *plan, unsigned char *base, size_t member,
                             size_t chunk) {
  return base + member * plan->peer_stride + chunk % plan->slots * plan->stride;
}

unsigned char *ob_plan_result(const struct onebit_plan *plan, bool next, size_t source,
                              size_t chunk) {
  int copy = next ? !plan->result_now : plan->result_now;
  unsigned char *base = plan->results[copy];
  size_t member = source;
  if (plan->doubling && !plan->in_pairs)
    member = (source + plan->group.size - plan->group.place) % plan->group.size;
  if (ob_host_shares(plan)) {
    member = source % plan->group.size;
    base = plan->host.shared.base[source / plan->group.size] + plan->host.results_at[copy];
  }
  return ob_message_at(plan, base, member, chunk);
}

size_t ob_plan_sources(const struct onebit_plan *plan) {
  return plan->host.ranks ? plan->shares : plan->group.size;
}

bool ob_gathers_whole(const struct onebit_plan *plan) {
  return (plan->options.operation == ONEBIT_ALLGATHER && !plan->of_shares) ||
         plan->schedule == ONEBIT_SCHEDULE_ALLGATHER;
}

bool ob_sends_halves(const struct onebit_plan *plan) {
  return plan->options.wire == ONEBIT_WIRE_DENSE && plan->options.dtype != ONEBIT_FLOAT32 &&
         plan->options.operation != ONEBIT_ALLREDUCE;
}

size_t ob_share_of(const struct onebit_plan *plan, size_t member) {
  return ob_gathers_whole(plan) ? 0 : plan->first_share + member;
}

size_t ob_own_share(const struct onebit_plan *plan) { return ob_share_of(plan, plan->group.place); }

unsigned char *ob_result_of(const struct onebit_plan *plan, size_t member, size_t chunk) {
  return ob_plan_result(plan, true, plan->first_share + member, chunk);
}

size_t ob_shifted(const struct onebit_plan *plan, size_t step) {
  return (plan->group.place + step) % plan->group.size;
}

bool ob_is_dense(const struct onebit_plan *plan) { return plan->options.wire == ONEBIT_WIRE_DENSE; }

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

struct ob_batch *ob_exchange_batch(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->exchange[chunk % plan->slots];
  struct ob_message_shape mine = ob_plan_message(plan, ob_own_share(plan), chunk);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < plan->group.size; step++) {
    size_t member = ob_shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, ob_share_of(plan, member), chunk);
    add_endpoints(plan, batch, member, ob_message_at(plan, plan->outgoing, member, chunk),
                  ob_message_bytes(&shape), ob_message_at(plan, plan->incoming, member, chunk),
                  ob_message_bytes(&mine));
  }
  return batch;
}

struct ob_batch *ob_gather_batch(struct onebit_plan *plan, size_t chunk) {
  struct ob_batch *batch = plan->gather[chunk % plan->slots];
  struct ob_message_shape mine = ob_plan_message(plan, ob_own_share(plan), chunk);
  unsigned char *out = ob_result_of(plan, plan->group.place, chunk);
  batch->sends = batch->receives = 0;
  for (size_t step = 1; step < plan->group.size; step++) {
    size_t member = ob_shifted(plan, step);
    struct ob_message_shape shape = ob_plan_message(plan, ob_share_of(plan, member), chunk);
    add_endpoints(plan, batch, member, out, ob_message_bytes(&mine),
                  ob_result_of(plan, member, chunk), ob_message_bytes(&shape));
  }
  return batch;
}

void ob_exchange_chunk(struct onebit_plan *plan, size_t chunk) {
  for (size_t member = 0; member < plan->group.size; member++) {
    struct ob_message_shape shape = ob_plan_message(plan, ob_share_of(plan, member), chunk);
    unsigned char *out = ob_message_at(plan, plan->outgoing, member, chunk);
    stamp(plan, ob_message_view(out, &shape).header, &shape, OB_MESSAGE_WORKER, plan->worker_scale);
  }
  begin(plan, ob_exchange_batch(plan, chunk));
}

void ob_gather_chunk(struct onebit_plan *plan, size_t chunk) {
  struct ob_message_shape mine = ob_plan_message(plan, ob_own_share(plan), chunk);
  unsigned char *out = ob_result_of(plan, plan->group.place, chunk);
  bool served = plan->options.operation == ONEBIT_ALLREDUCE && !ob_gathers_whole(plan);
  stamp(plan, ob_message_view(out, &mine).header, &mine, OB_MESSAGE_SERVER,
        served ? plan->server_scale : plan->worker_scale);
  begin(plan, ob_gather_batch(plan, chunk));
}

/* What one round of doubling moves: so many messages from here to there, to and from these. */
struct round {
  size_t count, from_place, to_place; /* places among the results in memory */
  size_t to, from;                    /* members */
};

static struct round round_of(const struct onebit_plan *plan, size_t number) {
  size_t size = plan->group.size, place = plan->group.place, distance = (size_t)1 << number;
  if (plan->in_pairs) { /* each of a pair has the group of `distance` ranks that it is in */
    size_t peer = place ^ distance;
    return (struct round){distance, place & ~(distance - 1), peer & ~(distance - 1), peer, peer};
  }
  return (struct round){distance < size - distance ? distance : size - distance, 0, distance,
                        (place + size - distance) % size, (place + distance) % size};
}

struct ob_batch *ob_round_batch(struct onebit_plan *plan, size_t number) {
  struct ob_batch *batch = plan->gather[0];
  struct round round = round_of(plan, number);
  unsigned char *results = plan->results[!plan->result_now];
  size_t bytes = round.count * plan->peer_stride;
  batch->sends = batch->receives = 1;
  batch->send[0] = (struct ob_endpoint){results + round.from_place * plan->peer_stride, bytes,
                                        plan->group.ranks[round.to]};
  batch->receive[0] = (struct ob_endpoint){results + round.to_place * plan->peer_stride, bytes,
                                           plan->group.ranks[round.from]};
  return batch;
}

void ob_pass(struct onebit_plan *plan, size_t number) {
  if (number == 0) {
    struct ob_message_shape mine = ob_plan_message(plan, 0, 0);
    unsigned char *own = ob_result_of(plan, plan->group.place, 0);
    stamp(plan, ob_message_view(own, &mine).header, &mine, OB_MESSAGE_SERVER, plan->worker_scale);
  }
  begin(plan, ob_round_batch(plan, number));
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
  size_t share = kind == OB_MESSAGE_WORKER ? ob_own_share(plan) : ob_share_of(plan, member);
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  const struct ob_header *header = in->data;
  onebit_status_t status = ob_message_check(in->data, in->bytes, &shape, &expected);
  if (status == ONEBIT_OK)
    ob_steps_hear(plan, in->peer, header->flags, header->agreed);
  else
    refuse(plan, in->peer, status);
}

bool ob_receive(struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                enum ob_message_kind kind, bool wait) {
  onebit_status_t status = plan->comm->transport->test(batch, wait);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status != ONEBIT_OK)
    ob_steps_give_up(plan);
  for (size_t i = 0; status == ONEBIT_OK && i < batch->receives; i++)
    check_message(plan, &batch->receive[i], ob_shifted(plan, i + 1), chunk, kind);
  return true;
}

static void check_passed(struct onebit_plan *plan, size_t number) {
  const struct ob_endpoint *in = &plan->gather[0]->receive[0];
  struct round round = round_of(plan, number);
  struct ob_message_shape shape = ob_plan_message(plan, 0, 0);
  if (in->bytes != round.count * plan->peer_stride) {
    ob_error(ONEBIT_ERROR_MESSAGE, "message: %zu bytes, expected %zu", in->bytes,
             round.count * plan->peer_stride);
    refuse(plan, in->peer, ONEBIT_ERROR_MESSAGE);
    return;
  }
  for (size_t k = round.to_place; k < round.to_place + round.count; k++) {
    size_t member = plan->in_pairs ? k : (plan->group.place + k) % plan->group.size;
    struct ob_endpoint one = {ob_result_of(plan, member, 0), ob_message_bytes(&shape),
                              plan->group.ranks[member]};
    check_message(plan, &one, member, 0, OB_MESSAGE_SERVER);
  }
}

bool ob_passed(struct onebit_plan *plan, size_t number, bool wait) {
  onebit_status_t status = plan->comm->transport->test(plan->gather[0], wait);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status == ONEBIT_OK)
    check_passed(plan, number);
  else
    ob_steps_give_up(plan);
  return true;
}
