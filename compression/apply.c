/* Decodes, averages and applies messages block by block. This file also has the threads and the
 * scratch memory of all loops over blocks. */
#include <string.h>

#include "compression/blocks.h"
#include "compression/pass_element.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"

int ob_processor_count(void) {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return 0;
#endif
}

/* Splits the range first .. end - 1 into equal parts, one for each thread, and calls body(context,
 * first, end, thread) with each part. */
static void run_in_threads(int threads, size_t first, size_t end,
                           void (*body)(void *context, size_t first, size_t end, int thread),
                           void *context) {
#ifdef _OPENMP
  if (threads > 1 && end - first > 1) {
#pragma omp parallel num_threads(threads)
    {
      /* OpenMP's team may contain a thread of the program. */
      const struct ob_float_environment found = ob_float_enter();
      size_t count = end - first, thread = (size_t)omp_get_thread_num();
      size_t team = (size_t)omp_get_num_threads();
      body(context, first + count * thread / team, first + count * (thread + 1) / team,
           (int)thread);
      ob_float_leave(&found);
    }
    return;
  }
#endif
  (void)threads;
  body(context, first, end, 0);
}

size_t ob_level_scratch(const struct ob_work *work) {
  const size_t block = work->layout->block;
  return block + (work->measured ? ob_measure_scratch(block) : 0);
}

size_t ob_work_scratch(const struct ob_work *work) {
  size_t threads = (size_t)work->threads, sums = work->max_streams + 1;
  size_t block = work->layout->block;
  size_t levels = work->max_width > 1 ? threads * ob_level_scratch(work) : 0;
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
  work->wide = ob_allocate(ob_work_scratch(work), sizeof *work->wide);
  if (!work->words || !work->scales || !work->values || !work->wide)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %zu streams", slots);
  return ONEBIT_OK;
}

void ob_work_destroy(struct ob_work *work) {
  ob_release((void *)work->words);
  ob_release(work->scales);
  ob_release((void *)work->values);
  ob_release(work->wide);
}

void ob_block_step_run(struct ob_block_step *step,
                       void (*body)(void *context, size_t first, size_t end, int thread)) {
  const struct ob_message_shape *shape = step->shape;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  run_in_threads(step->work->threads, shape->first, shape->first + shape->blocks, body, step);
}

static void block_step_body(void *context, size_t first, size_t end, int thread) {
  const struct ob_block_step *step = context;
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    const struct ob_block block = ob_layout_block(step->work->layout, b, &piece);
    step->body(step, b, &block, thread);
  }
}

void ob_block_step_run_each(struct ob_block_step *step, int threads, ob_block_body *body) {
  const struct ob_message_shape *shape = step->shape;
  step->body = body;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  run_in_threads(threads, shape->first, shape->first + shape->blocks, block_step_body, step);
}

onebit_dtype_t ob_block_input_dtype(const struct ob_block_step *step) {
  return step->source->float32 ? ONEBIT_FLOAT32 : step->work->dtype;
}

const char *ob_block_input(const struct ob_block_step *step, const struct ob_block *block) {
  const char *base = step->source->inputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(ob_block_input_dtype(step)) : NULL;
}

static char *block_output(const struct ob_block_step *step, const struct ob_block *block) {
  char *base = step->outputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(step->work->output_dtype) : NULL;
}

/* Returns the position of a block's first element in a message's values. */
static size_t block_position(const struct ob_block_step *step, const struct ob_block *block) {
  return (block->word - step->first_word) * OB_LANES;
}

uint32_t *ob_block_fields(const struct ob_block_step *step, const struct ob_view *view,
                          const struct ob_block *block) {
  return view->words + (block->word - step->first_word) * view->width;
}

float ob_block_scale(const struct ob_block_step *step, const struct ob_view *view, size_t block) {
  return step->work->one_scale ? view->header->scale : view->scales[block - step->shape->first];
}

