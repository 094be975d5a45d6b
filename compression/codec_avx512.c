/* The codec for x86-64 processors with AVX-512 (F, BW, DQ, VL). The compiler may use these
 * instructions in the whole file: its functions may only be called if ob_codec_usable returns
 * true. */
#if defined(__x86_64__)

#include <immintrin.h>

#include "compression/codec.h"

/* Functions on vectors that codec_template.h needs, with AVX-512. */
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

static inline V v_smaller(V a, V b) { return _mm512_min_ps(a, b); }
static inline V v_larger(V a, V b) { return _mm512_range_ps(a, b, 0xb); } /* larger |x|, no sign */

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

/* Stores bfloat16 values as ob_to_bfloat16 does: rounds to nearest, ties to even, in integers, and
 * converts NaN separately. */
static inline void v_store_bfloat16(uint16_t *to, V value) {
  __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  __m512i words =
      _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), nan, upper, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtepi32_epi16(words));
}

/* Bounds values to the range of float16. The minimum and maximum instructions return their second
 * operand if one of the two is a NaN, so NaN stays NaN. */
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

static inline uint32_t group_pack_signs(const V group[2]) {
  return (uint32_t)_mm512_movepi32_mask(_mm512_castps_si512(group[0])) |
         (uint32_t)_mm512_movepi32_mask(_mm512_castps_si512(group[1])) << 16;
}

/* Sets the signs of a group: in lane i the bit of element i is shifted to the position of the sign.
 * Then magnitude | (shifted & sign bit) is one ternary operation, which overwrites its first
 * operand. */
static inline void group_apply_signs(uint32_t word, V magnitude, V group[2]) {
  const __m512i all = _mm512_set1_epi32((int)word), size = _mm512_castps_si512(magnitude);
  const __m512i sign = _mm512_set1_epi32((int)OB_SIGN_BIT);
  const __m512i low =
      _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
  const __m512i high = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i first = _mm512_sllv_epi32(all, low), second = _mm512_sllv_epi32(all, high);
  group[0] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(first, size, sign, 0xec));
  group[1] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(second, size, sign, 0xec));
}

/* Returns the levels of 2 or 4 bits times the scale, as a table that is indexed by the code in the
 * low bits of a lane; the higher bits are ignored. */
#define VECTOR_LEVELS
static inline V level_table(unsigned width, V scale) {
  const V two = _mm512_set4_ps(-0.5f, -1.5f, 1.5f, 0.5f),
          four = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm512_mul_ps(width == 2 ? two : four, scale);
}

static inline V look_up_level(unsigned width, V table, __m512i code) {
  return width == 2 ? _mm512_permutevar_ps(table, code) : _mm512_permutexvar_ps(code, table);
}

/* Decodes levels of 8 bits: the sign of the code, the bits 0111 and the rest of the code are the
 * upper 12 bits of the float. */
static inline V decode_byte(__m512i code) {
  const __m512i upper = _mm512_slli_epi32(code, 20), no_sign = _mm512_set1_epi32((int)0x87ffffff),
                exponent = _mm512_set1_epi32(112 << 23);
  const __mmask16 some = _mm512_test_epi32_mask(code, _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(
      _mm512_maskz_ternarylogic_epi32(some, upper, no_sign, exponent, 0xea)); /* a & b | c */
}

static inline void group_decode_levels(V group[2], const uint32_t *fields, unsigned width,
                                       V scale) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i down = _mm512_and_si512(_mm512_mullo_epi32(lane, _mm512_set1_epi32((int)width)),
                                        _mm512_set1_epi32(31));
  const V table = level_table(width, scale);
  for (int k = 0; k < 2; k++) {
    const void *from = (const uint8_t *)fields + 2 * (int)width * k;
    if (width == 8) {
      const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
      group[k] = _mm512_mul_ps(decode_byte(codes), scale);
      continue;
    }
    __m512i words = _mm512_set1_epi32((int)fields[width == 2 ? k : 2 * k]);
    if (width == 4)
      words = _mm512_mask_set1_epi32(words, 0xff00, (int)fields[2 * k + 1]);
    group[k] = look_up_level(width, table, _mm512_srlv_epi32(words, down));
  }
}

