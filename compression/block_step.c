/* The threads and memory of the loops over the blocks of a message. */
#include "compression/block_step.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"

int ob_processors(void) {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return 0;
#endif
}

void ob_parallel(int threads, size_t first, size_t end,
                 void (*body)(void *context, size_t first, size_t end, int thread), void *context) {
#ifdef _OPENMP
  if (threads > 1 && end - first > 1) {
#pragma omp parallel num_threads(threads)
    {
      /* The team may contain a thread of the program. */
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

size_t ob_scratch_of_levels(const struct ob_work *work) {
  const size_t block = work->layout->block;
  return block + (work->measured ? ob_measure_scratch(block) : 0);
}

size_t ob_work_wide(const struct ob_work *work) {
  size_t threads = (size_t)work->threads, sums = work->max_streams + 1;
  size_t block = work->layout->block;
  size_t levels = work->max_width > 1 ? threads * ob_scratch_of_levels(work) : 0;
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

void ob_block_step_run(struct ob_block_step *step,
                       void (*body)(void *context, size_t first, size_t end, int thread)) {
  const struct ob_message_shape *shape = step->shape;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  ob_parallel(step->work->threads, shape->first, shape->first + shape->blocks, body, step);
}

static void block_step_body(void *context, size_t first, size_t end, int thread) {
  const struct ob_block_step *step = context;
  size_t piece = 0;
  for (size_t b = first; b < end; b++) {
    const struct ob_block block = ob_layout_block(step->work->layout, b, &piece);
    step->body(step, b, &block, thread);
  }
}

void ob_block_step_each(struct ob_block_step *step, int threads, ob_block_body *body) {
  const struct ob_message_shape *shape = step->shape;
  step->body = body;
  step->first_word = ob_layout_word(step->work->layout, shape->first);
  ob_parallel(threads, shape->first, shape->first + shape->blocks, block_step_body, step);
}

onebit_dtype_t ob_block_input_dtype(const struct ob_block_step *step) {
  return step->source->float32 ? ONEBIT_FLOAT32 : step->work->dtype;
}

const char *ob_block_input(const struct ob_block_step *step, const struct ob_block *block) {
  const char *base = step->source->inputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(ob_block_input_dtype(step)) : NULL;
}

char *ob_block_output(const struct ob_block_step *step, const struct ob_block *block) {
  char *base = step->outputs[block->piece];
  return base ? base + block->offset * ob_dtype_size(step->work->output_dtype) : NULL;
}

size_t ob_block_position(const struct ob_block_step *step, const struct ob_block *block) {
  return (block->word - step->first_word) * OB_LANES;
}

uint32_t *ob_block_fields(const struct ob_block_step *step, const struct ob_view *view,
                          const struct ob_block *block) {
  return view->words + (block->word - step->first_word) * view->width;
}

float ob_block_scale(const struct ob_block_step *step, const struct ob_view *view, size_t block) {
  return step->work->one_scale ? view->header->scale : view->scales[block - step->shape->first];
}

void ob_block_streams(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                      const uint32_t **words, float *scales) {
  const float weight = (float)(1.0 / (double)step->work->streams);
  for (size_t s = 0; s < step->work->streams; s++) {
    words[s] = ob_block_fields(step, &step->in[s], block);
    scales[s] = ob_block_scale(step, &step->in[s], b) * weight;
  }
}