void ob_block_point_to_streams(const struct ob_block_step *step, size_t b,
                               const struct ob_block *block, const uint32_t **words,
                               float *scales) {
  const float weight = (float)(1.0 / (double)step->work->streams);
  for (size_t s = 0; s < step->work->streams; s++) {
    words[s] = ob_block_fields(step, &step->in[s], block);
    scales[s] = ob_block_scale(step, &step->in[s], b) * weight;
  }
}

/* --- Compressed messages: sums, stores, passes of optimizers -----------------------------------*/

static void sum_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                      int thread) {
  const struct ob_work *work = step->work;
  const uint32_t **words = work->words + (size_t)thread * work->streams;
  float *scales = work->scales + (size_t)thread * work->streams;
  ob_block_point_to_streams(step, b, block, words, scales);
  struct ob_sum_run run = {.count = block->count,
                           .streams = work->streams,
                           .width = step->in->width,
                           .bits = words,
                           .scales = scales,
                           .output = step->out
                                         ? (void *)(step->out->values + block_position(step, block))
                                         : block_output(step, block),
                           .dtype = step->out ? ONEBIT_FLOAT32 : work->output_dtype};
  work->codec->sum(&run);
}

void ob_sum_blocks(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  ob_block_step_run_each(&step, work->threads, sum_block);
}

void ob_sum_values(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .out = out};
  ob_block_step_run_each(&step, work->threads, sum_block);
}

static void store_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                        int thread) {
  const struct ob_work *work = step->work;
  (void)thread;
  struct ob_store_run run = {.count = block->valid, /* the caller's buffer has no padding */
                             .stream = work->stream,
                             .width = step->in->width,
                             .bits = ob_block_fields(step, step->in, block),
                             .scale = ob_block_scale(step, step->in, b),
                             .output = block_output(step, block),
                             .dtype = work->output_dtype};
  work->codec->store(&run);
}

