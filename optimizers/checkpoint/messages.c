/*
 * Momentum that was sent, and residuals, back into a unit.
 *
 * Momentum is written into the messages that the last exchange would have left: signs, and one
 * scale a block. Where blocks lie as they lay when it was saved, all of a block has one magnitude,
 * which is the scale, and every bit is as it was. Where they do not (another block_size; one scale
 * a share, and another number of ranks), the scale is that of the block's elements, as a
 * compression would choose it, and what the message cannot say of the momentum, times beta1, is
 * added to the residual: the next compensated value is then the same but for rounding, on every
 * rank.
 */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* Elements of one block, at most OB_CHUNK. */
struct segment {
  size_t block, piece, offset, count;
  size_t word; /* where they begin in the layout */
};

typedef onebit_status_t visit(struct ob_loading *loading, size_t unit,
                              const struct segment *segment, void *context);

/* Calls `body` on all elements of the blocks first .. end - 1, in their order. */
static onebit_status_t walk(struct ob_loading *loading, size_t unit, size_t first, size_t end,
                            visit *body, void *context) {
  const struct ob_layout *layout = &loading->optimizer->units[unit].bits->geometry.layout;
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    for (size_t at = 0; at < block.count; at += OB_CHUNK) {
      size_t left = block.count - at;
      struct segment segment = {b, piece, block.offset + at, left < OB_CHUNK ? left : OB_CHUNK,
                                block.word + at / OB_LANES};
      OB_TRY(body(loading, unit, &segment, context));
    }
  }
  return ONEBIT_OK;
}

static onebit_status_t fetch(struct ob_loading *loading, enum ob_saved what, size_t unit,
                             const struct segment *segment, float *values) {
  return ob_loading_fetch(loading, what, unit, segment->piece, segment->offset, segment->count,
                          values);
}

/* Where it was no message, it was saved times beta1. */
static onebit_status_t fetch_momentum(struct ob_loading *loading, size_t unit,
                                      const struct segment *segment, float *values) {
  bool was_sent = loading->parts.list[0].header.stage == OB_STAGE_SENT;
  float beta1 = (float)loading->optimizer->moments.beta1;
  OB_TRY(fetch(loading, OB_SAVED_MOMENTUM, unit, segment, values));
  for (size_t i = 0; !was_sent && !loading->dry && i < segment->count; i++)
    values[i] /= beta1;
  return ONEBIT_OK;
}

/* --- Scales ------------------------------------------------------------------------------------*/

/* Of the elements that have one scale. */
struct measure {
  size_t region;
  float least, most;
  double sum;
  size_t count;
};

