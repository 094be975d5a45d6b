/*
 * Functions for messages of more than one bit an element (levels.h, codec_levels.h): for four
 * elements, and for a tile. A lane's four elements have 4, 2 or 1 bytes of a message, in the order
 * of the fours.
 */
#ifndef OB_CUDA_LEVELS_CUH
#define OB_CUDA_LEVELS_CUH

#include "compression/levels.h"
#include "cuda/location.cuh"

/* --- Four elements */

/* Loads the codes of the four that is `away` fours after the four at element `first`, a multiple of
 * 4. */
template <unsigned width>
static __device__ inline uint32_t load_codes(const uint32_t *fields, unsigned first,
                                             unsigned away = 0) {
  const unsigned four = first / 4;
  if (width == 8)
    return __ldcs(fields + four + away);
  if (width == 4)
    return __ldcs((const uint16_t *)(const void *)fields + four + away);
  return __ldcs((const uint8_t *)(const void *)fields + four + away);
}

template <unsigned width>
static __device__ inline void store_codes(uint32_t *fields, unsigned first, uint32_t codes) {
  if (width == 8)
    fields[first / 4] = codes;
  else if (width == 4)
    ((uint16_t *)(void *)fields)[first / 4] = (uint16_t)codes;
  else
    ((uint8_t *)(void *)fields)[first / 4] = (uint8_t)codes;
}

/* Returns the level of code number j, with the same bits as ob_decode_level
 * (tests/gpu/test_plans.c) but without its conversions, which are slow. With 8 bits, the sign,
 * exponent and mantissa are shifted to their positions in a float, and 112 is added to the exponent
 * by an OR, since its bits are not in use. With fewer bits the code minus the smallest code is
 * written to the low mantissa bits of a power of two; that power minus the smallest code is then
 * subtracted. */
template <unsigned width> static __device__ inline float level_of(uint32_t codes, unsigned j) {
  if (width == 8) {
    const uint32_t moved = (uint32_t)((int32_t)(codes << (24 - 8 * j)) >> 4);
    const float level = ob_float_of((moved & 0x87f00000u) | 0x38000000u);
    return moved & 0x07f00000u ? level : 0;
  }
  if (width == 4) /* 2^23 + 8 + code */
    return ob_float_of((codes >> 4 * j & 15) ^ 0x4b000008u) - 8388616.0f;
  const uint32_t moved = j == 0 ? codes << 1 : codes >> (2 * j - 1); /* 2^22 + 2.5 + code */
  return ob_float_of((moved & 6) ^ 0x4a800005u) - 4194306.0f;
}

/* --- A tile */

/* The number of tiles that a warp keeps in shared memory until the scale of its block is known: all
 * tiles of a block of 2048 elements. Of a longer block the last tiles are in shared memory, and the
 * others in the array of residuals. */
constexpr unsigned resident_tiles = 4, resident_elements = resident_tiles * tile_elements;

/* A block whose values become levels. */
struct level_block {
  unsigned count, end; /* the number of elements; the same in whole words */
  float *residual_out;
  uint32_t *fields;
  float4 *tiles; /* the warp's resident_elements */
};

/* A lane's sums, from which the scale is computed. */
struct level_sums {
  float squares;
  uint32_t largest; /* bits of a magnitude: as integers they have the magnitudes' order */
};

static __device__ inline float4 *tile_at(const struct level_block &run, unsigned first) {
  return run.tiles + first % resident_elements / 4;
}

/* Returns true if the values from `first` on stay in shared memory: no later values overwrite
 * them. */
static __device__ inline bool is_resident(const struct level_block &run, unsigned first) {
  return first + resident_elements >= run.count;
}

/* Stores a tile until the scale is known, and adds it to the sums. */
template <bool whole>
static __device__ inline void keep_tile(const struct level_block &run, unsigned first,
                                        const float (&value)[fours_a_tile][4],
                                        struct level_sums *sums) {
  float4 *tile = tile_at(run, first);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++)
    tile[four_at(k) / 4] = make_float4(value[k][0], value[k][1], value[k][2], value[k][3]);
  if (!is_resident(run, first))
    store_parts<ONEBIT_FLOAT32, whole>(run.residual_out, first, run.end, true, value);
  __syncwarp();
  OB_UNROLL
  for (unsigned w = 0; w < tile_words; w++) {
    const float one = ((const float *)tile)[w * OB_LANES + lane_number()];
    sums->squares += ob_magnitude(one, ONEBIT_SCALE_RMS);
    sums->largest = max(sums->largest, ob_bits_of(one) & ~OB_SIGN_BIT);
  }
}

/* Stores the codes of the stored values, and the residuals. Past the block's end both are zeros. */
template <unsigned width, bool whole>
static __device__ inline void quantise_tile(const struct level_block &run, unsigned first,
                                            float scale) {
  const float inverse = ob_inverse_scale(scale);
  const bool resident = is_resident(run, first);
  OB_UNROLL
  for (unsigned k = 0; k < fours_a_tile; k++) {
    const unsigned at = first + four_at(k);
    const float4 four = tile_at(run, first)[four_at(k) / 4];
    float value[4] = {four.x, four.y, four.z, four.w};
    uint32_t codes = 0;
    if (!whole && at >= run.end)
      continue;
    if (!resident)
      load_values<ONEBIT_FLOAT32, true>(run.residual_out, at, run.end, true, value);
    OB_UNROLL
    for (unsigned j = 0; j < 4; j++) {
      const uint32_t code =
          (uint32_t)ob_encode_level(value[j] * inverse, width) & ((1u << width) - 1);
      const bool there = whole || at + j < run.count;
      value[j] = there ? value[j] - level_of<width>(code, 0) * scale : 0;
      codes |= (there ? code : 0) << j * width;
    }
    store_values<ONEBIT_FLOAT32, true>(run.residual_out, at, run.end, true, value);
    store_codes<width>(run.fields, at, codes);
  }
}

/* --- A block */

static __device__ inline struct level_block make_level_block(
    const struct ob_cuda_residual &residual, uint32_t now, const struct location &location,
    const struct ob_view &out, unsigned width, float4 *tiles) {
  const unsigned count = (unsigned)location.block.count;
  return {count, padded_count(count), values_of(residual, !now, location.block),
          out.words + location.word * width, tiles};
}

/* Sets the scale as quantise_block in blocks.c does, for all lanes. The residual's scale is 0,
 * since residuals are stored as exact errors. */
static __device__ inline float set_level_scale(const struct ob_cuda_plan &plan, uint32_t now,
                                               bool server, const struct location &location,
                                               const struct ob_view &out, unsigned width,
                                               const struct level_sums &sums) {
  const struct ob_cuda_residual &residual = server ? plan.server : plan.worker;
  const float sum = sum_lanes(sums.squares);
  const float largest = ob_float_of(largest_lane(sums.largest));
  float scale = 0;
  if (lane_number() == 0) {
    if (ob_is_finite(sum))
      scale = ob_level_scale(sum, location.block.count, largest, plan.rule, width);
    note_scale(plan.state, ob_is_finite(sum) ? largest : sum, server);
    residual.scales[!now][location.number - residual.first] = 0;
    out.scales[location.index] = scale;
  }
  return __shfl_sync(all_lanes, scale, 0);
}

template <unsigned width>
static __device__ inline void quantise_tiles(const struct level_block &run, float scale) {
  for (unsigned first = 0; first < run.count; first += tile_elements)
    if (first + tile_elements <= run.count)
      quantise_tile<width, true>(run, first, scale);
    else
      quantise_tile<width, false>(run, first, scale);
}

#endif
