/* Cuts a plan into segments, chunks and steps, for all schedules. */
#include "collectives/schedules/schedule.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/plan_private.h"

/* The number of elements in a message of one bit (8 kB) if neither the plan's options nor the cost
 * model set it. Messages of more bits have fewer elements. A segment has at most MAX_CHUNKS
 * messages, so very large segments have longer messages. */
#define CHUNK_ELEMENTS ((size_t)65536)
#define MAX_CHUNKS     ((size_t)256)

/* The largest allowed number of chunks. With more, either chunk_size is a mistake, or memory is too
 * small for so many elements. */
#define MAX_CHUNKS_ASKED ((size_t)1 << 20)

static size_t divide_rounding_up(size_t a, size_t b) { return a / b + (a % b != 0); }

/* Returns total * part / parts, without overflow. */
static size_t scale_by_fraction(size_t total, size_t part, size_t parts) {
  return total / parts * part + total % parts * part / parts;
}

/* Returns the first word of segment k; the caller rounds it up to the start of a block. */
static size_t segment_first_word(const struct onebit_plan *plan, const struct ob_plan_shape *shape,
                                 size_t k) {
  const struct ob_layout *layout = &plan->geometry.layout;
  if (shape->segment_pieces)
    return layout->piece[shape->segment_pieces[k]].first_word;
  if (shape->segment_a_piece)
    return layout->piece[k].first_word;
  return scale_by_fraction(layout->words, k, plan->geometry.segments);
}

/* Returns the number of elements of a message between processors, for a segment of `elements`
 * elements. */
static size_t choose_host_chunk(const struct onebit_plan *plan, size_t elements) {
  const size_t fixed = CHUNK_ELEMENTS / (plan->geometry.dense ? 1 : plan->geometry.width);
  size_t chunk = plan->comm->transport->network ? plan->choice.chunk : fixed;
  /* A chunk of a host's inputs has this number of elements from every segment, and should stay in
   * the caches (measured with 2 hosts of 4 ranks, 64 MiB: 47 ms, and 72 ms with chunks twice as
   * long). */
  if (plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL && chunk > fixed)
    chunk = fixed;
  return divide_rounding_up(elements, chunk) > MAX_CHUNKS ? divide_rounding_up(elements, MAX_CHUNKS)
                                                          : chunk;
}

static size_t choose_chunk_count(const struct onebit_plan *plan, const struct ob_plan_shape *shape,
                                 size_t words) {
  const struct ob_executor *executor = plan->executor;
  size_t elements = words * OB_LANES, chunk = plan->options.chunk_size;
  size_t max = plan->comm->transport->put ? OB_MAX_STREAM_ELEMENTS : OB_MAX_CHUNK_ELEMENTS;
  if (!elements)
    return 1;
  if (!chunk && executor->chunks && !shape->among_hosts)
    chunk =
        divide_rounding_up(elements, executor->chunks(plan, elements * plan->geometry.segments));
  else if (!chunk)
    chunk = choose_host_chunk(plan, elements);
  return divide_rounding_up(elements, chunk < max ? chunk : max);
}

/* Adds the number of chunks on a device to the explanation; the number from the cost model is for a
 * processor. */
static void explain_chunks(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  char *text = plan->choice.text;
  size_t length = strlen(text);
  if (plan->executor->chunks && !plan->options.chunk_size && !shape->among_hosts)
    snprintf(text + length, sizeof plan->choice.text - length,
             "on a device: %zu message%s to each rank in each phase, of at most %zu elements\n",
             plan->geometry.chunks, plan->geometry.chunks == 1 ? "" : "s",
             ob_plan_longest_message(plan));
}

static void cut_segment(struct onebit_plan *plan, const struct ob_plan_shape *shape,
                        size_t segment) {
  struct ob_geometry *geometry = &plan->geometry;
  size_t first = segment_first_word(plan, shape, segment),
         end = segment_first_word(plan, shape, segment + 1);
  for (size_t i = 0; i < geometry->chunks; i++)
    geometry->bounds[segment * geometry->chunks + i] = ob_layout_first_block_from(
        &geometry->layout, first + scale_by_fraction(end - first, i, geometry->chunks));
}

static onebit_status_t cut_chunks(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_geometry *geometry = &plan->geometry;
  size_t longest = 0;
  for (size_t k = 0; k < geometry->segments; k++) {
    size_t words = segment_first_word(plan, shape, k + 1) - segment_first_word(plan, shape, k);
    longest = words > longest ? words : longest;
  }
  geometry->chunks = choose_chunk_count(plan, shape, longest);
  if (geometry->chunks > MAX_CHUNKS_ASKED)
    return plan->options.chunk_size
               ? ob_error(ONEBIT_ERROR_ARGUMENT,
                          "chunk_size is %zu, which makes %zu messages to each rank, more than %zu",
                          plan->options.chunk_size, geometry->chunks, MAX_CHUNKS_ASKED)
               : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu elements",
                          longest * OB_LANES);
  geometry->bounds =
      ob_allocate(geometry->segments * geometry->chunks + 1, sizeof *geometry->bounds);
  if (!geometry->bounds)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu chunks", geometry->chunks);
  for (size_t k = 0; k < geometry->segments; k++)
    cut_segment(plan, shape, k);
  geometry->bounds[geometry->segments * geometry->chunks] = geometry->layout.blocks;
  return ONEBIT_OK;
}

/* Returns the bytes of a segment's messages of one kind. */
static uint64_t count_segment_bytes(const struct onebit_plan *plan, size_t segment,
                                    size_t (*bytes_of)(const struct onebit_plan *plan,
                                                       size_t segment, size_t chunk)) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < plan->geometry.chunks; i++)
    bytes += bytes_of(plan, segment, i);
  return bytes;
}

