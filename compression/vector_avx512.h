/* The vector vocabulary in AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>

#define VL 16
typedef __m512 V;

static inline V v_set(float value) { return _mm512_set1_ps(value); }
static inline V v_load(const float *from) { return _mm512_loadu_ps(from); }
static inline void v_store(float *to, V value) { _mm512_storeu_ps(to, value); }
static inline void v_stream(float *to, V value) { _mm512_stream_ps(to, value); }
static inline V v_add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V sign_bits(void) { return _mm512_set1_ps(-0.0f); }
static inline V v_abs(V a) { return _mm512_andnot_ps(sign_bits(), a); }

static inline V v_if_zero(V a, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_EQ_OQ), no, yes);
}

static inline V v_root_guess(V a) {
  __m512i half = _mm512_srli_epi32(_mm512_castps_si512(a), 1);
  return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(OB_ROOT_GUESS), half));
}

static inline V v_with_sign(V magnitude, V signs) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(signs, sign_bits()));
}

static inline V v_load_bfloat16(const uint16_t *from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline V v_load_float16(const uint16_t *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

/* ob_to_bfloat16: round half to even in integers, and NaN by itself. */
static inline void v_store_bfloat16(uint16_t *to, V value) {
  __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  __m512i words =
      _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), nan, upper, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(words));
}

/* Of a NaN and a number these two take their second operand. */
static inline V v_bound_float16(V value) {
  const V max = _mm512_set1_ps(OB_FLOAT16_MAX), min = _mm512_set1_ps(-OB_FLOAT16_MAX);
  return _mm512_min_ps(max, _mm512_max_ps(min, value));
}

static inline void v_store_float16(uint16_t *to, V value) {
  _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

static inline void v_store_moment(uint16_t *to, V moment, V chance, bool stream) {
  __m512i low = _mm512_and_si512(_mm512_castps_si512(chance), _mm512_set1_epi32(0xffff));
  __m512i sum = _mm512_add_epi32(_mm512_castps_si512(moment), low);
  __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
  if (stream)
    _mm256_stream_si256((__m256i *)(void *)to, words);
  else
    _mm256_storeu_si256((__m256i *)(void *)to, words);
}

static inline uint32_t group_signs(const V group[2]) {
  return (uint32_t)_mm512_movepi32_mask(_mm512_castps_si512(group[0])) |
         (uint32_t)_mm512_movepi32_mask(_mm512_castps_si512(group[1])) << 16;
}

/* Lane i shifts its bit of the word up to the sign; magnitude | (shifted & sign bit) is one ternary
 * operation. */
static inline void group_signed(uint32_t word, V magnitude, V group[2]) {
  const __m512i all = _mm512_set1_epi32((int)word), size = _mm512_castps_si512(magnitude);
  const __m512i sign = _mm512_set1_epi32((int)OB_SIGN_BIT);
  const __m512i low =
      _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
  const __m512i high = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_sllv_epi32(all, low), second = _mm512_sllv_epi32(all, high);
  group[0] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(size, first, sign, 0xf8));
  group[1] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(size, second, sign, 0xf8));
}

/* Levels of 2 and 4 bits times the scale, by the code, which is in the low bits of each lane: those
 * that are looked up, whatever is above. */
#define VECTOR_LEVELS
static inline V level_table(unsigned width, V scale) {
  const V two = _mm512_set4_ps(-0.5f, -1.5f, 1.5f, 0.5f),
          four = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm512_mul_ps(width == 2 ? two : four, scale);
}

static inline V level_of(unsigned width, V table, __m512i code) {
  return width == 2 ? _mm512_permutevar_ps(table, code) : _mm512_permutexvar_ps(code, table);
}

/* Of 8 bits: sign, 0111 and the rest of the code are the upper 12 bits of the float. */
static inline V level_of_byte(__m512i code) {
  const __m512i upper = _mm512_slli_epi32(code, 20), no_sign = _mm512_set1_epi32((int)0x87ffffff),
                exponent = _mm512_set1_epi32(112 << 23);
  const __mmask16 some = _mm512_test_epi32_mask(code, _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(
      _mm512_maskz_ternarylogic_epi32(some, upper, no_sign, exponent, 0xea)); /* a & b | c */
}

static inline void group_levels(V group[2], const uint32_t *fields, unsigned width, V scale) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i down = _mm512_and_si512(_mm512_mullo_epi32(lane, _mm512_set1_epi32((int)width)),
                                        _mm512_set1_epi32(31));
  const V table = level_table(width, scale);
  for (int k = 0; k < 2; k++) {
    const void *from = (const uint8_t *)fields + 2 * (int)width * k;
    if (width == 8) {
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
      group[k] = _mm512_mul_ps(level_of_byte(codes), scale);
      continue;
    }
    __m512i words = _mm512_set1_epi32((int)fields[width == 2 ? k : 2 * k]);
    if (width == 4)
      words = _mm512_mask_set1_epi32(words, 0xff00, (int)fields[2 * k + 1]);
    group[k] = level_of(width, table, _mm512_srlv_epi32(words, down));
  }
}

