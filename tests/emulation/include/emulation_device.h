/*
 * The device side of the emulation: qualifiers, built-in variables, barriers, warp collectives,
 * atomics.
 */
#ifndef EMULATION_DEVICE_H
#define EMULATION_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
/* The threads of a CTA are fibers of one OS thread, whose variables are their shared memory. */
#define __shared__ static thread_local

extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;

namespace emulation {

enum class collective { sync, ballot, shuffle };

/* Ends the process with this message, for undefined behaviour of CUDA and hangs. */
[[noreturn]] __attribute__((format(printf, 1, 2))) void fatal(const char *words, ...);

/* Waits for the lanes of `mask` and returns the calling lane's result. For a shuffle the result is
 * the value of lane `source`. */
uint64_t wait_for_warp(collective kind, unsigned mask, uint64_t value, unsigned source);
void wait_for_cta();
unsigned lane();

/* T, as the type of a parameter from which the compiler does not deduce T. The argument is
 * converted to T. It permits atomicAdd(&unsigned_sum, 1). */
template <typename T> using same = std::common_type_t<T>;

template <typename To, typename From> To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T> T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what a shuffle moves has 4 or 8 bytes");
  uint64_t carried = 0;
  memcpy(&carried, &value, sizeof value);
  carried = wait_for_warp(collective::shuffle, mask, carried, source);
  memcpy(&value, &carried, sizeof value);
  return value;
}

/* Checks the alignment of a vector access. The hardware needs an address that is a multiple of the
 * access size. */
template <typename T> T *aligned(T *address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T))
    fatal("misaligned access: %zu bytes at %p", sizeof(T), (const void *)address);
  return address;
}

template <typename T, typename Change> T exchange(T *address, Change change) {
  T old = __atomic_load_n(aligned(address), __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, change(old), false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}

} // namespace emulation

inline void __syncthreads() { emulation::wait_for_cta(); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::wait_for_warp(emulation::collective::sync, mask, 0, 0);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return (unsigned)emulation::wait_for_warp(emulation::collective::ballot, mask, predicate != 0, 0);
}

template <typename T> T __shfl_sync(unsigned mask, T value, int source) {
  return emulation::shuffle(mask, value, (unsigned)source % 32);
}
/* A lane gets its own value if lane + delta is past the last lane. */
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  unsigned lane = emulation::lane();
  return emulation::shuffle(mask, value, lane + delta < 32 ? lane + delta : lane);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulation::shuffle(mask, value, (emulation::lane() ^ (unsigned)lanes) % 32);
}

template <typename T> T atomicAdd(T *address, emulation::same<T> value) {
  return __atomic_fetch_add(emulation::aligned(address), value, __ATOMIC_RELAXED);
}
template <typename T> T atomicOr(T *address, emulation::same<T> value) {
  return __atomic_fetch_or(emulation::aligned(address), value, __ATOMIC_RELAXED);
}
template <typename T> T atomicExch(T *address, emulation::same<T> value) {
  return emulation::exchange(address, [value](T) { return value; });
}
template <typename T>
T atomicCAS(T *address, emulation::same<T> expected, emulation::same<T> value) {
  return emulation::exchange(address, [=](T old) { return old == expected ? value : old; });
}

/* Programmatic dependent launch. Kernels run one after the other here. A kernel that is launched to
 * start early ends the process unless all of its threads call cudaGridDependencySynchronize. */
void cudaGridDependencySynchronize();
inline void cudaTriggerProgrammaticLaunchCompletion() {}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline int __ffs(int value) { return __builtin_ffs(value); }

/* Loads and stores with cache hints. They check that the address is aligned to the size of the
 * access. __ldg is not provided, since a kernel that is launched early could use it to read data
 * that the previous kernel has not written yet. */
template <typename T> T __ldcs(const T *address) { return *emulation::aligned(address); }
template <typename T> T __ldcg(const T *address) { return *emulation::aligned(address); }
template <typename T> void __stcs(T *address, T value) { *emulation::aligned(address) = value; }

inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

#endif
