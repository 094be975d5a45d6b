/* Norms of what an optimizer keeps. */
#include "optimizers/norms.h"

#include <math.h>

#include "base/error.h"
#include "base/memory.h"

/* Elements that are looked at together where the host has to have them copied. */
#define ELEMENTS_AT_ONCE ((size_t)65536)

struct ob_span ob_span_of_unit(const struct ob_unit *unit, bool padding) {
  return (struct ob_span){0, unit->bits->geometry.layout.blocks, padding};
}

struct ob_span ob_span_of_tensor(const struct onebit_optimizer *optimizer, size_t tensor) {
  const struct ob_tensor *of = &optimizer->tensors[tensor];
  return (struct ob_span){of->first_block, of->end_block, false};
}

/* Elements of a block that count. A piece of no tensor is padding; so may be the end of others. */
static size_t counted(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                      const struct ob_block *block, bool padding) {
  if (padding)
    return block->count;
  return unit->tensor_of[block->piece] < optimizer->tensor_count ? block->valid : 0;
}

/* In the blocks that this rank compresses. */
static struct ob_span compressed(const struct ob_unit *unit, struct ob_span span) {
  size_t first, end;
  ob_plan_compressed(unit->bits, &first, &end);
  span.first = span.first > first ? span.first : first;
  span.end = span.end < end ? span.end : end;
  return span;
}

/* What a momentum of the piece is multiplied with before it is exchanged. Padding has none. */
static double scaling_of(const struct ob_unit *unit, size_t piece) {
  return unit->scalings[piece] == 0 ? 1 : (double)unit->scalings[piece];
}

static double square_sum(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

static double error_square_sum(const float *values, size_t count, float scale) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) {
    double error = (double)ob_kept_error(values[i], scale);
    sum += error * error;
  }
  return sum;
}

/* --- Arrays that lie as a layout's words do */

struct walk {
  const struct onebit_optimizer *optimizer;
  const struct ob_unit *unit;
  struct ob_span span;
  const float *values;
  size_t first_word;
  const float *scales; /* NULL: the values themselves; else kept values' errors. On the host */
  double factor;       /* of what is stored */
};

static double block_squares(const struct walk *walk, size_t number, const struct ob_block *block,
                            const float *values) {
  const struct ob_kept *kept = &walk->unit->bits->worker;
  size_t count = counted(walk->optimizer, walk->unit, block, walk->span.padding);
  double factor = walk->factor * (walk->scales ? scaling_of(walk->unit, block->piece) : 1);
  double sum = walk->scales
                   ? error_square_sum(values, count,
                                      walk->scales[kept->one_scale ? 0 : number - kept->first])
                   : square_sum(values, count);
  return sum / (factor * factor);
}

/* Blocks from `block` on that are looked at together: one at least. */
static size_t group_end(const struct ob_layout *layout, size_t block, size_t end) {
  size_t next = block + 1, first = ob_layout_word(layout, block);
  while (next < end && (ob_layout_word(layout, next + 1) - first) * OB_LANES <= ELEMENTS_AT_ONCE)
    next++;
  return next;
}

static onebit_status_t add_group(const struct walk *walk, size_t first, size_t end, float *room,
                                 double *squares) {
  const struct ob_layout *layout = &walk->unit->bits->geometry.layout;
  size_t word = ob_layout_word(layout, first), words = ob_layout_word(layout, end) - word;
  const float *values = walk->values + (word - walk->first_word) * OB_LANES;
  if (room) {
    OB_TRY(
        walk->unit->bits->executor->residuals->copy(room, values, words * OB_LANES * sizeof *room));
    values = room;
  }
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    *squares += block_squares(walk, b, &block, values + (block.word - word) * OB_LANES);
  }
  return ONEBIT_OK;
}

static bool on_host(const struct ob_unit *unit) {
  return unit->bits->executor->residuals == &ob_memory_host;
}

static onebit_status_t no_memory(void) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a look at the state");
}

