/*
 * Checksums of messages (compression/message.h), by all warps of a launch: a warp a run of a
 * payload, of which each lane has two lanes. Warps add up in memory; the last of them to be done
 * goes on with the sums.
 */
#ifndef OB_CUDA_CHECKSUM_CUH
#define OB_CUDA_CHECKSUM_CUH

#include "compression/message.h"
#include "cuda/device.cuh"

/* Warps for each message of a launch: the runs of the longest, and at least one. */
static __host__ __device__ inline size_t check_runs(const struct ob_geometry &geometry) {
  const size_t words = (geometry.stride - sizeof(struct ob_header)) / sizeof(uint32_t);
  return words ? (words + OB_CHECK_RUN - 1) / OB_CHECK_RUN : 1;
}

/* The sum of the two lanes of a run that this lane has. */
static __device__ inline uint32_t check_lanes(const uint32_t *payload, size_t count, size_t run) {
  const uint32_t first = (uint32_t)(run * OB_CHECK_LANES) + lane_number();
  uint32_t one = ob_check_begin(first), two = ob_check_begin(first + OB_LANES);
  const size_t left = count - run * OB_CHECK_RUN;
  const unsigned end = left < OB_CHECK_RUN ? (unsigned)left : OB_CHECK_RUN;
  const uint32_t *words = payload + run * OB_CHECK_RUN;
  OB_UNROLL
  for (unsigned round = 0; round < OB_CHECK_RUN; round += OB_CHECK_LANES) {
    const unsigned at = round + lane_number();
    if (round >= end)
      continue;
    one = ob_check_word(one, at < end ? __ldcg(&words[at]) : 0);
    two = ob_check_word(two, at + OB_LANES < end ? __ldcg(&words[at + OB_LANES]) : 0);
  }
  return ob_check_end(one) + ob_check_end(two);
}

/* Adds this warp's run of the message to *sum, where the message has such a run. */
static __device__ inline void check_run(unsigned char *message,
                                        const struct ob_message_shape &shape, size_t run,
                                        uint32_t *sum) {
  const size_t count = ob_message_payload(&shape);
  if (run * OB_CHECK_RUN >= count)
    return;
  uint32_t lane = check_lanes((const uint32_t *)(message + sizeof(struct ob_header)), count, run);
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2)
    lane += __shfl_xor_sync(all_lanes, lane, (int)width);
  if (lane_number() == 0)
    atomicAdd(sum, lane);
}

/* True if all other warps of the launch are done; `done` is 0 again when the last one is. */
static __device__ inline bool is_last_warp(uint32_t *done) {
  uint32_t before = 0;
  const uint32_t warps = gridDim.x * gridDim.y * warps_a_block;
  if (lane_number() == 0) {
    __threadfence();
    before = atomicAdd(done, 1u);
    if (before + 1 == warps)
      *done = 0;
    __threadfence();
  }
  return __shfl_sync(all_lanes, before, 0) + 1 == warps;
}

/* True in the last of so many thread blocks that come here with the same `done`, in all its
 * threads. The barriers make one thread's fences those of all. */
static __device__ inline bool is_last_block(uint32_t *done, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(done, 1u) + 1 == blocks;
    if (last)
      *done = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

#endif
