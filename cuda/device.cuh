/*
 * The functions of a warp that works on a block, which all kernels share.
 *
 * One warp processes one block: lane l adds the elements l, l + 32, ... in this order, and the
 * lanes are then added by halving, which is the sum that numerics.h defines. (CUB's block sum
 * promises no order of additions, and float atomics have none.)
 *
 * A tile is 512 elements. Lane l has four groups of four elements, called fours, which begin at 4
 * l, 128 + 4 l, 256 + 4 l and 384 + 4 l: an access has 16 bytes, or 8 with types of 16 bits. All
 * loads of a tile come before the first use, so a warp that reads two float32 arrays has 4 KiB in
 * flight. An H200 needs about 25 KiB in flight on each multiprocessor (4.8 TB/s times 0.7 us, over
 * 132); 24 resident warps may have 96 KiB. For the sum, values pass through a tile in shared
 * memory, the warp's own, where lane l finds element l of each word.
 *
 * Data that a call reads or writes once is marked as such for the caches (__ldcs, __stcs).
 */
#ifndef OB_CUDA_DEVICE_CUH
#define OB_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>

#include "compression/codec.h"
#include "cuda/kernels.h"

/* Arrays in registers need every index known when compiling. */
#ifdef __CUDACC__
#define OB_UNROLL _Pragma("unroll")
#else
#define OB_UNROLL
#endif

constexpr unsigned warps_a_block = 4, threads_a_block = warps_a_block * OB_LANES;
/* Thread blocks on a multiprocessor at once: 24 warps with 80 registers per thread, enough for all
 * loads of a tile. */
constexpr unsigned blocks_at_once = 6;
constexpr unsigned fours_a_tile = 4; /* the fours of a tile that a lane has */
constexpr unsigned tile_elements = fours_a_tile * 4 * OB_LANES, tile_words = 16;
constexpr unsigned all_lanes = 0xffffffffu;

/* --- Launching */

/* The host finds the module of this file's kernels by the address of this kernel. */
static __global__ void module_kernel() {}

static const struct module_of_file {
  module_of_file() { ob_cuda_add_module((const void *)module_kernel); }
} module_of_file;

/* The first statement of a kernel that may be launched early. Its thread blocks may start before
 * the kernel ahead of it on the stream has ended, and wait here until that kernel has ended and its
 * writes are visible. That kernel has waited in the same way, so all kernels before it have ended
 * too. The next kernel may start when the last block of this kernel has started: then no block of
 * this kernel waits for a multiprocessor. Code for older devices is launched in turn and waits for
 * nothing here. */