static onebit_status_t add_blocks(const struct walk *walk, double *squares) {
  const struct ob_layout *layout = &walk->unit->bits->geometry.layout;
  size_t most = layout->block > ELEMENTS_AT_ONCE ? layout->block : ELEMENTS_AT_ONCE;
  float *room = on_host(walk->unit) ? NULL : ob_allocate(most, sizeof *room);
  onebit_status_t status = room || on_host(walk->unit) ? ONEBIT_OK : no_memory();
  for (size_t b = walk->span.first, next; status == ONEBIT_OK && b < walk->span.end; b = next) {
    next = group_end(layout, b, walk->span.end);
    status = add_group(walk, b, next, room, squares);
  }
  ob_release(room);
  return status;
}

/* --- Momentum and error */

static bool servers_have_momentum(const struct onebit_optimizer *optimizer) {
  return optimizer->method->serve_rule == OB_SERVE_LION;
}

/* Until the first bits are sent the momentum is where the kept values are, and there is no kept
 * error. */
static bool kept_is_momentum(const struct onebit_optimizer *optimizer, const struct ob_unit *unit) {
  if (!optimizer->method->momentum)
    return unit->uncompressed && servers_have_momentum(optimizer);
  return unit->uncompressed || !ob_optimizer_is_frozen(optimizer) ||
         optimizer->steps == optimizer->frozen_at || !ob_optimizer_compresses(optimizer);
}

/* As a kept value it is stored times beta1 from the freeze on. */
static onebit_status_t add_kept_momentum(const struct onebit_optimizer *optimizer,
                                         const struct ob_unit *unit, struct ob_span span,
                                         double *squares) {
  const struct ob_kept *kept = &unit->bits->worker;
  bool stored = ob_optimizer_is_frozen(optimizer) && !unit->uncompressed;
  const struct walk walk = {.optimizer = optimizer,
                            .unit = unit,
                            .span = span,
                            .values = kept->values[kept->now],
                            .first_word = kept->first_word,
                            .factor = stored ? (double)(float)optimizer->moments.beta1 : 1};
  return add_blocks(&walk, squares);
}

/* Of the share that this rank serves. */
static onebit_status_t add_served_momentum(const struct onebit_optimizer *optimizer,
                                           const struct ob_unit *unit, struct ob_span span,
                                           double *squares) {
  const struct ob_kept *kept = &unit->bits->server;
  const size_t end = kept->first + kept->blocks;
  span.first = span.first > kept->first ? span.first : kept->first;
  span.end = span.end < end ? span.end : end;
  const struct walk walk = {.optimizer = optimizer,
                            .unit = unit,
                            .span = span,
                            .values = kept->values[kept->now],
                            .first_word = kept->first_word,
                            .factor = 1};
  return add_blocks(&walk, squares);
}

/* Of an array of the unit's own; sharded, of the blocks that this rank serves. */
static onebit_status_t add_array(const struct onebit_optimizer *optimizer,
                                 const struct ob_unit *unit, const float *values,
                                 struct ob_span span, double *squares) {
  const size_t end = unit->first_block + unit->blocks;
  span.first = span.first > unit->first_block ? span.first : unit->first_block;
  span.end = span.end < end ? span.end : end;
  const struct walk walk = {.optimizer = optimizer,
                            .unit = unit,
                            .span = span,
                            .values = values,
                            .first_word = unit->first_word,
                            .factor = 1};
  return add_blocks(&walk, squares);
}

/* The current scales, where the host can read them: to be released, also after a failure. */
static onebit_status_t copy_scales(const struct ob_kept *kept, float **scales) {
  const size_t count = kept->one_scale ? 1 : kept->blocks;
  *scales = ob_allocate(count, sizeof **scales);
  return *scales ? kept->memory->copy(*scales, kept->scales[kept->now], count * sizeof **scales)
                 : no_memory();
}

onebit_status_t ob_add_error(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                             struct ob_span span, double *squares) {
  const struct ob_kept *kept = &unit->bits->worker;
  if (kept_is_momentum(optimizer, unit))
    return ONEBIT_OK;
  struct walk walk = {.optimizer = optimizer,
                      .unit = unit,
                      .span = compressed(unit, span),
                      .values = kept->values[kept->now],
                      .first_word = kept->first_word,
                      .factor = 1};
  float *scales;
  onebit_status_t status = copy_scales(kept, &scales);
  walk.scales = scales;
  if (status == ONEBIT_OK)
    status = add_blocks(&walk, squares);
  ob_release(scales);
  return status;
}

/* --- Messages: every element of a block is +-scale */

