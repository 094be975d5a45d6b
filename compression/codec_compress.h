/*
 * This part of codec_template.h compresses a rank's values, reduces the ranks' messages on a
 * server, and computes the checksum of a payload. It uses the macros and the functions on groups of
 * the template.
 */
#include <string.h>

/* --- Compressing -------------------------------------------------------------------------------*/

/* Computes ob_reciprocal_root in each lane. */
FIXED V v_reciprocal_root(V value) {
  const V guess = v_root_guess(value), square = v_mul(v_mul(value, guess), guess);
  return v_mul(guess, v_mul(v_set(OB_ROOT_FACTOR), v_sub(v_set(OB_ROOT_TERM), square)));
}

/* Prefetches the input group one page ahead, and its moments, which are half as wide. */
FIXED void group_prefetch_moments(const struct ob_compress_run *run, onebit_dtype_t dtype,
                                  size_t first) {
  group_prefetch(run->residual + first);
  prefetch_line(run->moments + first, 2048);
  if (dtype == ONEBIT_FLOAT32 && run->input)
    group_prefetch((const float *)run->input + first);
}

/* Returns the sum of the moments of a sample. */
static float codec_add_moments(const uint16_t *moments, struct ob_sample sample) {
  V lanes[GROUP];
  group_set(lanes, 0);
  for (size_t word = sample.first; word < sample.end; word += sample.step)
    for (int k = 0; k < GROUP; k++)
      lanes[k] = v_add(lanes[k], v_load_bfloat16(moments + word * OB_LANES + (size_t)(k * VL)));
  return group_sum_lanes(lanes);
}

/* Computes ob_moment_input for the elements of the group. The arrays of moments have whole words,
 * as those of residuals do. */
FIXED void group_apply_moments(V group[GROUP], const struct ob_compress_run *run, size_t first,
                               const V error[GROUP]) {
  const struct ob_moment_factors f = ob_choose_moment_factors(run->moment, run->momentum_scale);
  const V min = v_set(f.epsilon * f.epsilon + f.floor);
  for (int k = 0; k < GROUP; k++) {
    const size_t at = first + (size_t)(k * VL);
    const V gradient = v_mul(v_set(run->factor), group[k]),
            before = v_load_bfloat16(run->moments + at),
            square = v_mul(v_mul(v_set(f.one_minus_beta2), gradient), gradient),
            now = v_add(v_mul(v_set(f.beta2), before), square),
            mean = v_add(v_mul(v_set(f.now), now), v_mul(v_set(f.before), before));
    group[k] = v_mul(gradient, v_reciprocal_root(v_add(mean, min)));
    v_store_moment(run->moments_out + at, now, error[k], run->stream_moments);
  }
}

/* Bounds products with reciprocals, as ob_bound_product does. A zero becomes +0 both here and
 * there. */
FIXED void group_bound_products(V group[GROUP], const V own[GROUP], float limit) {
  const V zero = v_set(0), bound = v_set(limit);
  for (int k = 0; k < GROUP; k++) {
    const V square = v_mul(group[k], group[k]), below = v_smaller(v_mul(group[k], own[k]), bound),
            bounded = v_sub(zero, v_smaller(v_sub(zero, below), bound));
    group[k] = v_add(bounded, v_sub(square, square));
  }
}

/* group = weight * group; with reciprocals each element is also multiplied by its own reciprocal,
 * and the product is bounded by the limit */
FIXED void group_apply_weight(V group[GROUP], V weight, const struct ob_compress_run *run,
                              size_t first, size_t end) {
  V own[GROUP];
  for (int k = 0; k < GROUP; k++)
    group[k] = v_mul(weight, group[k]);
  if (!run->reciprocals)
    return;
  if (first + OB_LANES <= end)
    group_load(own, run->reciprocals, first, ONEBIT_FLOAT32);
  else
    part_load(own, run->reciprocals, first, end, ONEBIT_FLOAT32);
  if (run->limit > 0)
    group_bound_products(group, own, run->limit);
  else
    for (int k = 0; k < GROUP; k++)
      group[k] = v_mul(group[k], own[k]);
}

