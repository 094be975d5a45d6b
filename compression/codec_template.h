/*
 * The template of all codecs, one for each instruction set. A codec_*.c file defines functions on
 * vectors, and then includes this file. This file defines the row of the table of codecs, whose
 * symbol is CODEC.
 *
 * The including file defines these macros and static functions:
 *   CODEC, CODEC_NAME                         the row's symbol, and its name as text
 *   V, VL                                     a vector of VL float32, VL a divisor of 32
 *   v_set                                     broadcast
 *   v_load v_store v_stream                   whole vectors, any alignment (v_stream: aligned to
 *                                             the vector)
 *   v_add v_sub v_mul v_abs                   one IEEE operation per lane, rounded to nearest
 *   v_with_sign(magnitude, signs)             the magnitude, which is not negative, with the sign
 *                                             bits of the other
 *   v_larger(a, b)                            the larger magnitude; of a NaN and a number either
 *   v_smaller(a, b)                           a where a < b, else b
 *   v_if_zero(a, yes, no)                     yes in lanes where a is zero
 *   v_root_guess                              the first guess of ob_reciprocal_root
 *   v_load_bfloat16 v_load_float16            convert as in numerics.h
 *   v_store_bfloat16 v_store_float16          convert as in numerics.h
 *   v_bound_float16                           ob_bound_float16
 *   v_store_moment(to, moment, chance, stream)  as ob_moment_round; `stream` allows non-temporal
 *                                             stores
 *   group_pack_signs(V[GROUP])                the sign bits of a group of 32 elements, element i in
 *                                             bit i
 *   group_apply_signs(word, magnitude, V[GROUP])  the magnitude with bit i of the word as the sign
 *                                             of element i
 *
 * All functions work on groups of 32 elements. A group has one word of sign bits, and one element
 * for each lane of the sum that numerics.h defines, so that sums do not depend on the width of
 * vectors. A last, partial group is copied through a small array.
 */
#include "compression/levels.h"
#include "compression/pass_element.h"

#define GROUP (OB_LANES / VL)
#define FIXED __attribute__((always_inline)) static inline

/* OB_INDEPENDENT precedes a loop that the compiler may vectorise, since its iterations do not
 * depend on each other. OB_UNROLLED precedes a loop over slots, which the compiler unrolls, since
 * it knows which slots a pass uses. */
#ifdef __clang__
#define OB_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define OB_UNROLLED    _Pragma("unroll")
#else
#define OB_INDEPENDENT _Pragma("GCC ivdep")
#define OB_UNROLLED    _Pragma("GCC unroll 16")
#endif

/* FOR_WIDTH and FOR_DTYPE run the body with the width, or the type, as a constant. */
#define FOR_WIDTH(width, body)                                                                     \
  ((width) == 1 ? body(1) : (width) == 2 ? body(2) : (width) == 4 ? body(4) : body(8))
#define FOR_DTYPE(dtype, body)                                                                     \
  ((dtype) == ONEBIT_FLOAT32    ? body(ONEBIT_FLOAT32)                                             \
   : (dtype) == ONEBIT_BFLOAT16 ? body(ONEBIT_BFLOAT16)                                            \
                                : body(ONEBIT_FLOAT16))

/* --- Prefetching
 *
 * The prefetching of the CPU itself stops at the end of a page, so a loop over memory waits at the
 * beginning of each page. A loop that reads several messages, each of one bit per element, waits
 * most of the time. Prefetching lines far enough ahead helps functions that compute much: reduce,
 * passes that decode messages, and compress with moments. In functions that compute little it only
 * costs time (docs/measured/processor.md). The address may lie beyond the array: prefetching it
 * then has no effect. */
FIXED void prefetch_line(const void *from, size_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)from + ahead));
}

/* Prefetches the group that lies one page ahead. */
FIXED void group_prefetch(const float *group) {
  for (size_t at = 0; at < OB_LANES * sizeof *group; at += 64)
    prefetch_line(group + at / sizeof *group, 4096);
}

/* Prefetches the cache lines of each stream that are 2,048 elements ahead of element i; does so
 * only for every 512th element. */
FIXED void streams_prefetch(const uint32_t *const *bits, size_t streams, size_t i, unsigned width) {
  if (i % 512 != 0)
    return;
  for (size_t s = 0; s < streams; s++)
    for (unsigned line = 0; line < width; line++)
      prefetch_line(bits[s] + i / OB_LANES * width, 256 * width + 64 * line);
}

FIXED size_t smaller_size(size_t a, size_t b) { return a < b ? a : b; }