/* What is looked at of them, and where it goes. */
struct message_walk {
  const struct onebit_optimizer *optimizer;
  const struct ob_unit *unit;
  struct ob_span span;
  double *squares;
  size_t *beyond;
  float *reciprocals; /* room for those of a block, where they are a device's */
};

typedef onebit_status_t visit_block(const struct message_walk *walk, const struct ob_block *block,
                                    float scale);

static onebit_status_t walk_message(const struct message_walk *walk, struct ob_message_shape shape,
                                    unsigned char *message, visit_block *visit) {
  const struct ob_layout *layout = &walk->unit->bits->geometry.layout;
  const struct ob_span span = walk->span;
  struct ob_view view = ob_message_view(message, &shape);
  size_t piece = 0, first = shape.first > span.first ? shape.first : span.first;
  for (size_t b = first; b < shape.first + shape.blocks && b < span.end; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    float scale = shape.one_scale ? view.header->scale : view.scales[b - shape.first];
    OB_TRY(visit(walk, &block, scale));
  }
  return ONEBIT_OK;
}

/* `room` is for a copy of one message, which may be in memory of a device. */
static onebit_status_t walk_results(const struct message_walk *walk, unsigned char *room,
                                    visit_block *visit) {
  const struct onebit_plan *plan = walk->unit->bits;
  for (size_t source = 0; source < ob_plan_sources(plan); source++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_message(plan, source, chunk);
      if (shape.first >= walk->span.end || shape.first + shape.blocks <= walk->span.first)
        continue;
      OB_TRY(plan->executor->messages->copy(room, ob_plan_result(plan, false, source, chunk),
                                            ob_message_bytes(&shape)));
      OB_TRY(walk_message(walk, shape, room, visit));
    }
  return ONEBIT_OK;
}

/* Of the latest result. */
static onebit_status_t walk_messages(const struct message_walk *walk, visit_block *visit) {
  unsigned char *room = ob_allocate(1, walk->unit->bits->geometry.stride);
  onebit_status_t status = room ? walk_results(walk, room, visit) : no_memory();
  ob_release(room);
  return status;
}

static onebit_status_t add_scale(const struct message_walk *walk, const struct ob_block *block,
                                 float scale) {
  double size = (double)scale / scaling_of(walk->unit, block->piece);
  *walk->squares +=
      size * size * (double)counted(walk->optimizer, walk->unit, block, walk->span.padding);
  return ONEBIT_OK;
}

static onebit_status_t add_result(const struct onebit_optimizer *optimizer,
                                  const struct ob_unit *unit, struct ob_span span,
                                  double *squares) {
  const struct message_walk walk = {
      .optimizer = optimizer, .unit = unit, .span = span, .squares = squares};
  return walk_messages(&walk, add_scale);
}

/* What this rank has sent of its gradients, where nobody but the servers knows the mean. */
static onebit_status_t add_sent(const struct onebit_optimizer *optimizer,
                                const struct ob_unit *unit, struct ob_span span, double *squares) {
  const struct ob_kept *kept = &unit->bits->worker;
  float *scales;
  size_t piece = 0;
  onebit_status_t status = copy_scales(kept, &scales);
  for (size_t b = span.first; status == ONEBIT_OK && b < span.end; b++) {
    struct ob_block block = ob_layout_block(&unit->bits->geometry.layout, b, &piece);
    double scale = (double)scales[kept->one_scale ? 0 : b - kept->first];
    *squares += scale * scale * (double)counted(optimizer, unit, &block, span.padding);
  }
  ob_release(scales);
  return status;
}

onebit_status_t ob_add_signal(const struct onebit_optimizer *optimizer, const struct ob_unit *unit,
                              struct ob_span span, double *squares) {
  if (kept_is_momentum(optimizer, unit))
    return ONEBIT_OK;
  if (optimizer->method->sharded || servers_have_momentum(optimizer))
    return add_sent(optimizer, unit, compressed(unit, span), squares);
  return add_result(optimizer, unit, compressed(unit, span), squares);
}

