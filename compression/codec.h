/*
 * The table of codecs: where the arithmetic runs. One row an instruction set, all rows give the
 * same bits.
 *
 * A row's functions work on one run: up to a block of consecutive elements that share a scale,
 * starting at a whole word of the residuals and of the sign bits. What is a run, which scale it
 * has and who works on it is decided above (blocks.h). Bits past the run's last element in its last
 * word are written as zero, and ignored when read.
 *
 * Where `width` is more than 1, in place of signs there are levels of `width` bits (levels.h), as
 * many words a group of 32, which stand for the level times the scale. That is a scale of the whole
 * block: compress and reduce write the new values as `residual_out`, to a place where they stay in
 * the caches, and `quantise` makes levels of them and the new residual, which is the error itself:
 * the scale to read it with is 0. These three may be called for one part of a block after the
 * other, from element `first`, the first of a group, up to `count`.
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

/* Lanes of a block whose values become levels: the sum of magnitudes, as numerics.h defines it, and
 * the largest, which is meaningless where the sum is not finite. */
struct ob_lanes {
  float sum[OB_LANES], largest[OB_LANES];
};

/* residual_out = (residual - scale * sign(residual)) + input, where input is
 *   RAW        weight * input[i]
 *   MOMENTUM   scaling * (decay * m[i] + weight * input[i]), with m[i] = +-momentum_scale / scaling
 *              by momentum_bits
 * and the product with input[i] is multiplied by reciprocals[i] where there are such, and cut off
 * at a limit where there is one (ob_limited); and bits = signs of residual_out. Where what is kept
 * is the momentum, it is added before the scaling. With moments, factor * input[i] and moments[i]
 * first become what takes the place of input[i], and moments_out[i] (ob_moment_input). From `valid`
 * on there is padding: its input is zero. */
struct ob_compress_run {
  size_t first, count, valid;
  const void *input; /* valid elements of dtype; NULL: zeros */
  onebit_dtype_t dtype;
  float weight;
  const float *reciprocals; /* or NULL */
  enum ob_moment_rule moment_rule;
  const uint16_t *moments; /* as `residual`; NULL without a rule */
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
  struct ob_lanes *lanes; /* NULL, or the sums so far of a block that is added in parts */
  float limit;            /* the largest magnitude of products with reciprocals; 0: unbounded */
};

/* total = sum over streams, in their order, of +-scales[i];
 * residual_out = total + (residual - scale * sign(residual)), and out its signs. Of Lion,
 * residual_out is the new momentum, and out the signs of the direction, whose magnitudes are
 * summed. */
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

/* A run of sums: the plain sum of the streams, stored. */
struct ob_sum_run {
  size_t count, streams;
  unsigned width;
  const uint32_t *const *bits;
  const float *scales;
  void *output;
  onebit_dtype_t dtype;
};

/* A run that quantises: levels of the values, and the error: values - decoded. */
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
  bool stream; /* as above, for what is written and not read */
  size_t count;
  float *arrays[OB_ARRAYS]; /* those that the pass reads or writes */
  float *parameter;
  void *copy; /* NULL, or the parameters as copy_dtype: written where `parameter` is */
  onebit_dtype_t copy_dtype;
  const void *gradient; /* NULL: zeros */
  onebit_dtype_t gradient_dtype;
  unsigned width, last_width;
  const uint32_t *message; /* signs, of this scale (ob_pass_scale) */
  float message_scale;
  const uint32_t *last; /* likewise; NULL: last_values are it */
  float last_scale;
  const float *last_values;
  struct ob_pass_factors factors;
  float sums[OB_SUMS]; /* out, those that the pass has */
};

struct ob_codec {
  const char *name;
  /* Both return the sum of magnitudes of the run, summed as numerics.h defines; 0 where it is added
   * to lanes. */
  float (*compress)(const struct ob_compress_run *);
  float (*reduce)(const struct ob_reduce_run *);
  /* The sum of the moments of a sample, by lanes as well. */
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
  /* The contribution of `count` words of a payload to a message's checksum (message.h). */
  uint32_t (*checksum)(const void *payload, size_t count);
};

/* Returns a row of the table, fastest first, or NULL past the end. Not all rows can run on this
 * processor. */
const struct ob_codec *ob_codec_row(size_t index);
bool ob_codec_usable(const struct ob_codec *codec);

/* The codec of that name, or the fastest that can run here when name is NULL.
 * ONEBIT_ERROR_ARGUMENT, with the usable names, for one that is unknown or cannot run here. */
onebit_status_t ob_codec_find(const char *name, const struct ob_codec **codec);

/* The codec that ONEBIT_CODEC names, or the fastest. */
onebit_status_t ob_codec_choose(const struct ob_codec **codec);

extern const struct ob_codec ob_codec_scalar;
#if defined(__x86_64__)
extern const struct ob_codec ob_codec_avx2, ob_codec_avx512;
#elif defined(__aarch64__)
extern const struct ob_codec ob_codec_neon;
#endif

#endif
