/*
 * The common part of the loops over the blocks of a message (blocks.h): one step on one message, as
 * the threads see it, and the position of a block in it.
 */
#ifndef OB_COMPRESSION_BLOCK_STEP_H
#define OB_COMPRESSION_BLOCK_STEP_H

#include "compression/blocks.h"

struct ob_block_step;

/* Does the step on block b of the layout. */
typedef void ob_block_body(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                           int thread);

struct ob_block_step {
  struct ob_work *work;
  const struct ob_message_shape *shape;
  size_t first_word; /* of the message */
  const struct ob_view *in, *last;
  struct ob_view *out;
  struct ob_residual *residual;
  double *sums;
  const struct ob_source *source;
  const struct ob_pass_sink *sink;
  size_t streams; /* of which a dense mean is made, of halves times `factor` */
  float factor;
  void *const *outputs;
  ob_block_body *body;
};

/* Runs `body` on all blocks of the shape, cut among the threads of the work. */
void ob_block_step_run(struct ob_block_step *step,
                       void (*body)(void *context, size_t first, size_t end, int thread));

/* Does `body` on all blocks of the shape, cut among so many threads. */
void ob_block_step_each(struct ob_block_step *step, int threads, ob_block_body *body);

/* Floats of scratch of a thread: the values of a block that wait for their scale. */
size_t ob_scratch_of_levels(const struct ob_work *work);

/* The type of inputs: sources may be float32 whatever the plan's type. The block's place in its
 * piece's input, or output; NULL: there is none. */
onebit_dtype_t ob_block_input_dtype(const struct ob_block_step *step);
const char *ob_block_input(const struct ob_block_step *step, const struct ob_block *block);
char *ob_block_output(const struct ob_block_step *step, const struct ob_block *block);

/* The place of a block in a message, in elements. */
size_t ob_block_position(const struct ob_block_step *step, const struct ob_block *block);

/* The words of a block in a message. */
uint32_t *ob_block_fields(const struct ob_block_step *step, const struct ob_view *view,
                          const struct ob_block *block);

/* The magnitude that a message's sign bits stand for in this block, or the factor of its levels. */
float ob_block_scale(const struct ob_block_step *step, const struct ob_view *view, size_t block);

/* Points the thread's scratch at block b of each message; the mean's 1 / streams goes into the
 * scales. */
void ob_block_streams(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                      const uint32_t **words, float *scales);

#endif
