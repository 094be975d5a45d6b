/* Compresses and reduces messages block by block, and undoes both operations. */
#include <string.h>

#include "compression/blocks.h"

static void flag_large_scale(struct ob_work *work, float scale) {
  if (scale >= OB_LARGE_SCALE)
    atomic_store_explicit(&work->large, true, memory_order_relaxed);
}

/* Computes a block's scale from the sum of its magnitudes, and stores it in the message and in the
 * residual. With one scale for all blocks it stores the sum instead, for ob_compute_buffer_scale.
 * If the scale is not finite, 0 is stored, and work->not_finite is set. */
static void blocks_set_scale(struct ob_block_step *step, size_t block, size_t count, float sum) {
  struct ob_work *work = step->work;
  struct ob_residual *residual = step->residual;
  if (work->one_scale) {
    step->sums[block - residual->first] = (double)sum;
    return;
  }
  const onebit_scale_t rule = ob_serve_scale_rule(residual->serving.rule, work->rule);
  float scale = ob_round(ob_scale((double)sum, count, rule), residual->result_dtype);
  if (!ob_is_finite(scale)) {
    atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
    scale = 0;
  }
  flag_large_scale(work, scale);
  residual->scales[!residual->now][block - residual->first] = scale;
  step->out->scales[block - step->shape->first] = ob_serve_scale(residual->serving.rule, scale);
}

/* Returns the index of the block's first element in the values of the residual. */
static size_t residual_offset(const struct ob_residual *residual, const struct ob_block *block) {
  return (block->word - residual->first_word) * OB_LANES;
}

static float *residual_values(const struct ob_residual *residual, int copy,
                              const struct ob_block *block) {
  return residual->values[copy] + residual_offset(residual, block);
}

static float blocks_residual_scale(const struct ob_residual *residual, size_t block) {
  if (residual->eager[residual->now])
    return 0;
  return residual->scales[residual->now][residual->one_scale ? 0 : block - residual->first];
}

/* Returns a thread's scratch, to which compress and reduce write the new values of a block if
 * messages have levels. */
static float *thread_scratch(const struct ob_block_step *step, int thread) {
  return step->work->wide + (size_t)thread * ob_level_scratch(step->work);
}

/* --- Measuring */

static bool is_measured(const struct ob_residual *residual, size_t b) {
  return residual->norms && (b - residual->first) % OB_MEASURE_EVERY == residual->phase;
}

/* Measures a block after it was quantised. `values` are the compensated values; `error` is the new
 * residual, or NULL with one bit. */
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
      .scratch = thread_scratch(step, thread) + work->layout->block,
  };
  residual->norms[b - residual->first] = ob_measure_block(&run, work->codec);
}

/* --- Levels
 *
 * A block's scale is known only when all of its values are computed, so the values wait in a
 * thread's scratch. They are quantised part by part while the values of the next block are
 * computed: each new part overwrites the part that was just quantised. So the CPU computes while it
 * reads memory. Reading the arrays evicts the scratch from the first-level cache, but the CPU reads
 * the scratch only once per block. */

/* The number of elements in a part. Sizes of 32 to 2,048 were measured: 256 and 512 took the least
 * time (docs/measured/processor.md). */
#define PART 512

/* The run that computes the values of a block, and the run that quantises the previous block.
 * Either `compress` or `reduce` computes the values; the other is NULL. */
struct levels {
  struct ob_compress_run *compress;
  struct ob_reduce_run *reduce;
  struct ob_quantise_run last; /* the run of the previous block; count is 0 if there is none */
};

static void quantise_part(const struct ob_block_step *step, struct ob_quantise_run run,
                          size_t first) {
  if (first >= run.count)
    return;
  run.first = first;
  run.count = run.count - first > PART ? first + PART : run.count;
  step->work->codec->quantise(&run);
}

/* Computes the new values of the elements first .. end - 1. */
static void compute_part(const struct ob_block_step *step, const struct levels *levels,
                         size_t first, size_t end) {
  const struct ob_codec *codec = step->work->codec;
  if (levels->compress) {
    levels->compress->first = first, levels->compress->count = end;
    codec->compress(levels->compress);
  } else {
    levels->reduce->first = first, levels->reduce->count = end;
    codec->reduce(levels->reduce);
  }
}

