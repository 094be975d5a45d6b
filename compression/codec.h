/*
 * The table of codecs, which do the arithmetic on the host. It has one row for each instruction
 * set. All rows compute results that are equal bit for bit.
 *
 * A row's functions work on one run: consecutive elements of a block, at most the whole block,
 * which share a scale. A run starts at a whole word of the residuals and of the sign bits. The
 * module blocks.h chooses which elements form a run, their scale and their thread. In a run's last
 * word, bits past its last element are written as zero, and ignored when read.
 *
 * If `width` is more than 1, messages have levels of `width` bits (levels.h) in place of signs:
 * `width` words for a group of 32 elements. The decoded value is the level times the scale of its
 * block, which is known only at the end of the block. So compress and reduce write the new values
 * to `residual_out`, which is then a small buffer that stays in the caches. From these values
 * `quantise` computes the levels and the new residual. That residual is the error itself, so
 * residual_scale is 0 when the residual is read. These three functions may process a block in
 * parts: from element `first`, which begins a group, up to `count`.
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

/* Partial results, in lanes, of a block whose values become levels: the sum of magnitudes, as
 * numerics.h defines it, and the largest magnitude. If the sum is not finite, the largest magnitude
 * is meaningless. */
struct ob_lanes {
  float sum[OB_LANES], largest[OB_LANES];
};

/* Compresses a run: residual_out = (residual - scale * sign(residual)) + input, where input is
 *   RAW        weight * input[i]
 *   MOMENTUM   scaling * (decay * m[i] + weight * input[i]), with m[i] = +-momentum_scale / scaling
 *              and the sign from momentum_bits
 * If `reciprocals` is not NULL, the product with input[i] is also multiplied by reciprocals[i], and
 * bounded by `limit` if that is not 0 (ob_bound_product). `bits` receives the signs of
 * residual_out. With momentum_in_residual the residual is added before the product with `scaling`.
 * With moments, input[i] is first replaced by the result of ob_moment_input, which is computed from
 * factor * input[i] and moments[i], and which sets moments_out[i]. Elements from `valid` on are
 * padding, whose input is zero. */
struct ob_compress_run {
  size_t first, count, valid;
  const void *input; /* `valid` elements of type dtype; NULL: zeros */
  onebit_dtype_t dtype;
  float weight;
  const float *reciprocals; /* NULL, or a factor for each element */
  enum ob_moment_rule moment_rule;
  const uint16_t *moments; /* one for each element; NULL without a rule */
  uint16_t *moments_out;
  float factor;
  struct ob_moment_factors moment;
  onebit_scale_t rule;
  bool stream;                   /* residuals are larger than the caches: non-temporal stores */
  bool stream_moments;           /* the same for moments */
  const uint32_t *momentum_bits; /* NULL: RAW */
  unsigned momentum_width;
  float momentum_scale, decay, scaling;
  bool momentum_in_residual;
  const float *residual;
  float residual_scale;
  float *residual_out;    /* has whole words; elements from count on are set to zero */
  uint32_t *bits;         /* NULL: the caller does not need them */
  struct ob_lanes *lanes; /* NULL, or the lanes of a block that is computed in parts */
  float limit;            /* bound of the products with reciprocals; 0: no bound */
};

/* Reduces a run: total = the sum of +-scales[i] over the streams, in their order; residual_out =
 * total + (residual - scale * sign(residual)), and `out` receives its signs. With Lion,
 * residual_out is the new momentum, `out` receives the signs of the direction, and the magnitudes
 * of the direction are summed. */
struct ob_reduce_run {
  size_t first, count, streams;
  unsigned width;
  const uint32_t *const *bits; /* one pointer for each stream */
  const float *scales;         /* one for each stream, divided by the number of streams */
  struct ob_serving serving;
  onebit_scale_t rule;
  bool stream; /* non-temporal stores, as in struct ob_compress_run */
  const float *residual;
  float residual_scale;
  float *residual_out;
  uint32_t *out; /* NULL: the caller does not need the signs */
  struct ob_lanes *lanes;
};

