/*
 * The table of codecs, which do the arithmetic on the host. There is one row for each instruction
 * set; all rows give the same bits.
 *
 * A row's functions work on one run: up to a block of consecutive elements that share a scale,
 * starting at a whole word of the residuals and of the sign bits. blocks.h decides which elements
 * form a run, their scale and their thread. Bits past the run's last element in its last word are
 * written as zero, and ignored when read.
 *
 * If `width` is more than 1, messages have levels of `width` bits (levels.h) in place of signs:
 * `width` words for a group of 32. A level stands for the level times the scale of its block, which
 * is known only at the end of the block. So compress and reduce write the new values to
 * `residual_out`, which then is a buffer that stays in the caches; `quantise` computes from them
 * the levels and the new residual. That residual is the error itself, so the scale for reading it
 * is 0. These three functions may be called for one part of a block after the other, from element
 * `first`, the first of a group, up to `count`.
 */
#ifndef OB_COMPRESSION_CODEC_H
#define OB_COMPRESSION_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "compression/levels.h"
#include "compression/message.h"
#include "compression/passes.h"
#include "onebit/plan.h"

/* The lanes of a block whose values become levels: of the sum of magnitudes, as numerics.h defines
 * it, and of the largest magnitude, which means nothing if the sum is not finite. */
struct ob_lanes {
  float sum[OB_LANES], largest[OB_LANES];
};

/* residual_out = (residual - scale * sign(residual)) + input, where input is
 *   RAW        weight * input[i]
 *   MOMENTUM   scaling * (decay * m[i] + weight * input[i]), with m[i] = +-momentum_scale / scaling
 *              by momentum_bits
 * The product with input[i] is also multiplied by reciprocals[i] if these are given, and bounded by
 * `limit` if this is not 0 (ob_bound_product). `bits` receives the signs of residual_out. With
 * momentum_in_residual the residual is added before the product with `scaling`. With moments,
 * ob_moment_input first replaces input[i], from factor * input[i] and moments[i], and sets
 * moments_out[i]. Elements from `valid` on are padding, whose input is zero. */
struct ob_compress_run {
  size_t first, count, valid;
  const void *input; /* valid elements of dtype; NULL: zeros */
  onebit_dtype_t dtype;
  float weight;
  const float *reciprocals; /* NULL, or the factor of each element */
  enum ob_moment_rule moment_rule;
  const uint16_t *moments; /* one an element; NULL without a rule */
  uint16_t *moments_out;
  float factor;
  struct ob_moment_factors moment;
  onebit_scale_t rule;
  bool stream;         /* the residuals are larger than the caches: write them past the caches */
  bool stream_moments; /* likewise */
  const uint32_t *momentum_bits; /* NULL: RAW */
  unsigned momentum_width;
  float momentum_scale, decay, scaling;
  bool momentum_in_residual;
  const float *residual;
  float residual_scale;
  float *residual_out;    /* whole words: lanes past count are set to zero */
  uint32_t *bits;         /* NULL: the caller does not need them */
  struct ob_lanes *lanes; /* NULL, or the lanes of a block that is computed in parts */
  float limit;            /* the largest magnitude of products with reciprocals; 0: unbounded */
};

/* total = sum over streams, in their order, of +-scales[i];
 * residual_out = total + (residual - scale * sign(residual)), and `out` receives its signs. With
 * Lion, residual_out is the new momentum, `out` receives the signs of the direction, and the
 * magnitudes of the direction are summed. */
struct ob_reduce_run {
  size_t first, count, streams;
  unsigned width;
  const uint32_t *const *bits; /* one pointer a stream */
  const float *scales;         /* one a stream, already divided by the number of streams */
  struct ob_serving serving;
  onebit_scale_t rule;
  bool stream; /* as above */
  const float *residual;
  float residual_scale;
  float *residual_out;
  uint32_t *out; /* as above */
  struct ob_lanes *lanes;
};

