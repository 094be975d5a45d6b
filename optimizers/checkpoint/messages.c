/*
 * Momentum that was sent, back into a bucket.
 *
 * It is written into the messages that the last exchange would have left: signs, and one scale a
 * block. Where blocks lie as they lay when it was saved, all of a block has one magnitude, which is
 * the scale, and every bit is as it was. Where they do not (another block_size; one scale a shard,
 * and another number of ranks), the scale is that of the block's elements, as a compression would
 * choose it, and what the message cannot say of the momentum, times beta1, is added to the
 * residual: the next compensated value is then the same but for rounding, on every rank.
 */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "optimizers/checkpoint/checkpoint.h"

static const struct ob_bucket *bucket_of(const struct ob_loading *loading) {
  return &loading->optimizer->buckets[loading->bucket];
}

static size_t real_of(const struct ob_loading *loading, size_t piece) {
  return loading->map.all[loading->map.of_bucket[loading->bucket] + piece].count[OB_ELEMENTS];
}

/* Where it was no message, it was saved times beta1. */
static onebit_status_t read_momentum(struct ob_loading *loading, const struct ob_run *run,
                                     float *values) {
  bool was_sent = loading->parts.list[0].header.stage == OB_STAGE_SENT;
  OB_TRY(ob_loading_read(loading, OB_SAVED_MOMENTUM, run, values));
  for (size_t i = 0; !was_sent && !loading->dry && i < run->count; i++)
    values[i] /= (float)loading->optimizer->moments.beta1;
  return ONEBIT_OK;
}

/* The scale that element i of a run has, and how far in the run the elements of its block go. */
static size_t scale_of(const struct onebit_plan *plan, const struct ob_run *run, size_t i,
                       size_t *end) {
  size_t size = plan->geometry.layout.block, number = (run->offset + i) / size;
  size_t block = plan->geometry.layout.piece[run->piece].first_block + number;
  size_t stop = (number + 1) * size - run->offset;
  *end = stop < run->count ? stop : run->count;
  return plan->work.one_scale ? ob_interval_of(plan->geometry.bounds, plan->geometry.chunks,
                                               plan->geometry.segments, block)
                              : block;
}

/* Elements of a run that have a say: not padding of which nothing is known. */
static size_t known_of(const struct ob_loading *loading, const struct ob_run *run) {
  size_t real = real_of(loading, run->piece);
  if (loading->parts.same_padding || run->offset + run->count <= real)
    return run->count;
  return run->offset < real ? real - run->offset : 0;
}

/* Of the elements that have one scale. */
struct measure {
  struct ob_loading *loading;
  size_t scale, count;
  float min, max;
  double sum;
};

static onebit_status_t measure_run(void *context, const struct ob_run *run) {
  struct measure *measure = context;
  struct ob_loading *loading = measure->loading;
  const struct onebit_plan *plan = bucket_of(loading)->bits;
  size_t known = known_of(loading, run);
  OB_TRY(read_momentum(loading, run, loading->values));
  for (size_t i = 0, end; !loading->dry && i < known; i = end) {
    size_t scale = scale_of(plan, run, i, &end);
    if (scale != measure->scale)
      *measure = (struct measure){.loading = loading, .scale = scale, .min = INFINITY};
    end = end < known ? end : known;
    for (size_t j = i; j < end; j++) {
      float size = fabsf(loading->values[j]);
      bool squares = plan->work.rule == ONEBIT_SCALE_RMS;
      measure->min = size < measure->min ? size : measure->min;
      measure->max = size > measure->max ? size : measure->max;
      measure->sum += squares ? (double)size * (double)size : (double)size;
    }
    measure->count += end - i;
    loading->scales[scale] = measure->min == measure->max
                                 ? measure->max
                                 : ob_scale(measure->sum, measure->count, plan->work.rule);
  }
  return ONEBIT_OK;
}

/* --- Messages ----------------------------------------------------------------------------------*/

struct signs {
  struct ob_loading *loading;
  uint32_t *words;
  size_t first_word;
};

static onebit_status_t write_signs(void *context, const struct ob_run *run) {
  const struct signs *signs = context;
  struct ob_loading *loading = signs->loading;
  const struct ob_piece *piece = &bucket_of(loading)->bits->geometry.layout.piece[run->piece];
  uint32_t *words = signs->words + (piece->first_word + run->offset / OB_LANES - signs->first_word);
  size_t known = known_of(loading, run);
  OB_TRY(read_momentum(loading, run, loading->values));
  for (size_t i = 0; i < known; i++)
    words[i / OB_LANES] |= (ob_bits_of(loading->values[i]) >> 31) << i % OB_LANES;
  return ONEBIT_OK;
}

static onebit_status_t write_message(struct ob_loading *loading, const struct onebit_plan *plan,
                                     size_t segment, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
  struct ob_view view = ob_message_view(loading->reader.message, &shape);
  struct signs signs = {loading, view.words, ob_layout_word(&plan->geometry.layout, shape.first)};
  memset(loading->reader.message, 0, ob_message_bytes(&shape));
  if (shape.one_scale)
    view.header->scale = loading->scales[segment];
  else
    memcpy(view.scales, loading->scales + shape.first, shape.blocks * sizeof(float));
  OB_TRY(ob_each_run(&plan->geometry.layout, shape.first, shape.first + shape.blocks, write_signs,
                     &signs));
  return plan->executor->messages->copy(ob_plan_result(plan, false, segment, chunk),
                                        loading->reader.message, ob_message_bytes(&shape));
}

/* A rank writes those that it would have received: where ranks of a host share memory, each its
 * own. */
onebit_status_t ob_restore_messages(struct ob_loading *loading) {
  const struct onebit_plan *plan = bucket_of(loading)->bits;
  struct measure measure = {.loading = loading, .scale = SIZE_MAX};
  size_t scales = plan->work.one_scale ? plan->geometry.segments : plan->geometry.layout.blocks;
  bool shared = plan->host.shared.base != NULL;
  size_t first = shared ? plan->geometry.first_segment : 0;
  size_t end = shared ? first + plan->geometry.members : ob_plan_sources(plan);
  memset(loading->scales, 0, scales * sizeof *loading->scales);
  OB_TRY(
      ob_each_run(&plan->geometry.layout, 0, plan->geometry.layout.blocks, measure_run, &measure));
  for (size_t segment = first; !loading->dry && segment < end; segment++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++)
      OB_TRY(write_message(loading, plan, segment, chunk));
  return ONEBIT_OK;
}

/* Padding has no momentum where it fills a tensor up; where it is of no tensor its momentum stays
 * as it is. */
onebit_status_t ob_add_unsaid(struct ob_loading *loading, const struct ob_run *run,
                              float *residual) {
  const struct ob_bucket *bucket = bucket_of(loading);
  float *momentum = loading->more;
  bool of_none = bucket->scalings[run->piece] == 0;
  size_t real = real_of(loading, run->piece);
  double decay = of_none ? 1 : (double)(float)loading->optimizer->moments.beta1;
  OB_TRY(read_momentum(loading, run, momentum));
  for (size_t i = 0, end; i < run->count; i = end) {
    float scale = loading->scales[scale_of(bucket->bits, run, i, &end)];
    for (size_t j = i; j < end; j++) {
      float said = ob_decode(ob_bits_of(momentum[j]) >> 31, scale);
      if (said != momentum[j] && (of_none || run->offset + j < real))
        residual[j] = (float)((double)residual[j] + decay * ((double)momentum[j] - (double)said));
    }
  }
  return ONEBIT_OK;
}
