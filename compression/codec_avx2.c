/* The codec for x86-64 processors with AVX2 and F16C. The compiler may use these instructions in
 * the whole file: its functions may only be called if ob_codec_usable returns true. */
#if defined(__x86_64__)

#include <immintrin.h>

#include "compression/codec.h"

/* Functions on vectors that codec_template.h needs, with AVX2 and F16C. */
#define VL 8
typedef __m256 V;

static inline V v_set(float value) { return _mm256_set1_ps(value); }
static inline V v_load(const float *from) { return _mm256_loadu_ps(from); }
static inline void v_store(float *to, V value) { _mm256_storeu_ps(to, value); }
static inline void v_stream(float *to, V value) { _mm256_stream_ps(to, value); }
static inline V v_add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V sign_bits(void) { return _mm256_set1_ps(-0.0f); }
static inline V v_abs(V a) { return _mm256_andnot_ps(sign_bits(), a); }

static inline V v_smaller(V a, V b) { return _mm256_min_ps(a, b); }
static inline V v_larger(V a, V b) {
  return _mm256_castsi256_ps(
      _mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(v_abs(b))));
}

static inline V v_if_zero(V a, V yes, V no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ));
}

static inline V v_root_guess(V a) {
  __m256i half = _mm256_srli_epi32(_mm256_castps_si256(a), 1);
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(OB_ROOT_GUESS), half));
}

static inline V v_with_sign(V magnitude, V signs) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(signs, sign_bits()));
}

static inline V v_load_bfloat16(const uint16_t *from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline V v_load_float16(const uint16_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

/* Stores bfloat16 values as ob_to_bfloat16 does: rounds to nearest, ties to even, in integers, and
 * converts NaN separately. */
static inline void v_store_bfloat16(uint16_t *to, V value) {
  __m256i bits = _mm256_castps_si256(value), upper = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), quiet, nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(packed));
}

/* Bounds values to the range of float16. The minimum and maximum instructions return their second
 * operand if one of the two is a NaN, so NaN stays NaN. */
static inline V v_bound_float16(V value) {
  const V max = _mm256_set1_ps(OB_FLOAT16_MAX), min = _mm256_set1_ps(-OB_FLOAT16_MAX);
  return _mm256_min_ps(max, _mm256_max_ps(min, value));
}

static inline void v_store_moment(uint16_t *to, V moment, V chance, bool stream) {
  __m256i low = _mm256_and_si256(_mm256_castps_si256(chance), _mm256_set1_epi32(0xffff));
  __m256i sum = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(moment), low), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(sum, sum), 0x08);
  if (stream)
    _mm_stream_si128((__m128i *)(void *)to, _mm256_castsi256_si128(packed));
  else
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(packed));
}

static inline void v_store_float16(uint16_t *to, V value) {
  _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

static inline uint32_t group_pack_signs(const V group[4]) {
  return (uint32_t)_mm256_movemask_ps(group[0]) | (uint32_t)_mm256_movemask_ps(group[1]) << 8 |
         (uint32_t)_mm256_movemask_ps(group[2]) << 16 |
         (uint32_t)_mm256_movemask_ps(group[3]) << 24;
}

/* Sets the signs of a group: in lane i the bit of element i is shifted to the position of the
 * sign. */
static inline void group_apply_signs(uint32_t word, V magnitude, V group[4]) {
  const __m256i all = _mm256_set1_epi32((int)word);
  for (int k = 0; k < 4; k++) {
    const int high = 31 - 8 * k;
    const __m256i shift = _mm256_setr_epi32(high, high - 1, high - 2, high - 3, high - 4, high - 5,
                                            high - 6, high - 7);
    group[k] = v_with_sign(magnitude, _mm256_castsi256_ps(_mm256_sllv_epi32(all, shift)));
  }
}

/* Decodes levels of 8 bits: the sign of the code, the bits 0111 and the rest of the code are the
 * upper 12 bits of the float. */
#define VECTOR_LEVELS
static inline V decode_byte(__m256i code) {
  const __m256i upper = _mm256_slli_epi32(code, 20),
                own = _mm256_and_si256(upper, _mm256_set1_epi32(127 << 20)),
                signed_own = _mm256_and_si256(upper, _mm256_set1_epi32((int)0x87ffffff)),
                level = _mm256_or_si256(signed_own, _mm256_set1_epi32(112 << 23));
  return _mm256_castsi256_ps(_mm256_sign_epi32(level, own)); /* 0 in lanes where `own` is 0 */
}

/* Returns the levels of 2 bits times the scale, as a table that is indexed by the code in the low
 * bits of a lane. */
static inline V level_table(V scale) {
  return _mm256_mul_ps(_mm256_setr_ps(0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f), scale);
}

static inline void group_decode_levels(V group[4], const uint32_t *fields, unsigned width,
                                       V scale) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i at = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)width));
  const V table = level_table(scale);
  for (int k = 0; k < 4; k++) {
    if (width == 8) {
      const void *from = fields + 2 * k;
      const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
      group[k] = _mm256_mul_ps(decode_byte(codes), scale);
    } else if (width == 4) {
      const __m256i up = _mm256_sub_epi32(_mm256_set1_epi32(28), at),
                    high = _mm256_sllv_epi32(_mm256_set1_epi32((int)fields[k]), up);
      group[k] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(high, 28)), scale);
    } else {
      const __m256i down = _mm256_add_epi32(at, _mm256_set1_epi32(k % 2 * 16));
      group[k] = _mm256_permutevar_ps(
          table, _mm256_srlv_epi32(_mm256_set1_epi32((int)fields[k / 2]), down));
    }
  }
}

