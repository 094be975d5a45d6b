/* Compresses and reduces, block by block; and undoes either. */
#include <string.h>

#include "compression/blocks.h"

static void note_scale(struct ob_work *work, float scale) {
  if (scale >= OB_LARGE_SCALE)
    atomic_store_explicit(&work->large, true, memory_order_relaxed);
}

/* Makes the sum of a block's magnitudes its scale, in the message and with the residuals, or leaves
 * it to ob_finish. A scale that is not finite never leaves: the flag does. */
static void blocks_set_scale(struct ob_block_step *step, size_t block, size_t count, float sum) {
  struct ob_work *work = step->work;
  struct ob_residual *residual = step->residual;
  if (work->one_scale) {
    step->sums[block - residual->first] = (double)sum;
    return;
  }
  const onebit_scale_t rule = ob_serve_measure(residual->serving.rule, work->rule);
  float scale = ob_round(ob_scale((double)sum, count, rule), residual->result_dtype);
  if (!ob_is_finite(scale)) {
    atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
    scale = 0;
  }
  note_scale(work, scale);
  residual->scales[!residual->now][block - residual->first] = scale;
  step->out->scales[block - step->shape->first] = ob_serve_scale(residual->serving.rule, scale);
}

/* The position of the block in the residual's values. */
static size_t residual_at(const struct ob_residual *residual, const struct ob_block *block) {
  return (block->word - residual->first_word) * OB_LANES;
}

static float *residual_values(const struct ob_residual *residual, int copy,
                              const struct ob_block *block) {
  return residual->values[copy] + residual_at(residual, block);
}

static float blocks_residual_scale(const struct ob_residual *residual, size_t block) {
  if (residual->eager[residual->now])
    return 0;
  return residual->scales[residual->now][residual->one_scale ? 0 : block - residual->first];
}

/* The scratch to which compress and reduce write the new values of a block of levels. */
static float *scratch_for(const struct ob_block_step *step, int thread) {
  return step->work->wide + (size_t)thread * ob_scratch_of_levels(step->work);
}

/* --- Measuring */

static bool is_measured(const struct ob_residual *residual, size_t b) {
  return residual->norms && (b - residual->first) % OB_MEASURE_EVERY == residual->phase;
}

/* Measures a block after it was quantised; `values`: compensated, `error`: what is left, or
 * NULL. */
static void blocks_measure(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                           int thread, const float *values, const float *error) {
  const struct ob_work *work = step->work;
  const struct ob_residual *residual = step->residual;
  const struct ob_measure_run run = {
      .count = block->count,
      .width = step->out->width,
      .values = values,
      .scale = residual->scales[!residual->now][b - residual->first],
      .error = error,
      .before = residual_values(residual, residual->now, block),
      .before_scale = blocks_residual_scale(residual, b),
      .rule = work->rule,
      .scratch = scratch_for(step, thread) + work->layout->block,
  };
  residual->norms[b - residual->first] = ob_measure(&run, work->codec);
}

/* --- Levels
 *
 * A block's scale is known once all of its values are, so these wait in a thread's scratch. They
 * become levels while those of the next block are found, part by part and in the same place: what
 * reads memory goes on while what computes does, and the scratch, whose lines the arrays drive out
 * of the first-level cache, is fetched once. */

/* Elements in a part: of 32 to 2,048, 256 and 512 took least time (docs/measured/processor.md). */
#define PART 512

/* The run that finds a block's values, one of the two, and the run that makes levels of the block
 * before. */
struct levels {
  struct ob_compress_run *compress;
  struct ob_reduce_run *reduce;
  struct ob_quantise_run last; /* of the previous block; count is 0 if there is none */
};

static void quantise_part(const struct ob_block_step *step, struct ob_quantise_run run,
                          size_t first) {
  if (first >= run.count)
    return;
  run.first = first;
  run.count = run.count - first > PART ? first + PART : run.count;
  step->work->codec->quantise(&run);
}

/* Finds the new values of the elements first .. end - 1. */
static void find_part(const struct ob_block_step *step, const struct levels *levels, size_t first,
                      size_t end) {
  const struct ob_codec *codec = step->work->codec;
  if (levels->compress) {
    levels->compress->first = first, levels->compress->count = end;
    codec->compress(levels->compress);
  } else {
    levels->reduce->first = first, levels->reduce->count = end;
    codec->reduce(levels->reduce);
  }
}