/* Returns the run that quantises a block into the message and the new residual; `lanes` are the
 * lanes of the whole block. */
static struct ob_quantise_run make_quantise_run(const struct ob_block_step *step, size_t b,
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
  flag_large_scale(work, largest);
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
static void quantise_rest(const struct ob_block_step *step, struct levels *levels) {
  for (size_t i = 0; i < levels->last.count; i += PART)
    quantise_part(step, levels->last, i);
  levels->last.count = 0;
}

/* Computes the values of block b and quantises the previous block. Block b itself is quantised by
 * the next call, or here if it is measured. */
static void compute_level_block(const struct ob_block_step *step, struct levels *levels, size_t b,
                                const struct ob_block *block, int thread) {
  struct ob_lanes lanes = {{0}, {0}};
  if (levels->compress)
    levels->compress->lanes = &lanes;
  else
    levels->reduce->lanes = &lanes;
  for (size_t i = 0; i < block->count || i < levels->last.count; i += PART) {
    quantise_part(step, levels->last, i);
    if (i < block->count)
      compute_part(step, levels, i, block->count - i > PART ? i + PART : block->count);
  }
  const float *const values = thread_scratch(step, thread);
  levels->last = make_quantise_run(step, b, block, values, &lanes);
  if (!is_measured(step->residual, b))
    return;
  const float *error = levels->last.residual_out;
  quantise_rest(step, levels);
  blocks_measure(step, b, block, thread, values, error);
}

/* Returns the floor that is added to the second-moment estimates of a table's block. */
static float blocks_compute_floor(const struct ob_block_step *step, size_t b,
                                  const struct ob_block *block,
                                  const struct ob_moment_factors *factors) {
  const struct ob_residual *residual = step->residual;
  const struct ob_piece *piece = &step->work->layout->piece[block->piece];
  const float times = step->source->floors ? step->source->floors[block->piece] : 0;
  if (times == 0)
    return 0;
  const struct ob_interval words = ob_piece_interval(piece, &step->source->own);
  const struct ob_sample sample = ob_choose_sample(b, words.end - words.first);
  const uint16_t *moments =
      residual->moments[residual->now] + (words.first - residual->first_word) * OB_LANES;
  return ob_moment_floor(times, step->work->codec->add_moments(moments, sample), sample, factors);
}

/* Sets the addresses of the block's moments: those that the run reads, and those that it writes. */
static void point_to_moments(const struct ob_block_step *step, size_t b,
                             const struct ob_block *block, struct ob_compress_run *run) {
  const struct ob_residual *residual = step->residual;
  const size_t at = residual_offset(residual, block);
  run->moments = residual->moments[residual->now] + at;
  run->moments_out = residual->moments[!residual->now] + at;
  run->factor = step->source->values ? 1 : step->source->factor;
  run->moment = step->source->moment;
  run->moment.floor = blocks_compute_floor(step, b, block, &run->moment);
}

/* Fills in the run through the pointer, as fill_reduce_run does. If the struct were copied, its
 * members would be loaded in wider pieces right after they were stored. Such a load waits until all
 * stores have reached the cache: 100 ns per block. */
static void fill_compress_run(const struct ob_block_step *step, size_t b,
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

static void mark_changed(const struct ob_residual *residual, size_t b) {
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
    fill_compress_run(step, b, &block, &run);
    mark_changed(step->residual, b);
    if (step->out->width == 1) {
      run.bits = ob_block_fields(step, step->out, &block);
      blocks_set_scale(step, b, block.count, work->codec->compress(&run));
      if (is_measured(step->residual, b))
        blocks_measure(step, b, &block, thread, run.residual_out, NULL);
      continue;
    }
    run.residual_out = thread_scratch(step, thread);
    run.stream = false, run.rule = ONEBIT_SCALE_RMS;
    levels.compress = &run;
    compute_level_block(step, &levels, b, &block, thread);
  }
  quantise_rest(step, &levels);
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
static void fill_reduce_run(const struct ob_block_step *step, size_t b,
                            const struct ob_block *block, int thread, struct ob_reduce_run *run) {
  const struct ob_work *work = step->work;
  const struct ob_residual *residual = step->residual;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  ob_block_point_to_streams(step, b, block, words, scales);
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
    fill_reduce_run(step, b, &block, thread, &run);
    mark_changed(step->residual, b);
    if (step->out->width == 1) {
      run.out = ob_block_fields(step, step->out, &block);
      blocks_set_scale(step, b, block.count, work->codec->reduce(&run));
      if (is_measured(step->residual, b))
        blocks_measure(step, b, &block, thread, run.residual_out, NULL);
      continue;
    }
    run.residual_out = thread_scratch(step, thread);
    run.stream = false, run.rule = ONEBIT_SCALE_RMS;
    levels.reduce = &run;
    compute_level_block(step, &levels, b, &block, thread);
  }
  quantise_rest(step, &levels);
}

void ob_reduce_blocks(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                      const struct ob_message_shape *shape, struct ob_view *out, double *sums) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .in = in, .residual = residual, .out = out, .sums = sums};
  residual->eager[!residual->now] = out->width > 1;
  ob_block_step_run(&step, reduce_body);
}

