/*
 * The part of codec_template.h that reduces the ranks' messages on a server, with its parameters
 * and its functions on groups.
 */
/* Sums the streams' values for the group whose word is `word`: in their order, one addition after
 * the other. Tables of the sums of four streams, looked up by four signs, were weighed: with 16
 * streams in the caches AVX-512 takes 15 % less, AVX2 11 % more, and a GPU 190 instructions where
 * it has 202, while memory is the ceiling. That is not worth other results. */
FIXED void group_sum(V total[GROUP], size_t word, size_t streams, unsigned width,
                     const uint32_t *const *bits, const float *scales) {
  group_values(total, bits[0], word, width, v_set(scales[0]));
  for (size_t s = 1; s < streams; s++) {
    V term[GROUP];
    group_values(term, bits[s], word, width, v_set(scales[s]));
    for (int k = 0; k < GROUP; k++)
      total[k] = v_add(total[k], term[k]);
  }
}

FIXED void group_sum_of_any(V total[GROUP], size_t word, const struct ob_reduce_run *run) {
  group_of_any(total, run->bits[0], word, run->width, run->scales[0]);
  for (size_t s = 1; s < run->streams; s++) {
    V term[GROUP];
    group_of_any(term, run->bits[s], word, run->width, run->scales[s]);
    for (int k = 0; k < GROUP; k++)
      total[k] = v_add(total[k], term[k]);
  }
}

FIXED float reduce_run(const struct ob_reduce_run *all, onebit_scale_t rule, unsigned width) {
  const struct ob_reduce_run copy = *all, *const run = &copy;
  V total[GROUP], error[GROUP];
  const V scale = v_set(run->residual_scale);
  struct sums sums = sums_begin(run->lanes);
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    group_prefetch(run->residual + i);
    streams_prefetch(run->bits, run->streams, i, width);
    group_sum(total, i / OB_LANES, run->streams, width, run->bits, run->scales);
    group_error(error, run->residual + i, scale);
    group_compensate(total, error);
    if (run->count - i < OB_LANES)
      group_cut(total, run->count - i);
    group_keep(total, total, run->residual_out + i, run->out ? run->out + i / OB_LANES : NULL,
               run->stream, rule, &sums);
  }
  return sums_end(&sums, run->lanes);
}

/* Makes the new momentum from the old one and the mean gradient; returns the signs of the
 * direction, whose magnitudes are added to the lanes. */
FIXED uint32_t group_lion(const V mean[GROUP], const struct ob_reduce_run *run, size_t first,
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
  const uint32_t zeros = group_signs(zero);
  return (group_signs(direction) & ~zeros) | (zeros & OB_LION_ZEROS);
}

static float reduce_lion(const struct ob_reduce_run *run) {
  V lanes[GROUP], mean[GROUP];
  group_set(lanes, 0);
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    const size_t left = run->count - i;
    group_prefetch(run->residual + i);
    streams_prefetch(run->bits, run->streams, i, run->width);
    if (run->width == 1)
      group_sum(mean, i / OB_LANES, run->streams, 1, run->bits, run->scales);
    else
      group_sum_of_any(mean, i / OB_LANES, run);
    if (left < OB_LANES)
      group_cut(mean, left);
    const uint32_t signs = group_lion(mean, run, i, lanes);
    run->out[i / OB_LANES] = left < OB_LANES ? signs & ((1u << left) - 1) : signs;
  }
  return group_total(lanes);
}

static float reduce(const struct ob_reduce_run *run) {
  if (run->serving.rule == OB_SERVE_LION)
    return reduce_lion(run);
  if (run->width > 1)
    return run->width == 2   ? reduce_run(run, ONEBIT_SCALE_RMS, 2)
           : run->width == 4 ? reduce_run(run, ONEBIT_SCALE_RMS, 4)
                             : reduce_run(run, ONEBIT_SCALE_RMS, 8);
  return run->rule == ONEBIT_SCALE_RMS ? reduce_run(run, ONEBIT_SCALE_RMS, 1)
                                       : reduce_run(run, ONEBIT_SCALE_MEAN_ABSOLUTE, 1);
}