/* Makes the run that quantises a block, whose lanes are known, into the message and the new
 * residual. */
static struct ob_quantise_run quantise_run(const struct ob_block_step *step, size_t b,
                                           const struct ob_block *block, const float *values,
                                           struct ob_lanes *lanes) {
  struct ob_work *work = step->work;
  struct ob_residual *residual = step->residual;
  const unsigned width = step->out->width;
  const float sum = ob_sum_lanes(lanes->sum);
  float largest = work->codec->largest(lanes->largest, OB_LANES), scale = 0;
  if (ob_is_finite(sum))
    scale = ob_level_scale(sum, block->count, largest, work->rule, width);
  else
    atomic_store_explicit(&work->not_finite, true, memory_order_relaxed), largest = 0;
  note_scale(work, largest);
  residual->scales[!residual->now][b - residual->first] = largest;
  step->out->scales[b - step->shape->first] = scale;
  return (struct ob_quantise_run){
      .count = block->count,
      .width = width,
      .values = values,
      .scale = scale,
      .stream = work->stream && !is_measured(residual, b),
      .residual_out = residual_values(residual, !residual->now, block),
      .fields = ob_block_fields(step, step->out, block),
  };
}

/* Quantises the rest of the previous block. */
static void finish_levels(const struct ob_block_step *step, struct levels *levels) {
  for (size_t i = 0; i < levels->last.count; i += PART)
    quantise_part(step, levels->last, i);
  levels->last.count = 0;
}

static void level_block(const struct ob_block_step *step, struct levels *levels, size_t b,
                        const struct ob_block *block, int thread) {
  struct ob_lanes lanes = {{0}, {0}};
  if (levels->compress)
    levels->compress->lanes = &lanes;
  else
    levels->reduce->lanes = &lanes;
  for (size_t i = 0; i < block->count || i < levels->last.count; i += PART) {
    quantise_part(step, levels->last, i);
    if (i < block->count)
      find_part(step, levels, i, block->count - i > PART ? i + PART : block->count);
  }
  const float *const values = scratch_for(step, thread);
  levels->last = quantise_run(step, b, block, values, &lanes);
  if (!is_measured(step->residual, b))
    return;
  const float *error = levels->last.residual_out;
  finish_levels(step, levels);
  blocks_measure(step, b, block, thread, values, error);
}

/* The floor that a table adds to the estimates of a block. */
static float blocks_floor_of(const struct ob_block_step *step, size_t b,
                             const struct ob_block *block,
                             const struct ob_moment_factors *factors) {
  const struct ob_residual *residual = step->residual;
  const struct ob_piece *piece = &step->work->layout->piece[block->piece];
  const float times = step->source->floors ? step->source->floors[block->piece] : 0;
  if (times == 0)
    return 0;
  const struct ob_interval words = ob_piece_interval(piece, &step->source->own);
  const struct ob_sample sample = ob_sample_for(b, words.end - words.first);
  const uint16_t *moments =
      residual->moments[residual->now] + (words.first - residual->first_word) * OB_LANES;
  return ob_moment_floor(times, step->work->codec->add_moments(moments, sample), sample, factors);
}

/* Sets the moments of the block: those that the run reads, and those that it writes. */
static void point_to_moments(const struct ob_block_step *step, size_t b,
                             const struct ob_block *block, struct ob_compress_run *run) {
  const struct ob_residual *residual = step->residual;
  const size_t at = residual_at(residual, block);
  run->moments = residual->moments[residual->now] + at;
  run->moments_out = residual->moments[!residual->now] + at;
  run->factor = step->source->values ? 1 : step->source->factor;
  run->moment = step->source->moment;
  run->moment.floor = blocks_floor_of(step, b, block, &run->moment);
}

/* Fills in the run in place, as begin_reduce_run does: a copy of the struct reads in wider pieces
 * what was just written, and so waits for all that is on its way to memory, 100 ns a block. */
