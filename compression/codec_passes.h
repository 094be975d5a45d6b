/*
 * This part of codec_template.h runs the passes of the optimizers, with the template's functions on
 * groups. A pass works on one group at a time. It works directly in the optimizer's arrays; values
 * that are not float32, and a last, partial group, are copied to small arrays. The compiler
 * vectorises the arithmetic in pass_element.h.
 */
struct pass_group {
  float *at[OB_SLOTS], *array[OB_SLOTS];
  bool streams[OB_SLOTS];
  float small[OB_SLOTS][OB_LANES] __attribute__((aligned(64)));
  float quotient[OB_LANES] __attribute__((aligned(64)));
  float sum[OB_SUMS][OB_LANES] __attribute__((aligned(64)));
};

/* Marks a function that all passes share; it is not inlined into each of them. */
#define SHARED __attribute__((noinline)) static

SHARED void pass_load_gradient(float to[OB_LANES], const struct ob_pass_run *run, size_t first,
                               size_t count) {
  V group[GROUP];
  if (!run->gradient)
    group_set(group, 0);
  else if (count == OB_LANES)
    group_load(group, run->gradient, first, run->gradient_dtype);
  else
    part_load(group, run->gradient, first, first + count, run->gradient_dtype);
  group_store(group, to, 0, ONEBIT_FLOAT32);
}

FIXED void pass_load_message(float to[OB_LANES], const uint32_t *words, size_t word, bool signs,
                             unsigned width, float scale, size_t count) {
  V group[GROUP];
  if (signs)
    group_apply_signs(words[word], v_set(scale), group);
  else
    group_decode_any_width(group, words, word, width, scale);
  group_store(group, to, 0, ONEBIT_FLOAT32);
  for (size_t i = count; i < OB_LANES; i++)
    to[i] = 0;
}

SHARED void pass_store_copy(const float *from, const struct ob_pass_run *run, size_t first,
                            size_t count) {
  V group[GROUP];
  group_load(group, from, 0, ONEBIT_FLOAT32);
  group_bound_results(group, run->copy_dtype);
  if (count == OB_LANES)
    group_store(group, run->copy, first, run->copy_dtype);
  else
    part_store(group, run->copy, first, first + count, run->copy_dtype);
}

/* Returns the array of floats of a slot; NULL: the slot has none. */
FIXED float *pass_find_array(const struct ob_pass_run *run, int slot) {
  if (slot == OB_GRADIENT && run->gradient_dtype == ONEBIT_FLOAT32)
    return (float *)run->gradient; /* no pass writes gradients */
  return slot < OB_ARRAYS ? run->arrays[slot] : slot == OB_PARAMETER ? run->parameter : NULL;
}

/* Returns true for slots that a pass writes but does not read. Their arrays get non-temporal
 * stores, since ordinary stores would first read the cache lines. */
FIXED bool pass_only_writes(enum ob_pass_kind kind, int slot) {
  return OB_MASK(slot) & ob_pass_writes(kind) & ~ob_pass_reads(kind);
}

FIXED bool pass_is_streamed(const struct ob_pass_run *run, enum ob_pass_kind kind, int slot) {
  const float *array = pass_find_array(run, slot);
  return pass_only_writes(kind, slot) && run->stream && array && (uintptr_t)array % sizeof(V) == 0;
}

/* Sets the pointer of each slot to its array, or to a small array of zeros. */
FIXED void pass_point_to_arrays(struct pass_group *group, const struct ob_pass_run *run,
                                enum ob_pass_kind kind) {
  const unsigned used = ob_pass_reads(kind) | ob_pass_writes(kind);
  OB_UNROLLED
  for (int slot = 0; slot < OB_SLOTS; slot++)
    if (used & OB_MASK(slot)) {
      group->streams[slot] = pass_is_streamed(run, kind, slot);
      group->array[slot] = group->streams[slot] ? NULL : pass_find_array(run, slot);
      memset(group->small[slot], 0, sizeof group->small[slot]);
    }
}

/* Returns true if prefetching the arrays makes this pass faster. That is so for passes that decode
 * a message, since they compute much. */
FIXED bool pass_prefetches(enum ob_pass_kind kind) {
  return ob_pass_reads(kind) & OB_MASK(OB_MESSAGE);
}

