/*
 * make_float4 and its like.
 */
#ifndef EMULATION_VECTOR_FUNCTIONS_H
#define EMULATION_VECTOR_FUNCTIONS_H

#include "vector_types.h"

#define EMULATION_MAKE2(vector, element)                                                           \
  static inline vector make_##vector(element x, element y) { return vector{x, y}; }
#define EMULATION_MAKE4(vector, element)                                                           \
  static inline vector make_##vector(element x, element y, element z, element w) {                 \
    return vector{x, y, z, w};                                                                     \
  }

EMULATION_MAKE2(uchar2, unsigned char)
EMULATION_MAKE4(uchar4, unsigned char)
EMULATION_MAKE2(ushort2, unsigned short)
EMULATION_MAKE4(ushort4, unsigned short)
EMULATION_MAKE2(int2, int)
EMULATION_MAKE4(int4, int)
EMULATION_MAKE2(uint2, unsigned int)
EMULATION_MAKE4(uint4, unsigned int)
EMULATION_MAKE2(float2, float)
EMULATION_MAKE4(float4, float)
EMULATION_MAKE2(double2, double)
EMULATION_MAKE2(longlong2, long long)
EMULATION_MAKE2(ulonglong2, unsigned long long)

static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) {
  return uint3{x, y, z};
}

#endif
