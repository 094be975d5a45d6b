/* Loops over the blocks of a dense message, one for each step. */
#include <string.h>

#include "compression/blocks.h"

/* One step on one message, as the threads see it. */
struct step {
  struct ob_work *work;
  const struct ob_message_shape *shape;
  size_t first_word; /* of the message */
  const struct ob_source *source;
  const void *const *inputs; /* of the source, or to be copied */
  float factor;              /* of halves that are added up */
  void *const *outputs;
  const struct ob_view *in;
  struct ob_view *out;
};

static void dense_run_step(struct step *step,
                           void (*body)(void *context, size_t first, size_t end, int thread)) {
  const struct ob_message_shape *shape = step->shape;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  ob_parallel(step->work->threads, shape->first, shape->first + shape->blocks, body, step);
}

/* The position of the block in the message, in elements; the next: the elements that its words
 * hold. */
static size_t dense_position_of(const struct step *step, const struct ob_block *block) {
  return (block->word - step->first_word) * OB_LANES;
}

static size_t capacity_of(const struct ob_block *block) {
  return (block->count + OB_LANES - 1) / OB_LANES * OB_LANES;
}

/* The type of inputs: sources may be float32 whatever the plan's type. */
static onebit_dtype_t dense_input_dtype(const struct step *step) {
  return step->source && step->source->float32 ? ONEBIT_FLOAT32 : step->work->dtype;
}

static const void *dense_input_of(const struct step *step, const struct ob_block *block) {
  const char *base = step->inputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(dense_input_dtype(step)) : NULL;
}

static void *dense_output_of(const struct step *step, const struct ob_block *block) {
  size_t size = ob_dtype_size(step->work->output_dtype);
  return (char *)step->outputs[block->piece] + block->offset * size;
}

static void mark_not_finite(struct ob_work *work) {
  atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
}

/* Loads the block times the factor, zeros where it has no input; the rest of the last word may hold
 * what an earlier message left there. True if it is finite; where `bounded` is set, if the sum of
 * its squares is. */
static bool load_block(const struct step *step, const struct ob_block *block, float *values) {
  const struct ob_work *work = step->work;
  const void *input = dense_input_of(step, block);
  const float *loaded = values;
  size_t valid = input ? block->valid : 0, capacity = capacity_of(block);
  bool finite =
      work->codec->load(input, dense_input_dtype(step), step->source->factor, valid, values);
  memset(values + valid, 0, (capacity - valid) * sizeof *values);
  return work->bounded ? work->codec->mean(&loaded, 1, 1, capacity, values) : finite;
}

/* Copies the block as it is, into messages of its type. */
static void copy_block(const struct step *step, const struct ob_block *block) {
  const void *input = dense_input_of(step, block);
  size_t size = ob_dtype_size(step->work->dtype), valid = input ? block->valid * size : 0;
  char *to = (char *)step->out->values + dense_position_of(step, block) * size;
  if (valid)
    memcpy(to, input, valid);
  memset(to + valid, 0, capacity_of(block) * size - valid);
}

static void load_body(void *context, size_t first, size_t end, int thread) {
  const struct step *step = context;
  struct ob_work *work = step->work;
  bool half = step->shape->half;
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    float *values = half ? work->wide + (size_t)thread * work->layout->block
                         : step->out->values + dense_position_of(step, &block);
    if (!load_block(step, &block, values))
      mark_not_finite(work);
    if (half)
      copy_block(step, &block);
  }
}

void ob_load_blocks(struct ob_work *work, const struct ob_source *source,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct step step = {
      .work = work, .shape = shape, .source = source, .inputs = source->inputs, .out = out};
  dense_run_step(&step, load_body);
}

static void copy_body(void *context, size_t first, size_t end, int thread) {
  const struct step *step = context;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(step->work->layout, b, &piece);
    copy_block(step, &block);
  }
}

void ob_copy_blocks(struct ob_work *work, const void *const *inputs,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct step step = {.work = work, .shape = shape, .inputs = inputs, .out = out};
  dense_run_step(&step, copy_body);
}

/* Points the scratch at the block in each message, or at its values as float32. */
static void gather_values(const struct step *step, const struct ob_block *block, size_t streams) {
  struct ob_work *work = step->work;
  size_t at = dense_position_of(step, block);
  for (size_t s = 0; s < streams; s++) {
    float *wide = work->wide + s * work->layout->block;
    if (step->shape->half)
      work->codec->load(step->in[s].halves + at, work->dtype, step->factor, capacity_of(block),
                        wide);
    work->values[s] = step->shape->half ? wide : step->in[s].values + at;
  }
}

/* Makes the mean of a block at a time, so that what counts as not finite does not depend on how
 * messages are cut. */
static void mean_of_block(const struct step *step, const struct ob_block *block, size_t streams,
                          float *out) {
  struct ob_work *work = step->work;
  const float weight = (float)(1.0 / (double)streams);
  gather_values(step, block, streams);
  if (!work->codec->mean(work->values, streams, weight, capacity_of(block), out) && !work->bounded)
    mark_not_finite(work);
}

void ob_mean_blocks(struct ob_work *work, const struct ob_view *in, size_t streams, float factor,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct step step = {.work = work, .shape = shape, .factor = factor, .in = in};
  size_t piece = 0;
  step.first_word = ob_layout_word(work->layout, shape->first);
  for (size_t b = shape->first; b < shape->first + shape->blocks; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    mean_of_block(&step, &block, streams, out->values + dense_position_of(&step, &block));
  }
}

void ob_average_blocks(struct ob_work *work, const struct ob_view *in, float factor,
                       const struct ob_message_shape *shape, void *const *outputs) {
  struct step step = {.work = work, .shape = shape, .factor = factor, .in = in, .outputs = outputs};
  float *mean = work->wide + work->streams * work->layout->block;
  size_t piece = 0;
  step.first_word = ob_layout_word(work->layout, shape->first);
  for (size_t b = shape->first; b < shape->first + shape->blocks; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    mean_of_block(&step, &block, work->streams, mean);
    work->codec->convert(mean, block.valid, dense_output_of(&step, &block), work->output_dtype);
  }
}

static void convert_body(void *context, size_t first, size_t end, int thread) {
  const struct step *step = context;
  struct ob_work *work = step->work;
  size_t piece = 0;
  (void)thread;
  for (size_t b = first; b < end; b++) {
    struct ob_block block = ob_layout_block(work->layout, b, &piece);
    size_t at = dense_position_of(step, &block);
    if (step->shape->half)
      memcpy(dense_output_of(step, &block), step->in->halves + at, block.valid * sizeof(uint16_t));
    else
      work->codec->convert(step->in->values + at, block.valid, dense_output_of(step, &block),
                           work->output_dtype);
  }
}

void ob_convert_blocks(struct ob_work *work, const struct ob_view *in,
                       const struct ob_message_shape *shape, void *const *outputs) {
  struct step step = {.work = work, .shape = shape, .in = in, .outputs = outputs};
  dense_run_step(&step, convert_body);
}