void ob_store_blocks(struct ob_work *work, const struct ob_view *in,
                     const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  ob_block_step_run_each(&step, work->threads, store_block);
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

static void run_block_pass(const struct ob_block_step *step, size_t b,
                           const struct ob_block *block) {
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
  if (ob_pass_divides_gradients(sink->kind))
    run.factors.floor = ob_divisor_floor(sink->variances[b], block->valid, &sink->factors);
  point_to_arrays(sink, block, &run);
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

/* Runs the pass on a block. If the block is padding, it sets the sums of the block to 0 instead. In
 * a pass that reads or writes parameters, a piece without parameters is padding. */
static void run_pass_or_clear_sums(const struct ob_block_step *step, size_t b,
                                   const struct ob_block *block, int thread) {
  const struct ob_pass_sink *sink = step->sink;
  const unsigned uses = ob_pass_reads(sink->kind) | ob_pass_writes(sink->kind);
  bool padding = uses & OB_MASK(OB_PARAMETER) && !sink->masters && !sink->parameters[block->piece];
  (void)thread;
  if (block->valid && !padding)
    run_block_pass(step, b, block);
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
  ob_block_step_run_each(&step, work->threads, run_pass_or_clear_sums);
}

/* --- Dense messages ----------------------------------------------------------------------------*/

/* Returns the number of elements that a block's words can hold. */
static size_t block_capacity(const struct ob_block *block) {
  return (block->count + OB_LANES - 1) / OB_LANES * OB_LANES;
}

static void mark_not_finite(struct ob_work *work) {
  atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
}

/* Loads the block, multiplied by the source's factor, and pads its last word with zeros, since the
 * buffer may still hold values of an earlier message. Returns whether all elements are finite, or,
 * if work->bounded is set, whether the sum of their squares is finite. */
static bool load_block(const struct ob_block_step *step, const struct ob_block *block,
                       float *values) {
  const struct ob_work *work = step->work;
  const void *input = ob_block_input(step, block);
  const float *loaded = values;
  size_t valid = input ? block->valid : 0, capacity = block_capacity(block);
  bool finite =
      work->codec->load(input, ob_block_input_dtype(step), step->source->factor, valid, values);
  memset(values + valid, 0, (capacity - valid) * sizeof *values);
  return work->bounded ? work->codec->mean(&loaded, 1, 1, capacity, values) : finite;
}

/* Copies the block unchanged into a message of the same type. */
static void copy_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                       int thread) {
  const void *input = ob_block_input(step, block);
  size_t size = ob_dtype_size(step->work->dtype), valid = input ? block->valid * size : 0;
  char *to = (char *)step->out->values + block_position(step, block) * size;
  (void)b, (void)thread;
  if (valid)
    memcpy(to, input, valid);
  memset(to + valid, 0, block_capacity(block) * size - valid);
}

/* Loads a block into the message. A message of 16-bit values gets a copy of the input; the loaded
 * float32 values are then only checked. */
static void load_message_block(const struct ob_block_step *step, size_t b,
                               const struct ob_block *block, int thread) {
  struct ob_work *work = step->work;
  const bool half = step->shape->half;
  float *values = half ? work->wide + (size_t)thread * work->layout->block
                       : step->out->values + block_position(step, block);
  if (!load_block(step, block, values))
    mark_not_finite(work);
  if (half)
    copy_block(step, b, block, thread);
}

void ob_load_blocks(struct ob_work *work, const struct ob_source *source,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {.work = work, .shape = shape, .source = source, .out = out};
  ob_block_step_run_each(&step, work->threads, load_message_block);
}

void ob_copy_blocks(struct ob_work *work, const void *const *inputs,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  const struct ob_source source = {.inputs = inputs};
  struct ob_block_step step = {.work = work, .shape = shape, .source = &source, .out = out};
  ob_block_step_run_each(&step, work->threads, copy_block);
}

/* Sets the scratch pointers to the values of the block in each message. Converts 16-bit values to
 * float32 first. */
static void gather_values(const struct ob_block_step *step, const struct ob_block *block,
                          size_t streams) {
  struct ob_work *work = step->work;
  size_t at = block_position(step, block);
  for (size_t s = 0; s < streams; s++) {
    float *wide = work->wide + s * work->layout->block;
    if (step->shape->half)
      work->codec->load(step->in[s].halves + at, work->dtype, step->factor, block_capacity(block),
                        wide);
    work->values[s] = step->shape->half ? wide : step->in[s].values + at;
  }
}

/* Averages a block of the messages into `out` or into the outputs. Each block is checked
 * separately, so that the result of the check does not depend on the sizes of messages. */
static void average_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                          int thread) {
  struct ob_work *work = step->work;
  const size_t streams = step->streams, capacity = block_capacity(block);
  float *mean = step->out ? step->out->values + block_position(step, block)
                          : work->wide + streams * work->layout->block;
  (void)b, (void)thread;
  gather_values(step, block, streams);
  if (!work->codec->mean(work->values, streams, (float)(1.0 / (double)streams), capacity, mean) &&
      !work->bounded)
    mark_not_finite(work);
  if (!step->out)
    work->codec->convert(mean, block->valid, block_output(step, block), work->output_dtype);
}

void ob_average_values(struct ob_work *work, const struct ob_view *in, size_t streams, float factor,
                       const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .factor = factor, .in = in, .streams = streams, .out = out};
  ob_block_step_run_each(&step, 1, average_block);
}

void ob_average_blocks(struct ob_work *work, const struct ob_view *in, float factor,
                       const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work,
                               .shape = shape,
                               .factor = factor,
                               .in = in,
                               .streams = work->streams,
                               .outputs = outputs};
  ob_block_step_run_each(&step, 1, average_block);
}

static void convert_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                          int thread) {
  const size_t at = block_position(step, block);
  char *output = block_output(step, block);
  (void)b, (void)thread;
  if (step->shape->half)
    memcpy(output, step->in->halves + at, block->valid * sizeof(uint16_t));
  else
    step->work->codec->convert(step->in->values + at, block->valid, output,
                               step->work->output_dtype);
}

void ob_convert_blocks(struct ob_work *work, const struct ob_view *in,
                       const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  ob_block_step_run_each(&step, work->threads, convert_block);
}