onebit_status_t ob_add_momentum(const struct onebit_optimizer *optimizer,
                                const struct ob_unit *unit, struct ob_span span, double *squares) {
  if (servers_have_momentum(optimizer) && !unit->uncompressed)
    return add_served_momentum(optimizer, unit, span, squares);
  if (!optimizer->method->momentum)
    return add_array(optimizer, unit, unit->arrays[OB_MOMENTUM], span, squares);
  if (kept_is_momentum(optimizer, unit))
    return add_kept_momentum(optimizer, unit, span, squares);
  return add_result(optimizer, unit, span, squares);
}

/* --- Steps at the bound */

/* Elements of a block that make a step of more than ONEBIT_STEP_BOUND, `scale` being their
 * momentum's or step's. NULL: no reciprocals, what is exchanged is the step. */
static size_t count_block(const float *reciprocals, size_t count, float scale) {
  size_t beyond = 0;
  for (size_t i = 0; i < count; i++)
    beyond += (reciprocals ? reciprocals[i] * scale : scale) > ONEBIT_STEP_BOUND;
  return beyond;
}

static onebit_status_t count_bounded(const struct message_walk *walk, const struct ob_block *block,
                                     float scale) {
  const struct onebit_optimizer *optimizer = walk->optimizer;
  const struct ob_unit *unit = walk->unit;
  const bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  const float factor = ob_factors_of(optimizer, optimizer->steps).adam.momentum_factor;
  size_t count = counted(optimizer, unit, block, false);
  const float *reciprocals = unit->arrays[OB_VARIANCE] + block->word * OB_LANES;
  if (!step && walk->reciprocals) {
    OB_TRY(unit->bits->executor->residuals->copy(walk->reciprocals, reciprocals,
                                                 count * sizeof *reciprocals));
    reciprocals = walk->reciprocals;
  }
  scale = scale / (float)scaling_of(unit, block->piece) * factor;
  *walk->beyond += count_block(step ? NULL : reciprocals, count, scale);
  return ONEBIT_OK;
}

onebit_status_t ob_count_bounded(const struct onebit_optimizer *optimizer,
                                 const struct ob_unit *unit, struct ob_span span, size_t *beyond) {
  *beyond = 0;
  if (!optimizer->method->momentum || optimizer->method->sharded || !unit->arrays[OB_VARIANCE] ||
      kept_is_momentum(optimizer, unit) || isinf(ob_step_bound(optimizer)))
    return ONEBIT_OK;
  struct message_walk walk = {.optimizer = optimizer, .unit = unit, .span = span, .beyond = beyond};
  if (!on_host(unit)) {
    walk.reciprocals = ob_allocate(unit->bits->geometry.layout.block, sizeof *walk.reciprocals);
    if (!walk.reciprocals)
      return no_memory();
  }
  onebit_status_t status = walk_messages(&walk, count_bounded);
  ob_release(walk.reciprocals);
  return status;
}

/* --- Parameters: a piece's follow each other */

static onebit_status_t add_piece(const struct ob_unit *unit, size_t piece, float *room,
                                 double *squares) {
  size_t valid = unit->bits->geometry.layout.piece[piece].valid;
  for (size_t i = 0; i < valid; i += ELEMENTS_AT_ONCE) {
    size_t count = valid - i < ELEMENTS_AT_ONCE ? valid - i : ELEMENTS_AT_ONCE;
    const float *values = unit->parameters[piece] + i;
    if (room)
      OB_TRY(unit->bits->executor->residuals->copy(room, values, count * sizeof *room));
    *squares += square_sum(room ? room : values, count);
  }
  return ONEBIT_OK;
}

onebit_status_t ob_add_parameters(const struct onebit_optimizer *optimizer, size_t tensor,
                                  double *squares) {
  const struct ob_unit *unit = &optimizer->units[optimizer->tensors[tensor].unit];
  if (optimizer->method->sharded && unit->masters)
    return add_array(optimizer, unit, unit->masters, ob_span_of_tensor(optimizer, tensor), squares);
  float *room = on_host(unit) ? NULL : ob_allocate(ELEMENTS_AT_ONCE, sizeof *room);
  onebit_status_t status = room || on_host(unit) ? ONEBIT_OK : no_memory();
  for (size_t k = 0; status == ONEBIT_OK && k < unit->bits->geometry.layout.pieces; k++)
    if (unit->tensor_of[k] == tensor)
      status = add_piece(unit, k, room, squares);
  ob_release(room);
  return status;
}