FIXED void group_set(V group[GROUP], float value) {
  for (int k = 0; k < GROUP; k++)
    group[k] = v_set(value);
}

FIXED void group_copy(V group[GROUP], const V from[GROUP]) {
  for (int k = 0; k < GROUP; k++)
    group[k] = from[k];
}

FIXED void group_load(V group[GROUP], const void *buffer, size_t first, onebit_dtype_t dtype) {
  for (int k = 0; k < GROUP; k++) {
    size_t at = first + (size_t)(k * VL);
    group[k] = dtype == ONEBIT_FLOAT32    ? v_load((const float *)buffer + at)
               : dtype == ONEBIT_BFLOAT16 ? v_load_bfloat16((const uint16_t *)buffer + at)
                                          : v_load_float16((const uint16_t *)buffer + at);
  }
}

/* Bounds results to the range of their type before they are stored. */
FIXED void group_bound_results(V group[GROUP], onebit_dtype_t dtype) {
  if (dtype == ONEBIT_FLOAT16)
    for (int k = 0; k < GROUP; k++)
      group[k] = v_bound_float16(group[k]);
}

FIXED void group_store(const V group[GROUP], void *buffer, size_t first, onebit_dtype_t dtype) {
  for (int k = 0; k < GROUP; k++) {
    size_t at = first + (size_t)(k * VL);
    if (dtype == ONEBIT_FLOAT32)
      v_store((float *)buffer + at, group[k]);
    else if (dtype == ONEBIT_BFLOAT16)
      v_store_bfloat16((uint16_t *)buffer + at, group[k]);
    else
      v_store_float16((uint16_t *)buffer + at, group[k]);
  }
}

/* Loads the elements first .. end - 1 of a buffer, which are at most a group, and sets the rest of
 * the group to zero. */
FIXED void part_load(V group[GROUP], const void *buffer, size_t first, size_t end,
                     onebit_dtype_t dtype) {
  float part[OB_LANES] = {0};
  for (size_t i = first; i < end; i++)
    part[i - first] = ob_load(buffer, i, dtype);
  group_load(group, part, 0, ONEBIT_FLOAT32);
}

FIXED void part_store(const V group[GROUP], void *buffer, size_t first, size_t end,
                      onebit_dtype_t dtype) {
  float part[OB_LANES];
  group_store(group, part, 0, ONEBIT_FLOAT32);
  for (size_t i = first; i < end; i++)
    ob_store(buffer, i, dtype, part[i - first]);
}

/* Sets the elements from `left` on to zero. */
FIXED void group_clear_from(V group[GROUP], size_t left) {
  float part[OB_LANES];
  group_store(group, part, 0, ONEBIT_FLOAT32);
  for (size_t i = left; i < OB_LANES; i++)
    part[i] = 0;
  group_load(group, part, 0, ONEBIT_FLOAT32);
}

FIXED float group_sum_lanes(const V group[GROUP]) {
  float lanes[OB_LANES];
  group_store(group, lanes, 0, ONEBIT_FLOAT32);
  return ob_sum_lanes(lanes);
}

/* The lanes to which a run adds: the lanes of a block that is computed in parts, or lanes of the
 * run itself. */
struct sums {
  V sum[GROUP], largest[GROUP];
};

FIXED struct sums sums_load(const struct ob_lanes *so_far) {
  struct sums sums;
  group_set(sums.sum, 0);
  group_set(sums.largest, 0);
  if (so_far) {
    group_load(sums.sum, so_far->sum, 0, ONEBIT_FLOAT32);
    group_load(sums.largest, so_far->largest, 0, ONEBIT_FLOAT32);
  }
  return sums;
}

FIXED float sums_store(const struct sums *sums, struct ob_lanes *so_far) {
  if (!so_far)
    return group_sum_lanes(sums->sum);
  group_store(sums->sum, so_far->sum, 0, ONEBIT_FLOAT32);
  group_store(sums->largest, so_far->largest, 0, ONEBIT_FLOAT32);
  return 0;
}

/* Computes the error of the last call from the lazy residual. */
FIXED void group_compute_error(V error[GROUP], const float *residual, V scale) {
  for (int k = 0; k < GROUP; k++) {
    V c = v_load(residual + k * VL);
    error[k] = v_sub(c, v_with_sign(scale, c));
  }
}

/* Adds the error to the group. */
FIXED void group_add_error(V group[GROUP], const V error[GROUP]) {
  for (int k = 0; k < GROUP; k++)
    group[k] = v_add(error[k], group[k]);
}

