/*
 * Compressing, reducing and decoding the blocks of one message: the loop over blocks, their scales,
 * and the threads. One function a step of a collective; each is one pass over memory.
 *
 * The residual and its lazy error. Where the literature keeps the error e = c - s * sign(c) of
 * the compensated value c, we keep c and the scale s it was sent with, and compute e when the next
 * call needs it: the same operations with the same rounding, one pass over memory instead of two.
 * There are two copies, the current and the next: a call reads the one and writes the other, and
 * only ob_residual_commit, once all ranks are known to be well, makes the next the current. So a
 * skipped or failed call leaves the error as it was, to the bit. Where an optimizer has moments of
 * this rank's own gradients, they change in compress too, and lie beside: two copies likewise.
 *
 * With one copy compress and reduce work in place, which takes as long as memory allows, and a call
 * that is not to be is undone: e is c - x, where x is made once more, of the input that the caller
 * still holds or of the messages that are still there. That is not exact, since the sum c = e + x
 * was rounded, but to that rounding and the difference's own. Nothing else would be exact and as
 * small: what the sum has lost are low bits of e, as many as x has larger ones, so of some elements
 * all. Where x is not finite, compress leaves the element as it was, to the bit.
 */
#ifndef OB_COMPRESSION_BLOCKS_H
#define OB_COMPRESSION_BLOCKS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/memory.h"
#include "compression/codec.h"
#include "compression/message.h"

/* --- Measuring ---------------------------------------------------------------------------------*/

/* The norms by which a plan finds that its messages have too few bits, or more than they need
 * (collectives/ladder.h). */
/* Sums of squares. */
struct ob_norms {
  double input;    /* the values added to the residual */
  double residual; /* the residual after quantising */
  double value;    /* the compensated values, input and residual before */
  double lower;    /* what half as many bits would leave of those */
};

/* One block, after it was quantised. The arrays have whole groups. */
struct ob_measure_run {
  size_t count;
  unsigned width;      /* bits an element */
  const float *values; /* compensated */
  float scale;         /* in one bit: the scale they were sent with */
  const float *error;  /* in more bits: the new residual */
  const float *before; /* the residual before: lazy, with before_scale, or if that is 0 plain */
  float before_scale;
  onebit_scale_t rule;
  float *scratch; /* of more than one bit: ob_measure_scratch floats */
};

size_t ob_measure_scratch(size_t block);

struct ob_norms ob_measure(const struct ob_measure_run *run, const struct ob_codec *codec);

/* --- The residuals -----------------------------------------------------------------------------*/

/* A call measures one block in OB_MEASURE_EVERY: measuring takes up to a tenth of its time. */
#define OB_MEASURE_EVERY 16

/* Residuals of the blocks first .. first + blocks - 1 of a layout. */
struct ob_residual {
  size_t first, first_word, blocks, words;
  bool one_scale;
  /* The type of results that are stored straight from the messages: scales are rounded to it before
   * they are sent, so that the residual has what rounding loses. */
  onebit_dtype_t result_dtype;
  const struct ob_memory *memory; /* where the arrays are */
  int now;                        /* which copy is the current one */
  float *values[2];               /* of one copy, both are that */
  bool *changed;        /* of one copy: which blocks this call has changed; NULL: there are two */
  float *scales[2];     /* one a block, or one in all */
  uint16_t *moments[2]; /* one an element; NULL without moments */
  /* True: the error is stored as it is, for messages of more than one bit; a scale is only its
   * size. */
  bool eager[2];
  /* Norms of blocks, one each, in a plan that moves between widths: those with a number of `phase`,
   * modulo OB_MEASURE_EVERY, are measured in this call. NULL: none. */
  struct ob_norms *norms;
  size_t phase;
  /* The server's rule. Where it keeps something other than a residual, that is stored as plain
   * numbers, and the scale only says how large they are. */
  struct ob_serving serving;
};

/* copies: 1, in memory of the host alone, or 2. Moments have two in any case. */
onebit_status_t ob_residual_create(struct ob_residual *residual, const struct ob_layout *layout,
                                   size_t first, size_t end, bool one_scale, bool moments,
                                   int copies, const struct ob_memory *memory);
void ob_residual_destroy(struct ob_residual *residual);
void ob_residual_commit(struct ob_residual *residual);
/* Resets everything except the moments. Fails only where the memory does, which host memory never
 * does. */
onebit_status_t ob_residual_reset(struct ob_residual *residual);
/* Gives memory of the host back to the system after a reset, until it is written. */
void ob_residual_return(struct ob_residual *residual);
/* Resets the residuals after a call without error feedback, and keeps a server's other state. */
onebit_status_t ob_residual_forget(struct ob_residual *residual);
/* True if a scale is OB_LARGE_SCALE or larger. For memory of the host. */
bool ob_residual_large(const struct ob_residual *residual);
size_t ob_residual_bytes(const struct ob_residual *residual);