/* Returns the lower byte of each 16-bit half of the lanes, in the order of the elements; larger
 * numbers saturate. */
static inline __m256i select_low_bytes(__m256i low, __m256i high) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}

/* Packs the low `width` bits of each lane, one code after the other. */
static inline void pack_codes(const __m256i code[4], unsigned width, uint32_t *fields) {
  const __m256i mask = _mm256_set1_epi32((1 << width) - 1);
  __m256i one[4];
  for (int k = 0; k < 4; k++)
    one[k] = _mm256_and_si256(code[k], mask);
  const __m256i bytes =
      select_low_bytes(_mm256_packus_epi32(one[0], one[1]), _mm256_packus_epi32(one[2], one[3]));
  const __m256i pairs =
      _mm256_maddubs_epi16(bytes, _mm256_set1_epi16((short)(1 << (8 + width) | 1)));
  __m256i packed = _mm256_packus_epi16(pairs, pairs);
  if (width == 2) {
    packed = _mm256_maddubs_epi16(packed, _mm256_set1_epi16(0x1001));
    packed = _mm256_packus_epi16(packed, packed);
    fields[0] = (uint32_t)_mm256_extract_epi32(packed, 0);
    fields[1] = (uint32_t)_mm256_extract_epi32(packed, 4);
    return;
  }
  packed = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128((__m128i *)(void *)fields, _mm256_castsi256_si128(packed));
}

/* Computes ob_encode_level for 8-bit codes: returns the lower 7 bits of the codes, without the sign
 * bit, and sets `level` to the levels of the codes. */
static inline __m256i quantise_ratio(V ratio, V *level) {
  const __m256i bits = _mm256_castps_si256(ratio), above = _mm256_castps_si256(v_abs(ratio)),
                rounded = _mm256_add_epi32(above, _mm256_set1_epi32(1 << 19)),
                bound = _mm256_min_epu32(rounded, _mm256_set1_epi32(0x3ff << 20)),
                some = _mm256_cmpgt_epi32(bound, _mm256_set1_epi32((0x381 << 20) - 1)),
                code = _mm256_srli_epi32(_mm256_and_si256(bound, some), 20),
                sign = _mm256_and_si256(_mm256_slli_epi32(some, 31), bits);
  *level = _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(code, 20), sign));
  return code;
}

/* Packs codes of 8 bits. Their signs come from the ratios, which are saturated to bytes of the same
 * sign. */
static inline void pack_bytes(const __m256i code[4], const V ratio[4], uint32_t *fields) {
  const __m256i *bits = (const __m256i *)(const void *)ratio, low = _mm256_set1_epi16(127),
                signs = _mm256_packs_epi16(_mm256_packs_epi32(bits[0], bits[1]),
                                           _mm256_packs_epi32(bits[2], bits[3])),
                first = _mm256_and_si256(_mm256_packs_epi32(code[0], code[1]), low),
                second = _mm256_and_si256(_mm256_packs_epi32(code[2], code[3]), low),
                minus = _mm256_and_si256(signs, _mm256_set1_epi8((char)-128)),
                order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7),
                all = _mm256_or_si256(_mm256_packus_epi16(first, second), minus);
  _mm256_storeu_si256((__m256i *)(void *)fields, _mm256_permutevar8x32_epi32(all, order));
}

static inline void group_quantise(const float *values, unsigned width, V inverse, V scale,
                                  V error[4], uint32_t *fields) {
  const V table = level_table(scale), rounder = _mm256_set1_ps(OB_ROUNDER);
  const __m256i zero = _mm256_castps_si256(rounder),
                min = _mm256_add_epi32(zero, _mm256_set1_epi32(width == 2 ? -2 : -7)),
                max = _mm256_add_epi32(zero, _mm256_set1_epi32(width == 2 ? 1 : 7));
  __m256i code[4];
  V ratio[4];
  for (int k = 0; k < 4; k++) {
    const V value = v_load(values + 8 * k);
    V level;
    ratio[k] = _mm256_mul_ps(value, inverse);
    if (width == 8) {
      code[k] = quantise_ratio(ratio[k], &level);
      error[k] = _mm256_sub_ps(value, _mm256_mul_ps(level, scale));
      continue;
    }
    const V offset = width == 2 ? _mm256_sub_ps(ratio[k], _mm256_set1_ps(0.5f)) : ratio[k];
    code[k] = _mm256_castps_si256(_mm256_add_ps(offset, rounder));
    code[k] = _mm256_min_epi32(_mm256_max_epi32(code[k], min), max);
    level = width == 2 ? _mm256_permutevar_ps(table, code[k])
                       : _mm256_mul_ps(_mm256_sub_ps(_mm256_castsi256_ps(code[k]), rounder), scale);
    error[k] = _mm256_sub_ps(value, level);
  }
  if (width == 8)
    pack_bytes(code, ratio, fields);
  else
    pack_codes(code, width, fields);
}

#define CODEC      ob_codec_avx2
#define CODEC_NAME "avx2"
#include "compression/codec_template.h"

#else
typedef int ob_no_avx2_here; /* ISO C wants a declaration in every file */
#endif
