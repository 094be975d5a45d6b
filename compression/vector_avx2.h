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

/* Each lane shifts its code to the top, and down again with its sign; of 8 bits, which have a sign
 * of their own, it gets a byte. */
#define VECTOR_FIELDS
static inline void group_unpack(const uint32_t *fields, unsigned width, int32_t code[OB_LANES]) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i at = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)width));
  const __m256i up = _mm256_sub_epi32(_mm256_set1_epi32(32 - (int)width), at);
  for (int k = 0; k < 4; k++) {
    __m256i codes;
    if (width == 8) {
      codes =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(fields + 2 * k)));
    } else {
      const uint32_t word = width == 4 ? fields[k] : fields[k / 2] >> k % 2 * 16;
      codes = _mm256_sllv_epi32(_mm256_set1_epi32((int)word), up);
      codes = _mm256_srai_epi32(codes, 32 - (int)width);
    }
    _mm256_storeu_si256((__m256i *)(void *)(code + 8 * k), codes);
  }
}

/* Whole numbers of 32 bits, of which each is at most 255, as bytes. */
static inline __m256i bytes_of(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i halves = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(halves, order);
}

/* Neighbours are brought together in lanes of twice the size, until a lane has a byte. */
static inline void group_pack(const int32_t code[OB_LANES], unsigned width, uint32_t *fields) {
  const __m256i mask = _mm256_set1_epi32((1 << width) - 1), zero = _mm256_setzero_si256();
  __m256i one[4];
  for (int k = 0; k < 4; k++)
    one[k] =
        _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(code + 8 * k)), mask);
  const __m256i bytes = bytes_of(one[0], one[1], one[2], one[3]);
  if (width == 8) {
    _mm256_storeu_si256((__m256i *)(void *)fields, bytes);
    return;
  }
  const __m256i two = _mm256_or_si256(bytes, _mm256_srli_epi16(bytes, 8 - (int)width));
  if (width == 4) {
    const __m256i low = _mm256_and_si256(two, _mm256_set1_epi16(255));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, zero), 0x08);
    _mm_storeu_si128((__m128i *)(void *)fields, _mm256_castsi256_si128(packed));
    return;
  }
  const __m256i low = _mm256_and_si256(two, _mm256_set1_epi16(15));
  const __m256i four =
      _mm256_and_si256(_mm256_or_si256(low, _mm256_srli_epi32(low, 12)), _mm256_set1_epi32(255));
  _mm_storel_epi64((__m128i *)(void *)fields,
                   _mm256_castsi256_si128(bytes_of(four, zero, zero, zero)));
}