/* Converts the residual to plain floats, in the order of the elements; and back. `import` takes
 * finite values. Errors: ONEBIT_ERROR_MEMORY and those of the memory, where that is not the
 * host's. */
size_t ob_residual_elements(const struct ob_residual *residual, const struct ob_layout *layout);
onebit_status_t ob_residual_export(const struct ob_residual *residual,
                                   const struct ob_layout *layout, float *error);
onebit_status_t ob_residual_import(struct ob_residual *residual, const struct ob_layout *layout,
                                   const float *error);

/* The parameters and the scratch of all work on a plan's blocks. */
struct ob_work {
  const struct ob_codec *codec;
  const struct ob_layout *layout;
  onebit_scale_t rule;
  onebit_dtype_t dtype, output_dtype; /* of inputs, and of what is stored */
  bool one_scale;     /* one for all blocks: known when the last is compressed (ob_finish) */
  unsigned max_width; /* of messages of bits */
  bool measured;      /* residuals have norms */
  bool undoes;        /* residuals have one copy */
  bool stream;        /* the buffers exceed the caches */
  /* Dense messages: their values have 16 bits; and sums of them are not checked, so each block of
   * the input must have a finite sum of squares. */
  bool half, bounded;
  int threads;
  size_t streams;         /* messages that are reduced or summed */
  size_t max_streams;     /* the number of streams of which means are made, if larger */
  const uint32_t **words; /* scratch of ob_reduce_blocks and ob_sum_blocks: streams a thread */
  float *scales;          /* likewise */
  const float **values;   /* scratch of ob_mean_blocks: max_streams */
  float *wide;            /* scratch: blocks of float32, ob_work_wide in all */
  /* Set by any step that meets such a value or scale; the caller clears them. */
  atomic_bool not_finite, large;
};

/* Floats of scratch, once `streams` and the members above it are set. */
size_t ob_work_wide(const struct ob_work *work);

/* The layout must outlive the work. */
onebit_status_t ob_work_create(struct ob_work *work, size_t streams, size_t max_streams);
void ob_work_destroy(struct ob_work *work);

/* The input of compress: inputs[piece] points to the piece's elements, NULL: zeros. It is
 * multiplied by `weight`; with `momentum`, decay times the momentum that was last exchanged is
 * added. `momentum_in_residual`: the momentum has not been exchanged yet, the residuals' array has
 * it, times decay.
 *
 * `factor` scales an element of the inputs before it is added to anyone else's: it is loaded times
 * factor into dense messages and into the sums of a host's ranks, and where no such sum comes
 * first, weight * factor is the weight. So the numbers tested for being not finite, or too large
 * for their square, are those that count: a loss scale makes no difference to it. */
struct ob_source {
  const void *const *inputs;
  float factor;
  bool momentum, momentum_in_residual;
  float decay, weight;
  /* NULL, or the factor of each piece's momentum while it travels. 0: the piece is padding whose
   * momentum stays as it is: its decay is 1. */
  const float *scalings;
  const float *reciprocals; /* NULL, or one an element, likewise; they lie as the layout does */
  float limit;              /* of the product with those, which is cut off there; 0: none */
  const float *values;      /* not NULL: instead of inputs, those of one message, in its words */
  bool float32;             /* inputs are, whatever else the plan's dtype is about */
  /* The rule of the moments, of residuals that have them, and its factors. */
  enum ob_moment_rule moment_rule;
  struct ob_moment_factors moment;
  const float *floors;    /* NULL, or for each piece a factor of a table's mean moment */
  struct ob_interval own; /* where there are floors: the words whose moments this rank moves */
};

/* Compresses the blocks of `shape` into `out`. `last` is the message with the same blocks that came
 * back from the last exchange, the momentum, where the source wants it. `sums` (one a block of the
 * residuals) takes the sums of magnitudes when there is one scale. */
void ob_compress_blocks(struct ob_work *work, const struct ob_source *source,
                        struct ob_residual *residual, const struct ob_message_shape *shape,
                        const struct ob_view *last, struct ob_view *out, double *sums);

/* Sums the messages in[0 .. streams - 1], which all have this shape, with the residuals into
 * `out`. */
void ob_reduce_blocks(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                      const struct ob_message_shape *shape, struct ob_view *out, double *sums);

