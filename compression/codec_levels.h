/*
 * Messages of more than one bit an element: the part of codec_template.h that makes them and reads
 * them, with its parameters and its words for groups. A vocabulary that defines VECTOR_LEVELS has
 * what is between here and #endif in its own words:
 *   group_levels(V[GROUP], fields, width, scale)  what a group's codes stand for
 *   group_quantise(values, width, inverse, scale, V[GROUP], fields)  codes of a group of values,
 *                                                 and what they leave; inverse: 1 / scale
 * For others the compiler makes the vectors, of the arithmetic in levels.h.
 */
#ifndef VECTOR_LEVELS
/* Unpacks codes, two a byte or four: their shifts do not depend on the element, so that the
 * compiler can make vectors even where these have one shift for all lanes. */
FIXED void group_unpack(const uint32_t *fields, unsigned width, int32_t code[OB_LANES]) {
  const unsigned each = 8 / width;
  OB_INDEPENDENT
  for (unsigned byte = 0; byte < OB_LANES / each; byte++)
    for (unsigned k = 0; k < each; k++) {
      const uint32_t high = fields[byte / 4] >> byte % 4 * 8 << (32 - width * (k + 1));
      code[byte * each + k] = width == 8 ? (int32_t)(high >> 24) : (int32_t)high >> (32 - width);
    }
}

FIXED void group_pack(const int32_t code[OB_LANES], unsigned width, uint32_t *fields) {
  const unsigned each = 32 / width;
  for (unsigned word = 0; word < width; word++) {
    fields[word] = 0;
    for (unsigned k = 0; k < each; k++)
      fields[word] |= ((uint32_t)code[word * each + k] & ((1u << width) - 1)) << k * width;
  }
}

FIXED void group_levels(V group[GROUP], const uint32_t *fields, unsigned width, V scale) {
  int32_t code[OB_LANES];
  float level[OB_LANES];
  group_unpack(fields, width, code);
  OB_INDEPENDENT
  for (int i = 0; i < OB_LANES; i++)
    level[i] = ob_level_of(code[i], width);
  for (int k = 0; k < GROUP; k++)
    group[k] = v_mul(v_load(level + k * VL), scale);
}

FIXED void group_quantise(const float *values, unsigned width, V inverse, V scale, V error[GROUP],
                          uint32_t *fields) {
  float ratio[OB_LANES], level[OB_LANES];
  int32_t code[OB_LANES];
  for (int k = 0; k < GROUP; k++)
    v_store(ratio + k * VL, v_mul(v_load(values + k * VL), inverse));
  OB_INDEPENDENT
  for (int i = 0; i < OB_LANES; i++) {
    code[i] = ob_code_of(ratio[i], width);
    level[i] = ob_level_of(code[i], width);
  }
  group_pack(code, width, fields);
  for (int k = 0; k < GROUP; k++)
    error[k] = v_sub(v_load(values + k * VL), v_mul(v_load(level + k * VL), scale));
}
#endif

/* Decodes the elements of group number `word`: signs, or levels. */
FIXED void group_values(V group[GROUP], const uint32_t *words, size_t word, unsigned width,
                        V scale) {
  if (width == 1)
    group_signed(words[word], scale, group);
  else
    group_levels(group, words + width * word, width, scale);
}

/* Decodes a group whose width the compiler does not know: levels are the exception, and not worth a
 * copy of all widths in each place. */
__attribute__((noinline)) static void levels_of_any(V group[GROUP], const uint32_t *fields,
                                                    unsigned width, float scale) {
  if (width == 2)
    group_levels(group, fields, 2, v_set(scale));
  else if (width == 4)
    group_levels(group, fields, 4, v_set(scale));
  else
    group_levels(group, fields, 8, v_set(scale));
}

FIXED void group_of_any(V group[GROUP], const uint32_t *words, size_t word, unsigned width,
                        float scale) {
  if (width == 1)
    group_signed(words[word], v_set(scale), group);
  else
    levels_of_any(group, words + width * word, width, scale);
}

/* Quantises a run. The code of 0 is 0 in every width, but its error may not be. */
FIXED void quantise_run(const struct ob_quantise_run *all, unsigned width) {
  const struct ob_quantise_run copy = *all, *const run = &copy;
  const V inverse = v_set(ob_inverse_scale(run->scale)), scale = v_set(run->scale);
  V error[GROUP];
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    group_quantise(run->values + i, width, inverse, scale, error,
                   run->fields + i / OB_LANES * width);
    if (run->count - i < OB_LANES)
      group_cut(error, run->count - i);
    for (int k = 0; k < GROUP; k++)
      if (run->stream)
        v_stream(run->residual_out + i + k * VL, error[k]);
      else
        v_store(run->residual_out + i + k * VL, error[k]);
  }
}

static void quantise(const struct ob_quantise_run *run) {
  if (run->width == 2)
    quantise_run(run, 2);
  else if (run->width == 4)
    quantise_run(run, 4);
  else
    quantise_run(run, 8);
}

/* Returns the largest magnitude. As integers, the bits of magnitudes are in the same order as the
 * magnitudes, and those of a NaN are above all others. */
static float largest(const float *values, size_t count) {
  uint32_t lanes[OB_LANES] = {0}, max_bits = 0;
  for (size_t i = 0; i < count; i += OB_LANES) {
    OB_INDEPENDENT
    for (int k = 0; k < OB_LANES; k++) {
      const uint32_t bits = ob_bits_of(values[i + (size_t)k]) & ~OB_SIGN_BIT;
      lanes[k] = bits > lanes[k] ? bits : lanes[k];
    }
  }
  for (int k = 0; k < OB_LANES; k++)
    max_bits = lanes[k] > max_bits ? lanes[k] : max_bits;
  return ob_float_of(max_bits);
}