/* group = scaling * (decay * momentum + group). `decayed` is decay times the magnitude of the
 * momentum: the product of a magnitude is rounded as the product of the signed value is. */
FIXED void group_add_momentum(V group[GROUP], const struct ob_compress_run *run, size_t word,
                              bool levels, float decayed, V scaling) {
  V momentum[GROUP];
  if (levels)
    group_decode_levels_any_width(momentum, run->momentum_bits + run->momentum_width * word,
                                  run->momentum_width, decayed);
  else
    group_apply_signs(run->momentum_bits[word], v_set(decayed), momentum);
  for (int k = 0; k < GROUP; k++)
    group[k] = v_mul(scaling, v_add(momentum[k], group[k]));
}

/* The encodings of a run's momentum: none, signs, or levels. Levels are rare, so all widths and
 * rules share one loop for each type of input, which calls a function to decode levels. */
enum momentum { NONE, SIGNS, LEVELS };

/* Compresses a run. Here and below the run is copied to a local variable. A vector store may change
 * any object whose address is known elsewhere, so the compiler would otherwise read the members
 * again after each store. */
FIXED float compress_run(const struct ob_compress_run *all, onebit_dtype_t dtype,
                         onebit_scale_t rule, enum momentum momentum, bool moments) {
  const struct ob_compress_run copy = *all, *const run = &copy;
  V group[GROUP], error[GROUP], input[GROUP], stored[GROUP];
  struct sums sums = sums_load(run->lanes);
  const bool in_place = run->residual_out == run->residual;
  const V scale = v_set(run->residual_scale), weight = v_set(run->weight),
          scaling = v_set(run->scaling);
  const float decayed = run->decay * (run->momentum_scale / run->scaling);
  const bool residual_first = momentum && run->momentum_in_residual;
  const size_t given = smaller_size(run->count, run->valid);
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    const bool whole = i + OB_LANES <= given;
    if (moments)
      group_prefetch_moments(run, dtype, i);
    group_compute_error(error, run->residual + i, scale);
    if (!run->input)
      group_set(group, 0);
    else if (whole)
      group_load(group, run->input, i, dtype);
    else
      part_load(group, run->input, i, given, dtype);
    if (moments)
      group_apply_moments(group, run, i, error);
    group_apply_weight(group, weight, run, i, given);
    if (residual_first)
      group_add_error(group, error);
    if (momentum)
      group_add_momentum(group, run, i / OB_LANES, momentum == LEVELS, decayed, scaling);
    if (momentum && !whole) /* padding has no momentum */
      group_clear_from(group, given > i ? given - i : 0);
    group_copy(input, group);
    if (!residual_first)
      group_add_error(group, error);
    if (!whole && run->count - i < OB_LANES)
      group_clear_from(group, run->count - i);
    group_copy(stored, group);
    if (in_place)
      group_keep_finite(stored, input, run->residual + i);
    group_store_residual(group, stored, run->residual_out + i,
                         run->bits ? run->bits + i / OB_LANES : NULL, run->stream, rule, &sums);
  }
  return sums_store(&sums, run->lanes);
}

FIXED float compress_with_dtype(const struct ob_compress_run *run, onebit_scale_t rule,
                                enum momentum momentum, bool moments) {
#define COMPRESS(dtype) compress_run(run, dtype, rule, momentum, moments)
  return FOR_DTYPE(run->dtype, COMPRESS);
}

FIXED float compress_with_rule(const struct ob_compress_run *run, onebit_scale_t rule) {
  if (run->moment_rule)
    return run->momentum_bits ? compress_with_dtype(run, rule, SIGNS, true)
                              : compress_with_dtype(run, rule, NONE, true);
  return run->momentum_bits ? compress_with_dtype(run, rule, SIGNS, false)
                            : compress_with_dtype(run, rule, NONE, false);
}

static float codec_compress(const struct ob_compress_run *run) {
  if (run->momentum_bits && run->momentum_width > 1)
    return compress_with_dtype(run, run->rule, LEVELS, run->moment_rule);
  return run->rule == ONEBIT_SCALE_RMS ? compress_with_rule(run, ONEBIT_SCALE_RMS)
                                       : compress_with_rule(run, ONEBIT_SCALE_MEAN_ABSOLUTE);
}