/* True if the call has changed a block of the only copy. With two copies: false. */
bool ob_residual_has_changed(const struct ob_residual *residual);
/* Undo a call that failed or was skipped: the blocks of `shape` that it has changed become the
 * errors before, as exactly as is said above, from the call's own input; the others become their
 * present errors. Call ob_residual_end_undo after all blocks. One thread at a time. */
void ob_undo_compress(struct ob_work *work, const struct ob_source *source,
                      struct ob_residual *residual, const struct ob_message_shape *shape,
                      const struct ob_view *last);
void ob_undo_reduce(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                    const struct ob_message_shape *shape);
void ob_residual_end_undo(struct ob_residual *residual);

/* Finds the one scale, from the sums of all blocks of the residuals, for the residuals; the caller
 * puts the returned scale into the messages. */
float ob_finish(struct ob_work *work, struct ob_residual *residual, const double *sums);

/* outputs[piece] = the mean of the messages, at once; or, as float32, the values of `out`. */
void ob_sum_blocks(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, void *const *outputs);
void ob_sum_values(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, struct ob_view *out);

/* outputs[piece] = the decoded message. */
void ob_store_blocks(struct ob_work *work, const struct ob_view *in,
                     const struct ob_message_shape *shape, void *const *outputs);

/* The operands of an optimizer's pass. Arrays lie as a layout's words do, from first_word on. */
struct ob_pass_sink {
  enum ob_pass_kind kind;
  size_t first_word;
  float *arrays[OB_ARRAYS];
  /* The parameters by piece; a piece without parameters (padding) has no part in a pass that reads
   * them. Or not NULL: all of them as masters, which lie as the arrays do. */
  float *const *parameters;
  float *masters;
  void *const *copies; /* NULL, or the parameters in copy_dtype */
  const void *const *gradients;
  onebit_dtype_t copy_dtype, gradient_dtype;
  const float *learning_rates, *weight_decays;
  const float *rate_factors; /* factors of the sums of rates; NULL: 1 */
  const float *scalings;     /* NULL: 1 */
  const float *last_values;  /* decay times the momentum before, where no message has it */
  float last_decay;
  /* Factors, except for those that are one a piece; rate_sum and anchor_decay are sums of the
   * steps' rates. */
  struct ob_pass_factors factors;
  double *sums[OB_SUMS]; /* one a block of the layout; NULL where not wanted */
  /* The sum of each block's variances before this step, for passes that divide gradients. It may be
   * sums[0]. */
  const double *variances;
  /* For arrays of a device: its own form of the members that are here by piece. */
  const struct ob_bucket_device *device;
};

/* Runs a pass over the blocks of `shape`, or with NULL over all. `in`: the message, for passes that
 * take one: ob_pass_scale makes of its scales what the pass reads. `last`: the one before, where
 * the pass reads it and there is one. */
void ob_pass_blocks(struct ob_work *work, const struct ob_view *in, const struct ob_view *last,
                    const struct ob_message_shape *shape, const struct ob_pass_sink *sink);

/* --- Dense messages */

/* Loads the source's inputs, times its factor, into a message; halves as they are. NULL: zeros. */
void ob_load_blocks(struct ob_work *work, const struct ob_source *source,
                    const struct ob_message_shape *shape, struct ob_view *out);

/* Does the same, whether values are finite or not. */
void ob_copy_blocks(struct ob_work *work, const void *const *inputs,
                    const struct ob_message_shape *shape, struct ob_view *out);

/* The mean of messages, for halves times the factor, as float32; or to the outputs. */
void ob_mean_blocks(struct ob_work *work, const struct ob_view *in, size_t streams, float factor,
                    const struct ob_message_shape *shape, struct ob_view *out);
void ob_average_blocks(struct ob_work *work, const struct ob_view *in, float factor,
                       const struct ob_message_shape *shape, void *const *outputs);

/* Converts a message to the outputs. */
void ob_convert_blocks(struct ob_work *work, const struct ob_view *in,
                       const struct ob_message_shape *shape, void *const *outputs);

/* Returns how many processors the calling thread may use, by its binding; 0: this build has no
 * threads. */
int ob_processors(void);

/* --- Within compression/: one step on one message, as the threads see it -----------------------*/

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

/* Runs `body` on all blocks of the shape, divided among `threads` threads. */
void ob_block_step_each(struct ob_block_step *step, int threads, ob_block_body *body);

/* Floats of scratch of a thread: the values of a block that wait for their scale. */
size_t ob_scratch_of_levels(const struct ob_work *work);

/* The type of inputs: sources may be float32 whatever the plan's type. The block's place in its
 * piece's input, or output; NULL: there is none. */
onebit_dtype_t ob_block_input_dtype(const struct ob_block_step *step);
const char *ob_block_input(const struct ob_block_step *step, const struct ob_block *block);

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
