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

/* Each lane gets the word that has its code, shifts it up to the top, and down again with its sign;
 * of 8 bits, which have a sign of their own, a byte. */
#define VECTOR_FIELDS
static inline void group_unpack(const uint32_t *fields, unsigned width, int32_t code[OB_LANES]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)width));
  const __m512i word = _mm512_srli_epi32(at, 5),
                up = _mm512_sub_epi32(_mm512_set1_epi32(32 - (int)width),
                                      _mm512_and_si512(at, _mm512_set1_epi32(31)));
  for (int k = 0; k < 2; k++) {
    const void *from = (const uint8_t *)fields + 2 * (int)width * k;
    __m512i codes;
    if (width == 8) {
      codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    } else {
      const __m128i loaded =
          width == 4 ? _mm_loadl_epi64((const __m128i *)from) : _mm_cvtsi32_si128((int)fields[k]);
      codes = _mm512_permutexvar_epi32(word, _mm512_castsi128_si512(loaded));
      codes = _mm512_srai_epi32(_mm512_sllv_epi32(codes, up), 32 - width);
    }
    _mm512_storeu_si512(code + 16 * k, codes);
  }
}

/* Neighbours are brought together in lanes of twice the size, until a lane has a byte. */
static inline void group_pack(const int32_t code[OB_LANES], unsigned width, uint32_t *fields) {
  for (int k = 0; k < 2; k++) {
    void *to = (uint8_t *)fields + 2 * (int)width * k;
    const __m512i mask = _mm512_set1_epi32((1 << width) - 1),
                  one = _mm512_and_si512(_mm512_loadu_si512(code + 16 * k), mask);
    if (width == 8) {
      _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(one));
      continue;
    }
    const __m512i two = _mm512_or_si512(one, _mm512_srli_epi64(one, 32 - width));
    const __m128i pairs = _mm512_cvtepi64_epi16(two);
    if (width == 4) {
      _mm_storel_epi64((__m128i *)to, _mm_cvtepi16_epi8(pairs));
      continue;
    }
    const __m128i low = _mm_and_si128(pairs, _mm_set1_epi16(15));
    fields[k] =
        (uint32_t)_mm_cvtsi128_si32(_mm_cvtepi32_epi8(_mm_or_si128(low, _mm_srli_epi32(low, 12))));
  }
}