/* Prepares values that overwrite a residual: elements whose input is not finite keep the old
 * residual, so that the call can be undone (blocks.h). */
FIXED void group_keep_finite(V stored[GROUP], const V input[GROUP], const float *residual) {
  for (int k = 0; k < GROUP; k++)
    stored[k] = v_if_zero(v_sub(input[k], input[k]), stored[k], v_load(residual + k * VL));
}

/* Stores `stored`, which are new residuals or values to quantise, and adds the magnitudes of the
 * group to the sums. Also writes the group's signs, or if `signs` is NULL updates the largest
 * magnitudes. */
FIXED void group_store_residual(const V group[GROUP], const V stored[GROUP], float *residual,
                                uint32_t *signs, bool stream, onebit_scale_t rule,
                                struct sums *sums) {
  for (int k = 0; k < GROUP; k++) {
    if (stream)
      v_stream(residual + k * VL, stored[k]);
    else
      v_store(residual + k * VL, stored[k]);
    V size = rule == ONEBIT_SCALE_RMS ? v_mul(group[k], group[k]) : v_abs(group[k]);
    sums->sum[k] = v_add(sums->sum[k], size);
  }
  if (signs)
    *signs = group_pack_signs(group);
  else
    for (int k = 0; k < GROUP; k++)
      sums->largest[k] = v_larger(sums->largest[k], group[k]);
}

#include "compression/codec_levels.h"

#include "compression/codec_compress.h"

/* Returns true if a sum may exceed the largest float16. With signs no sum exceeds the sum of the
 * scales, which is rounded as often. With levels a sum may be larger, so the result is always
 * true. */
FIXED bool sum_may_exceed_float16(const struct ob_sum_run *run) {
  float max = 0;
  for (size_t s = 0; s < run->streams; s++)
    max += run->scales[s];
  return run->width > 1 || max > OB_FLOAT16_MAX;
}

FIXED void sum_run(const struct ob_sum_run *run, onebit_dtype_t dtype, unsigned width) {
  V total[GROUP];
  const onebit_dtype_t bound =
      dtype == ONEBIT_FLOAT16 && sum_may_exceed_float16(run) ? ONEBIT_FLOAT16 : ONEBIT_FLOAT32;
  size_t i = 0;
  for (; i + OB_LANES <= run->count; i += OB_LANES) {
    streams_prefetch(run->bits, run->streams, i, width);
    group_sum_streams(total, i / OB_LANES, run->streams, width, run->bits, run->scales);
    group_bound_results(total, bound);
    group_store(total, run->output, i, dtype);
  }
  if (i < run->count) {
    group_sum_streams(total, i / OB_LANES, run->streams, width, run->bits, run->scales);
    group_bound_results(total, bound);
    part_store(total, run->output, i, run->count, dtype);
  }
}

FIXED void sum_with_width(const struct ob_sum_run *run, unsigned width) {
#define SUM_AS(dtype) sum_run(run, dtype, width)
  FOR_DTYPE(run->dtype, SUM_AS);
}

static void codec_sum(const struct ob_sum_run *run) {
#define SUM(width) sum_with_width(run, width)
  FOR_WIDTH(run->width, SUM);
}

FIXED void store_run(const struct ob_store_run *run, onebit_dtype_t dtype, unsigned width) {
  V group[GROUP];
  const bool levels = width > 1;
  const V scale = v_set(levels ? run->scale : ob_bound(run->scale, dtype));
  const onebit_dtype_t bound = levels ? dtype : ONEBIT_FLOAT32;
  size_t i = 0;
  for (; i + OB_LANES <= run->count; i += OB_LANES) {
    group_decode(group, run->bits, i / OB_LANES, width, scale);
    group_bound_results(group, bound);
    group_store(group, run->output, i, dtype);
  }
  if (i < run->count) {
    group_decode(group, run->bits, i / OB_LANES, width, scale);
    group_bound_results(group, bound);
    part_store(group, run->output, i, run->count, dtype);
  }
}

/* Stores float32 values with non-temporal stores, at addresses that are multiples of a vector's
 * size. */
FIXED void store_streaming(const struct ob_store_run *run, unsigned width) {
  V group[GROUP];
  const V scale = v_set(run->scale);
  float *output = run->output;
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    group_decode(group, run->bits, i / OB_LANES, width, scale);
    for (int k = 0; k < GROUP; k++)
      v_stream(output + i + k * VL, group[k]);
  }
}