/* --- Reducing ----------------------------------------------------------------------------------*/

/* Sums the values of the streams in group number `word`, one addition after the other, in the order
 * of the streams. An alternative was measured: tables of the sums of four streams, indexed by four
 * signs. With 16 streams in the caches, tables take 15 % less time with AVX-512, 11 % more with
 * AVX2, and on a GPU 190 instructions instead of 202, but a GPU is limited by its memory. Tables
 * would change the results, so they are not used. */
FIXED void group_sum_streams(V total[GROUP], size_t word, size_t streams, unsigned width,
                             const uint32_t *const *bits, const float *scales) {
  group_decode(total, bits[0], word, width, v_set(scales[0]));
  for (size_t s = 1; s < streams; s++) {
    V term[GROUP];
    group_decode(term, bits[s], word, width, v_set(scales[s]));
    for (int k = 0; k < GROUP; k++)
      total[k] = v_add(total[k], term[k]);
  }
}

FIXED void group_sum_any_width(V total[GROUP], size_t word, const struct ob_reduce_run *run) {
  group_decode_any_width(total, run->bits[0], word, run->width, run->scales[0]);
  for (size_t s = 1; s < run->streams; s++) {
    V term[GROUP];
    group_decode_any_width(term, run->bits[s], word, run->width, run->scales[s]);
    for (int k = 0; k < GROUP; k++)
      total[k] = v_add(total[k], term[k]);
  }
}

FIXED float reduce_run(const struct ob_reduce_run *all, onebit_scale_t rule, unsigned width) {
  const struct ob_reduce_run copy = *all, *const run = &copy;
  V total[GROUP], error[GROUP];
  const V scale = v_set(run->residual_scale);
  struct sums sums = sums_load(run->lanes);
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    group_prefetch(run->residual + i);
    streams_prefetch(run->bits, run->streams, i, width);
    group_sum_streams(total, i / OB_LANES, run->streams, width, run->bits, run->scales);
    group_compute_error(error, run->residual + i, scale);
    group_add_error(total, error);
    if (run->count - i < OB_LANES)
      group_clear_from(total, run->count - i);
    group_store_residual(total, total, run->residual_out + i,
                         run->out ? run->out + i / OB_LANES : NULL, run->stream, rule, &sums);
  }
  return sums_store(&sums, run->lanes);
}

/* Updates the momentum with the mean gradient. Returns the signs of the direction, and adds the
 * direction's magnitudes to the lanes. */
FIXED uint32_t group_reduce_lion(const V mean[GROUP], const struct ob_reduce_run *run, size_t first,
                                 V lanes[GROUP]) {
  const struct ob_lion_factors *f = &run->serving.lion;
  const V beta1 = v_set(f->beta1), rest1 = v_set(f->one_minus_beta1), beta2 = v_set(f->beta2),
          rest2 = v_set(f->one_minus_beta2);
  V direction[GROUP], zero[GROUP];
  for (int k = 0; k < GROUP; k++) {
    const size_t at = first + (size_t)(k * VL);
    const V before = v_load(run->residual + at),
            after = v_add(v_mul(beta2, before), v_mul(rest2, mean[k]));
    direction[k] = v_add(v_mul(beta1, before), v_mul(rest1, mean[k]));
    zero[k] = v_if_zero(direction[k], v_set(-1), v_set(1));
    lanes[k] = v_add(lanes[k], v_abs(direction[k]));
    if (run->stream)
      v_stream(run->residual_out + at, after);
    else
      v_store(run->residual_out + at, after);
  }
  const uint32_t zeros = group_pack_signs(zero);
  return (group_pack_signs(direction) & ~zeros) | (zeros & OB_LION_ZEROS);
}

