/* The loop over the blocks of a message, once for each step. */
#include "compression/blocks.h"

#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/error.h"
#include "base/memory.h"

void ob_parallel(int threads, size_t first, size_t end,
                 void (*body)(void *context, size_t first, size_t end, int thread), void *context) {
#ifdef _OPENMP
  if (threads > 1 && end - first > 1) {
#pragma omp parallel num_threads(threads)
    {
      size_t count = end - first, thread = (size_t)omp_get_thread_num();
      size_t team = (size_t)omp_get_num_threads();
      body(context, first + count * thread / team, first + count * (thread + 1) / team,
           (int)thread);
    }
    return;
  }
#endif
  (void)threads;
  body(context, first, end, 0);
}

/* Floats: the values of a block that wait for their scale. */
static size_t scratch_of_levels(const struct ob_work *work) {
  const size_t block = work->layout->block;
  return block + (work->measured ? ob_measure_scratch(block) : 0);
}

size_t ob_work_wide(const struct ob_work *work) {
  size_t threads = (size_t)work->threads, sums = work->max_streams + 1;
  size_t block = work->layout->block;
  size_t levels = work->max_width > 1 ? threads * scratch_of_levels(work) : 0;
  size_t dense = work->half || work->bounded ? (threads > sums ? threads : sums) * block : 0;
  size_t undo = work->undoes ? 2 * block + block / OB_LANES : 0;
  size_t one_bit = undo > dense ? undo : dense;
  return levels > one_bit ? levels : one_bit;
}

onebit_status_t ob_work_create(struct ob_work *work, size_t streams, size_t max_streams) {
  size_t slots = streams * (size_t)work->threads;
  work->streams = streams;
  work->max_streams = max_streams;
  work->words = ob_allocate(slots, sizeof *work->words);
  work->scales = ob_allocate(slots, sizeof *work->scales);
  work->values = ob_allocate(max_streams, sizeof *work->values);
  work->wide = ob_allocate(ob_work_wide(work), sizeof *work->wide);
  if (!work->words || !work->scales || !work->values || !work->wide)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu streams", slots);
  return ONEBIT_OK;
}

void ob_work_destroy(struct ob_work *work) {
  ob_release((void *)work->words);
  ob_release(work->scales);
  ob_release((void *)work->values);
  ob_release(work->wide);
}

/* One step on one message, as the threads see it. */
struct step {
  struct ob_work *work;
  const struct ob_message_shape *shape;
  size_t first_word; /* of the message */
  const struct ob_view *in, *last;
  struct ob_view *out;
  struct ob_residual *residual;
  double *sums;
  const struct ob_source *source;
  const struct ob_pass_sink *sink;
  void *const *outputs;
};

static void run_step(struct step *step,
                     void (*body)(void *context, size_t first, size_t end, int thread)) {
  const struct ob_message_shape *shape = step->shape;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  ob_parallel(step->work->threads, shape->first, shape->first + shape->blocks, body, step);
}

static onebit_dtype_t input_dtype(const struct step *step) {
  return step->source->float32 ? ONEBIT_FLOAT32 : step->work->dtype;
}

/* The piece's element where the block begins. */
static const char *input_of(const struct step *step, const struct ob_block *block) {
  const char *base = step->source->inputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(input_dtype(step)) : NULL;
}

/* Where it goes: there, or among the values of the message. */
static void *output_of(const struct step *step, const struct ob_block *block) {
  size_t size = ob_dtype_size(step->work->output_dtype);
  if (step->out)
    return step->out->values + (block->word - step->first_word) * OB_LANES;
  char *base = step->outputs[block->piece]; /* NULL: of no elements */
  return base ? base + block->offset * size : NULL;
}

/* What a message's sign bits stand for in this block, or what its levels are multiplied with. */
static float scale_of(const struct step *step, const struct ob_view *view, size_t block) {
  return step->work->one_scale ? view->header->scale : view->scales[block - step->shape->first];
}

static void note_scale(struct ob_work *work, float scale) {
  if (scale >= OB_LARGE_SCALE)
    atomic_store_explicit(&work->large, true, memory_order_relaxed);
}

/* The words of a message where the block begins. */
static uint32_t *fields_at(const struct step *step, const struct ob_view *view,
                           const struct ob_block *block) {
  return view->words + (block->word - step->first_word) * view->width;
}