/* The low `width` bits of each lane, one after the other: neighbours are brought together in lanes
 * of twice the size. Where bits of the third choose, the first, else the second: 0xca. */
static inline void pack_codes(const __m512i code[2], unsigned width, uint32_t *fields) {
  __m128i bytes[2];
  for (int k = 0; k < 2; k++) {
    const __m512i next = _mm512_srli_epi64(code[k], 32 - width),
                  own = _mm512_set1_epi32((1 << width) - 1);
    bytes[k] = _mm512_cvtepi64_epi8(_mm512_ternarylogic_epi32(own, code[k], next, 0xca));
  }
  const __m128i all = _mm_unpacklo_epi64(bytes[0], bytes[1]);
  if (width == 4) {
    _mm_storeu_si128((__m128i *)(void *)fields, all);
    return;
  }
  const __m128i low = _mm_and_si128(all, _mm_set1_epi8(15)),
                pairs = _mm_maddubs_epi16(low, _mm_set1_epi16(0x1001));
  _mm_storel_epi64((__m128i *)(void *)fields, _mm_packus_epi16(pairs, pairs));
}

/* ob_code_of, of 8 bits; a code's lower 7 bits are in the byte of its lane, and its level there. */
static inline __m512i code_in_byte(V ratio, V *level) {
  const __m512i bits = _mm512_castps_si512(ratio), sign = _mm512_set1_epi32((int)OB_SIGN_BIT),
                above = _mm512_andnot_si512(sign, bits),
                rounded = _mm512_add_epi32(above, _mm512_set1_epi32(1 << 19)),
                bound = _mm512_min_epu32(rounded, _mm512_set1_epi32(0x3ff << 20));
  const __mmask16 some = _mm512_cmpgt_epu32_mask(bound, _mm512_set1_epi32((0x381 << 20) - 1));
  const __m512i code = _mm512_maskz_srli_epi32(some, bound, 20),
                upper = _mm512_slli_epi32(code, 20);
  *level = _mm512_castsi512_ps(_mm512_maskz_ternarylogic_epi32(some, upper, bits, sign, 0xf8));
  return code;
}

static inline void group_quantise(const float *values, unsigned width, V inverse, V scale,
                                  V error[2], uint32_t *fields) {
  const V table = level_table(width, scale), rounder = _mm512_set1_ps(OB_ROUNDER);
  const __m512i zero = _mm512_castps_si512(rounder),
                min = _mm512_add_epi32(zero, _mm512_set1_epi32(width == 2 ? -2 : -7)),
                max = _mm512_add_epi32(zero, _mm512_set1_epi32(width == 2 ? 1 : 7));
  __m512i code[2];
  for (int k = 0; k < 2; k++) {
    const V value = v_load(values + 16 * k), ratio = _mm512_mul_ps(value, inverse);
    V level;
    if (width == 8) {
      code[k] = code_in_byte(ratio, &level);
      error[k] = _mm512_sub_ps(value, _mm512_mul_ps(level, scale));
      const __m128i bytes = _mm_and_si128(_mm512_cvtepi32_epi8(code[k]), _mm_set1_epi8(127));
      const __mmask16 minus = _mm512_movepi32_mask(_mm512_castps_si512(ratio));
      _mm_storeu_si128((__m128i *)(void *)(fields + 4 * k),
                       _mm_or_si128(bytes, _mm_maskz_set1_epi8(minus, (char)-128)));
      continue;
    }
    const V offset = width == 2 ? _mm512_sub_ps(ratio, _mm512_set1_ps(0.5f)) : ratio;
    code[k] = _mm512_castps_si512(_mm512_add_ps(offset, rounder));
    code[k] = _mm512_min_epi32(_mm512_max_epi32(code[k], min), max);
    error[k] = _mm512_sub_ps(value, level_of(width, table, code[k]));
  }
  if (width < 8)
    pack_codes(code, width, fields);
}
