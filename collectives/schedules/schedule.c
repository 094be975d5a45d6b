/*
 * The schedule: who serves what, in which messages, and in which order things are done.
 *
 * Allreduce, for chunks 0 .. n-1 (C compress, E exchange, r receive, R reduce, G gather, c collect,
 * A apply, check: check early):
 *
 *   bits          C0 E0 C1 E1 ... | r0 R0 G0 r1 R1 G1 ... | check c0 A0 c1 A1 ... | decide commit
 *   one scale     C0 C1 ... finish E0 E1 ... | r0 R0 r1 R1 ... finish G0 G1 ... | check ...
 *   dense window  C0 E0 | C1 E1 r0 R0 G0 c0 A0 | C2 E2 r1 R1 G1 c1 A1 | ... decide
 *   allgather     C0 G0 C1 G1 ... | c0 c1 ... | decide A0 A1 ... commit; one small message: C0,
 *                 then round after round of passing on
 *   hierarchical  as bits or dense window, with the steps of a host (host.h): put and barrier
 *                 before C, wait free before R, publish and wait after c
 *
 * The operation allgather is as the schedule of that name. In a dense window it is C0 G0 | C1 G1 c0
 * A0 | ..., and a reduce-scatter C0 E0 | C1 E1 r0 A0 | ...
 *
 * While a rank compresses chunk i + 1, chunk i travels; while it reduces chunk i, the next ones
 * arrive and results leave. Results are decoded as they come when every worker's word is in and
 * no rank can cause the call to be skipped any more (steps.c, check_early); otherwise after the
 * decision, so that a call that is skipped changes no buffer. Reduce-scatter ends after r with a
 * sum into the caller's buffer.
 */
#include "collectives/schedules/schedule.h"

#include <limits.h>

#include "base/error.h"
#include "base/memory.h"

/* Elements in a message where neither the plan's options nor the cost model say: 8 kB of bits. With
 * very large shares messages grow, to bound their number. */
#define CHUNK_ELEMENTS ((size_t)65536)
#define CHUNKS_AT_MOST ((size_t)256)

/* An MPI count is an int, and a dense message has 4 bytes an element. */
#define CHUNK_ELEMENTS_AT_MOST ((size_t)1 << 28)

/* More chunks than this are a mistake, or more elements than any memory holds. */
#define MOST_CHUNKS ((size_t)1 << 20)

/* Dense messages in a window: one being exchanged while the one before is reduced. */
#define WINDOW_SLOTS 2

static size_t divided_up(size_t a, size_t b) { return a / b + (a % b != 0); }

/* total * part / parts, without overflow. */
static size_t fraction(size_t total, size_t part, size_t parts) {
  return total / parts * part + total % parts * part / parts;
}

/* The first word of share k, before it is moved to the start of a block. */
static size_t share_word(const struct onebit_plan *plan, const struct ob_plan_shape *shape,
                         size_t k) {
  if (shape->share_pieces)
    return plan->layout.piece[shape->share_pieces[k]].first_word;
  if (shape->share_a_piece)
    return plan->layout.piece[k].first_word;
  return fraction(plan->layout.words, k, plan->shares);
}

static size_t chunks_for(const struct onebit_plan *plan, size_t words) {
  size_t elements = words * OB_LANES, asked = plan->options.chunk_size;
  size_t chunk = asked                            ? asked
                 : plan->comm->transport->network ? plan->choice.chunk
                                                  : CHUNK_ELEMENTS;
  /* A chunk of the host's inputs is as many elements of every share, which should stay in the
   * caches (measured: 2 hosts of 4 ranks, 64 MiB: 47 ms, with chunks twice as long 72). */
  if (!asked && plan->schedule == ONEBIT_SCHEDULE_HIERARCHICAL && chunk > CHUNK_ELEMENTS)
    chunk = CHUNK_ELEMENTS;
  if (!asked && divided_up(elements, chunk) > CHUNKS_AT_MOST)
    chunk = divided_up(elements, CHUNKS_AT_MOST);
  if (chunk > CHUNK_ELEMENTS_AT_MOST)
    chunk = CHUNK_ELEMENTS_AT_MOST;
  return elements ? divided_up(elements, chunk) : 1;
}

static void cut_share(struct onebit_plan *plan, const struct ob_plan_shape *shape, size_t share) {
  size_t first = share_word(plan, shape, share), end = share_word(plan, shape, share + 1);
  for (size_t i = 0; i < plan->chunks; i++) {
    size_t word = first + fraction(end - first, i, plan->chunks);
    plan->bounds[share * plan->chunks + i] = ob_layout_block_from(&plan->layout, word);
  }
}