FIXED void pass_load_group(struct pass_group *group, const struct ob_pass_run *run,
                           enum ob_pass_kind kind, bool signs, size_t first, size_t count) {
  const unsigned reads = ob_pass_reads(kind), used = reads | ob_pass_writes(kind);
  OB_UNROLLED
  for (int slot = 0; slot < OB_SLOTS; slot++)
    if (used & OB_MASK(slot)) {
      float *array = group->array[slot];
      group->at[slot] = count == OB_LANES && array ? array + first : group->small[slot];
      if (array && count == OB_LANES && pass_prefetches(kind))
        group_prefetch(array + first);
      if (array && count < OB_LANES)
        memcpy(group->small[slot], array + first, count * sizeof *array);
    }
  if (reads & OB_MASK(OB_GRADIENT) && !group->array[OB_GRADIENT])
    pass_load_gradient(group->small[OB_GRADIENT], run, first, count);
  if (reads & OB_MASK(OB_MESSAGE))
    pass_load_message(group->small[OB_MESSAGE], run->message, first / OB_LANES, signs, run->width,
                      run->message_scale, count);
  if (reads & OB_MASK(OB_LAST) && run->last)
    pass_load_message(group->small[OB_LAST], run->last, first / OB_LANES, signs, run->last_width,
                      run->last_scale, count);
  else if (reads & OB_MASK(OB_LAST))
    for (size_t i = 0; i < count; i++)
      group->small[OB_LAST][i] = run->last_values[first + i];
}

/* Sets the quotients (ob_pass_quotient) of a group whose messages are signs. of[4] has the
 * quotients of the four pairs of signs. */
FIXED void pass_load_quotient(struct pass_group *group, enum ob_pass_kind kind, const float of[4]) {
  const bool two = ob_pass_reads(kind) & OB_MASK(OB_LAST);
  const float plus_plus = of[0], minus_plus = of[1], plus_minus = of[2], minus_minus = of[3];
  OB_INDEPENDENT
  for (unsigned i = 0; i < OB_LANES; i++) {
    const bool now = ob_bits_of(group->small[OB_MESSAGE][i]) >> 31,
               last = two && ob_bits_of(group->small[OB_LAST][i]) >> 31;
    group->quotient[i] = ob_select(last, ob_select(now, minus_minus, plus_minus),
                                   ob_select(now, minus_plus, plus_plus));
  }
}

FIXED void pass_store_group(const struct pass_group *group, const struct ob_pass_run *run,
                            enum ob_pass_kind kind, size_t first, size_t count) {
  const unsigned writes = ob_pass_writes(kind);
  OB_UNROLLED
  for (int slot = 0; slot <= OB_PARAMETER; slot++) {
    float *array = writes & OB_MASK(slot) ? pass_find_array(run, slot) : NULL;
    if (array && count < OB_LANES)
      memcpy(array + first, group->small[slot], count * sizeof *array);
    else if (pass_only_writes(kind, slot) && group->streams[slot])
      for (int k = 0; k < GROUP; k++)
        v_stream(array + first + k * VL, v_load(group->small[slot] + k * VL));
  }
  if (writes & OB_MASK(OB_PARAMETER) && run->copy)
    pass_store_copy(group->at[OB_PARAMETER], run, first, count);
}

/* Computes the pass for the elements of a group. Elements past the end are zeros, which add nothing
 * to sums; their results are not stored. */
FIXED void pass_compute_elements(enum ob_pass_kind kind, bool divided, struct pass_group *group,
                                 const struct ob_pass_factors *factors) {
  const unsigned reads = ob_pass_reads(kind), writes = ob_pass_writes(kind),
                 summed = ob_pass_sums(kind);
  float *at[OB_SLOTS];
  for (int slot = 0; slot < OB_SLOTS; slot++)
    at[slot] = group->at[slot];
  OB_INDEPENDENT
  for (size_t i = 0; i < OB_LANES; i++) {
    struct ob_element e;
    for (int slot = 0; slot < OB_SLOTS; slot++)
      e.at[slot] = reads & OB_MASK(slot) ? at[slot][i] : 0;
    e = divided ? ob_pass_element_by_quotient(kind, e, group->quotient[i], factors)
                : ob_pass_element(kind, e, factors);
    for (int slot = 0; slot <= OB_PARAMETER; slot++)
      if (writes & OB_MASK(slot))
        at[slot][i] = e.at[slot];
    for (int k = 0; k < OB_SUMS; k++)
      if (summed & OB_MASK(k))
        group->sum[k][i] = e.sum[k];
  }
}

/* Adds sums to lanes that stay in registers: with lanes in memory each group would wait for the
 * group before. */
FIXED void pass_add_sums(V lanes[OB_SUMS][GROUP], const struct pass_group *group,
                         enum ob_pass_kind kind) {
  OB_UNROLLED
  for (int k = 0; k < OB_SUMS; k++)
    if (ob_pass_sums(kind) & OB_MASK(k))
      for (int j = 0; j < GROUP; j++) {
        const V more = v_load(group->sum[k] + j * VL);
        lanes[k][j] = k == OB_LARGEST ? v_smaller(more, lanes[k][j]) : v_add(lanes[k][j], more);
      }
}