/* The sum of a block's magnitudes becomes its scale, in the message and with the residuals, or
 * waits for ob_finish. A scale that is not finite never leaves: the flag does. */
static void set_scale(struct step *step, size_t block, size_t count, float sum) {
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

/* Where the block's values are among the kept ones. */
static size_t residual_at(const struct ob_residual *residual, const struct ob_block *block) {
  return (block->word - residual->first_word) * OB_LANES;
}

static float *residual_values(const struct ob_residual *residual, int copy,
                              const struct ob_block *block) {
  return residual->values[copy] + residual_at(residual, block);
}

static float residual_scale(const struct ob_residual *residual, size_t block) {
  if (residual->eager[residual->now])
    return 0;
  return residual->scales[residual->now][residual->one_scale ? 0 : block - residual->first];
}

/* Where compress and reduce write the new values of a block of levels. */
static float *scratch_for(const struct step *step, int thread) {
  return step->work->wide + (size_t)thread * scratch_of_levels(step->work);
}

/* --- Measuring */

static bool is_measured(const struct ob_residual *residual, size_t b) {
  return residual->norms && (b - residual->first) % OB_MEASURE_EVERY == residual->phase;
}

/* After a block was quantised; `values`: compensated, `error`: what is left, or NULL. */
static void measure(const struct step *step, size_t b, const struct ob_block *block, int thread,
                    const float *values, const float *error) {
  const struct ob_work *work = step->work;
  const struct ob_residual *residual = step->residual;
  const struct ob_measure_run run = {
      .count = block->count,
      .width = step->out->width,
      .values = values,
      .scale = residual->scales[!residual->now][b - residual->first],
      .error = error,
      .before = residual_values(residual, residual->now, block),
      .before_scale = residual_scale(residual, b),
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

/* Elements in a part: of 32 to 2,048, 256 and 512 took least
 * (docs/measured/2026-11-23-widths.md). */
#define PART 512

/* What makes the values of a block, one of these, and what then makes levels of them. */
struct levels {
  struct ob_compress_run *compress;
  struct ob_reduce_run *reduce;
  struct ob_quantise_run last; /* of the block before: count is 0 where there is none */
};

static void quantise_part(const struct step *step, struct ob_quantise_run run, size_t first) {
  if (first >= run.count)
    return;
  run.first = first;
  run.count = run.count - first > PART ? first + PART : run.count;
  step->work->codec->quantise(&run);
}

/* The new values of the elements first .. end - 1. */
static void find_part(const struct step *step, const struct levels *levels, size_t first,
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

/* The run that makes levels in the message, and the new residual, of the values that the lanes are
 * of. */
static struct ob_quantise_run quantise_run(const struct step *step, size_t b,
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
      .fields = fields_at(step, step->out, block),
  };
}

/* The block before becomes levels. */
static void finish_levels(const struct step *step, struct levels *levels) {
  for (size_t i = 0; i < levels->last.count; i += PART)
    quantise_part(step, levels->last, i);
  levels->last.count = 0;
}

static void level_block(const struct step *step, struct levels *levels, size_t b,
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
  measure(step, b, block, thread, values, error);
}

/* The moments of the block: what the run reads, and what it writes. */
static void point_to_moments(const struct step *step, const struct ob_block *block,
                             struct ob_compress_run *run) {
  const struct ob_residual *residual = step->residual;
  const size_t at = residual_at(residual, block);
  run->moments = residual->moments[residual->now] + at;
  run->moments_out = residual->moments[!residual->now] + at;
  run->factor = step->source->values ? 1 : step->source->factor;
  run->moment = step->source->moment;
}

static struct ob_compress_run compress_run_of(const struct step *step, size_t b,
                                              const struct ob_block *block) {
  const struct ob_work *work = step->work;
  const struct ob_source *source = step->source;
  const struct ob_residual *residual = step->residual;
  const size_t word = block->word - step->first_word;
  const bool factor_applied = source->values || source->moment_rule;
  const float weight = factor_applied ? source->weight : source->weight * source->factor;
  const float scaling = source->scalings ? source->scalings[block->piece] : 1;
  struct ob_compress_run run = {
      .count = block->count,
      .valid = block->valid,
      .input =
          source->values ? (const void *)(source->values + word * OB_LANES) : input_of(step, block),
      .dtype = source->values ? ONEBIT_FLOAT32 : input_dtype(step),
      .rule = work->rule,
      .stream = work->stream && !is_measured(residual, b) && !residual->changed,
      .momentum_bits = source->momentum ? fields_at(step, step->last, block) : NULL,
      .momentum_width = source->momentum ? step->last->width : 1,
      .momentum_scale = source->momentum ? scale_of(step, step->last, b) : 0,
      .decay = scaling == 0 ? 1 : source->decay,
      .weight = scaling == 0 ? 0 : weight,
      .scaling = scaling == 0 ? 1 : scaling,
      .momentum_in_residual = source->momentum_in_residual,
      .reciprocals =
          source->reciprocals ? source->reciprocals + residual_at(residual, block) : NULL,
      .moment_rule = source->moment_rule,
      .residual = residual_values(residual, residual->now, block),
      .residual_scale = residual_scale(residual, b),
      .residual_out = residual_values(residual, !residual->now, block),
  };
  if (run.moment_rule)
    point_to_moments(step, block, &run);
  return run;
}

static void note_changed(const struct ob_residual *residual, size_t b) {
  if (residual->changed)
    residual->changed[b - residual->first] = true;
}

static void compress_body(void *context, size_t first, size_t end, int thread) {
  struct step *step = context;
  struct ob_work *work = step->work;
  struct levels levels = {0};
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    struct ob_compress_run run = compress_run_of(step, b, &block);
    note_changed(step->residual, b);
    if (step->out->width == 1) {
      run.bits = fields_at(step, step->out, &block);
      set_scale(step, b, block.count, work->codec->compress(&run));
      if (is_measured(step->residual, b))
        measure(step, b, &block, thread, run.residual_out, NULL);
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
  struct step step = {.work = work,
                      .shape = shape,
                      .source = source,
                      .residual = residual,
                      .last = last,
                      .out = out,
                      .sums = sums};
  residual->eager[!residual->now] = out->width > 1;
  run_step(&step, compress_body);
}

/* Points the thread's scratch at block b of each message; the mean's 1 / streams goes into the
 * scales. */
static void gather_streams(const struct step *step, size_t b, const struct ob_block *block,
                           const uint32_t **words, float *scales) {
  const float weight = (float)(1.0 / (double)step->work->streams);
  for (size_t s = 0; s < step->work->streams; s++) {
    words[s] = fields_at(step, &step->in[s], block);
    scales[s] = scale_of(step, &step->in[s], b) * weight;
  }
}

/* `words` and `scales` are the thread's scratch. */
static struct ob_reduce_run reduce_run_of(const struct step *step, size_t b,
                                          const struct ob_block *block, int thread) {
  const struct ob_work *work = step->work;
  const struct ob_residual *residual = step->residual;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  gather_streams(step, b, block, words, scales);
  return (struct ob_reduce_run){
      .count = block->count,
      .streams = work->streams,
      .width = step->in->width,
      .bits = words,
      .scales = scales,
      .serving = residual->serving,
      .rule = work->rule,
      .stream = work->stream && !is_measured(residual, b) && !residual->changed,
      .residual = residual_values(residual, residual->now, block),
      .residual_scale = residual_scale(residual, b),
      .residual_out = residual_values(residual, !residual->now, block),
  };
}

static void reduce_body(void *context, size_t first, size_t end, int thread) {
  struct step *step = context;
  struct ob_work *work = step->work;
  struct levels levels = {0};
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    struct ob_reduce_run run = reduce_run_of(step, b, &block, thread);
    note_changed(step->residual, b);
    if (step->out->width == 1) {
      run.out = fields_at(step, step->out, &block);
      set_scale(step, b, block.count, work->codec->reduce(&run));
      if (is_measured(step->residual, b))
        measure(step, b, &block, thread, run.residual_out, NULL);
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
  struct step step = {
      .work = work, .shape = shape, .in = in, .residual = residual, .out = out, .sums = sums};
  residual->eager[!residual->now] = out->width > 1;
  run_step(&step, reduce_body);
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

static void sum_body(void *context, size_t first, size_t end, int thread) {
  struct step *step = context;
  struct ob_work *work = step->work;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    gather_streams(step, b, &block, words, scales);
    struct ob_sum_run run = {.count = block.count,
                             .streams = work->streams,
                             .width = step->in->width,
                             .bits = words,
                             .scales = scales,
                             .output = output_of(step, &block),
                             .dtype = step->out ? ONEBIT_FLOAT32 : work->output_dtype};
    work->codec->sum(&run);
  }
}

void ob_sum_blocks(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, void *const *outputs) {
  struct step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  run_step(&step, sum_body);
}

void ob_sum_values(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, struct ob_view *out) {
  struct step step = {.work = work, .shape = shape, .in = in, .out = out};
  run_step(&step, sum_body);
}

static void store_body(void *context, size_t first, size_t end, int thread) {
  struct step *step = context;
  struct ob_work *work = step->work;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    struct ob_store_run run = {.count =
                                   block.valid, /* padding has no place in the caller's buffer */
                               .stream = work->stream,
                               .width = step->in->width,
                               .bits = fields_at(step, step->in, &block),
                               .scale = scale_of(step, step->in, b),
                               .output = output_of(step, &block),
                               .dtype = work->output_dtype};
    work->codec->store(&run);
  }
}

void ob_store_blocks(struct ob_work *work, const struct ob_view *in,
                     const struct ob_message_shape *shape, void *const *outputs) {
  struct step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  run_step(&step, store_body);
}

static void point_to_arrays(const struct ob_pass_sink *sink, const struct ob_block *block,
                            struct ob_pass_run *run) {
  size_t at = (block->word - sink->first_word) * OB_LANES;
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    run->arrays[slot] = sink->arrays[slot] ? sink->arrays[slot] + at : NULL;
  if (sink->masters)
    run->parameter = sink->masters + at;
  else if (sink->parameters && sink->parameters[block->piece])
    run->parameter = sink->parameters[block->piece] + block->offset;
  if (sink->copies && sink->copies[block->piece])
    run->copy =
        (char *)sink->copies[block->piece] + block->offset * ob_dtype_size(sink->copy_dtype);
  if (sink->gradients && sink->gradients[block->piece])
    run->gradient = (const char *)sink->gradients[block->piece] +
                    block->offset * ob_dtype_size(sink->gradient_dtype);
  if (sink->last_values)
    run->last_values = sink->last_values + at;
}

static void pass_block(const struct step *step, size_t b, const struct ob_block *block) {
  const struct ob_pass_sink *sink = step->sink;
  struct ob_pass_run run = {.kind = sink->kind,
                            .stream = step->work->stream,
                            .count = block->valid,
                            .copy_dtype = sink->copy_dtype,
                            .gradient_dtype = sink->gradient_dtype,
                            .factors = sink->factors};
  run.factors.learning_rate = sink->learning_rates[block->piece];
  run.factors.weight_decay = sink->weight_decays[block->piece];
  run.factors.scaling = sink->scalings ? sink->scalings[block->piece] : 1;
  const float of_rates = sink->rate_factors ? sink->rate_factors[block->piece] : 1;
  run.factors.rate_sum = sink->factors.rate_sum * of_rates;
  run.factors.anchor_decay = run.factors.weight_decay * (sink->factors.anchor_decay * of_rates);
  point_to_arrays(sink, block, &run);
  if (step->in) {
    run.width = step->in->width;
    run.message = fields_at(step, step->in, block);
    run.message_scale = ob_pass_scale(sink->kind, scale_of(step, step->in, b), &run.factors);
  }
  if (step->last) {
    run.last_width = step->last->width;
    run.last = fields_at(step, step->last, block);
    run.last_scale = scale_of(step, step->last, b) / run.factors.scaling * sink->last_decay;
  }
  step->work->codec->pass(&run);
  for (int k = 0; k < OB_SUMS; k++)
    if (sink->sums[k])
      sink->sums[k][b] = (double)run.sums[k];
}

static void pass_body(void *context, size_t first, size_t end, int thread) {
  const struct step *step = context;
  const struct ob_pass_sink *sink = step->sink;
  const unsigned uses = ob_pass_reads(sink->kind) | ob_pass_writes(sink->kind);
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(step->work->layout, b, &piece);
    bool padding = uses & OB_MASK(OB_PARAMETER) && !sink->masters && !sink->parameters[block.piece];
    if (block.valid && !padding)
      pass_block(step, b, &block);
    else
      for (int k = 0; k < OB_SUMS; k++)
        if (sink->sums[k])
          sink->sums[k][b] = 0;
  }
}

void ob_pass_blocks(struct ob_work *work, const struct ob_view *in, const struct ob_view *last,
                    const struct ob_message_shape *shape, const struct ob_pass_sink *sink) {
  const struct ob_message_shape all = {.blocks = work->layout->blocks};
  struct step step = {
      .work = work, .shape = shape ? shape : &all, .in = in, .last = last, .sink = sink};
  run_step(&step, pass_body);
}

/* --- After a call */

void ob_residual_commit(struct ob_residual *residual) {
  residual->now = !residual->now;
  if (residual->changed)
    memset(residual->changed, 0, residual->blocks);
}

/* What the element was before `added`; or what it is, where nothing was added. A sum that is not
 * finite says nothing any more: then it is zero. */
static float undone(float value, float scale, float added, bool changed) {
  if (!changed || !ob_is_finite(added))
    return ob_residual_of(value, scale);
  const float before = value - added;
  return ob_is_finite(before) ? before : 0;
}

/* What the call has added to a block's errors, as the codec adds it to none. The scratch has a
 * block of zeros, one for this, and its signs. */
static void find_added(const struct step *step, size_t b, const struct ob_block *block) {
  const struct ob_work *work = step->work;
  const size_t full = work->layout->block;
  float *const zeros = work->wide, *const added = zeros + full;
  uint32_t *const signs = (uint32_t *)(void *)(added + full);
  memset(zeros, 0, full * sizeof *zeros);
  if (step->source) {
    struct ob_compress_run run = compress_run_of(step, b, block);
    run.residual = zeros, run.residual_scale = 0, run.residual_out = added, run.bits = signs;
    work->codec->compress(&run);
    return;
  }
  struct ob_reduce_run run = reduce_run_of(step, b, block, 0);
  run.residual = zeros, run.residual_scale = 0, run.residual_out = added, run.out = signs;
  work->codec->reduce(&run);
}

static void undo(struct step step) {
  const struct ob_residual *residual = step.residual;
  const struct ob_layout *layout = step.work->layout;
  const size_t first = step.shape->first;
  const float *const added = step.work->wide + layout->block;
  size_t piece = 0;
  step.first_word = ob_layout_word(layout, first);
  for (size_t b = first; b < first + step.shape->blocks; b++) {
    const struct ob_block block = ob_layout_block(layout, b, &piece);
    const bool changed = residual->changed[b - residual->first];
    float *const values = residual_values(residual, residual->now, &block);
    const float scale = residual_scale(residual, b);
    if (changed)
      find_added(&step, b, &block);
    for (size_t i = 0; i < block.count; i++)
      values[i] = undone(values[i], scale, changed ? added[i] : 0, changed);
  }
}

void ob_undo_compress(struct ob_work *work, const struct ob_source *source,
                      struct ob_residual *residual, const struct ob_message_shape *shape,
                      const struct ob_view *last) {
  undo((struct step){
      .work = work, .shape = shape, .source = source, .residual = residual, .last = last});
}

void ob_undo_reduce(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                    const struct ob_message_shape *shape) {
  undo((struct step){.work = work, .shape = shape, .in = in, .residual = residual});
}

bool ob_residual_has_changed(const struct ob_residual *residual) {
  return residual->changed && memchr(residual->changed, true, residual->blocks);
}

/* The values are the errors themselves: one scale of all blocks could not be that of some. */
void ob_residual_undone(struct ob_residual *residual) {
  const size_t scales = residual->one_scale ? 1 : residual->blocks;
  memset(residual->scales[residual->now], 0, scales * sizeof(float));
  memset(residual->changed, 0, residual->blocks);
}

bool ob_residual_large(const struct ob_residual *residual) {
  size_t scales = residual->one_scale ? 1 : residual->blocks;
  for (size_t b = 0; b < scales; b++)
    if (residual->scales[residual->now][b] >= OB_LARGE_SCALE)
      return true;
  return false;
}
