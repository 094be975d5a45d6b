/*
 * Doubling: an allgather of one small message in log2(P) rounds, each of which doubles the number
 * of messages that a rank has. If the number of ranks is a power of two, they exchange in pairs
 * (recursive doubling), so that TCP can send an acknowledgement with the peer's message. Any other
 * number of ranks uses the allgather of Bruck et al. (1997), in which results lie in the order of
 * their distance from the rank.
 *
 *   C | round 0 | round 1 | ... | R, if dense | decide | A
 *
 * In round k a rank sends the messages of up to 2^k ranks. If ranks exchange in pairs, it sends
 * them to the rank whose number differs in bit k, which sends as many back. Otherwise it sends them
 * to the rank whose number is smaller by 2^k, modulo P.
 *
 * Limits: each rank has one message, and a round's bytes must fit an MPI count, an int.
 */
#include <limits.h>

#include "base/error.h"
#include "collectives/messages.h"
#include "collectives/watch.h"

/* True if these ranks use rounds. Ranks that are threads have no cost model, so they use rounds
 * from OB_COST_DOUBLING_RANKS ranks on. */
static bool are_rounds_used(onebit_comm_t comm) {
  const struct ob_cost_task task = {
      .hosts = comm->hosts.count, .ranks = comm->size, .max_ranks = comm->hosts.max};
  return comm->transport->network ? ob_cost_rounds_pay(&comm->costs, &task)
                                  : comm->size >= OB_COST_DOUBLING_RANKS;
}

bool ob_doubling_fits(const struct onebit_plan *plan) {
  const struct ob_geometry *geometry = &plan->geometry;
  return plan->schedule == &ob_schedule_allgather && plan->options.operation == ONEBIT_ALLREDUCE &&
         are_rounds_used(plan->comm) && plan->comm->transport->host_messages &&
         geometry->chunks == 1 &&
         geometry->stride <= (size_t)INT_MAX / (geometry->members / 2); /* in the last round */
}

static bool is_in_pairs(const struct onebit_plan *plan) { return !plan->geometry.rotated; }

/* The messages of a round: their number, their positions, and the ranks that they go to and come
 * from. */
struct round {
  size_t count, from_position, to_position; /* positions among the results in memory */
  size_t to, from;                          /* members */
};

static struct round plan_round(const struct onebit_plan *plan, size_t number) {
  size_t size = plan->geometry.members, own = plan->geometry.member;
  size_t distance = (size_t)1 << number;
  if (is_in_pairs(plan)) { /* each rank of a pair has the messages of its `distance` ranks */
    size_t peer = own ^ distance;
    return (struct round){distance, own & ~(distance - 1), peer & ~(distance - 1), peer, peer};
  }
  return (struct round){distance < size - distance ? distance : size - distance, 0, distance,
                        (own + size - distance) % size, (own + distance) % size};
}

struct ob_batch *ob_round_batch(const struct onebit_plan *plan, size_t number) {
  struct ob_batch *batch = plan->gather[0];
  struct round round = plan_round(plan, number);
  unsigned char *results = plan->geometry.results[!plan->state->result_now];
  size_t each = plan->geometry.peer_stride;
  batch->sends = batch->receives = 1;
  batch->send[0] = (struct ob_endpoint){results + round.from_position * each, round.count * each,
                                        plan->member_ranks[round.to]};
  size_t max_bytes = ob_ladder_max_bytes(&plan->state->ladder, round.count, round.count * each);
  batch->receive[0] = (struct ob_endpoint){results + round.to_position * each, max_bytes,
                                           plan->member_ranks[round.from]};
  return batch;
}

bool ob_begin_round(const struct onebit_plan *plan, size_t number, bool wait) {
  struct ob_message_shape mine = ob_plan_message(plan, 0, 0);
  (void)wait;
  ob_steps_note_own(plan);
  if (number == 0)
    ob_write_header(plan, ob_result_of(plan, plan->geometry.member, 0), &mine, OB_MESSAGE_SERVER,
                    plan->flight->worker_scale);
  ob_begin_batch(plan, ob_round_batch(plan, number));
  return true;
}

static void check_round(const struct onebit_plan *plan, size_t number) {
  const struct ob_endpoint *in = &plan->gather[0]->receive[0];
  struct round round = plan_round(plan, number);
  struct ob_message_shape shape = ob_plan_message(plan, 0, 0);
  size_t bytes = round.count * plan->geometry.peer_stride;
  if (in->bytes != bytes) {
    ob_error(ONEBIT_ERROR_MESSAGE, "message has %zu bytes, expected %zu", in->bytes, bytes);
    ob_refuse_message(plan, in->peer, ONEBIT_ERROR_MESSAGE);
    return;
  }
  for (size_t k = round.to_position; k < round.to_position + round.count; k++) {
    size_t member = is_in_pairs(plan) ? k : ob_neighbour(&plan->geometry, k);
    struct ob_endpoint one = {ob_result_of(plan, member, 0), ob_message_bytes(&shape),
                              plan->member_ranks[member]};
    ob_check_message(plan, &one, 0, 0, OB_MESSAGE_SERVER);
  }
}

bool ob_end_round(const struct onebit_plan *plan, size_t number, bool wait) {
  onebit_status_t status = plan->comm->transport->test(plan->gather[0], wait ? OB_WAIT_SLICE : 0);
  if (status == ONEBIT_IN_PROGRESS)
    return false;
  if (status == ONEBIT_OK)
    check_round(plan, number);
  else
    ob_steps_give_up(plan);
  return true;
}

static void doubling_build(struct onebit_plan *plan, bool decided) {
  if (decided) {
    ob_steps_add(plan, OB_STEP_APPLY_WHOLE, 0);
    return;
  }
  ob_steps_add(plan, OB_STEP_COMPRESS_WHOLE, 0);
  if (plan->geometry.one_scale)
    ob_steps_add(plan, OB_STEP_FINISH_WORKER, 0);
  for (size_t round = 0; (size_t)1 << round < plan->geometry.members; round++) {
    ob_steps_add(plan, OB_STEP_BEGIN_ROUND, round);
    ob_steps_add(plan, OB_STEP_END_ROUND, round);
  }
  if (plan->geometry.dense)
    ob_steps_add(plan, OB_STEP_REDUCE_WHOLE, 0);
}

/* Computes the sizes. A round sends whole strides, so that all its bytes are contiguous. */
static void doubling_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  ob_schedule_allgather.sizes(plan, sizes);
  sizes->wire_bytes = (plan->geometry.members - 1) * plan->geometry.stride;
}

/* The cost model has no row for doubling: the allgather's cost includes the rounds. */
const struct ob_schedule ob_schedule_doubling = {.build = doubling_build, .sizes = doubling_sizes};
