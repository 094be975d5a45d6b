/*
 * This module compresses, reduces and decodes the blocks of a message. It has the loops over
 * blocks, computes their scales, and starts the threads. Each step of a collective calls one
 * function, which reads and writes memory in one pass.
 *
 * The residual is stored as a lazy error. In the literature the residual is the error e = c - s *
 * sign(c) of the compensated value c. This library stores c and the scale s with which c was sent,
 * and computes e in the next call. The operations and their rounding are the same, but one pass
 * over memory is enough instead of two. The residual has two copies, the current one and the next
 * one. A call reads the current copy and writes the next one; ob_residual_commit exchanges them
 * once all ranks are known to have succeeded. So a skipped or failed call leaves every bit of the
 * residual unchanged. Compress also changes the moments that an optimizer stores of this rank's own
 * gradients; they have two copies, too.
 *
 * If a residual has only one copy, compress and reduce overwrite it, and a call that fails or is
 * skipped is undone. The call has replaced the error e by the sum c = e + x, where x is the input
 * of compress, or the mean of the messages that are reduced. To undo this, x is computed again from
 * the input or the messages, which still exist, and the error becomes c - x. This value differs
 * from e by the rounding of the sum and of the difference. Restoring e exactly would need as much
 * memory as a second copy, since the rounded sum may have lost all bits of e if x is much larger
 * than e. If x is not finite, compress does not change the element at all.
 */
#ifndef OB_COMPRESSION_BLOCKS_H
#define OB_COMPRESSION_BLOCKS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/memory.h"
#include "compression/codec.h"
#include "compression/message.h"

/* --- Measuring ---------------------------------------------------------------------------------*/

/* Sums of squares over a block. They show whether a plan's messages have too few bits, or more than
 * they need (collectives/ladder.h). */
struct ob_norms {
  double input;    /* the values added to the residual */
  double residual; /* the residual after quantising */
  double value;    /* the compensated values: input plus residual before the call */
  double lower;    /* the residual that half as many bits would leave */
};

/* The arguments of measuring a block after it was quantised. The arrays have whole groups of 32
 * elements. */
struct ob_measure_run {
  size_t count;
  unsigned width;      /* bits per element */
  const float *values; /* the compensated values */
  float scale;         /* with one bit: the scale that the values were sent with */
  const float *error;  /* with more bits: the new residual */
  const float *before; /* the residual before the call: lazy if before_scale > 0, else the error */
  float before_scale;
  onebit_scale_t rule;
  float *scratch; /* with more than one bit: ob_measure_scratch floats */
};

/* Returns the number of floats of scratch that ob_measure_block needs for blocks of this size. */
size_t ob_measure_scratch(size_t block);

struct ob_norms ob_measure_block(const struct ob_measure_run *run, const struct ob_codec *codec);

/* --- The residuals -----------------------------------------------------------------------------*/

/* A call measures only one of OB_MEASURE_EVERY blocks. Measuring makes a call's computation longer
 * by up to a tenth. */
#define OB_MEASURE_EVERY 16

/* The residuals of the blocks first .. first + blocks - 1 of a layout. */
struct ob_residual {
  size_t first, first_word, blocks, words;
  bool one_scale;
  /* The type of results that are decoded from messages directly to the caller's buffer. Scales are
   * rounded to this type before they are sent, so that the residual includes the rounding error. */
  onebit_dtype_t result_dtype;
  const struct ob_memory *memory; /* the kind of memory of the arrays */
  int now;                        /* index of the current copy */
  float *values[2];               /* with one copy both pointers are equal */
  /* With one copy: true for blocks that this call has changed. Otherwise NULL. */
  bool *changed;
  float *scales[2];     /* one for each block, or one for all */
  uint16_t *moments[2]; /* one for each element; NULL without moments */
  /* True if the values are the error itself, and not a lazy error; so it is with messages of more
   * than one bit. The scales then only tell how large the error is. */
  bool eager[2];
  /* The norms of each block, in a plan whose width may change; else NULL. This call measures the
   * blocks whose number, modulo OB_MEASURE_EVERY, is `phase`. */
  struct ob_norms *norms;
  size_t phase;
  /* The rule by which the server reduces. If the server's state under this rule is not a residual,
   * `values` contains that state, and the scales only tell how large it is. */
  struct ob_serving serving;
};