/* Which share has this block. */
static size_t share_of(const struct onebit_plan *plan, size_t block) {
  size_t low = 0, high = plan->geometry.segments;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (plan->geometry.bounds[middle * plan->geometry.chunks] <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

static size_t region_of(const struct onebit_plan *plan, size_t block) {
  return plan->work.one_scale ? share_of(plan, block) : block;
}

/* What is not known of padding has no say. */
static size_t known_of(const struct ob_loading *loading, size_t unit,
                       const struct segment *segment) {
  size_t real = loading->map.of_unit[unit][segment->piece].real;
  if (loading->parts.same_padding || segment->offset + segment->count <= real)
    return segment->count;
  return segment->offset < real ? real - segment->offset : 0;
}

static onebit_status_t measure_segment(struct ob_loading *loading, size_t unit,
                                       const struct segment *segment, void *context) {
  const struct onebit_plan *plan = loading->optimizer->units[unit].bits;
  struct measure *measure = context;
  float *values = loading->values;
  OB_TRY(fetch_momentum(loading, unit, segment, values));
  if (loading->dry)
    return ONEBIT_OK;
  size_t region = region_of(plan, segment->block), known = known_of(loading, unit, segment);
  if (region != measure->region)
    *measure = (struct measure){.region = region, .least = INFINITY};
  for (size_t i = 0; i < known; i++) {
    float size = fabsf(values[i]);
    bool squares = plan->work.rule == ONEBIT_SCALE_RMS;
    measure->least = size < measure->least ? size : measure->least;
    measure->most = size > measure->most ? size : measure->most;
    measure->sum += squares ? (double)size * (double)size : (double)size;
  }
  measure->count += known;
  if (measure->count)
    loading->scales[region] = measure->least == measure->most
                                  ? measure->most
                                  : ob_scale(measure->sum, measure->count, plan->work.rule);
  return ONEBIT_OK;
}

static onebit_status_t measure_unit(struct ob_loading *loading, size_t unit) {
  const struct onebit_plan *plan = loading->optimizer->units[unit].bits;
  struct measure measure = {.region = SIZE_MAX};
  size_t regions = plan->work.one_scale ? plan->geometry.segments : plan->geometry.layout.blocks;
  memset(loading->scales, 0, regions * sizeof *loading->scales);
  return walk(loading, unit, 0, plan->geometry.layout.blocks, measure_segment, &measure);
}

/* --- Messages ----------------------------------------------------------------------------------*/

struct message {
  struct ob_view view;
  size_t first_word;
};

static onebit_status_t write_signs(struct ob_loading *loading, size_t unit,
                                   const struct segment *segment, void *context) {
  struct message *message = context;
  OB_TRY(fetch_momentum(loading, unit, segment, loading->values));
  uint32_t *words = message->view.words + (segment->word - message->first_word);
  size_t known = known_of(loading, unit, segment);
  for (size_t i = 0; i < known; i++)
    words[i / OB_LANES] |= (ob_bits_of(loading->values[i]) >> 31) << i % OB_LANES;
  return ONEBIT_OK;
}

static onebit_status_t write_message(struct ob_loading *loading, size_t unit, size_t share,
                                     size_t chunk) {
  const struct onebit_plan *plan = loading->optimizer->units[unit].bits;
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  struct message message = {.view = ob_message_view(loading->message, &shape),
                            .first_word = ob_layout_word(&plan->geometry.layout, shape.first)};
  memset(loading->message, 0, ob_message_bytes(&shape));
  if (shape.one_scale)
    message.view.header->scale = loading->scales[share];
  else
    memcpy(message.view.scales, loading->scales + shape.first, shape.blocks * sizeof(float));
  OB_TRY(walk(loading, unit, shape.first, shape.first + shape.blocks, write_signs, &message));
  return plan->executor->messages->copy(ob_plan_result(plan, false, share, chunk), loading->message,
                                        ob_message_bytes(&shape));
}

/* A rank writes those that it would have received: where ranks of a host share memory, each its
 * own. */
static onebit_status_t write_messages(struct ob_loading *loading, size_t unit) {
  const struct onebit_plan *plan = loading->optimizer->units[unit].bits;
  bool shared = ob_host_shares(plan);
  size_t first = shared ? plan->geometry.first_segment : 0;
  size_t end = shared ? first + plan->geometry.members : ob_plan_sources(plan);
  for (size_t share = first; share < end; share++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++)
      OB_TRY(write_message(loading, unit, share, chunk));
  return ONEBIT_OK;
}

onebit_status_t ob_restore_messages(struct ob_loading *loading, size_t unit) {
  OB_TRY(measure_unit(loading, unit));
  return loading->dry ? ONEBIT_OK : write_messages(loading, unit);
}

/* --- Residuals -------------------------------------------------------------------------------*/

struct errors {
  struct ob_kept *kept;
  enum ob_saved what;
  bool sent;  /* the momentum was, so what its message cannot say is to be added */
  bool large; /* one of them is from OB_LARGE_SCALE on */
};

/* Adds what the message cannot say. Padding has no momentum where it fills a tensor up; where it is
 * of no tensor its momentum stays as it is. */
static onebit_status_t add_rest(struct ob_loading *loading, size_t unit,
                                const struct segment *segment, float *errors) {
  const struct ob_unit *at = &loading->optimizer->units[unit];
  float *momentum = loading->more;
  OB_TRY(fetch_momentum(loading, unit, segment, momentum));
  if (loading->dry)
    return ONEBIT_OK;
  float scale = loading->scales[region_of(at->bits, segment->block)];
  bool of_none = at->scalings[segment->piece] == 0;
  size_t real = loading->map.of_unit[unit][segment->piece].real;
  double decay = of_none ? 1 : (double)(float)loading->optimizer->moments.beta1;
  for (size_t i = 0; i < segment->count; i++) {
    float said = ob_decode(ob_bits_of(momentum[i]) >> 31, scale);
    if (said != momentum[i] && (of_none || segment->offset + i < real))
      errors[i] = (float)((double)errors[i] + decay * ((double)momentum[i] - (double)said));
  }
  return ONEBIT_OK;
}

static onebit_status_t restore_segment(struct ob_loading *loading, size_t unit,
                                       const struct segment *segment, void *context) {
  struct errors *errors = context;
  float *values = loading->values;
  if (loading->optimizer->options.no_error_feedback)
    memset(values, 0, segment->count * sizeof *values);
  else
    OB_TRY(fetch(loading, errors->what, unit, segment, values));
  if (errors->sent)
    OB_TRY(add_rest(loading, unit, segment, values));
  if (loading->dry)
    return ONEBIT_OK;
  for (size_t i = 0; i < segment->count; i++)
    errors->large |= fabsf(values[i]) >= OB_LARGE_SCALE;
  const struct ob_kept *kept = errors->kept;
  return kept->memory->copy(kept->values[kept->now] + (segment->word - kept->first_word) * OB_LANES,
                            values, segment->count * sizeof *values);
}

onebit_status_t ob_restore_errors(struct ob_loading *loading, size_t unit, bool sent) {
  const struct ob_unit *at = &loading->optimizer->units[unit];
  struct errors worker = {.kept = &at->bits->worker, .what = OB_SAVED_WORKER, .sent = sent};
  struct errors server = {.kept = ob_saved_server(at), .what = OB_SAVED_SERVER};
  size_t first, end;
  ob_saved_blocks(at, OB_SAVED_WORKER, &first, &end);
  OB_TRY(walk(loading, unit, first, end, restore_segment, &worker));
  ob_saved_blocks(at, OB_SAVED_SERVER, &first, &end);
  OB_TRY(walk(loading, unit, first, end, restore_segment, &server));
  if (!loading->dry)
    at->bits->server_large = server.large;
  return ONEBIT_OK;
}