/* Returns the lower or the upper 16 bits of each lane of the group, in the order of the lanes. */
static inline __m512i select_halves(const __m512i lanes[2], int upper) {
  static const uint16_t even[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i order = _mm512_loadu_si512(even), odd = _mm512_set1_epi16(1);
  return _mm512_permutex2var_epi16(lanes[0], upper ? _mm512_or_si512(order, odd) : order, lanes[1]);
}

/* Returns the bits of `yes` where the mask's bits are set, and the bits of `no` elsewhere. */
static inline __m512i select_bits(int mask, __m512i yes, __m512i no) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), yes, no, 0xca);
}

/* Packs the low `width` bits of each lane, one code after the other: neighbouring codes are joined
 * in lanes of twice the size. */
static inline void pack_codes(const __m512i code[2], unsigned width, uint32_t *fields) {
  const __m512i words = select_halves(code, 0), next = _mm512_srli_epi32(words, 16 - width),
                pairs = select_bits((1 << width) - 1, words, next);
  if (width == 4)
    _mm_storeu_si128((__m128i *)(void *)fields, _mm512_cvtepi32_epi8(pairs));
  else
    _mm_storel_epi64((__m128i *)(void *)fields,
                     _mm512_cvtepi64_epi8(select_bits(15, pairs, _mm512_srli_epi64(pairs, 28))));
}

/* Packs levels of 8 bits into bytes. The sign, exponent and mantissa of each are in the upper half
 * of a float whose exponent is that of the level. */
static inline void pack_bytes(const __m512i level[2], uint32_t *fields) {
  const __m512i words = select_halves(level, 1),
                bytes = select_bits(0x00800080, _mm512_srli_epi16(words, 8),
                                    _mm512_srli_epi16(words, 4));
  _mm256_storeu_si256((__m256i *)(void *)fields, _mm512_cvtepi16_epi8(bytes));
}

/* Quantises to 8 bits as ob_encode_level does, but returns the level as a float, with the sign of
 * the ratio. Sets `some` in lanes whose level is not 0. */
static inline __m512i quantise_ratio(V ratio, __mmask16 *some) {
  const V smallest = _mm512_castsi512_ps(_mm512_set1_epi32((0x381 << 20) - (1 << 19))),
          size = _mm512_range_ps(ratio, _mm512_set1_ps(1.875f), 0xa); /* 0xa: the smaller |x| */
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(size), _mm512_set1_epi32(1 << 19));
  *some = _mm512_cmp_ps_mask(size, smallest, _CMP_GE_OQ);
  return _mm512_ternarylogic_epi32(
      _mm512_maskz_and_epi32(*some, rounded, _mm512_set1_epi32(0x7ff00000)),
      _mm512_castps_si512(ratio), _mm512_set1_epi32((int)OB_SIGN_BIT), 0xf8); /* a | b & c */
}

static inline void group_quantise(const float *values, unsigned width, V inverse, V scale,
                                  V error[2], uint32_t *fields) {
  const V table = level_table(width, scale), rounder = _mm512_set1_ps(OB_ROUNDER),
          largest = _mm512_set1_ps(ob_largest_level(width));
  __m512i code[2];
  for (int k = 0; k < 2; k++) {
    const V value = v_load(values + 16 * k), ratio = _mm512_mul_ps(value, inverse);
    if (width == 8) {
      __mmask16 some;
      code[k] = quantise_ratio(ratio, &some);
      const V level = _mm512_mul_ps(_mm512_castsi512_ps(code[k]), scale);
      error[k] = _mm512_mask_sub_ps(value, some, value, level);
      continue;
    }
    const V bound = _mm512_range_ps(ratio, largest, 2), /* the smaller magnitude, with its sign */
        offset = width == 2 ? _mm512_sub_ps(bound, _mm512_set1_ps(0.5f)) : bound;
    code[k] = _mm512_castps_si512(_mm512_add_ps(offset, rounder));
    error[k] = _mm512_sub_ps(value, look_up_level(width, table, code[k]));
  }
  if (width == 8)
    pack_bytes(code, fields);
  else
    pack_codes(code, width, fields);
}

#define CODEC      ob_codec_avx512
#define CODEC_NAME "avx512"
#include "compression/codec_template.h"

#else
typedef int ob_no_avx512_here; /* ISO C wants a declaration in every file */
#endif