/* Creates a residual. `copies` is 1 or 2; 1 is possible only in host memory. Moments always have
 * two copies. */
onebit_status_t ob_residual_create(struct ob_residual *residual, const struct ob_layout *layout,
                                   size_t first, size_t end, bool one_scale, bool moments,
                                   int copies, const struct ob_memory *memory);
void ob_residual_destroy(struct ob_residual *residual);
void ob_residual_commit(struct ob_residual *residual);
/* Sets everything except the moments to zero. Never fails if the residual is in host memory. */
onebit_status_t ob_residual_reset(struct ob_residual *residual);
/* Returns host memory to the system, after a reset; the system allocates it again when it is
 * written. */
void ob_residual_return_memory(struct ob_residual *residual);
/* Resets the residual after a call without error feedback, unless the server's state is not a
 * residual. */
onebit_status_t ob_residual_forget(struct ob_residual *residual);
/* Returns true if a scale is OB_LARGE_SCALE or larger. The scales must be in host memory. */
bool ob_residual_has_large_scale(const struct ob_residual *residual);
size_t ob_residual_bytes(const struct ob_residual *residual);

/* ob_residual_export writes the residual as plain floats, in the order of the elements;
 * ob_residual_import sets it from such floats, which must be finite. Errors: ONEBIT_ERROR_MEMORY,
 * and in device memory the errors of a copy. */
size_t ob_residual_elements(const struct ob_residual *residual, const struct ob_layout *layout);
onebit_status_t ob_residual_export(const struct ob_residual *residual,
                                   const struct ob_layout *layout, float *error);
onebit_status_t ob_residual_import(struct ob_residual *residual, const struct ob_layout *layout,
                                   const float *error);

/* The parameters and the scratch memory for all work on a plan's blocks. */
struct ob_work {
  const struct ob_codec *codec;
  const struct ob_layout *layout;
  onebit_scale_t rule;
  onebit_dtype_t dtype, output_dtype; /* the types of inputs and of stored results */
  bool one_scale;                     /* one scale for all blocks, known when all are compressed */
  unsigned max_width;                 /* the largest width of compressed messages */
  bool measured;                      /* residuals have norms */
  bool undoes;                        /* residuals have one copy */
  bool stream;                        /* the buffers are larger than the caches */
  /* For dense messages. half: their values have 16 bits. bounded: sums are not checked later, so
   * each block of the input must have a finite sum of squares. */
  bool half, bounded;
  int threads;
  size_t streams;         /* number of messages that are reduced or summed */
  size_t max_streams;     /* number of messages that are averaged, if larger than `streams` */
  const uint32_t **words; /* scratch of ob_reduce_blocks and ob_sum_blocks, of each thread */
  float *scales;          /* scratch of the same size */
  const float **values;   /* scratch of ob_average_values: max_streams */
  float *wide;            /* scratch: blocks of float32, ob_work_scratch in all */
  /* A step sets these if it finds a value that is not finite, or a large scale. The caller clears
   * them. */
  atomic_bool not_finite, large;
};

/* Returns the number of floats in `wide`. The members before `wide` must be set. */
size_t ob_work_scratch(const struct ob_work *work);

/* Allocates the scratch memory. The layout must exist as long as the work. */
onebit_status_t ob_work_create(struct ob_work *work, size_t streams, size_t max_streams);
void ob_work_destroy(struct ob_work *work);

/* The input of compress. inputs[piece] points to the elements of a piece; NULL stands for zeros.
 * The input is multiplied by `weight`. If `momentum` is set, `decay` times the momentum of the last
 * exchange is added. If `momentum_in_residual` is set, the momentum has not been exchanged yet: the
 * residual's array contains it, already multiplied by `decay`.
 *
 * An input is multiplied by `factor` before it is added to the inputs of other ranks. This happens
 * when it is loaded into a dense message or into the sum of a host's ranks; without such a sum,
 * compress multiplies it by weight * factor. So the tests for finite values and finite squares are
 * made without the loss scale, and their results do not depend on it. */