static __device__ inline void await_kernels_ahead() {
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* Launches a kernel. `early`: it calls await_kernels_ahead, and was compiled for devices that
 * support that. */
template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_with_overlap(bool early, void (*kernel)(Parameters...),
                                              dim3 blocks, unsigned threads, cudaStream_t stream,
                                              const Arguments &...arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_grid(void (*kernel)(Parameters...), dim3 blocks, unsigned threads,
                                      cudaStream_t stream, const Arguments &...arguments) {
  return launch_with_overlap(false, kernel, blocks, threads, stream, arguments...);
}

template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_one_warp(void (*kernel)(Parameters...), cudaStream_t stream,
                                          const Arguments &...arguments) {
  return launch_grid(kernel, dim3(1), OB_LANES, stream, arguments...);
}

/* Launches one warp for each of `count` items in each of `messages` messages. cudaLaunchKernelEx
 * replaces the syntax <<<...>>>, so that a launch is an ordinary function call. */
template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_warps(bool early, void (*kernel)(Parameters...), size_t count,
                                       size_t messages, cudaStream_t stream,
                                       const Arguments &...arguments) {
  const size_t blocks = (count + warps_a_block - 1) / warps_a_block;
  if (blocks == 0 || messages == 0)
    return cudaSuccess;
  if (blocks > INT_MAX || messages > USHRT_MAX) /* the limits of a grid */
    return cudaErrorInvalidConfiguration;
  return launch_with_overlap(early, kernel, dim3((unsigned)blocks, (unsigned)messages),
                             threads_a_block, stream, arguments...);
}

template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_kernel(void (*kernel)(Parameters...), size_t count,
                                        size_t messages, cudaStream_t stream,
                                        const Arguments &...arguments) {
  return launch_warps(false, kernel, count, messages, stream, arguments...);
}

/* Launches a kernel that calls await_kernels_ahead. */
template <typename... Parameters, typename... Arguments>
static inline cudaError_t launch_early_kernel(void (*kernel)(Parameters...), size_t count,
                                              size_t messages, cudaStream_t stream,
                                              const struct ob_cuda_plan &plan,
                                              const Arguments &...arguments) {
  return launch_warps(plan.early, kernel, count, messages, stream, plan, arguments...);
}

/* Selects a template's kernel by dtype. */
#define KERNEL_OF(dtype, kernel)                                                                   \
  ((dtype) == ONEBIT_FLOAT32    ? kernel<ONEBIT_FLOAT32>                                           \
   : (dtype) == ONEBIT_BFLOAT16 ? kernel<ONEBIT_BFLOAT16>                                          \
                                : kernel<ONEBIT_FLOAT16>)

static __device__ inline unsigned lane_number() { return threadIdx.x % OB_LANES; }

static __device__ inline size_t warp_number() {
  return (size_t)blockIdx.x * warps_a_block + threadIdx.x / OB_LANES;
}

/* --- Elements */

/* part_at returns the position in a tile of the lane's part number k, if a part has `width`
 * elements; four_at returns the position of the lane's group of four number k. */
template <unsigned width> static __device__ inline unsigned part_at(unsigned k) {
  return (k * OB_LANES + lane_number()) * width;
}

static __device__ inline unsigned four_at(unsigned k) { return part_at<4>(k); }

static __device__ inline unsigned padded_count(unsigned count) {
  return (count + OB_LANES - 1) / OB_LANES * OB_LANES;
}

static __device__ inline bool is_aligned(const void *buffer, size_t bytes) {
  return (uintptr_t)buffer % bytes == 0;
}

static __device__ inline void load_raw(const void *from, uint32_t (&raw)[4]) {
  const uint4 all = __ldcs((const uint4 *)from);
  raw[0] = all.x, raw[1] = all.y, raw[2] = all.z, raw[3] = all.w;
}

static __device__ inline void load_raw(const void *from, uint32_t (&raw)[2]) {
  const uint2 both = __ldcs((const uint2 *)from);
  raw[0] = both.x, raw[1] = both.y;
}

static __device__ inline void load_raw(const void *from, uint32_t (&raw)[1]) {
  raw[0] = __ldcs((const uint32_t *)from);
}

static __device__ inline void store_raw(void *to, const uint32_t (&raw)[4]) {
  __stcs((uint4 *)to, make_uint4(raw[0], raw[1], raw[2], raw[3]));
}

static __device__ inline void store_raw(void *to, const uint32_t (&raw)[2]) {
  __stcs((uint2 *)to, make_uint2(raw[0], raw[1]));
}

static __device__ inline void store_raw(void *to, const uint32_t (&raw)[1]) {
  __stcs((uint32_t *)to, raw[0]);
}

/* Stores 16 bytes in shared memory. */
static __device__ inline void store_raw_shared(void *to, const uint32_t (&raw)[4]) {
  *(uint4 *)to = make_uint4(raw[0], raw[1], raw[2], raw[3]);
}

static __device__ inline void store_raw_shared(void *to, const uint32_t (&raw)[2]) {
  *(uint2 *)to = make_uint2(raw[0], raw[1]);
}

template <onebit_dtype_t dtype> constexpr unsigned size_of = dtype == ONEBIT_FLOAT32 ? 4 : 2;

/* Converts 16 bits to float32 by one instruction. It gives the bits of numerics.h's functions for
 * all numbers and infinities (tests/gpu/test_between.c), and a NaN for a NaN, whose payload may
 * differ. */
template <onebit_dtype_t dtype> static __device__ inline float widen_value(uint16_t value) {
  return dtype == ONEBIT_BFLOAT16 ? ob_from_bfloat16(value) : __half2float(__ushort_as_half(value));
}

/* Converts two float32 values to 16 bits by one instruction; the first one is in the lower half. */
template <onebit_dtype_t dtype>
static __device__ inline uint32_t narrow_pair(float low, float high) {
  uint32_t both;
  if (dtype == ONEBIT_BFLOAT16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&both, &pair, sizeof both);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&both, &pair, sizeof both);
  }
  return both;
}

template <onebit_dtype_t dtype>
static __device__ inline float load_one(const void *buffer, unsigned i) {
  return dtype == ONEBIT_FLOAT32 ? __ldcs(&((const float *)buffer)[i])
                                 : widen_value<dtype>(__ldcs(&((const uint16_t *)buffer)[i]));
}

template <onebit_dtype_t dtype>
static __device__ inline void store_one(void *buffer, unsigned i, float value) {
  if (dtype == ONEBIT_FLOAT32)
    __stcs(&((float *)buffer)[i], value);
  else
    __stcs(&((uint16_t *)buffer)[i], (uint16_t)narrow_pair<dtype>(value, 0));
}