/* A run that stores the sum of the streams, without a residual. */
struct ob_sum_run {
  size_t count, streams;
  unsigned width;
  const uint32_t *const *bits;
  const float *scales;
  void *output;
  onebit_dtype_t dtype;
};

/* A run that computes the levels of values, and the error: the values minus the decoded levels. */
struct ob_quantise_run {
  size_t first, count;
  unsigned width;
  const float *values; /* whole groups, zeros from count on */
  float scale;
  bool stream;         /* as above, for the residuals */
  float *residual_out; /* whole groups: lanes past count are set to zero */
  uint32_t *fields;
};

struct ob_store_run {
  size_t count;
  unsigned width;
  bool stream; /* as above, for the output */
  const uint32_t *bits;
  float scale;
  void *output;
  onebit_dtype_t dtype;
};

/* A run of an optimizer's pass (passes.h). */
struct ob_pass_run {
  enum ob_pass_kind kind;
  bool stream; /* as above, for arrays that are only written */
  size_t count;
  float *arrays[OB_ARRAYS]; /* the arrays that the pass reads or writes */
  float *parameter;
  void *copy; /* NULL, or the parameters as copy_dtype: written where `parameter` is */
  onebit_dtype_t copy_dtype;
  const void *gradient; /* NULL: zeros */
  onebit_dtype_t gradient_dtype;
  unsigned width, last_width;
  const uint32_t *message; /* signs or levels, with this scale (ob_pass_scale) */
  float message_scale;
  const uint32_t *last; /* likewise; if NULL, last_values are read */
  float last_scale;
  const float *last_values;
  struct ob_pass_factors factors;
  float sums[OB_SUMS]; /* results: the sums that the pass computes */
};

struct ob_codec {
  const char *name;
  /* Both return the sum of the magnitudes of the run, as numerics.h defines it, or 0 if `lanes`
   * receives it. */
  float (*compress)(const struct ob_compress_run *);
  float (*reduce)(const struct ob_reduce_run *);
  /* Returns the sum of the moments of a sample, also added in lanes. */
  float (*add_moments)(const uint16_t *moments, struct ob_sample sample);
  /* Returns the largest magnitude of whole groups of values; a value that is not finite if one of
   * them is not. */
  float (*largest)(const float *values, size_t count);
  void (*quantise)(const struct ob_quantise_run *);
  void (*sum)(const struct ob_sum_run *);
  void (*store)(const struct ob_store_run *);
  void (*pass)(struct ob_pass_run *);
  /* Dense messages. load: output = factor * input; true if all of it is finite. mean: the sum of
   * `streams` inputs, added in their order, times `factor`; true if the sum of its squares is
   * finite. convert: output = float32 as dtype. */
  bool (*load)(const void *input, onebit_dtype_t dtype, float factor, size_t count, float *output);
  bool (*mean)(const float *const *inputs, size_t streams, float factor, size_t count,
               float *output);
  void (*convert)(const float *input, size_t count, void *output, onebit_dtype_t dtype);
  /* Returns the contribution of `count` words of a payload to a message's checksum (message.h). */
  uint32_t (*checksum)(const void *payload, size_t count);
};

/* Returns a row of the table, fastest first, or NULL past the end. Not all rows can run on this
 * processor. */
const struct ob_codec *ob_codec_row(size_t index);
bool ob_codec_usable(const struct ob_codec *codec);

/* Finds the codec of that name, or the fastest that can run here if name is NULL.
 * ONEBIT_ERROR_ARGUMENT, with the usable names, if it is unknown or cannot run here. */
onebit_status_t ob_codec_find(const char *name, const struct ob_codec **codec);

/* Chooses the codec that ONEBIT_CODEC names, or the fastest. */
onebit_status_t ob_codec_choose(const struct ob_codec **codec);

extern const struct ob_codec ob_codec_scalar;
#if defined(__x86_64__)
extern const struct ob_codec ob_codec_avx2, ob_codec_avx512;
#elif defined(__aarch64__)
extern const struct ob_codec ob_codec_neon;
#endif

#endif