/* A run that stores the sum of the streams; it has no residual. */
struct ob_sum_run {
  size_t count, streams;
  unsigned width;
  const uint32_t *const *bits;
  const float *scales;
  void *output;
  onebit_dtype_t dtype;
};

/* A run that computes the levels of values, and their error: the values minus the decoded
 * levels. */
struct ob_quantise_run {
  size_t first, count;
  unsigned width;
  const float *values; /* whole groups; zeros from element count on */
  float scale;
  bool stream;         /* non-temporal stores of the residuals */
  float *residual_out; /* whole groups; elements from count on are set to zero */
  uint32_t *fields;
};

struct ob_store_run {
  size_t count;
  unsigned width;
  bool stream; /* non-temporal stores of the output */
  const uint32_t *bits;
  float scale;
  void *output;
  onebit_dtype_t dtype;
};

/* A run of an optimizer's pass (passes.h). */
struct ob_pass_run {
  enum ob_pass_kind kind;
  bool stream; /* non-temporal stores to arrays that are only written */
  size_t count;
  float *arrays[OB_ARRAYS]; /* arrays that the pass reads or writes */
  float *parameter;
  void *copy; /* NULL, or the parameters as copy_dtype: written where `parameter` is */
  onebit_dtype_t copy_dtype;
  const void *gradient; /* NULL: zeros */
  onebit_dtype_t gradient_dtype;
  unsigned width, last_width;
  const uint32_t *message; /* signs or levels, with the scale message_scale (ob_pass_scale) */
  float message_scale;
  const uint32_t *last; /* the previous message; NULL: last_values is read instead */
  float last_scale;
  const float *last_values;
  struct ob_pass_factors factors;
  float sums[OB_SUMS]; /* results: the sums that the pass computes */
};

struct ob_codec {
  const char *name;
  /* compress and reduce return the sum of the run's magnitudes, as numerics.h defines it. If
   * `lanes` is not NULL it receives the partial sums instead, and the result is 0. */
  float (*compress)(const struct ob_compress_run *);
  float (*reduce)(const struct ob_reduce_run *);
  /* Returns the sum of the moments of a sample, added in lanes as numerics.h defines. */
  float (*add_moments)(const uint16_t *moments, struct ob_sample sample);
  /* Returns the largest magnitude in whole groups of values. The result is not finite if one of the
   * values is not. */
  float (*largest)(const float *values, size_t count);
  void (*quantise)(const struct ob_quantise_run *);
  void (*sum)(const struct ob_sum_run *);
  void (*store)(const struct ob_store_run *);
  void (*pass)(struct ob_pass_run *);
  /* For dense messages. load: output = factor * input; returns true if all of it is finite. mean:
   * the sum of `streams` inputs, added in their order, times `factor`; returns true if the sum of
   * its squares is finite. convert: converts float32 to dtype. */
  bool (*load)(const void *input, onebit_dtype_t dtype, float factor, size_t count, float *output);
  bool (*mean)(const float *const *inputs, size_t streams, float factor, size_t count,
               float *output);
  void (*convert)(const float *input, size_t count, void *output, onebit_dtype_t dtype);
  /* Returns what `count` words of a payload contribute to a message's checksum (message.h). */
  uint32_t (*checksum)(const void *payload, size_t count);
};

/* Returns a row of the table, which is in descending order of speed, or NULL past the end. Not all
 * rows can run on this CPU. */
const struct ob_codec *ob_codec_row(size_t index);
bool ob_codec_usable(const struct ob_codec *codec);

/* Finds the codec of that name, or with a NULL name the fastest codec that can run here.
 * ONEBIT_ERROR_ARGUMENT: the codec is unknown or cannot run here; the error message lists the
 * usable names. */
onebit_status_t ob_codec_find(const char *name, const struct ob_codec **codec);

/* Chooses the codec that ONEBIT_CODEC names, or the fastest one if it names none. */
onebit_status_t ob_codec_choose(const struct ob_codec **codec);

extern const struct ob_codec ob_codec_scalar;
#if defined(__x86_64__)
extern const struct ob_codec ob_codec_avx2, ob_codec_avx512;
#elif defined(__aarch64__)
extern const struct ob_codec ob_codec_neon;
#endif

#endif
