/*
 * NCCL's reductions. NCCL rounds in an order of its own; this code adds in the order of the ranks,
 * 16-bit floats in float32.
 */
#include <algorithm>

#include "compression/numerics.h"
#include "emulation_device.h"
#include "nccl_meeting.h"

namespace emulation {

namespace {

/* Reads and writes an element, and names the type of its arithmetic. */
template <typename T> struct element {
  using number = T;
  static T load(const void *from, size_t i) { return static_cast<const T *>(from)[i]; }
  static void store(void *to, size_t i, T value) { static_cast<T *>(to)[i] = value; }
};
template <onebit_dtype_t dtype> struct narrow {
  using number = float;
  static float load(const void *from, size_t i) { return ob_load(from, i, dtype); }
  static void store(void *to, size_t i, float value) { ob_store(to, i, dtype, value); }
};

template <typename T> T combine(T a, T b, ncclRedOp_t reduction) {
  switch (reduction) {
  case ncclProd:
    return static_cast<T>(a * b);
  case ncclMax:
    return std::max(a, b);
  case ncclMin:
    return std::min(a, b);
  default:
    return static_cast<T>(a + b);
  }
}

template <typename Element>
void reduce_as(void *to, const std::vector<const void *> &from, size_t count,
               ncclRedOp_t reduction) {
  using number = typename Element::number;
  for (size_t i = 0; i < count; i++) {
    number value = Element::load(from[0], i);
    for (size_t rank = 1; rank < from.size(); rank++)
      value = combine(value, Element::load(from[rank], i), reduction);
    if (reduction == ncclAvg)
      value = static_cast<number>(value / static_cast<number>(from.size()));
    Element::store(to, i, value);
  }
}

} // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32:
    return 4;
  default:
    return 8;
  }
}

void reduce(void *to, const std::vector<const void *> &from, size_t count, ncclDataType_t type,
            ncclRedOp_t reduction) {
  switch (type) {
  case ncclInt8:
    return reduce_as<element<int8_t>>(to, from, count, reduction);
  case ncclUint8:
    return reduce_as<element<uint8_t>>(to, from, count, reduction);
  case ncclInt32:
    return reduce_as<element<int32_t>>(to, from, count, reduction);
  case ncclUint32:
    return reduce_as<element<uint32_t>>(to, from, count, reduction);
  case ncclInt64:
    return reduce_as<element<int64_t>>(to, from, count, reduction);
  case ncclUint64:
    return reduce_as<element<uint64_t>>(to, from, count, reduction);
  case ncclFloat16:
    return reduce_as<narrow<ONEBIT_FLOAT16>>(to, from, count, reduction);
  case ncclBfloat16:
    return reduce_as<narrow<ONEBIT_BFLOAT16>>(to, from, count, reduction);
  case ncclFloat32:
    return reduce_as<element<float>>(to, from, count, reduction);
  case ncclFloat64:
    return reduce_as<element<double>>(to, from, count, reduction);
  }
}

} // namespace emulation
