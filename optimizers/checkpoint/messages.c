/*
 * Restores a bucket's momentum that had been sent in messages when it was saved.
 *
 * The momentum is written to the messages that the last exchange would have left: signs or levels,
 * and one scale per block. If blocks begin at the same elements as when the momentum was saved, all
 * elements of a block have one magnitude, which is the scale, and every bit is restored. Otherwise
 * (another block_size; or one scale per shard, and another number of ranks) the scale is the one
 * with which the block's elements would be compressed. The rounding error of the message, times
 * beta1, is then added to the residual, so the next compensated value is the same up to rounding,
 * on every rank.
 *
 * With levels, every block has an element of the largest level, so the scale is the block's largest
 * magnitude divided by that level, as when it was compressed, and rounding twice gives the same
 * scale. With s = fl(x / l) for the largest level l, fl(l s) / l is nearer to s than to any other
 * number, unless fl(l s) is x. So every bit is restored here, too; and in other blocks no value is
 * clipped.
 */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "optimizers/checkpoint/checkpoint.h"

static const struct ob_bucket *current_bucket(const struct ob_loading *loading) {
  return &loading->optimizer->buckets[loading->bucket];
}

static size_t count_tensor_elements(const struct ob_loading *loading, size_t piece) {
  return loading->stretches[piece].count[OB_ELEMENTS];
}

/* Reads momentum, and divides it by beta1 if it had not been sent yet when it was saved: such
 * momentum is saved times beta1. */
static onebit_status_t read_momentum(struct ob_loading *loading, const struct ob_run *run,
                                     float *values) {
  bool was_sent = loading->parts->list[0].header.stage == OB_STAGE_SENT;
  OB_TRY(ob_loading_read(loading, OB_SAVED_MOMENTUM, run, values));
  for (size_t i = 0; !was_sent && !loading->dry && i < run->count; i++)
    values[i] /= (float)loading->optimizer->moments.beta1;
  return ONEBIT_OK;
}

/* Returns the index of the scale of a run's element i, and sets *end to the end of its block in the
 * run. */
static size_t find_scale_index(const struct onebit_plan *plan, const struct ob_run *run, size_t i,
                               size_t *end) {
  size_t size = ob_plan_layout(plan)->block, number = (run->offset + i) / size;
  size_t block = ob_plan_layout(plan)->piece[run->piece].first_block + number;
  size_t stop = (number + 1) * size - run->offset;
  *end = stop < run->count ? stop : run->count;
  return ob_plan_geometry(plan)->one_scale
             ? ob_find_interval(ob_plan_geometry(plan)->bounds, ob_plan_geometry(plan)->chunks,
                                ob_plan_geometry(plan)->segments, block)
             : block;
}

/* Returns how many elements of a run have known values: all except padding that the parts do not
 * have. */
static size_t count_known_elements(const struct ob_loading *loading, const struct ob_run *run) {
  size_t real = count_tensor_elements(loading, run->piece);
  if (loading->parts->same_padding || run->offset + run->count <= real)
    return run->count;
  return run->offset < real ? real - run->offset : 0;
}

/* Returns the code of a value in a message; in one bit, its sign. */
static uint32_t encode_value(float value, float scale, unsigned width) {
  if (width == 1)
    return ob_bits_of(value) >> 31;
  return (uint32_t)ob_encode_level(value * ob_inverse_scale(scale), width) & ((1u << width) - 1);
}

/* Returns the value after it was encoded in a message and decoded again. */
static float message_value(float value, float scale, unsigned width) {
  if (width == 1)
    return ob_decode(ob_bits_of(value) >> 31, scale);
  return ob_decode_level(ob_encode_level(value * ob_inverse_scale(scale), width), width) * scale;
}

/* Statistics of the elements that share a scale. */
struct measure {
  size_t scale, count;
  float min, max;
  double sum;
};

static onebit_status_t measure_run(struct ob_loading *loading, const struct ob_run *run,
                                   struct measure *measure) {
  onebit_plan_t plan = current_bucket(loading)->bits;
  const unsigned width = (unsigned)ob_ladder_get_state(plan).last_width;
  size_t known = count_known_elements(loading, run);
  OB_TRY(read_momentum(loading, run, loading->values));
  for (size_t i = 0, end; !loading->dry && i < known; i = end) {
    size_t scale = find_scale_index(plan, run, i, &end);
    if (scale != measure->scale)
      *measure = (struct measure){.scale = scale, .min = INFINITY};
    end = end < known ? end : known;
    for (size_t j = i; j < end; j++) {
      float size = fabsf(loading->values[j]);
      bool squares = ob_plan_work(plan)->rule == ONEBIT_SCALE_RMS;
      measure->min = size < measure->min ? size : measure->min;
      measure->max = size > measure->max ? size : measure->max;
      measure->sum += squares ? (double)size * (double)size : (double)size;
    }
    measure->count += end - i;
    loading->scales[scale] = width > 1 ? ob_scale_to_level(measure->max, width)
                             : measure->min == measure->max
                                 ? measure->max
                                 : ob_scale(measure->sum, measure->count, ob_plan_work(plan)->rule);
  }
  return ONEBIT_OK;
}

