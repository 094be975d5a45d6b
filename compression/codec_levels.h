/*
 * Messages of more than one bit an element: the part of codec_template.h that makes them and reads
 * them, with its parameters and its words for groups. The compiler makes the vectors, of the
 * arithmetic in levels.h, but for packing and unpacking fields: a vocabulary that defines
 * VECTOR_FIELDS has these two.
 */
#ifndef VECTOR_FIELDS
FIXED void group_unpack(const uint32_t *fields, unsigned width, int32_t code[OB_LANES]) {
  for (unsigned i = 0; i < OB_LANES; i++)
    code[i] = ob_read_code(fields, i, width);
}

FIXED void group_pack(const int32_t code[OB_LANES], unsigned width, uint32_t *fields) {
  const unsigned each = 32 / width;
  for (unsigned word = 0; word < width; word++) {
    fields[word] = 0;
    for (unsigned k = 0; k < each; k++)
      fields[word] |= ((uint32_t)code[word * each + k] & ((1u << width) - 1)) << k * width;
  }
}
#endif

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

/* What the elements of group number `word` stand for: signs, or levels. */
FIXED void group_values(V group[GROUP], const uint32_t *words, size_t word, unsigned width,
                        V scale) {
  if (width == 1)
    group_signed(words[word], scale, group);
  else if (width == 2)
    group_levels(group, words + 2 * word, 2, scale);
  else if (width == 4)
    group_levels(group, words + 4 * word, 4, scale);
  else
    group_levels(group, words + 8 * word, 8, scale);
}

FIXED void quantise_run(const struct ob_quantise_run *run, unsigned width) {
  const float inverse = ob_inverse_scale(run->scale), scale = run->scale;
  V group[GROUP];
  for (size_t i = 0; i < run->count; i += OB_LANES) {
    const float *values = run->values + i;
    const size_t left = run->count - i;
    int32_t code[OB_LANES];
    float error[OB_LANES];
    OB_INDEPENDENT
    for (int k = 0; k < OB_LANES; k++) {
      code[k] = ob_code_of(values[k] * inverse, width);
      error[k] = values[k] - ob_level_of(code[k], width) * scale;
    }
    for (size_t k = left; k < OB_LANES; k++)
      code[k] = 0, error[k] = 0;
    group_pack(code, width, run->fields + i / OB_LANES * width);
    group_load(group, error, 0, ONEBIT_FLOAT32);
    for (int k = 0; k < GROUP; k++)
      if (run->stream)
        v_stream(run->residual_out + i + k * VL, group[k]);
      else
        v_store(run->residual_out + i + k * VL, group[k]);
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

/* As whole numbers, the bits of magnitudes are in the order of the magnitudes, and those of a NaN
 * are above all others. */
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