float ob_compute_buffer_scale(struct ob_work *work, struct ob_residual *residual,
                              const double *sums) {
  const double sum = ob_add_sums(sums, residual->blocks);
  const onebit_scale_t rule = ob_serve_scale_rule(residual->serving.rule, work->rule);
  size_t count = ob_residual_elements(residual, work->layout);
  float scale = count ? ob_round(ob_buffer_scale(sum, count, rule), residual->result_dtype) : 0;
  if (!ob_is_finite(scale)) {
    atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
    scale = 0;
  }
  flag_large_scale(work, scale);
  residual->scales[!residual->now][0] = scale;
  return ob_serve_scale(residual->serving.rule, scale);
}

/* --- Undoing a call, if the residual has one copy */

/* Returns the element's residual before the call, which has added `added` to it; the current
 * residual if nothing was added. If the value is not finite, the residual is lost and becomes
 * zero. */
static float blocks_undo_error(float value, float scale, float added, bool changed) {
  if (!changed || !ob_is_finite(added))
    return ob_residual_of(value, scale);
  const float before = value - added;
  return ob_is_finite(before) ? before : 0;
}

/* Computes the values that the call has added to a block's residual, by repeating the call on a
 * residual of zeros. The scratch has the block of zeros, the result, and the signs of the
 * result. */
static void compute_added(const struct ob_block_step *step, size_t b,
                          const struct ob_block *block) {
  const struct ob_work *work = step->work;
  const size_t full = work->layout->block;
  float *const zeros = work->wide, *const added = zeros + full;
  uint32_t *const signs = (uint32_t *)(void *)(added + full);
  memset(zeros, 0, full * sizeof *zeros);
  if (step->source) {
    struct ob_compress_run run;
    fill_compress_run(step, b, block, &run);
    run.residual = zeros, run.residual_scale = 0, run.residual_out = added, run.bits = signs;
    work->codec->compress(&run);
    return;
  }
  struct ob_reduce_run run;
  fill_reduce_run(step, b, block, 0, &run);
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
    compute_added(step, b, block);
  for (size_t i = 0; i < block->count; i++)
    values[i] = blocks_undo_error(values[i], scale, changed ? added[i] : 0, changed);
}

void ob_undo_compress(struct ob_work *work, const struct ob_source *source,
                      struct ob_residual *residual, const struct ob_message_shape *shape,
                      const struct ob_view *last) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .source = source, .residual = residual, .last = last};
  ob_block_step_run_each(&step, 1, undo_block);
}

void ob_undo_reduce(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                    const struct ob_message_shape *shape) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .residual = residual};
  ob_block_step_run_each(&step, 1, undo_block);
}
