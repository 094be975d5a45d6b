/*
 * The part of codec_template.h that compresses a rank's values, with its parameters and its
 * functions on groups.
 */

/* ob_reciprocal_root */
FIXED V v_reciprocal_root(V value) {
  const V guess = v_root_guess(value), square = v_mul(v_mul(value, guess), guess);
  return v_mul(guess, v_mul(v_set(OB_ROOT_FACTOR), v_sub(v_set(OB_ROOT_TERM), square)));
}

/* Prefetches a page ahead of the group; of moments, which are half as wide, as many elements. */
FIXED void group_prefetch_moments(const struct ob_compress_run *run, onebit_dtype_t dtype,
                                  size_t first) {
  group_prefetch(run->residual + first);
  prefetch(run->moments + first, 2048);
  if (dtype == ONEBIT_FLOAT32 && run->input)
    group_prefetch((const float *)run->input + first);
}

/* The sum of the moments of a sample. */
static float add_moments(const uint16_t *moments, struct ob_sample sample) {
  V lanes[GROUP];
  group_set(lanes, 0);
  for (size_t word = sample.first; word < sample.end; word += sample.step)
    for (int k = 0; k < GROUP; k++)
      lanes[k] = v_add(lanes[k], v_load_bfloat16(moments + word * OB_LANES + (size_t)(k * VL)));
  return group_total(lanes);
}

/* ob_moment_input of the group; the moments, like the residuals, fill whole words. */
FIXED void group_moments(V group[GROUP], const struct ob_compress_run *run, size_t first,
                         const V error[GROUP]) {
  const struct ob_moment_factors f = ob_moment_factors_for(run->moment, run->momentum_scale);
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

/* ob_limited of the group; zeros come out as +0 either way. */
FIXED void group_limit(V group[GROUP], const V own[GROUP], float limit) {
  const V zero = v_set(0), bound = v_set(limit);
  for (int k = 0; k < GROUP; k++) {
    const V square = v_mul(group[k], group[k]), below = v_smaller(v_mul(group[k], own[k]), bound),
            bounded = v_sub(zero, v_smaller(v_sub(zero, below), bound));
    group[k] = v_add(bounded, v_sub(square, square));
  }
}

/* group = weight * group, and each times its own reciprocal, up to the limit, where there are
 * such */
FIXED void group_weigh(V group[GROUP], V weight, const struct ob_compress_run *run, size_t first,
                       size_t end) {
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
    group_limit(group, own, run->limit);
  else
    for (int k = 0; k < GROUP; k++)
      group[k] = v_mul(group[k], own[k]);
}

/* group = scaling * (decay * momentum + group); the product with the momentum's sign is that of the
 * magnitude. */
FIXED void group_momentum(V group[GROUP], const struct ob_compress_run *run, size_t word,
                          bool levels, float decayed, V scaling) {
  V momentum[GROUP];
  if (levels)
    levels_of_any(momentum, run->momentum_bits + run->momentum_width * word, run->momentum_width,
                  decayed);
  else
    group_signed(run->momentum_bits[word], v_set(decayed), momentum);
  for (int k = 0; k < GROUP; k++)
    group[k] = v_mul(scaling, v_add(momentum[k], group[k]));
}

/* The forms of a run's momentum: none, signs, or levels. Levels are rare: all widths and rules
 * share one loop for each type of input, which decodes them by a call. */
enum momentum { NONE, SIGNS, LEVELS };

/* Compresses a run, which is copied here and below: a vector may be stored to any object whose
 * address is known elsewhere, so the compiler would read all of the struct again after each
 * store. */
FIXED float compress_run(const struct ob_compress_run *all, onebit_dtype_t dtype,
                         onebit_scale_t rule, enum momentum momentum, bool moments) {
  const struct ob_compress_run copy = *all, *const run = &copy;
  V group[GROUP], error[GROUP], input[GROUP], stored[GROUP];
  struct sums sums = sums_begin(run->lanes);
  const bool in_place = run->residual_out == run->residual;
  const V scale = v_set(run->residual_scale), weight = v_set(run->weight),
          scaling = v_set(run->scaling);
  const float decayed = run->decay * (run->momentum_scale / run->scaling);
  const bool residual_first = momentum && run->momentum_in_residual;
  const size_t given = smaller(run->count, run->valid);
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    const bool whole = i + OB_LANES <= given;
    if (moments)
      group_prefetch_moments(run, dtype, i);
    group_error(error, run->residual + i, scale);
    if (!run->input)
      group_set(group, 0);
    else if (whole)
      group_load(group, run->input, i, dtype);
    else
      part_load(group, run->input, i, given, dtype);
    if (moments)
      group_moments(group, run, i, error);
    group_weigh(group, weight, run, i, given);
    if (residual_first)
      group_compensate(group, error);
    if (momentum)
      group_momentum(group, run, i / OB_LANES, momentum == LEVELS, decayed, scaling);
    if (momentum && !whole) /* padding has no momentum */
      group_cut(group, given > i ? given - i : 0);
    group_copy(input, group);
    if (!residual_first)
      group_compensate(group, error);
    if (!whole && run->count - i < OB_LANES)
      group_cut(group, run->count - i);
    group_copy(stored, group);
    if (in_place)
      group_guard(stored, input, run->residual + i);
    group_keep(group, stored, run->residual_out + i, run->bits ? run->bits + i / OB_LANES : NULL,
               run->stream, rule, &sums);
  }
  return sums_end(&sums, run->lanes);
}

FIXED float compress_dtype(const struct ob_compress_run *run, onebit_scale_t rule,
                           enum momentum momentum, bool moments) {
  switch (run->dtype) {
  case ONEBIT_BFLOAT16:
    return compress_run(run, ONEBIT_BFLOAT16, rule, momentum, moments);
  case ONEBIT_FLOAT16:
    return compress_run(run, ONEBIT_FLOAT16, rule, momentum, moments);
  default:
    return compress_run(run, ONEBIT_FLOAT32, rule, momentum, moments);
  }
}

FIXED float compress_rule(const struct ob_compress_run *run, onebit_scale_t rule) {
  if (run->moment_rule)
    return run->momentum_bits ? compress_dtype(run, rule, SIGNS, true)
                              : compress_dtype(run, rule, NONE, true);
  return run->momentum_bits ? compress_dtype(run, rule, SIGNS, false)
                            : compress_dtype(run, rule, NONE, false);
}

static float compress(const struct ob_compress_run *run) {
  if (run->momentum_bits && run->momentum_width > 1)
    return compress_dtype(run, run->rule, LEVELS, run->moment_rule);
  return run->rule == ONEBIT_SCALE_RMS ? compress_rule(run, ONEBIT_SCALE_RMS)
                                       : compress_rule(run, ONEBIT_SCALE_MEAN_ABSOLUTE);
}