static void begin_compress_run(const struct ob_block_step *step, size_t b,
                               const struct ob_block *block, struct ob_compress_run *run) {
  const struct ob_work *work = step->work;
  const struct ob_source *source = step->source;
  const struct ob_residual *residual = step->residual;
  const size_t word = block->word - step->first_word;
  const bool factor_applied = source->values || source->moment_rule;
  const float weight = factor_applied ? source->weight : source->weight * source->factor;
  const float scaling = source->scalings ? source->scalings[block->piece] : 1;
  *run = (struct ob_compress_run){
      .count = block->count,
      .valid = block->valid,
      .input = source->values ? (const void *)(source->values + word * OB_LANES)
                              : ob_block_input(step, block),
      .dtype = source->values ? ONEBIT_FLOAT32 : ob_block_input_dtype(step),
      .rule = work->rule,
      .stream = work->stream && !is_measured(residual, b) && !residual->changed,
      .stream_moments = work->stream,
      .momentum_bits = source->momentum ? ob_block_fields(step, step->last, block) : NULL,
      .momentum_width = source->momentum ? step->last->width : 1,
      .momentum_scale = source->momentum ? ob_block_scale(step, step->last, b) : 0,
      .decay = scaling == 0 ? 1 : source->decay,
      .weight = scaling == 0 ? 0 : weight,
      .scaling = scaling == 0 ? 1 : scaling,
      .momentum_in_residual = source->momentum_in_residual,
      .reciprocals = source->reciprocals ? source->reciprocals + block->word * OB_LANES : NULL,
      .limit = source->limit,
      .moment_rule = source->moment_rule,
      .residual = residual_values(residual, residual->now, block),
      .residual_scale = blocks_residual_scale(residual, b),
      .residual_out = residual_values(residual, !residual->now, block),
  };
  if (run->moment_rule)
    point_to_moments(step, b, block, run);
}

static void note_changed(const struct ob_residual *residual, size_t b) {
  if (residual->changed)
    residual->changed[b - residual->first] = true;
}

static void compress_body(void *context, size_t first, size_t end, int thread) {
  struct ob_block_step *step = context;
  struct ob_work *work = step->work;
  struct levels levels = {0};
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    struct ob_compress_run run;
    begin_compress_run(step, b, &block, &run);
    note_changed(step->residual, b);
    if (step->out->width == 1) {
      run.bits = ob_block_fields(step, step->out, &block);
      blocks_set_scale(step, b, block.count, work->codec->compress(&run));
      if (is_measured(step->residual, b))
        blocks_measure(step, b, &block, thread, run.residual_out, NULL);
      continue;
    }
    run.residual_out = scratch_for(step, thread);
    run.stream = false, run.rule = ONEBIT_SCALE_RMS;
    levels.compress = &run;
    level_block(step, &levels, b, &block, thread);
  }
  finish_levels(step, &levels);
}

void ob_compress_blocks(struct ob_work *work, const struct ob_source *source,
                        struct ob_residual *residual, const struct ob_message_shape *shape,
                        const struct ob_view *last, struct ob_view *out, double *sums) {
  struct ob_block_step step = {.work = work,
                               .shape = shape,
                               .source = source,
                               .residual = residual,
                               .last = last,
                               .out = out,
                               .sums = sums};
  residual->eager[!residual->now] = out->width > 1;
  ob_block_step_run(&step, compress_body);
}

/* Fills in the run; its words and scales are in the thread's scratch. */
static void begin_reduce_run(const struct ob_block_step *step, size_t b,
                             const struct ob_block *block, int thread, struct ob_reduce_run *run) {
  const struct ob_work *work = step->work;
  const struct ob_residual *residual = step->residual;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  ob_block_streams(step, b, block, words, scales);
  *run = (struct ob_reduce_run){
      .count = block->count,
      .streams = work->streams,
      .width = step->in->width,
      .bits = words,
      .scales = scales,
      .serving = residual->serving,
      .rule = work->rule,
      .stream = work->stream && !is_measured(residual, b) && !residual->changed,
      .residual = residual_values(residual, residual->now, block),
      .residual_scale = blocks_residual_scale(residual, b),
      .residual_out = residual_values(residual, !residual->now, block),
  };
}