struct ob_source {
  const void *const *inputs;
  float factor;
  bool momentum, momentum_in_residual;
  float decay, weight;
  /* NULL, or for each piece the factor of its momentum in messages. 0 marks padding, whose momentum
   * does not change, since its decay is 1. */
  const float *scalings;
  const float *reciprocals; /* NULL, or a factor for each element of the layout */
  float limit;              /* bound of the products with reciprocals; 0: no bound */
  const float *values;      /* if not NULL, replaces inputs: elements of one message, by word */
  bool float32;             /* the inputs are float32, even if the plan's dtype is not */
  /* The rule of the residual's moments, if it has any, and the factors of the rule. */
  enum ob_moment_rule moment_rule;
  struct ob_moment_factors moment;
  /* NULL, or for each piece the smallest divisor: OB_TABLE_FLOOR for a table of outputs, else 0. */
  const float *floors;
  struct ob_interval own; /* with floors: the words of elements whose moments this rank stores */
};

/* Compresses the blocks of `shape` into `out`. `last` is the result of the last exchange for the
 * same blocks, which is the momentum; it is read if source->momentum is set. With one scale for all
 * blocks, `sums` receives the sum of magnitudes of each block of the residual. */
void ob_compress_blocks(struct ob_work *work, const struct ob_source *source,
                        struct ob_residual *residual, const struct ob_message_shape *shape,
                        const struct ob_view *last, struct ob_view *out, double *sums);

/* Adds the mean of the messages in[0 .. streams - 1], which all have this shape, to the residual,
 * and compresses the sum into `out`. */
void ob_reduce_blocks(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                      const struct ob_message_shape *shape, struct ob_view *out, double *sums);

/* Returns true if the residual has one copy and the call has changed a block of it. */
bool ob_residual_has_changed(const struct ob_residual *residual);
/* ob_undo_compress and ob_undo_reduce undo a call that failed or was skipped, from the input of the
 * call. The values of those blocks of `shape` that the call has changed become the errors before
 * the call, up to rounding (see the head of this file). The values of other blocks become their
 * current errors. When all blocks are undone, ob_residual_end_undo must be called. Only one thread
 * may call these functions at a time. */
void ob_undo_compress(struct ob_work *work, const struct ob_source *source,
                      struct ob_residual *residual, const struct ob_message_shape *shape,
                      const struct ob_view *last);
void ob_undo_reduce(struct ob_work *work, const struct ob_view *in, struct ob_residual *residual,
                    const struct ob_message_shape *shape);
void ob_residual_end_undo(struct ob_residual *residual);

/* Computes the one scale of all blocks from the blocks' sums, and stores it in the residual. The
 * caller writes the returned scale into the messages. */
float ob_compute_buffer_scale(struct ob_work *work, struct ob_residual *residual,
                              const double *sums);

/* Decode the messages in[0 .. streams - 1] and store their mean: ob_sum_blocks in outputs[piece],
 * ob_sum_values as float32 in the values of `out`. */
void ob_sum_blocks(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, void *const *outputs);
void ob_sum_values(struct ob_work *work, const struct ob_view *in,
                   const struct ob_message_shape *shape, struct ob_view *out);

/* Decodes the message into outputs[piece]. */
void ob_store_blocks(struct ob_work *work, const struct ob_view *in,
                     const struct ob_message_shape *shape, void *const *outputs);

/* The operands of an optimizer's pass. The elements of the arrays are in the order of the layout's
 * words, beginning with word first_word. */
struct ob_pass_sink {
  enum ob_pass_kind kind;
  size_t first_word;
  float *arrays[OB_ARRAYS];
  /* parameters[piece] points to the parameters of a piece; NULL marks padding, which is skipped by
   * passes over parameters. If `masters` is not NULL it is used instead: one array of all master
   * values, in the order of `arrays`. */
  float *const *parameters;
  float *masters;
  void *const *copies; /* NULL, or for each piece its parameters in copy_dtype */
  const void *const *gradients;
  onebit_dtype_t copy_dtype, gradient_dtype;
  const float *learning_rates, *weight_decays;
  const float *rate_factors; /* for each piece, factors of rate_sum and anchor_decay; NULL: 1 */
  const float *scalings;     /* for each piece; NULL: 1 */
  const float *last_values;  /* previous momentum times its decay, if no message has it */
  float last_decay;
  /* The factors that all pieces share. rate_sum and anchor_decay are sums of learning rates over
   * several steps. */
  struct ob_pass_factors factors;
  double *sums[OB_SUMS]; /* one for each block of the layout; NULL: not needed */
  /* For passes that divide gradients: the sum of each block's variances before this step. May be
   * the same array as sums[0]. */
  const double *variances;
  /* For arrays on a device: the device's copy of those members that have one entry for each
   * piece. */
  const struct ob_bucket_device *device;
};