static float reduce_lion(const struct ob_reduce_run *run) {
  V lanes[GROUP], mean[GROUP];
  group_set(lanes, 0);
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    const size_t left = run->count - i;
    group_prefetch(run->residual + i);
    streams_prefetch(run->bits, run->streams, i, run->width);
    if (run->width == 1)
      group_sum_streams(mean, i / OB_LANES, run->streams, 1, run->bits, run->scales);
    else
      group_sum_any_width(mean, i / OB_LANES, run);
    if (left < OB_LANES)
      group_clear_from(mean, left);
    const uint32_t signs = group_reduce_lion(mean, run, i, lanes);
    run->out[i / OB_LANES] = left < OB_LANES ? signs & ((1u << left) - 1) : signs;
  }
  return group_sum_lanes(lanes);
}

static float codec_reduce(const struct ob_reduce_run *run) {
  if (run->serving.rule == OB_SERVE_LION)
    return reduce_lion(run);
  if (run->width == 1 && run->rule != ONEBIT_SCALE_RMS)
    return reduce_run(run, ONEBIT_SCALE_MEAN_ABSOLUTE, 1);
#define REDUCE(width) reduce_run(run, ONEBIT_SCALE_RMS, width)
  return FOR_WIDTH(run->width, REDUCE);
}

/* --- Checksums ---------------------------------------------------------------------------------*/

/* The checksum uses the compiler's vector types. Each lane is a chain of dependent multiplications;
 * the chains of different lanes overlap in time. */
#define CHECK_VL (VL < 4 ? 4 : VL)
#define CHECKS   (OB_CHECK_LANES / CHECK_VL)

typedef uint32_t check_vector __attribute__((vector_size(CHECK_VL * sizeof(uint32_t))));

FIXED void check_begin_lanes(check_vector lanes[CHECKS], uint32_t first) {
  for (uint32_t k = 0; k < CHECKS; k++) {
    check_vector lane = {0};
    for (uint32_t i = 0; i < CHECK_VL; i++)
      lane[i] = ob_check_begin(first + k * CHECK_VL + i);
    lanes[k] = lane;
  }
}

FIXED void check_add_round(check_vector lanes[CHECKS], const unsigned char *words) {
  for (size_t k = 0; k < CHECKS; k++) {
    check_vector word;
    memcpy(&word, words + k * sizeof word, sizeof word);
    lanes[k] = (lanes[k] ^ word) * OB_CHECK_WORD;
    lanes[k] ^= lanes[k] >> 15;
  }
}

FIXED void check_end_lanes(check_vector *sum, const check_vector lanes[CHECKS]) {
  for (size_t k = 0; k < CHECKS; k++) {
    check_vector lane = (lanes[k] ^ lanes[k] >> 16) * OB_CHECK_WORD;
    lane = (lane ^ lane >> 13) * OB_CHECK_WORD2;
    *sum += lane ^ lane >> 16;
  }
}

/* Adds one run, which may be shorter at the end: missing words of its last round are zeros. */
FIXED void check_add_run(check_vector *sum, const unsigned char *words, size_t first,
                         size_t count) {
  const size_t whole = count / OB_CHECK_LANES * OB_CHECK_LANES;
  check_vector lanes[CHECKS];
  check_begin_lanes(lanes, (uint32_t)(first / (OB_CHECK_RUN / OB_CHECK_LANES)));
  for (size_t i = 0; i < whole; i += OB_CHECK_LANES)
    check_add_round(lanes, words + i * sizeof(uint32_t));
  if (whole < count) {
    unsigned char last[OB_CHECK_LANES * sizeof(uint32_t)] = {0};
    memcpy(last, words + whole * sizeof(uint32_t), (count - whole) * sizeof(uint32_t));
    check_add_round(lanes, last);
  }
  check_end_lanes(sum, lanes);
}

static uint32_t codec_checksum(const void *payload, size_t count) {
  const unsigned char *words = payload;
  check_vector sum = {0};
  uint32_t total = 0;
  for (size_t i = 0; i < count; i += OB_CHECK_RUN)
    check_add_run(&sum, words + i * sizeof(uint32_t), i, smaller_size(count - i, OB_CHECK_RUN));
  for (size_t k = 0; k < CHECK_VL; k++)
    total += sum[k];
  return total;
}