static void reduce_body(void *context, size_t first, size_t end, int thread) {
  struct ob_block_step *step = context;
  struct ob_work *work = step->work;
  struct levels levels = {0};
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    struct ob_reduce_run run;
    begin_reduce_run(step, b, &block, thread, &run);
    note_changed(step->residual, b);
    if (step->out->width == 1) {
      run.out = ob_block_fields(step, step->out, &block);
      blocks_set_scale(step, b, block.count, work->codec->reduce(&run));
      if (is_measured(step->residual, b))
        blocks_measure(step, b, &block, thread, run.residual_out, NULL);
      continue;
    }
    run.residual_out = scratch_for(step, thread);
    run.stream = false, run.rule = ONEBIT_SCALE_RMS;
    levels.reduce = &run;
    level_block(step, &levels, b, &block, thread);
  }
  finish_levels(step, &levels);
}

void ob_reduce_blocks(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                      const struct ob_message_shape *shape, struct ob_view *out, double *sums) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .in = in, .residual = residual, .out = out, .sums = sums};
  residual->eager[!residual->now] = out->width > 1;
  ob_block_step_run(&step, reduce_body);
}

float ob_finish(struct ob_work *work, struct ob_residual *residual, const double *sums) {
  const double sum = ob_add_sums(sums, residual->blocks);
  const onebit_scale_t rule = ob_serve_measure(residual->serving.rule, work->rule);
  size_t count = ob_residual_elements(residual, work->layout);
  float scale = count ? ob_round(ob_buffer_scale(sum, count, rule), residual->result_dtype) : 0;
  if (!ob_is_finite(scale)) {
    atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
    scale = 0;
  }
  note_scale(work, scale);
  residual->scales[!residual->now][0] = scale;
  return ob_serve_scale(residual->serving.rule, scale);
}

/* --- Undoing a call: of one copy of the residuals */

/* Returns the element's residual before `added`, or its current residual where nothing was added.
 * If the sum is not finite, the residual is lost and becomes zero. */
static float blocks_undo_error(float value, float scale, float added, bool changed) {
  if (!changed || !ob_is_finite(added))
    return ob_residual_of(value, scale);
  const float before = value - added;
  return ob_is_finite(before) ? before : 0;
}

/* Finds the values that the call has added to a block's residual, by adding them to zeros. The
 * scratch has a block of zeros, one for the result, and its signs. */
static void find_added(const struct ob_block_step *step, size_t b, const struct ob_block *block) {
  const struct ob_work *work = step->work;
  const size_t full = work->layout->block;
  float *const zeros = work->wide, *const added = zeros + full;
  uint32_t *const signs = (uint32_t *)(void *)(added + full);
  memset(zeros, 0, full * sizeof *zeros);
  if (step->source) {
    struct ob_compress_run run;
    begin_compress_run(step, b, block, &run);
    run.residual = zeros, run.residual_scale = 0, run.residual_out = added, run.bits = signs;
    work->codec->compress(&run);
    return;
  }
  struct ob_reduce_run run;
  begin_reduce_run(step, b, block, 0, &run);
  run.residual = zeros, run.residual_scale = 0, run.residual_out = added, run.out = signs;
  work->codec->reduce(&run);
}

static void undo_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                       int thread) {
  const struct ob_residual *residual = step->residual;
  const float *const added = step->work->wide + step->work->layout->block;
  const bool changed = residual->changed[b - residual->first];
  float *const values = residual_values(residual, residual->now, block);
  const float scale = blocks_residual_scale(residual, b);
  (void)thread;
  if (changed)
    find_added(step, b, block);
  for (size_t i = 0; i < block->count; i++)
    values[i] = blocks_undo_error(values[i], scale, changed ? added[i] : 0, changed);
}

void ob_undo_compress(struct ob_work *work, const struct ob_source *source,
                      struct ob_residual *residual, const struct ob_message_shape *shape,
                      const struct ob_view *last) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .source = source, .residual = residual, .last = last};
  ob_block_step_each(&step, 1, undo_block);
}

void ob_undo_reduce(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                    const struct ob_message_shape *shape) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .residual = residual};
  ob_block_step_each(&step, 1, undo_block);
}
