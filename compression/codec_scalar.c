/* The portable codec. */
#include "compression/codec.h"

/* Functions on vectors that codec_template.h needs, in portable C: a vector is one float, and a
 * group is an array, whose loops the compiler may vectorise. */
#define VL 1
typedef float V;

static inline V v_set(float value) { return value; }
static inline V v_load(const float *from) { return *from; }
static inline void v_store(float *to, V value) { *to = value; }
static inline void v_stream(float *to, V value) { *to = value; }
static inline V v_add(V a, V b) { return a + b; }
static inline V v_sub(V a, V b) { return a - b; }
static inline V v_mul(V a, V b) { return a * b; }
static inline V v_if_zero(V a, V yes, V no) { return ob_select(a == 0, yes, no); }
static inline V v_root_guess(V a) { return ob_root_guess(a); }
static inline V v_abs(V a) { return ob_float_of(ob_bits_of(a) & ~OB_SIGN_BIT); }

static inline V v_smaller(V a, V b) { return a < b ? a : b; }
static inline V v_larger(V a, V b) { return v_abs(b) > a ? v_abs(b) : a; }

static inline V v_with_sign(V magnitude, V signs) {
  return ob_float_of(ob_bits_of(magnitude) | (ob_bits_of(signs) & OB_SIGN_BIT));
}

static inline V v_load_bfloat16(const uint16_t *from) { return ob_from_bfloat16(*from); }
static inline V v_load_float16(const uint16_t *from) { return ob_from_float16(*from); }
static inline V v_bound_float16(V value) { return ob_bound_float16(value); }
static inline void v_store_bfloat16(uint16_t *to, V value) { *to = ob_to_bfloat16(value); }
static inline void v_store_float16(uint16_t *to, V value) { *to = ob_to_float16(value); }

static inline void v_store_moment(uint16_t *to, V moment, V chance, bool stream) {
  (void)stream;
  *to = ob_moment_round(moment, chance);
}

/* Packs eight bytes, each 0 or 1, into eight bits: the multiplication moves byte i to bit 56 + i,
 * and no addition carries. */
static inline uint32_t pack_bits(const uint8_t bytes[8]) {
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) /* one load on little-endian machines */
    word |= (uint64_t)bytes[i] << 8 * i;
  return (uint32_t)(word * 0x0102040810204080u >> 56);
}

static inline uint32_t group_pack_signs(const V group[OB_LANES]) {
  uint8_t negative[OB_LANES];
  for (int i = 0; i < OB_LANES; i++)
    negative[i] = (uint8_t)(ob_bits_of(group[i]) >> 31);
  return pack_bits(negative) | pack_bits(negative + 8) << 8 | pack_bits(negative + 16) << 16 |
         pack_bits(negative + 24) << 24;
}

/* Sets signs four elements at a time, by a table that is indexed by their bits: few targets of
 * portable code can shift each lane by its own amount. */
static inline void group_apply_signs(uint32_t word, V magnitude, V group[OB_LANES]) {
#define ROW(bits)                                                                                  \
  { (bits & 1u) << 31, (bits & 2u) << 30, (bits & 4u) << 29, (bits & 8u) << 28 }
  static const uint32_t signs[16][4] = {ROW(0),  ROW(1),  ROW(2),  ROW(3), ROW(4),  ROW(5),
                                        ROW(6),  ROW(7),  ROW(8),  ROW(9), ROW(10), ROW(11),
                                        ROW(12), ROW(13), ROW(14), ROW(15)};
#undef ROW
  const uint32_t plus = ob_bits_of(magnitude);
  for (int four = 0; four < OB_LANES / 4; four++)
    for (int i = 0; i < 4; i++)
      group[4 * four + i] = ob_float_of(plus | signs[word >> 4 * four & 15][i]);
}

#define CODEC      ob_codec_scalar
#define CODEC_NAME "scalar"
#include "compression/codec_template.h"