/* Runs a pass over the blocks of `shape`, or over all blocks if `shape` is NULL. `in` is the
 * message that the pass reads, and `last` the message of the previous exchange; each is NULL if the
 * pass does not read it, or it does not exist. ob_pass_scale converts the scales of `in` for the
 * pass. */
void ob_pass_blocks(struct ob_work *work, const struct ob_view *in, const struct ob_view *last,
                    const struct ob_message_shape *shape, const struct ob_pass_sink *sink);

/* --- Dense messages */

/* Loads the source's inputs, multiplied by source->factor, into a message; 16-bit values are copied
 * unchanged. An input that is NULL stands for zeros. */
void ob_load_blocks(struct ob_work *work, const struct ob_source *source,
                    const struct ob_message_shape *shape, struct ob_view *out);

/* Copies the inputs into a message without checking that they are finite. */
void ob_copy_blocks(struct ob_work *work, const void *const *inputs,
                    const struct ob_message_shape *shape, struct ob_view *out);

/* Compute the mean of messages; 16-bit values are first multiplied by `factor`. ob_average_values
 * stores it as float32 in `out`, ob_average_blocks stores it in outputs[piece]. */
void ob_average_values(struct ob_work *work, const struct ob_view *in, size_t streams, float factor,
                       const struct ob_message_shape *shape, struct ob_view *out);
void ob_average_blocks(struct ob_work *work, const struct ob_view *in, float factor,
                       const struct ob_message_shape *shape, void *const *outputs);

/* Converts the values of a dense message to outputs[piece]. */
void ob_convert_blocks(struct ob_work *work, const struct ob_view *in,
                       const struct ob_message_shape *shape, void *const *outputs);

/* Returns the number of CPUs that the calling thread may use, by its affinity; 0: this build has no
 * threads. */
int ob_processor_count(void);

/* --- For files of compression/: one step on one message, as the threads run it -----------------*/

struct ob_block_step;

/* Runs the step on block b of the layout, in thread number `thread`. */
typedef void ob_block_body(const struct ob_block_step *step, size_t b, const struct ob_block *block,
                           int thread);

struct ob_block_step {
  struct ob_work *work;
  const struct ob_message_shape *shape;
  size_t first_word; /* the first word of the message */
  const struct ob_view *in, *last;
  struct ob_view *out;
  struct ob_residual *residual;
  double *sums;
  const struct ob_source *source;
  const struct ob_pass_sink *sink;
  /* For a dense mean: the number of messages. 16-bit values are multiplied by `factor`. */
  size_t streams;
  float factor;
  void *const *outputs;
  ob_block_body *body;
};

/* Calls `body` once in each thread of the work, with the thread's part, first .. end - 1, of the
 * blocks of the shape. */
void ob_block_step_run(struct ob_block_step *step,
                       void (*body)(void *context, size_t first, size_t end, int thread));

/* Calls `body` once for each block of the shape; `threads` threads share the blocks. */
void ob_block_step_run_each(struct ob_block_step *step, int threads, ob_block_body *body);

/* Returns the number of floats of scratch that a thread needs for levels: the values of a block
 * wait in the scratch until the block's scale is known. */
size_t ob_level_scratch(const struct ob_work *work);

/* Returns the type of the inputs: float32 or the type of the plan. */
onebit_dtype_t ob_block_input_dtype(const struct ob_block_step *step);
/* Returns the address of the block's input, or NULL if its piece has none. */
const char *ob_block_input(const struct ob_block_step *step, const struct ob_block *block);

/* Returns the address of a block's words in a message. */
uint32_t *ob_block_fields(const struct ob_block_step *step, const struct ob_view *view,
                          const struct ob_block *block);

/* Returns the magnitude that this block's sign bits in a message stand for; in a message of levels,
 * the factor of the block's levels. */
float ob_block_scale(const struct ob_block_step *step, const struct ob_view *view, size_t block);

/* Sets `words` to the addresses of block b in each message. Sets `scales` to the block's scales
 * divided by the number of messages, so that the sum of the decoded values is the mean. */
void ob_block_point_to_streams(const struct ob_block_step *step, size_t b,
                               const struct ob_block *block, const uint32_t **words, float *scales);

#endif