struct ob_message_shape ob_plan_message(const struct onebit_plan *plan, size_t share,
                                        size_t chunk) {
  const size_t *bound = &plan->bounds[share * plan->chunks + chunk];
  size_t word = ob_layout_word(&plan->layout, bound[0]);
  return (struct ob_message_shape){
      .first = bound[0],
      .blocks = bound[1] - bound[0],
      .words = ob_layout_word(&plan->layout, bound[1]) - word,
      .one_scale = plan->work.one_scale,
      .dense = plan->options.wire == ONEBIT_WIRE_DENSE,
      .half = ob_sends_halves(plan),
  };
}

/* What this rank sends of a share's message: to its server, or as its server to the others. */
static uint64_t sent_bytes(const struct onebit_plan *plan, size_t share, size_t bytes) {
  size_t own = plan->shares == 1 ? 0 : plan->first_share + plan->group.place;
  if (share == own)
    return plan->options.operation == ONEBIT_REDUCE_SCATTER ? 0 : bytes * (plan->group.size - 1);
  if (plan->options.operation == ONEBIT_ALLGATHER)
    return 0;
  return share - plan->first_share < plan->group.size ? bytes : 0;
}

static void measure(struct onebit_plan *plan) {
  for (size_t share = 0; share < plan->shares; share++)
    for (size_t i = 0; i < plan->chunks; i++) {
      struct ob_message_shape shape = ob_plan_message(plan, share, i);
      size_t bytes = ob_message_bytes(&shape);
      if (bytes > plan->stride)
        plan->stride = bytes;
      plan->wire_bytes += sent_bytes(plan, share, bytes);
    }
  plan->stride = divided_up(plan->stride, OB_ALIGNMENT) * OB_ALIGNMENT;
  /* A cache line more: messages of all peers are read together, and at multiples of 4 kB from each
   * other they would contend for the same few lines of the first cache. */
  plan->peer_stride = plan->slots * plan->stride + OB_ALIGNMENT;
  /* A round moves the messages of up to half the ranks at once, and an MPI count is an int. */
  plan->doubling = plan->choice.doubling && plan->chunks == 1 &&
                   plan->stride <= (size_t)INT_MAX / (plan->group.size / 2);
  if (plan->doubling) {
    plan->in_pairs = (plan->group.size & (plan->group.size - 1)) == 0;
    plan->peer_stride = plan->stride;
    plan->wire_bytes = (plan->group.size - 1) * plan->stride;
  }
}

onebit_status_t ob_schedule_cut(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  bool whole = ob_gathers_whole(plan);
  plan->shares = whole ? 1 : (size_t)plan->comm->size;
  size_t longest = 0;
  for (size_t k = 0; k < plan->shares; k++) {
    size_t words = share_word(plan, shape, k + 1) - share_word(plan, shape, k);
    longest = words > longest ? words : longest;
  }
  plan->chunks = chunks_for(plan, longest);
  if (plan->chunks > MOST_CHUNKS)
    return plan->options.chunk_size
               ? ob_error(ONEBIT_ERROR_ARGUMENT, "chunk_size is %zu: %zu messages to a rank",
                          plan->options.chunk_size, plan->chunks)
               : ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu elements", longest * OB_LANES);
  plan->slots = shape->windowed && plan->chunks > WINDOW_SLOTS ? WINDOW_SLOTS : plan->chunks;
  plan->bounds = ob_allocate(plan->shares * plan->chunks + 1, sizeof *plan->bounds);
  if (!plan->bounds)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu chunks", plan->chunks);
  for (size_t k = 0; k < plan->shares; k++)
    cut_share(plan, shape, k);
  plan->bounds[plan->shares * plan->chunks] = plan->layout.blocks;
  measure(plan);
  return ONEBIT_OK;
}

static void add(struct onebit_plan *plan, enum ob_step_kind kind, size_t chunk) {
  plan->steps[plan->step_count++] = (struct ob_step){kind, (uint32_t)chunk};
}

static void add_all(struct onebit_plan *plan, enum ob_step_kind kind) {
  for (size_t i = 0; i < plan->chunks; i++)
    add(plan, kind, i);
}

/* In a hierarchical plan the inputs of the host come first. A rank loads a chunk ahead, so that the
 * ranks of a host need not keep in step. */
static void add_meeting(struct onebit_plan *plan, size_t chunk, size_t ahead) {
  if (!plan->host.ranks)
    return;
  for (size_t i = chunk ? chunk + ahead : 0; i <= chunk + ahead && i < plan->chunks; i++)
    add(plan, OB_STEP_HOST_PUT, i);
  add(plan, OB_STEP_HOST_BARRIER, chunk);
}

/* Compress, and send what is compressed as soon as its scales are known. */
static void add_sending(struct onebit_plan *plan, enum ob_step_kind send) {
  for (size_t i = 0; i < plan->chunks; i++) {
    add_meeting(plan, i, 1);
    add(plan, OB_STEP_COMPRESS, i);
    if (!plan->work.one_scale)
      add(plan, send, i);
  }
  if (plan->work.one_scale) {
    add(plan, OB_STEP_FINISH_WORKER, 0);
    add_all(plan, send);
  }
}