/* Converts loaded words to elements; a word has two elements of 16 bits. */
template <onebit_dtype_t dtype, unsigned width>
static __device__ inline void unpack_values(const uint32_t *raw, float (&some)[width]) {
  OB_UNROLL
  for (unsigned i = 0; i < width; i++)
    some[i] = dtype == ONEBIT_FLOAT32 ? ob_float_of(raw[i])
                                      : widen_value<dtype>((uint16_t)(raw[i / 2] >> i % 2 * 16));
}

template <onebit_dtype_t dtype, unsigned width>
static __device__ inline void pack_values(const float (&some)[width], uint32_t *raw) {
  OB_UNROLL
  for (unsigned i = 0; i < width; i += 4 / size_of<dtype>)
    if (dtype == ONEBIT_FLOAT32)
      raw[i] = ob_bits_of(some[i]);
    else
      raw[i / 2] = narrow_pair<dtype>(some[i], some[i + 1]);
}

/* Limits results to the range of dtype, before they are stored. */
template <onebit_dtype_t dtype, unsigned width>
static __device__ inline void bound_values(float (&some)[width]) {
  OB_UNROLL
  for (unsigned j = 0; j < width; j++)
    some[j] = ob_bound(some[j], dtype);
}

/* Loads `width` elements from `first` on; elements from `end` on are zeros. The load is one access
 * if the buffer is aligned to the size of that access. `whole`: all of them are before `end`. */
template <onebit_dtype_t dtype, bool whole, unsigned width>
static __device__ inline void load_values(const void *buffer, unsigned first, unsigned end,
                                          bool aligned, float (&some)[width]) {
  uint32_t raw[width * size_of<dtype> / 4];
  if (aligned && (whole || first + width <= end)) {
    load_raw((const char *)buffer + first * size_of<dtype>, raw);
    unpack_values<dtype>(raw, some);
  } else {
    OB_UNROLL
    for (unsigned j = 0; j < width; j++)
      some[j] = whole || first + j < end ? load_one<dtype>(buffer, first + j) : 0;
  }
}

template <onebit_dtype_t dtype, bool whole, unsigned width>
static __device__ inline void store_values(void *buffer, unsigned first, unsigned end, bool aligned,
                                           const float (&some)[width]) {
  uint32_t raw[width * size_of<dtype> / 4];
  if (aligned && (whole || first + width <= end)) {
    pack_values<dtype>(some, raw);
    store_raw((char *)buffer + first * size_of<dtype>, raw);
  } else {
    OB_UNROLL
    for (unsigned j = 0; j < width; j++)
      if (whole || first + j < end)
        store_one<dtype>(buffer, first + j, some[j]);
  }
}

/* Loads a lane's elements of a tile, in parts at the positions that part_at returns. */
template <onebit_dtype_t dtype, bool whole, unsigned parts, unsigned width>
static __device__ inline void load_parts(const void *buffer, unsigned first, unsigned end,
                                         bool aligned, float (&some)[parts][width]) {
  OB_UNROLL
  for (unsigned k = 0; k < parts; k++)
    load_values<dtype, whole>(buffer, first + part_at<width>(k), end, aligned, some[k]);
}

/* Loads a tile. In a whole tile no load has a condition and no conversion a branch, whatever the
 * alignment, so that all loads are in flight before the first use. */
template <onebit_dtype_t dtype, unsigned parts, unsigned width>
static __device__ inline void load_tile(const void *buffer, unsigned first, unsigned end,
                                        bool aligned, float (&some)[parts][width]) {
  if (first + tile_elements > end)
    load_parts<dtype, false>(buffer, first, end, aligned, some);
  else if (aligned)
    load_parts<dtype, true>(buffer, first, end, true, some);
  else
    load_parts<dtype, true>(buffer, first, end, false, some);
}

template <onebit_dtype_t dtype, bool whole, unsigned parts, unsigned width>
static __device__ inline void store_parts(void *buffer, unsigned first, unsigned end, bool aligned,
                                          const float (&some)[parts][width]) {
  OB_UNROLL
  for (unsigned k = 0; k < parts; k++)
    store_values<dtype, whole>(buffer, first + part_at<width>(k), end, aligned, some[k]);
}

template <onebit_dtype_t dtype, unsigned parts, unsigned width>
static __device__ inline void store_tile(void *buffer, unsigned first, unsigned end, bool aligned,
                                         const float (&some)[parts][width]) {
  if (first + tile_elements > end)
    store_parts<dtype, false>(buffer, first, end, aligned, some);
  else if (aligned)
    store_parts<dtype, true>(buffer, first, end, true, some);
  else
    store_parts<dtype, true>(buffer, first, end, false, some);
}

/* --- Signs */

