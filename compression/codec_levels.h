/*
 * This part of codec_template.h encodes and decodes messages of more than one bit per element. A
 * codec_*.c file that defines VECTOR_LEVELS has its own versions of these two functions:
 *   group_decode_levels(V[GROUP], fields, width, scale)  decodes a group
 *   group_quantise(values, width, inverse, scale, V[GROUP], fields)  encodes a group of values, and
 *                                                 computes their error; inverse: 1 / scale
 * For other files the two functions are defined here, with the arithmetic in levels.h, which the
 * compiler vectorises.
 */
#ifndef VECTOR_LEVELS
/* Unpacks the codes byte by byte. The shifts within a byte are constants, so the compiler can
 * vectorise the loop even if vector instructions can only shift all lanes by the same amount. */
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

FIXED void group_decode_levels(V group[GROUP], const uint32_t *fields, unsigned width, V scale) {
  int32_t code[OB_LANES];
  float level[OB_LANES];
  group_unpack(fields, width, code);
  OB_INDEPENDENT
  for (int i = 0; i < OB_LANES; i++)
    level[i] = ob_decode_level(code[i], width);
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
    code[i] = ob_encode_level(ratio[i], width);
    level[i] = ob_decode_level(code[i], width);
  }
  group_pack(code, width, fields);
  for (int k = 0; k < GROUP; k++)
    error[k] = v_sub(v_load(values + k * VL), v_mul(v_load(level + k * VL), scale));
}
#endif

/* Decodes the elements of group number `word`, which are signs, or with more than one bit
 * levels. */
FIXED void group_decode(V group[GROUP], const uint32_t *words, size_t word, unsigned width,
                        V scale) {
  if (width == 1)
    group_apply_signs(words[word], scale, group);
  else
    group_decode_levels(group, words + width * word, width, scale);
}

/* Decodes a group of levels whose width is not constant. Levels are rare, so callers are not
 * compiled for every width. */
__attribute__((noinline)) static void group_decode_levels_any_width(V group[GROUP],
                                                                    const uint32_t *fields,
                                                                    unsigned width, float scale) {
  if (width == 2)
    group_decode_levels(group, fields, 2, v_set(scale));
  else if (width == 4)
    group_decode_levels(group, fields, 4, v_set(scale));
  else
    group_decode_levels(group, fields, 8, v_set(scale));
}

FIXED void group_decode_any_width(V group[GROUP], const uint32_t *words, size_t word,
                                  unsigned width, float scale) {
  if (width == 1)
    group_apply_signs(words[word], v_set(scale), group);
  else
    group_decode_levels_any_width(group, words + width * word, width, scale);
}

/* Quantises a run. The code of the value 0 is 0 in every width, but the error of the value 0 may
 * not be 0. */
FIXED void quantise_run(const struct ob_quantise_run *all, unsigned width) {
  const struct ob_quantise_run copy = *all, *const run = &copy;
  const V inverse = v_set(ob_inverse_scale(run->scale)), scale = v_set(run->scale);
  V error[GROUP];
  for (size_t i = run->first; i < run->count; i += OB_LANES) {
    group_quantise(run->values + i, width, inverse, scale, error,
                   run->fields + i / OB_LANES * width);
    if (run->count - i < OB_LANES)
      group_clear_from(error, run->count - i);
    for (int k = 0; k < GROUP; k++)
      if (run->stream)
        v_stream(run->residual_out + i + k * VL, error[k]);
      else
        v_store(run->residual_out + i + k * VL, error[k]);
  }
}

static void codec_quantise(const struct ob_quantise_run *run) {
  if (run->width == 2)
    quantise_run(run, 2);
  else if (run->width == 4)
    quantise_run(run, 4);
  else
    quantise_run(run, 8);
}

/* Returns the largest magnitude. The bits of magnitudes, read as integers, have the same order as
 * the magnitudes, and those of a NaN are above all others. */
static float codec_largest(const float *values, size_t count) {
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