/* --- Messages ----------------------------------------------------------------------------------*/

/* Writes the codes of a run. The message's first word has number `first_word` in the layout. */
static onebit_status_t write_codes(struct ob_loading *loading, const struct ob_run *run,
                                   uint32_t *words, size_t first_word) {
  const struct onebit_plan *plan = current_bucket(loading)->bits;
  const struct ob_piece *piece = &ob_plan_layout(plan)->piece[run->piece];
  const unsigned width = (unsigned)ob_ladder_get_state(plan).last_width;
  words += width * (piece->first_word + run->offset / OB_LANES - first_word);
  size_t known = count_known_elements(loading, run);
  OB_TRY(read_momentum(loading, run, loading->values));
  for (size_t i = 0, end; i < known; i = end) {
    const float scale = loading->scales[find_scale_index(plan, run, i, &end)];
    for (end = end < known ? end : known; i < end; i++)
      words[i * width / OB_LANES] |= encode_value(loading->values[i], scale, width)
                                     << i * width % OB_LANES;
  }
  return ONEBIT_OK;
}

static onebit_status_t checkpoint_messages_write_message(struct ob_loading *loading,
                                                         const struct onebit_plan *plan,
                                                         size_t segment, size_t chunk) {
  struct ob_message_shape shape = ob_plan_last_message(plan, segment, chunk);
  struct ob_view view = ob_message_view(loading->reader.message, &shape);
  const struct ob_layout *layout = ob_plan_layout(plan);
  memset(loading->reader.message, 0, ob_message_bytes(&shape));
  if (shape.one_scale)
    view.header->scale = loading->scales[segment];
  else
    memcpy(view.scales, loading->scales + shape.first, shape.blocks * sizeof(float));
  for (struct ob_run run = {0};
       ob_find_next_run(layout, shape.first, shape.first + shape.blocks, &run);)
    OB_TRY(write_codes(loading, &run, view.words, ob_layout_word(layout, shape.first)));
  return ob_plan_message_memory(plan)->copy(ob_plan_result(plan, false, segment, chunk),
                                            loading->reader.message, ob_message_bytes(&shape));
}

/* Writes the messages that this rank would have received; if the ranks of a host share memory, each
 * rank writes its own message. */
onebit_status_t ob_restore_messages(struct ob_loading *loading) {
  const struct onebit_plan *plan = current_bucket(loading)->bits;
  struct measure measure = {.scale = SIZE_MAX};
  const struct ob_layout *layout = ob_plan_layout(plan);
  size_t scales =
      ob_plan_geometry(plan)->one_scale ? ob_plan_geometry(plan)->segments : layout->blocks;
  size_t first, end;
  ob_plan_own_results(plan, &first, &end);
  memset(loading->scales, 0, scales * sizeof *loading->scales);
  for (struct ob_run run = {0}; ob_find_next_run(layout, 0, layout->blocks, &run);)
    OB_TRY(measure_run(loading, &run, &measure));
  for (size_t segment = first; !loading->dry && segment < end; segment++)
    for (size_t chunk = 0; chunk < ob_plan_geometry(plan)->chunks; chunk++)
      OB_TRY(checkpoint_messages_write_message(loading, plan, segment, chunk));
  return ONEBIT_OK;
}

/* Momentum of padding that fills a tensor up is zero; padding that belongs to no tensor keeps its
 * momentum. */
onebit_status_t ob_add_rounding_error(struct ob_loading *loading, const struct ob_run *run,
                                      float *residual) {
  const struct ob_bucket *bucket = current_bucket(loading);
  float *momentum = loading->more;
  const unsigned width = (unsigned)ob_ladder_get_state(bucket->bits).last_width;
  bool of_none = bucket->scalings[run->piece] == 0;
  size_t real = count_tensor_elements(loading, run->piece);
  double decay = of_none ? 1 : (double)(float)loading->optimizer->moments.beta1;
  OB_TRY(read_momentum(loading, run, momentum));
  for (size_t i = 0, end; i < run->count; i = end) {
    float scale = loading->scales[find_scale_index(bucket->bits, run, i, &end)];
    for (size_t j = i; j < end; j++) {
      float said = message_value(momentum[j], scale, width);
      if (said != momentum[j] && (of_none || run->offset + j < real))
        residual[j] = (float)((double)residual[j] + decay * ((double)momentum[j] - (double)said));
    }
  }
  return ONEBIT_OK;
}