static void add_serving(struct onebit_plan *plan, size_t chunk) {
  add(plan, OB_STEP_RECEIVE, chunk);
  if (plan->host.ranks)
    add(plan, OB_STEP_HOST_WAIT_FREE, chunk);
  add(plan, OB_STEP_REDUCE, chunk);
  if (!plan->work.one_scale)
    add(plan, OB_STEP_GATHER, chunk);
}

static void add_serving_all(struct onebit_plan *plan) {
  for (size_t i = 0; i < plan->chunks; i++)
    add_serving(plan, i);
  if (plan->work.one_scale) {
    add(plan, OB_STEP_FINISH_SERVER, 0);
    add_all(plan, OB_STEP_GATHER);
  }
}

static void add_fetching(struct onebit_plan *plan, size_t chunk) {
  add(plan, OB_STEP_COLLECT, chunk);
  if (!plan->host.ranks)
    return;
  add(plan, OB_STEP_HOST_PUBLISH, chunk);
  add(plan, OB_STEP_HOST_WAIT, chunk);
}

/* The results come while others are still on their way; whenever it is sure how the call will end,
 * they are applied at once. In a hierarchical plan that takes the word of the host's other ranks,
 * who have received from other workers: they all have given it when the first chunk is fetched. */
static void add_collecting(struct onebit_plan *plan) {
  for (size_t i = 0; i < plan->chunks; i++) {
    add_fetching(plan, i);
    if (i == 0)
      add(plan, OB_STEP_CHECK_EARLY, 0);
    add(plan, OB_STEP_APPLY_EARLY, i);
  }
}

/* A chunk's result, or this rank's share of it. */
static void add_result(struct onebit_plan *plan, size_t chunk) {
  if (plan->options.operation == ONEBIT_ALLREDUCE)
    add_serving(plan, chunk);
  if (plan->options.operation == ONEBIT_REDUCE_SCATTER)
    add(plan, OB_STEP_RECEIVE, chunk);
  else
    add_fetching(plan, chunk);
  add(plan, OB_STEP_APPLY, chunk);
}

static void add_window(struct onebit_plan *plan) {
  bool gathers = plan->options.operation == ONEBIT_ALLGATHER;
  for (size_t i = 0; i <= plan->chunks; i++) {
    if (i < plan->chunks) {
      add_meeting(plan, i, 0);
      add(plan, OB_STEP_COMPRESS, i);
      add(plan, gathers ? OB_STEP_GATHER : OB_STEP_EXCHANGE, i);
    }
    if (i > 0)
      add_result(plan, i - 1);
  }
  add(plan, OB_STEP_DECIDE, 0);
  plan->decided = plan->step_count;
}

static void add_passing(struct onebit_plan *plan) {
  add(plan, OB_STEP_COMPRESS, 0);
  if (plan->work.one_scale)
    add(plan, OB_STEP_FINISH_WORKER, 0);
  for (size_t round = 0; (size_t)1 << round < plan->group.size; round++) {
    add(plan, OB_STEP_BEGIN_ROUND, round);
    add(plan, OB_STEP_END_ROUND, round);
  }
}

/* Everyone's message to everyone. The mean of dense ones is taken before it is decided whether the
 * call is well: it may overflow. */
static void add_gathering(struct onebit_plan *plan) {
  if (plan->doubling) {
    add_passing(plan);
  } else {
    add_sending(plan, OB_STEP_GATHER);
    add_all(plan, OB_STEP_COLLECT);
  }
  if (plan->options.wire == ONEBIT_WIRE_DENSE && plan->options.operation == ONEBIT_ALLREDUCE)
    add_all(plan, OB_STEP_REDUCE);
}

onebit_status_t ob_schedule_steps(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  /* At most thirteen steps a chunk, two a round of doubling, of which 2^32 ranks have 32, and five
   * for the whole. */
  plan->steps = ob_allocate(13 * plan->chunks + 2 * 32 + 5, sizeof *plan->steps);
  if (!plan->steps)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the steps of %zu chunks", plan->chunks);
  if (shape->windowed) {
    add_window(plan);
    return ONEBIT_OK;
  }
  switch (plan->options.operation) {
  case ONEBIT_ALLREDUCE:
    if (plan->schedule == ONEBIT_SCHEDULE_ALLGATHER) {
      add_gathering(plan);
      break;
    }
    add_sending(plan, OB_STEP_EXCHANGE);
    add_serving_all(plan);
    add_collecting(plan);
    break;
  case ONEBIT_ALLGATHER:
    add_gathering(plan);
    break;
  case ONEBIT_REDUCE_SCATTER:
    add_sending(plan, OB_STEP_EXCHANGE);
    add_all(plan, OB_STEP_RECEIVE);
    break;
  }
  add(plan, OB_STEP_DECIDE, 0);
  plan->decided = plan->step_count;
  add_all(plan, OB_STEP_APPLY);
  add(plan, OB_STEP_COMMIT, 0);
  return ONEBIT_OK;
}