FIXED void store_with_width(const struct ob_store_run *run, unsigned width) {
#define STORE_AS(dtype) store_run(run, dtype, width)
  if (run->stream && run->dtype == ONEBIT_FLOAT32 && run->count % OB_LANES == 0 &&
      (uintptr_t)run->output % sizeof(V) == 0)
    store_streaming(run, width);
  else
    FOR_DTYPE(run->dtype, STORE_AS);
}

static void codec_store(const struct ob_store_run *run) {
#define STORE(width) store_with_width(run, width)
  FOR_WIDTH(run->width, STORE);
}

#include "compression/codec_passes.h"

/* Loads a run, and returns true if all of it is finite. A value times zero is zero if the value is
 * finite and NaN if not; the sum of such products is NaN if one of them is. */
FIXED bool load_run(const void *input, onebit_dtype_t dtype, float factor, size_t count,
                    float *output) {
  V group[GROUP], lanes[GROUP];
  const V by = v_set(factor);
  size_t i = 0;
  group_set(lanes, 0);
  for (; i < count; i += OB_LANES) {
    const bool whole = i + OB_LANES <= count;
    if (whole)
      group_load(group, input, i, dtype);
    else
      part_load(group, input, i, count, dtype);
    for (int k = 0; k < GROUP; k++) {
      group[k] = v_mul(by, group[k]);
      lanes[k] = v_add(lanes[k], v_mul(group[k], v_set(0)));
    }
    if (whole)
      group_store(group, output, i, ONEBIT_FLOAT32);
    else
      part_store(group, output, i, count, ONEBIT_FLOAT32);
  }
  return group_sum_lanes(lanes) == 0;
}

static bool codec_load(const void *input, onebit_dtype_t dtype, float factor, size_t count,
                       float *output) {
#define LOAD(dtype) load_run(input, dtype, factor, count, output)
  return FOR_DTYPE(dtype, LOAD);
}

FIXED void average_group(V total[GROUP], const float *const *inputs, size_t streams, float factor,
                         size_t first, size_t end) {
  V term[GROUP];
  for (size_t s = 0; s < streams; s++) {
    if (first + OB_LANES <= end)
      group_load(term, inputs[s], first, ONEBIT_FLOAT32);
    else
      part_load(term, inputs[s], first, end, ONEBIT_FLOAT32);
    for (int k = 0; k < GROUP; k++)
      total[k] = s == 0 ? term[k] : v_add(total[k], term[k]);
  }
  for (int k = 0; k < GROUP; k++)
    total[k] = v_mul(total[k], v_set(factor));
}

FIXED void group_add_squares(V lanes[GROUP], const V group[GROUP]) {
  for (int k = 0; k < GROUP; k++)
    lanes[k] = v_add(lanes[k], v_mul(group[k], group[k]));
}

static bool codec_mean(const float *const *inputs, size_t streams, float factor, size_t count,
                       float *output) {
  V total[GROUP], lanes[GROUP];
  size_t i = 0;
  group_set(total, 0);
  group_set(lanes, 0);
  for (; i + OB_LANES <= count; i += OB_LANES) {
    average_group(total, inputs, streams, factor, i, count);
    group_add_squares(lanes, total);
    group_store(total, output, i, ONEBIT_FLOAT32);
  }
  if (i < count) {
    average_group(total, inputs, streams, factor, i, count);
    group_add_squares(lanes, total); /* elements past the end are zeros */
    part_store(total, output, i, count, ONEBIT_FLOAT32);
  }
  return ob_is_finite(group_sum_lanes(lanes));
}

FIXED void convert_run(const float *input, size_t count, void *output, onebit_dtype_t dtype) {
  V group[GROUP];
  size_t i = 0;
  for (; i + OB_LANES <= count; i += OB_LANES) {
    group_load(group, input, i, ONEBIT_FLOAT32);
    group_bound_results(group, dtype);
    group_store(group, output, i, dtype);
  }
  for (; i < count; i++)
    ob_store(output, i, dtype, ob_bound(input[i], dtype));
}

static void codec_convert(const float *input, size_t count, void *output, onebit_dtype_t dtype) {
#define CONVERT(dtype) convert_run(input, count, output, dtype)
  FOR_DTYPE(dtype, CONVERT);
}

const struct ob_codec CODEC = {
    .name = CODEC_NAME,
    .compress = codec_compress,
    .reduce = codec_reduce,
    .add_moments = codec_add_moments,
    .largest = codec_largest,
    .quantise = codec_quantise,
    .sum = codec_sum,
    .store = codec_store,
    .pass = codec_pass,
    .load = codec_load,
    .mean = codec_mean,
    .convert = codec_convert,
    .checksum = codec_checksum,
};
