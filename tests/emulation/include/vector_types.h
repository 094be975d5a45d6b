/*
 * CUDA's vector types, with the sizes and alignments of the real ones. C and C++.
 */
#ifndef EMULATION_VECTOR_TYPES_H
#define EMULATION_VECTOR_TYPES_H

#define EMULATION_ALIGNED(bytes) __attribute__((aligned(bytes)))

typedef struct EMULATION_ALIGNED(8) uint2 {
  unsigned int x, y;
} uint2;
typedef struct uint3 {
  unsigned int x, y, z;
} uint3;
typedef struct EMULATION_ALIGNED(16) uint4 {
  unsigned int x, y, z, w;
} uint4;
typedef struct EMULATION_ALIGNED(16) float4 {
  float x, y, z, w;
} float4;

#ifdef __cplusplus
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int width = 1, unsigned int height = 1, unsigned int depth = 1)
      : x(width), y(height), z(depth) {}
  constexpr dim3(uint3 from) : x(from.x), y(from.y), z(from.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return uint4{x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
#else
typedef struct dim3 {
  unsigned int x, y, z;
} dim3;
#endif

#endif