uint64_t ob_schedule_bytes_to_servers(const struct onebit_plan *plan) {
  uint64_t bytes = 0;
  for (size_t distance = 1; distance < plan->geometry.members; distance++) {
    size_t member = ob_neighbour(&plan->geometry, distance);
    size_t segment = ob_segment_of(&plan->geometry, member);
    bytes += count_segment_bytes(plan, segment, ob_plan_message_bytes);
  }
  return bytes;
}

uint64_t ob_schedule_bytes_to_all(const struct onebit_plan *plan) {
  size_t own = ob_segment_of(&plan->geometry, plan->geometry.member);
  return (plan->geometry.members - 1) * count_segment_bytes(plan, own, ob_plan_result_bytes);
}

uint64_t ob_schedule_bytes_to_replicas(const struct onebit_plan *plan) {
  uint64_t bytes = 0;
  for (size_t segment = 0; segment < plan->geometry.segments; segment++)
    bytes += count_segment_bytes(plan, segment, ob_plan_message_bytes);
  return (plan->geometry.members - 1) * bytes;
}

static size_t message_stride(size_t bytes) {
  return divide_rounding_up(bytes, OB_ALIGNMENT) * OB_ALIGNMENT;
}

/* Sets the strides so that memory suffices for the longest message of the largest width of the
 * plan. */
static void set_strides(struct ob_geometry *geometry, const struct onebit_plan *plan) {
  const unsigned width = geometry->width;
  geometry->width = (unsigned)plan->options.max_bits;
  for (size_t segment = 0; segment < geometry->segments; segment++)
    for (size_t i = 0; i < geometry->chunks; i++) {
      size_t bytes = ob_plan_message_bytes(plan, segment, i);
      geometry->stride = bytes > geometry->stride ? bytes : geometry->stride;
    }
  geometry->stride = message_stride(geometry->stride);
  geometry->width = width;
  /* The stride between peers has one more cache line. The messages of all peers are read together;
   * at distances that are a multiple of 4 kB they would compete for the same few lines of the L1
   * cache. */
  geometry->peer_stride = geometry->slots * geometry->stride + OB_ALIGNMENT;
}

/* Replaces an allgather of one small message by doubling, if doubling is possible. */
static void use_doubling_if_possible(struct onebit_plan *plan) {
  struct ob_geometry *geometry = &plan->geometry;
  if (!ob_doubling_fits(plan))
    return;
  plan->schedule = &ob_schedule_doubling;
  geometry->rotated = (geometry->members & (geometry->members - 1)) != 0;
  geometry->peer_stride = geometry->stride;
}

static void update_sizes(struct onebit_plan *plan) {
  plan->schedule->sizes(plan, &plan->sizes);
  plan->wire_bytes = plan->sizes.wire_bytes;
}

void ob_schedule_set_width(struct onebit_plan *plan, unsigned width) {
  struct ob_geometry *geometry = &plan->geometry;
  geometry->width = width;
  geometry->result_width = ob_serve_width(plan->state->server.serving.rule, width);
  if (plan->schedule == &ob_schedule_doubling) /* rounds move whole strides */
    geometry->stride = geometry->peer_stride = message_stride(ob_plan_message_bytes(plan, 0, 0));
  update_sizes(plan);
}

onebit_status_t ob_schedule_cut(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  struct ob_geometry *geometry = &plan->geometry;
  geometry->segments = geometry->whole ? 1 : (size_t)plan->comm->size;
  OB_TRY(cut_chunks(plan, shape));
  size_t window = plan->schedule->window;
  geometry->slots = window && geometry->chunks > window ? window : geometry->chunks;
  set_strides(geometry, plan);
  use_doubling_if_possible(plan);
  explain_chunks(plan, shape);
  update_sizes(plan);
  return ONEBIT_OK;
}

/* --- Steps -------------------------------------------------------------------------------------*/

void ob_schedule_add_all(struct onebit_plan *plan, enum ob_step_kind kind) {
  for (size_t i = 0; i < plan->geometry.chunks; i++)
    ob_steps_add(plan, kind, i);
}

void ob_schedule_add_sending(struct onebit_plan *plan, enum ob_step_kind compress,
                             enum ob_step_kind send) {
  bool at_once = !plan->geometry.one_scale;
  for (size_t i = 0; i < plan->geometry.chunks; i++) {
    ob_steps_add(plan, compress, i);
    if (at_once)
      ob_steps_add(plan, send, i);
  }
  if (at_once)
    return;
  ob_steps_add(plan, OB_STEP_FINISH_WORKER, 0);
  ob_schedule_add_all(plan, send);
}

/* Writes the list of steps, or only counts them if the list has no memory yet. */
static void list_steps(struct onebit_plan *plan) {
  plan->step_count = 0;
  plan->schedule->build(plan, false);
  ob_steps_add(plan, OB_STEP_DECIDE, 0);
  plan->decided = plan->step_count;
  plan->schedule->build(plan, true);
  ob_steps_add(plan, OB_STEP_COMMIT, 0);
}

onebit_status_t ob_schedule_steps(struct onebit_plan *plan) {
  list_steps(plan);
  plan->steps = ob_allocate(plan->step_count, sizeof *plan->steps);
  if (!plan->steps)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the steps of %zu chunks",
                    plan->geometry.chunks);
  list_steps(plan);
  return ONEBIT_OK;
}

const char *ob_wire_name(onebit_wire_t wire, int bits) {
  if (wire == ONEBIT_WIRE_DENSE)
    return "float32";
  return bits == 8 ? "8 bits" : bits == 4 ? "4 bits" : bits == 2 ? "2 bits" : "one bit";
}
