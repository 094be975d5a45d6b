/*
 * The passes of the optimizers: the part of codec_template.h that does them, with its parameters
 * and its words for groups. A group at a time, where its arrays lie, or in small ones: of what is
 * no float array, and of a last, partial group. The compiler makes the vectors, of the arithmetic
 * in passes.h.
 */
struct pass_group {
  float *at[OB_SLOTS];
  float small[OB_SLOTS][OB_LANES] __attribute__((aligned(64)));
};

/* The same for all passes: not worth a copy in each. */
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

FIXED void pass_load_message(float to[OB_LANES], const uint32_t *words, size_t word, unsigned width,
                             float scale, size_t count) {
  V group[GROUP];
  group_of_any(group, words, word, width, scale);
  group_store(group, to, 0, ONEBIT_FLOAT32);
  for (size_t i = count; i < OB_LANES; i++)
    to[i] = 0;
}

SHARED void pass_store_copy(const float *from, const struct ob_pass_run *run, size_t first,
                            size_t count) {
  V group[GROUP];
  group_load(group, from, 0, ONEBIT_FLOAT32);
  group_bound(group, run->copy_dtype);
  if (count == OB_LANES)
    group_store(group, run->copy, first, run->copy_dtype);
  else
    part_store(group, run->copy, first, first + count, run->copy_dtype);
}

/* The float array of a slot, or NULL where there is none. */
FIXED float *pass_array(const struct ob_pass_run *run, int slot) {
  return slot < OB_ARRAYS ? run->arrays[slot] : slot == OB_PARAMETER ? run->parameter : NULL;
}

FIXED void pass_read(struct pass_group *group, const struct ob_pass_run *run,
                     enum ob_pass_kind kind, size_t first, size_t count) {
  const unsigned reads = ob_pass_reads(kind), used = reads | ob_pass_writes(kind);
  for (int slot = 0; slot < OB_SLOTS; slot++) {
    float *array = pass_array(run, slot);
    group->at[slot] = count == OB_LANES && array ? array + first : group->small[slot];
    if (used & OB_MASK(slot) && array && count < OB_LANES)
      memcpy(group->small[slot], array + first, count * sizeof *array);
  }
  if (reads & OB_MASK(OB_GRADIENT))
    pass_load_gradient(group->small[OB_GRADIENT], run, first, count);
  if (reads & OB_MASK(OB_MESSAGE))
    pass_load_message(group->small[OB_MESSAGE], run->message, first / OB_LANES, run->width,
                      run->message_scale, count);
  if (reads & OB_MASK(OB_LAST) && run->last)
    pass_load_message(group->small[OB_LAST], run->last, first / OB_LANES, run->last_width,
                      run->last_scale, count);
  else if (reads & OB_MASK(OB_LAST))
    for (size_t i = 0; i < count; i++)
      group->small[OB_LAST][i] = run->last_values[first + i];
}

FIXED void pass_write(const struct pass_group *group, const struct ob_pass_run *run,
                      enum ob_pass_kind kind, size_t first, size_t count) {
  const unsigned writes = ob_pass_writes(kind);
  for (int slot = 0; slot <= OB_PARAMETER; slot++) {
    float *array = pass_array(run, slot);
    if (writes & OB_MASK(slot) && array && count < OB_LANES)
      memcpy(array + first, group->small[slot], count * sizeof *array);
  }
  if (writes & OB_MASK(OB_PARAMETER) && run->copy)
    pass_store_copy(group->at[OB_PARAMETER], run, first, count);
}

/* Elements past the end are zeros, and whatever comes of them stays here; they add nothing. */
FIXED void pass_elements(enum ob_pass_kind kind, const struct pass_group *group,
                         const struct ob_pass_factors *factors, float sums[OB_SUMS][OB_LANES]) {
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
    e = ob_pass_element(kind, e, factors);
    for (int slot = 0; slot <= OB_PARAMETER; slot++)
      if (writes & OB_MASK(slot))
        at[slot][i] = e.at[slot];
    for (int k = 0; k < OB_LARGEST; k++)
      if (summed & OB_MASK(k))
        sums[k][i] += e.sum[k];
    if (summed & OB_MASK(OB_LARGEST))
      sums[OB_LARGEST][i] =
          e.sum[OB_LARGEST] < sums[OB_LARGEST][i] ? e.sum[OB_LARGEST] : sums[OB_LARGEST][i];
  }
}

FIXED void pass_run(struct ob_pass_run *run, enum ob_pass_kind kind) {
  struct pass_group group;
  float sums[OB_SUMS][OB_LANES];
  const struct ob_pass_factors factors = run->factors;
  memset(&group, 0, sizeof group);
  for (int k = 0; k < OB_SUMS; k++)
    for (int lane = 0; lane < OB_LANES; lane++)
      sums[k][lane] = ob_sum_start(k);
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    const size_t count = smaller(OB_LANES, run->count - i);
    pass_read(&group, run, kind, i, count);
    pass_elements(kind, &group, &factors, sums);
    pass_write(&group, run, kind, i, count);
  }
  for (int k = 0; k < OB_LARGEST; k++)
    run->sums[k] = ob_pass_sums(kind) & OB_MASK(k) ? ob_sum_lanes(sums[k]) : 0;
  float min = sums[OB_LARGEST][0];
  for (int lane = 1; lane < OB_LANES; lane++)
    min = sums[OB_LARGEST][lane] < min ? sums[OB_LARGEST][lane] : min;
  run->sums[OB_LARGEST] = 1 / min;
}

#define PASS(name)                                                                                 \
  case OB_PASS_##name:                                                                             \
    pass_run(run, OB_PASS_##name);                                                                 \
    break;
static void pass(struct ob_pass_run *run) {
  switch (run->kind) {
    OB_PASS_KINDS(PASS)
  case OB_PASSES:
    break;
  }
}
#undef PASS
