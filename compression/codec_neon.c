/* The codec for AArch64 processors. */
#if defined(__aarch64__)

#include <arm_neon.h>

#include "compression/codec.h"

/* Functions on vectors that codec_template.h needs, with NEON. */
#define VL 4
typedef float32x4_t V;

static inline V v_set(float value) { return vdupq_n_f32(value); }
static inline V v_load(const float *from) { return vld1q_f32(from); }
static inline void v_store(float *to, V value) { vst1q_f32(to, value); }
static inline void v_stream(float *to, V value) { vst1q_f32(to, value); }
static inline V v_add(V a, V b) { return vaddq_f32(a, b); }
static inline V v_sub(V a, V b) { return vsubq_f32(a, b); }
static inline V v_mul(V a, V b) { return vmulq_f32(a, b); }
static inline V v_abs(V a) { return vabsq_f32(a); }

static inline V v_smaller(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline V v_larger(V a, V b) { return vmaxq_f32(a, vabsq_f32(b)); }

static inline V v_if_zero(V a, V yes, V no) { return vbslq_f32(vceqzq_f32(a), yes, no); }

static inline V v_root_guess(V a) {
  uint32x4_t half = vshrq_n_u32(vreinterpretq_u32_f32(a), 1);
  return vreinterpretq_f32_u32(vsubq_u32(vdupq_n_u32(OB_ROOT_GUESS), half));
}

static inline V set_bits(V magnitude, uint32x4_t bits) {
  return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(magnitude), bits));
}

static inline V v_with_sign(V magnitude, V signs) {
  return set_bits(magnitude, vandq_u32(vreinterpretq_u32_f32(signs), vdupq_n_u32(OB_SIGN_BIT)));
}

static inline V v_load_bfloat16(const uint16_t *from) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
}

static inline V v_load_float16(const uint16_t *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

/* Stores bfloat16 values as ob_to_bfloat16 does: rounds to nearest, ties to even, in integers, and
 * converts NaN separately. */
static inline void v_store_bfloat16(uint16_t *to, V value) {
  uint32x4_t bits = vreinterpretq_u32_f32(value), upper = vshrq_n_u32(bits, 16);
  uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
  uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  uint32x4_t number = vceqq_f32(value, value);
  uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
  vst1_u16(to, vmovn_u32(vbslq_u32(number, vshrq_n_u32(sum, 16), quiet)));
}

/* Bounds values to the range of float16. The minimum and maximum instructions return a NaN if one
 * of the two operands is a NaN. */
static inline V v_bound_float16(V value) {
  const V max = vdupq_n_f32(OB_FLOAT16_MAX);
  return vminq_f32(max, vmaxq_f32(vnegq_f32(max), value));
}

static inline void v_store_moment(uint16_t *to, V moment, V chance, bool stream) {
  uint32x4_t low = vandq_u32(vreinterpretq_u32_f32(chance), vdupq_n_u32(0xffff));
  (void)stream;
  vst1_u16(to, vshrn_n_u32(vaddq_u32(vreinterpretq_u32_f32(moment), low), 16));
}

static inline void v_store_float16(uint16_t *to, V value) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
}

/* Packs the signs of a group into a word. Each lane's sign is moved to the lane's bit in the word;
 * all these bits differ, so the sum of the lanes is the word. */
static inline uint32_t group_pack_signs(const V group[8]) {
  static const int32_t lane[4] = {0, 1, 2, 3};
  const int32x4_t first = vld1q_s32(lane);
  uint32x4_t all = vdupq_n_u32(0);
  for (int k = 0; k < 8; k++) {
    uint32x4_t sign = vshrq_n_u32(vreinterpretq_u32_f32(group[k]), 31);
    all = vorrq_u32(all, vshlq_u32(sign, vaddq_s32(first, vdupq_n_s32(4 * k))));
  }
  return vaddvq_u32(all);
}

static inline void group_apply_signs(uint32_t word, V magnitude, V group[8]) {
  static const int32_t top[4] = {31, 30, 29, 28};
  const int32x4_t first = vld1q_s32(top);
  for (int k = 0; k < 8; k++) {
    uint32x4_t moved = vshlq_u32(vdupq_n_u32(word), vsubq_s32(first, vdupq_n_s32(4 * k)));
    group[k] = set_bits(magnitude, vandq_u32(moved, vdupq_n_u32(OB_SIGN_BIT)));
  }
}

#define CODEC      ob_codec_neon
#define CODEC_NAME "neon"
#include "compression/codec_template.h"

#else
typedef int ob_no_neon_here; /* ISO C wants a declaration in every file */
#endif
