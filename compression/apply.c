/* Uses messages block by block: sums them, stores them, and runs passes of optimizers on them. */
#include "compression/block_step.h"
#include "compression/pass_element.h"

static void sum_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                      int thread) {
  const struct ob_work *work = step->work;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  ob_block_streams(step, b, block, words, scales);
  struct ob_sum_run run = {
      .count = block->count,
      .streams = work->streams,
      .width = step->in->width,
      .bits = words,
      .scales = scales,
      .output = step->out ? (void *)(step->out->values + ob_block_position(step, block))
                          : ob_block_output(step, block),
      .dtype = step->out ? ONEBIT_FLOAT32 : work->output_dtype};
  work->codec->sum(&run);
}

void ob_sum_blocks(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  ob_block_step_each(&step, work->threads, sum_block);
}

void ob_sum_values(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .out = out};
  ob_block_step_each(&step, work->threads, sum_block);
}

static void store_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                        int thread) {
  const struct ob_work *work = step->work;
  (void)thread;
  struct ob_store_run run = {.count =
                                 block->valid, /* padding has no place in the caller's buffer */
                             .stream = work->stream,
                             .width = step->in->width,
                             .bits = ob_block_fields(step, step->in, block),
                             .scale = ob_block_scale(step, step->in, b),
                             .output = ob_block_output(step, block),
                             .dtype = work->output_dtype};
  work->codec->store(&run);
}

void ob_store_blocks(struct ob_work *work, const struct ob_view *in,
                     const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  ob_block_step_each(&step, work->threads, store_block);
}

static void apply_point_to_arrays(const struct ob_pass_sink *sink, const struct ob_block *block,
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

static void pass_block(const struct ob_block_step *step, size_t b, const struct ob_block *block) {
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
  if (ob_pass_divides(sink->kind))
    run.factors.floor = ob_divisor_floor(sink->variances[b], block->valid, &sink->factors);
  apply_point_to_arrays(sink, block, &run);
  if (step->in) {
    run.width = step->in->width;
    run.message = ob_block_fields(step, step->in, block);
    run.message_scale = ob_pass_scale(sink->kind, ob_block_scale(step, step->in, b), &run.factors);
  }
  if (step->last) {
    run.last_width = step->last->width;
    run.last = ob_block_fields(step, step->last, block);
    run.last_scale = ob_block_scale(step, step->last, b) / run.factors.scaling * sink->last_decay;
  }
  step->work->codec->pass(&run);
  for (int k = 0; k < OB_SUMS; k++)
    if (sink->sums[k])
      sink->sums[k][b] = (double)run.sums[k];
}

/* Padding has no part in a pass that reads or writes parameters. */
static void pass_or_clear(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                          int thread) {
  const struct ob_pass_sink *sink = step->sink;
  const unsigned uses = ob_pass_reads(sink->kind) | ob_pass_writes(sink->kind);
  bool padding = uses & OB_MASK(OB_PARAMETER) && !sink->masters && !sink->parameters[block->piece];
  (void)thread;
  if (block->valid && !padding)
    pass_block(step, b, block);
  else
    for (int k = 0; k < OB_SUMS; k++)
      if (sink->sums[k])
        sink->sums[k][b] = 0;
}

void ob_pass_blocks(struct ob_work *work, const struct ob_view *in, const struct ob_view *last,
                    const struct ob_message_shape *shape, const struct ob_pass_sink *sink) {
  const struct ob_message_shape all = {.blocks = work->layout->blocks};
  struct ob_block_step step = {
      .work = work, .shape = shape ? shape : &all, .in = in, .last = last, .sink = sink};
  ob_block_step_each(&step, work->threads, pass_or_clear);
}
