/* Loops over the blocks of a dense message, one for each step. */
#include <string.h>

#include "compression/block_step.h"

/* The elements that a block's words hold. */
static size_t capacity_of(const struct ob_block *block) {
  return (block->count + OB_LANES - 1) / OB_LANES * OB_LANES;
}

static void mark_not_finite(struct ob_work *work) {
  atomic_store_explicit(&work->not_finite, true, memory_order_relaxed);
}

/* Loads the block times the factor, zeros where it has no input; the rest of the last word may hold
 * what an earlier message left there. True if it is finite; where `bounded` is set, if the sum of
 * its squares is. */
static bool load_block(const struct ob_block_step *step, const struct ob_block *block,
                       float *values) {
  const struct ob_work *work = step->work;
  const void *input = ob_block_input(step, block);
  const float *loaded = values;
  size_t valid = input ? block->valid : 0, capacity = capacity_of(block);
  bool finite =
      work->codec->load(input, ob_block_input_dtype(step), step->source->factor, valid, values);
  memset(values + valid, 0, (capacity - valid) * sizeof *values);
  return work->bounded ? work->codec->mean(&loaded, 1, 1, capacity, values) : finite;
}

/* Copies the block as it is, into messages of its type. */
static void copy_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                       int thread) {
  const void *input = ob_block_input(step, block);
  size_t size = ob_dtype_size(step->work->dtype), valid = input ? block->valid * size : 0;
  char *to = (char *)step->out->values + ob_block_position(step, block) * size;
  (void)b, (void)thread;
  if (valid)
    memcpy(to, input, valid);
  memset(to + valid, 0, capacity_of(block) * size - valid);
}

static void load_or_copy(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                         int thread) {
  struct ob_work *work = step->work;
  const bool half = step->shape->half;
  float *values = half ? work->wide + (size_t)thread * work->layout->block
                       : step->out->values + ob_block_position(step, block);
  if (!load_block(step, block, values))
    mark_not_finite(work);
  if (half)
    copy_block(step, b, block, thread);
}

void ob_load_blocks(struct ob_work *work, const struct ob_source *source,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {.work = work, .shape = shape, .source = source, .out = out};
  ob_block_step_each(&step, work->threads, load_or_copy);
}

void ob_copy_blocks(struct ob_work *work, const void *const *inputs,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  const struct ob_source source = {.inputs = inputs};
  struct ob_block_step step = {.work = work, .shape = shape, .source = &source, .out = out};
  ob_block_step_each(&step, work->threads, copy_block);
}

/* Points the scratch at the block in each message, or at its values as float32. */
static void gather_values(const struct ob_block_step *step, const struct ob_block *block,
                          size_t streams) {
  struct ob_work *work = step->work;
  size_t at = ob_block_position(step, block);
  for (size_t s = 0; s < streams; s++) {
    float *wide = work->wide + s * work->layout->block;
    if (step->shape->half)
      work->codec->load(step->in[s].halves + at, work->dtype, step->factor, capacity_of(block),
                        wide);
    work->values[s] = step->shape->half ? wide : step->in[s].values + at;
  }
}

/* Makes the mean of a block at a time, so that what counts as not finite does not depend on how
 * messages are cut: to the message, or to the outputs. */
static void mean_of_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                          int thread) {
  struct ob_work *work = step->work;
  const size_t streams = step->streams, capacity = capacity_of(block);
  float *mean = step->out ? step->out->values + ob_block_position(step, block)
                          : work->wide + streams * work->layout->block;
  (void)b, (void)thread;
  gather_values(step, block, streams);
  if (!work->codec->mean(work->values, streams, (float)(1.0 / (double)streams), capacity, mean) &&
      !work->bounded)
    mark_not_finite(work);
  if (!step->out)
    work->codec->convert(mean, block->valid, ob_block_output(step, block), work->output_dtype);
}

void ob_mean_blocks(struct ob_work *work, const struct ob_view *in, size_t streams, float factor,
                    const struct ob_message_shape *shape, struct ob_view *out) {
  struct ob_block_step step = {
      .work = work, .shape = shape, .factor = factor, .in = in, .streams = streams, .out = out};
  ob_block_step_each(&step, 1, mean_of_block);
}

void ob_average_blocks(struct ob_work *work, const struct ob_view *in, float factor,
                       const struct ob_message_shape *shape, void *const *outputs) {
  struct ob_block_step step = {.work = work,
                               .shape = shape,
                               .factor = factor,
                               .in = in,
                               .streams = work->streams,
                               .outputs = outputs};
  ob_block_step_each(&step, 1, mean_of_block);
}

static void convert_block(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                          int thread) {
  const size_t at = ob_block_position(step, block);
  char *output = ob_block_output(step, block);
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
  ob_block_step_each(&step, work->threads, convert_block);
}