FIXED void pass_run_group(struct pass_group *group, const struct ob_pass_run *run,
                          enum ob_pass_kind kind, bool signs, const float quotients[4],
                          const struct ob_pass_factors *factors, V lanes[OB_SUMS][GROUP],
                          size_t first, size_t count) {
  const bool divided = signs && ob_pass_has_quotient(kind);
  pass_load_group(group, run, kind, signs, first, count);
  if (divided)
    pass_load_quotient(group, kind, quotients);
  pass_compute_elements(kind, divided, group, factors);
  pass_add_sums(lanes, group, kind);
  pass_store_group(group, run, kind, first, count);
}

FIXED void pass_store_sums(struct ob_pass_run *run, enum ob_pass_kind kind,
                           V lanes[OB_SUMS][GROUP]) {
  float min[OB_LANES];
  OB_UNROLLED
  for (int k = 0; k < OB_LARGEST; k++)
    run->sums[k] = ob_pass_sums(kind) & OB_MASK(k) ? group_sum_lanes(lanes[k]) : 0;
  run->sums[OB_LARGEST] = 0;
  if (!(ob_pass_sums(kind) & OB_MASK(OB_LARGEST)))
    return;
  group_store(lanes[OB_LARGEST], min, 0, ONEBIT_FLOAT32);
  for (int lane = 1; lane < OB_LANES; lane++)
    min[0] = min[lane] < min[0] ? min[lane] : min[0];
  run->sums[OB_LARGEST] = 1 / min[0];
}

FIXED void pass_run(struct ob_pass_run *run, enum ob_pass_kind kind, bool signs) {
  struct pass_group group;
  V lanes[OB_SUMS][GROUP];
  float quotients[4];
  const struct ob_pass_factors factors = run->factors;
  size_t i = 0;
  OB_UNROLLED
  for (int k = 0; k < OB_SUMS; k++)
    group_set(lanes[k], ob_sum_initial_value(k));
  for (int k = 0; k < 4; k++)
    quotients[k] = ob_pass_quotient(kind, k & 1 ? -run->message_scale : run->message_scale,
                                    k & 2 ? -run->last_scale : run->last_scale, &factors);
  pass_point_to_arrays(&group, run, kind);
  for (; i + OB_LANES <= run->count; i += OB_LANES)
    pass_run_group(&group, run, kind, signs, quotients, &factors, lanes, i, OB_LANES);
  if (i < run->count)
    pass_run_group(&group, run, kind, signs, quotients, &factors, lanes, i, run->count - i);
  pass_store_sums(run, kind, lanes);
}

/* Runs the pass SQUARES, which only reads and computes little: its sums stay in registers. */
FIXED void pass_squares_dtype(struct ob_pass_run *run, onebit_dtype_t dtype) {
  V group[GROUP], lanes[GROUP];
  const V factor = v_set(run->factors.gradient_factor);
  group_set(lanes, 0);
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    if (dtype == ONEBIT_FLOAT32)
      group_prefetch((const float *)run->gradient + i);
    if (i + OB_LANES <= run->count)
      group_load(group, run->gradient, i, dtype);
    else
      part_load(group, run->gradient, i, run->count, dtype);
    for (int k = 0; k < GROUP; k++) {
      group[k] = v_mul(factor, group[k]);
      lanes[k] = v_add(lanes[k], v_mul(group[k], group[k]));
    }
  }
  run->sums[0] = group_sum_lanes(lanes);
}

static void pass_squares(struct ob_pass_run *run) {
  memset(run->sums, 0, sizeof run->sums);
  if (!run->gradient)
    return;
#define SQUARES(dtype) pass_squares_dtype(run, dtype)
  FOR_DTYPE(run->gradient_dtype, SQUARES);
}

/* Returns true if all messages that the pass reads are signs, as they are in nearly all calls. For
 * signs a pass has a separate loop, without a function call. */
static bool pass_reads_signs(const struct ob_pass_run *run) {
  const bool two = ob_pass_reads(run->kind) & OB_MASK(OB_LAST);
  return run->width == 1 && (!two || (run->last && run->last_width == 1));
}

#define PASS(name)                                                                                 \
  case OB_PASS_##name:                                                                             \
    if (ob_pass_reads(OB_PASS_##name) & OB_MASK(OB_MESSAGE) && pass_reads_signs(run))              \
      pass_run(run, OB_PASS_##name, true);                                                         \
    else                                                                                           \
      pass_run(run, OB_PASS_##name, false);                                                        \
    break;
static void codec_pass(struct ob_pass_run *run) {
  if (run->kind == OB_PASS_SQUARES) {
    pass_squares(run);
    return;
  }
  switch (run->kind) {
    OB_PASS_KINDS(PASS)
  case OB_PASSES:
    break;
  }
}
#undef PASS