/* Loads the signs of the tile that begins at element `first` of the block: lane l gets word l mod
 * 16, or 0 past the block's end. */
static __device__ inline uint32_t load_signs(const uint32_t *words, unsigned first,
                                             unsigned count) {
  const unsigned word = first / OB_LANES + lane_number() % tile_words;
  return word * OB_LANES < count ? words[word] : 0;
}

static __device__ inline void store_signs(uint32_t *words, unsigned first, unsigned count,
                                          uint32_t signs) {
  const unsigned word = first / OB_LANES + lane_number();
  if (lane_number() < tile_words && word * OB_LANES < count)
    words[word] = signs;
}

/* Returns the signs of the lane's group of four number k, element j in bit j; lanes from `base` on
 * hold the tile's words. Higher bits belong to other groups. */
static __device__ inline uint32_t four_signs(uint32_t signs, unsigned k, unsigned base) {
  const unsigned word = four_at(k) / OB_LANES, bit = four_at(k) % OB_LANES;
  return __shfl_sync(all_lanes, signs, (int)(base + word)) >> bit;
}

/* --- Lanes */

/* Adds a tile's magnitudes to the lanes' sums. Returns word l of the tile's signs in lane l, for l
 * < 16. */
static __device__ inline uint32_t add_tile(const float4 *tile, onebit_scale_t rule, float *lane) {
  const uint32_t own = 1u << lane_number();
  uint32_t mine = 0;
  __syncwarp();
  OB_UNROLL
  for (unsigned w = 0; w < tile_words; w++) {
    const float value = ((const float *)tile)[w * OB_LANES + lane_number()];
    *lane += ob_magnitude(value, rule);
    const uint32_t signs = __ballot_sync(all_lanes, (int)(ob_bits_of(value) >> 31));
    if (own & 1u << w) /* compiles to seven predicates at once (R2P) */
      mine = signs;
  }
  __syncwarp(); /* the next tile is stored in the same memory */
  return mine;
}

/* Returns the sum of the lanes in lane 0, in the order of ob_sum_lanes. */
template <typename T> static __device__ inline T sum_lanes(T lane) {
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2)
    lane += __shfl_down_sync(all_lanes, lane, width);
  return lane;
}

/* Returns the largest value of the lanes, in all lanes. No lane has a NaN. */
template <typename T> static __device__ inline T largest_lane(T lane) {
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2) {
    const T other = __shfl_xor_sync(all_lanes, lane, (int)width);
    lane = other > lane ? other : lane;
  }
  return lane;
}

/* Returns the smallest value of the lanes, in all lanes. */
static __device__ inline float min_lane(float lane) {
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2) {
    const float other = __shfl_xor_sync(all_lanes, lane, (int)width);
    lane = other < lane ? other : lane;
  }
  return lane;
}

/* The number of threads of a block that adds up sums: up to few_sums of them, or more. */
constexpr unsigned threads_for_few = 128, threads_for_many = OB_SUM_LANES;
/* The largest number of sums that a block of few threads loads at once. */
constexpr size_t few_sums = OB_SUM_LANES;

/* Adds a thread's values by halving. */
template <unsigned count> static __device__ inline double add_by_halving(double (&values)[count]) {
  OB_UNROLL
  for (unsigned width = count / 2; width > 0; width /= 2)
    for (unsigned k = 0; k < width; k++)
      values[k] += values[k + width];
  return values[0];
}

/* Adds up sums in the order of ob_add_sums with all threads of a block; lane 0 of its first warp
 * gets the result. Thread t has the lanes t, t + threads, ..., and loads eight sums before the
 * first addition: a block of 1024 threads then has 64 KiB in flight. `parts` is shared memory of
 * the block, with one value per thread. */
template <unsigned threads>
static __device__ inline double add_sums(const double *sums, size_t count, double *parts) {
  constexpr unsigned held = OB_SUM_LANES / threads, at_once = 8, rows = threads / OB_LANES;
  double lane[held] = {}, next[at_once], part[rows];
  for (size_t first = threadIdx.x; first < count; first += at_once * threads) {
    OB_UNROLL
    for (unsigned k = 0; k < at_once; k++) {
      const size_t i = first + k * threads;
      next[k] = i < count ? __ldcs(&sums[i]) : 0;
    }
    OB_UNROLL
    for (unsigned k = 0; k < at_once; k++)
      lane[k % held] += next[k];
  }
  parts[threadIdx.x] = add_by_halving(lane);
  __syncthreads();
  if (threadIdx.x >= OB_LANES)
    return 0;
  OB_UNROLL
  for (unsigned k = 0; k < rows; k++)
    part[k] = parts[k * OB_LANES + lane_number()];
  return sum_lanes(add_by_halving(part));
}

#endif
