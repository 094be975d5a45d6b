/* The vector vocabulary in AVX2 and F16C. */
#include <immintrin.h>

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

/* ob_to_bfloat16: round half to even in integers, and NaN by itself. */
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

/* Of a NaN and a number these two take their second operand. */
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

static inline uint32_t group_signs(const V group[4]) {
  return (uint32_t)_mm256_movemask_ps(group[0]) | (uint32_t)_mm256_movemask_ps(group[1]) << 8 |
         (uint32_t)_mm256_movemask_ps(group[2]) << 16 |
         (uint32_t)_mm256_movemask_ps(group[3]) << 24;
}

/* Lane i shifts its bit of the byte up to the sign. */
static inline void group_signed(uint32_t word, V magnitude, V group[4]) {
  const __m256i all = _mm256_set1_epi32((int)word);
  for (int k = 0; k < 4; k++) {
    const int high = 31 - 8 * k;
    const __m256i shift = _mm256_setr_epi32(high, high - 1, high - 2, high - 3, high - 4, high - 5,
                                            high - 6, high - 7);
    group[k] = v_with_sign(magnitude, _mm256_castsi256_ps(_mm256_sllv_epi32(all, shift)));
  }
}
