/*
 * Headers of calls that the host does not supervise. The device stamps and checks headers, with the
 * functions of compression/message.h and collectives/geometry.h that the host uses too.
 *
 * Many warps compute checksums (below). A message's header is only 40 bytes, so one warp, the last
 * that is done, handles all headers: lane l handles the members that are l + 1, l + 33, ... places
 * after this rank. If several members report an error, the error of the lowest lane counts.
 */
#ifndef OB_CUDA_HEADERS_CUH
#define OB_CUDA_HEADERS_CUH

#include "compression/message.h"
#include "cuda/device.cuh"
#include "cuda/location.cuh"

/*
 * ---- Checksums ----
 *
 * Checksums (compression/message.h) are computed by all warps of a launch: a warp takes a run of a
 * payload, and each of its threads two lanes of the checksum. Warps add their sums in memory, and
 * the last one that is done uses the totals.
 */

/* Returns the number of warps for each message of a launch: one for each run of the longest
 * message, and at least one. */
static __host__ __device__ inline size_t check_runs(const struct ob_geometry &geometry) {
  const size_t words = (geometry.stride - sizeof(struct ob_header)) / sizeof(uint32_t);
  return words ? (words + OB_CHECK_RUN - 1) / OB_CHECK_RUN : 1;
}

/* Returns the sum of this thread's two checksum lanes of a run. */
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

/* Adds this warp's run of the message to *sum, if the message has such a run. */
static __device__ inline void check_run(unsigned char *message,
                                        const struct ob_message_shape &shape, size_t run,
                                        uint32_t *sum) {
  const size_t count = ob_message_payload_count(&shape);
  if (run * OB_CHECK_RUN >= count)
    return;
  uint32_t lane = check_lanes((const uint32_t *)(message + sizeof(struct ob_header)), count, run);
  for (unsigned width = OB_LANES / 2; width > 0; width /= 2)
    lane += __shfl_xor_sync(all_lanes, lane, (int)width);
  if (lane_number() == 0)
    atomicAdd(sum, lane);
}

/* Returns true if all other warps of the launch are done. The last warp sets `done` to 0 again. */
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

/* Returns true in all threads of the last of `blocks` thread blocks that call this with the same
 * `done`. The barriers make the fences of one thread hold for all. */
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

/* --- Sealing */

/* Resets the call's state, except flags that earlier kernels may have set. Called by one lane. */
static __device__ inline void begin_call(struct ob_cuda_state *state) {
  state->server_flags = 0;
  state->stop = 0;
  state->sequence++;
  state->status = state->refused ? ONEBIT_ERROR_MESSAGE : ONEBIT_OK;
  state->failed = state->not_finite = -1;
}

/* Returns the shape of a member's message. The plan is that of one chunk (select_chunk). */
static __device__ inline struct ob_message_shape message_shape(const struct ob_cuda_plan &plan,
                                                               size_t member) {
  struct ob_message_shape shape = ob_message_blocks(&plan.geometry, segment_of(plan, member), 0);
  shape.words = ob_layout_word(&plan.geometry.layout, shape.first + shape.blocks);
  shape.words -= ob_layout_word(&plan.geometry.layout, shape.first);
  return shape;
}

/* Returns the header's number that must be the same on all ranks. */
static __device__ inline uint32_t agreed_number(const struct ob_cuda_stamp &stamp) {
  return stamp.rate ? ob_bits_of(*stamp.rate) : stamp.agreed;
}

static __device__ inline struct ob_message_call describe_call(const struct ob_cuda_plan &plan,
                                                              const struct ob_cuda_stamp &stamp) {
  return {stamp.kind, plan.state->sequence, plan.geometry.layout.elements, agreed_number(stamp)};
}

/* Returns the flags of this rank's headers. A rank that cannot take part sends only the flag that
 * says so, and no flags that other ranks have reported. */
static __device__ inline uint16_t header_flags(const struct ob_cuda_plan &plan, bool failed) {
  const struct ob_cuda_state *state = plan.state;
  uint32_t flags =
      state->flags | ob_payload_flags(plan.geometry.dense, plan.geometry.half, plan.geometry.width);
  if (failed || state->status != ONEBIT_OK)
    flags |= OB_FLAG_ERROR;
  if (!failed && state->status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  return (uint16_t)flags;
}

static __device__ inline int32_t origin_number(const struct ob_cuda_plan &plan, size_t member) {
  return (int32_t)(plan.origin + member * plan.origin_step);
}

/* Fails the call on this rank if its learning rate, which only the device has, is negative or not
 * finite. */
static __device__ inline void check_rate(const struct ob_cuda_plan &plan,
                                         const struct ob_cuda_stamp &stamp) {
  struct ob_cuda_state *state = plan.state;
  if (!stamp.rate || (*stamp.rate >= 0 && ob_is_finite(*stamp.rate)) || state->status != ONEBIT_OK)
    return;
  state->status = ONEBIT_ERROR_ARGUMENT;
  state->origin = origin_number(plan, plan.geometry.member);
  state->agreed = agreed_number(stamp);
}

/* Records the first rank that found a value that is not finite, as steps.c does. Called by one
 * lane. */
static __device__ inline void note_own_flags(const struct ob_cuda_plan &plan) {
  if (plan.state->flags & OB_FLAG_NOT_FINITE && plan.state->not_finite < 0)
    plan.state->not_finite = origin_number(plan, plan.geometry.member);
}

/* Returns the number of messages that are about to be sent: one to each member, or one result to
 * all. */
static __host__ __device__ inline size_t sent_count(const struct ob_cuda_plan &plan,
                                                    enum ob_message_kind kind) {
  return kind == OB_MESSAGE_SERVER ? 1 : plan.geometry.members;
}

static __device__ inline unsigned char *sent_message(const struct ob_cuda_plan &plan,
                                                     enum ob_message_kind kind, size_t i,
                                                     struct ob_message_shape *shape) {
  const uint32_t now = plan.state->now;
  const bool server = kind == OB_MESSAGE_SERVER;
  *shape = message_shape(plan, server ? plan.geometry.member : i);
  return server ? result_of(plan, next_copy(plan, now), plan.geometry.member)
                : message_to(plan, now, i);
}

static __device__ inline void stamp_headers(const struct ob_cuda_plan &plan,
                                            const struct ob_cuda_stamp &stamp) {
  const bool server = stamp.kind == OB_MESSAGE_SERVER;
  const float scale =
      server && !plan.geometry.whole ? plan.state->server_scale : plan.state->worker_scale;
  const struct ob_message_call call = describe_call(plan, stamp);
  for (size_t i = lane_number(); i < sent_count(plan, stamp.kind); i += OB_LANES) {
    struct ob_message_shape shape;
    struct ob_header *header = (struct ob_header *)sent_message(plan, stamp.kind, i, &shape);
    *header = ob_header_make(&shape, &call, header_flags(plan, stamp.failed), scale);
    header->checksum = ob_header_sum(header) + atomicExch(&plan.checks[1 + i], 0u);
  }
}

/* Stamps the messages when the checksums are known, with one warp. */
static __device__ inline void stamp_messages(const struct ob_cuda_plan &plan,
                                             const struct ob_cuda_stamp &stamp) {
  if (lane_number() == 0) {
    if (stamp.begins) {
      begin_call(plan.state);
      note_flags(plan.state, plan.state->residual_flags);
    }
    check_rate(plan, stamp);
    note_own_flags(plan);
  }
  __syncwarp();
  stamp_headers(plan, stamp);
}

/* --- Opening */

/* Checks a message as ob_message_check does, except for its length, which the transport has
 * matched, and for the sender's flags, which are read elsewhere. */
static __device__ inline onebit_status_t check_header(const struct ob_cuda_plan &plan,
                                                      const struct ob_cuda_stamp &stamp,
                                                      const struct ob_header &header,
                                                      const struct ob_message_shape &shape,
                                                      uint32_t payload) {
  const struct ob_message_call call = describe_call(plan, stamp);
  if (header.checksum != ob_header_sum(&header) + payload ||
      ob_header_check(&header, &shape, &call) != OB_HEADER_SOUND)
    return ONEBIT_ERROR_MESSAGE;
  return ob_header_disagrees(header.flags, header.agreed, agreed_number(stamp))
             ? ONEBIT_ERROR_MISMATCH
             : ONEBIT_OK;
}

/* Returns the lowest lane for which `says` is true, or -1. */
static __device__ inline int first_lane(bool says) {
  return __ffs((int)__ballot_sync(all_lanes, says)) - 1;
}

/* Returns a member's message to this rank, or its result for all ranks. */
static __device__ inline unsigned char *received_message(const struct ob_cuda_plan &plan,
                                                         enum ob_message_kind kind, size_t member,
                                                         struct ob_message_shape *shape) {
  const uint32_t now = plan.state->now;
  const bool server = kind == OB_MESSAGE_SERVER;
  *shape = message_shape(plan, server ? member : plan.geometry.member);
  return server ? result_of(plan, next_copy(plan, now), member)
                : message_from(plan, senders_of(plan, now), (unsigned)member);
}

/* Reads the headers of the members from `distance` on, one per lane, and notes the first errors and
 * flags. All lanes take part. */
static __device__ inline void read_headers(const struct ob_cuda_plan &plan,
                                           const struct ob_cuda_stamp &stamp, size_t distance) {
  struct ob_cuda_state *state = plan.state;
  const bool there = distance + lane_number() < plan.geometry.members;
  const size_t member = ob_neighbour(&plan.geometry, distance + lane_number());
  struct ob_header header = {};
  onebit_status_t status = ONEBIT_OK;
  if (there) {
    struct ob_message_shape shape;
    header = *(const struct ob_header *)received_message(plan, stamp.kind, member, &shape);
    status = check_header(plan, stamp, header, shape,
                          atomicExch(&plan.checks[distance + lane_number()], 0u));
  }
  const bool heard = there && status == ONEBIT_OK;
  const int lane = (int)lane_number();
  const int bad = first_lane(there && !heard);
  const int failed = first_lane(heard && header.flags & OB_FLAG_ERROR);
  const int not_finite = first_lane(heard && header.flags & OB_FLAG_NOT_FINITE);
  if (lane == bad && atomicCAS(&state->status, (int)ONEBIT_OK, (int)status) == ONEBIT_OK) {
    state->origin = origin_number(plan, member);
    state->agreed = header.agreed;
    state->refused |= status == ONEBIT_ERROR_MESSAGE;
  }
  if (lane == failed && state->failed < 0)
    state->failed = origin_number(plan, member);
  if (lane == not_finite && state->not_finite < 0)
    state->not_finite = origin_number(plan, member);
}

/* Checks the scales of a member's message, with one warp: the call fails unless the scales are
 * sound. */
static __device__ inline void check_scales(const struct ob_cuda_plan &plan, unsigned char *message,
                                           const struct ob_message_shape &shape, size_t member) {
  const float *scales = ob_message_view(message, &shape).scales;
  bool bad = false;
  for (size_t i = lane_number(); i < ob_message_scales(&shape); i += OB_LANES)
    bad |= !ob_scale_is_sound(scales[i]);
  if (__ballot_sync(all_lanes, bad) && lane_number() == 0 &&
      atomicCAS(&plan.state->status, (int)ONEBIT_OK, (int)ONEBIT_ERROR_MESSAGE) == ONEBIT_OK) {
    plan.state->origin = origin_number(plan, member);
    plan.state->refused = 1;
  }
}

/* Opens the warp's run of the message from the member `away` places after this rank. */
static __device__ inline void check_message_run(const struct ob_cuda_plan &plan,
                                                enum ob_message_kind kind, size_t away,
                                                size_t run) {
  const size_t member = ob_neighbour(&plan.geometry, away);
  struct ob_message_shape shape;
  unsigned char *message = received_message(plan, kind, member, &shape);
  check_run(message, shape, run, &plan.checks[away]);
  if (run == 0)
    check_scales(plan, message, shape, member);
}

/* Reads all headers when the checksums are known, with one warp. */
static __device__ inline void read_all_headers(const struct ob_cuda_plan &plan,
                                               const struct ob_cuda_stamp &stamp) {
  for (size_t distance = 1; distance < plan.geometry.members; distance += OB_LANES)
    read_headers(plan, stamp, distance);
}

/* --- The end */

static __device__ inline bool is_worse_status(int32_t status, int32_t than) {
  return status != ONEBIT_OK && status != than && (than == ONEBIT_OK || than == ONEBIT_SKIPPED);
}

/* --- Sealing and opening in kernels that make messages. The variants of kernels that do this take
 * more registers, so a multiprocessor runs one thread block fewer of them. They are used for short
 * messages, which never need as many blocks. */

/* Rounds the number of warps up to whole thread blocks. */
static __host__ __device__ inline size_t round_to_thread_blocks(size_t warps) {
  return (warps + warps_a_block - 1) / warps_a_block * warps_a_block;
}

static inline bool seals_or_opens(const struct ob_cuda_plan &plan) {
  return plan.seals || plan.opens;
}

/* Returns the number of additional warps in a launch, which open the messages of workers. */
static inline size_t extra_warps(const struct ob_cuda_plan &plan) {
  return plan.opens ? (plan.geometry.members - 1) * check_runs(plan.geometry) : 0;
}

/* Opens messages with the additional warps, whose thread blocks follow those of `count` warps. */
static __device__ inline void open_extra_messages(const struct ob_cuda_plan &plan, size_t count) {
  const unsigned warp = (unsigned)warp_number() - (unsigned)count;
  const unsigned runs = (unsigned)check_runs(plan.geometry), away = 1 + warp / runs;
  if (away < plan.geometry.members)
    check_message_run(plan, OB_MESSAGE_WORKER, away, warp % runs);
}

/* Ends a kernel that makes messages, one in each row of the grid, and may open received ones. The
 * last block of a message computes its checksum, and the last block of all stamps the headers. All
 * threads take part. */
static __device__ inline void finish_messages(const struct ob_cuda_plan &plan) {
  struct ob_cuda_stamp opened = plan.stamp;
  const unsigned warp = threadIdx.x / OB_LANES;
  if (!is_last_block(&plan.checks[1 + plan.geometry.members + blockIdx.y], gridDim.x))
    return;
  opened.kind = OB_MESSAGE_WORKER;
  if (plan.opens && warp == 0)
    read_all_headers(plan, opened);
  if (!plan.seals)
    return;
  __syncthreads(); /* the sums of received messages have been read: sent ones use the same memory */
  struct ob_message_shape shape;
  unsigned char *message = sent_message(plan, plan.stamp.kind, blockIdx.y, &shape);
  for (size_t run = warp; run * OB_CHECK_RUN < ob_message_payload_count(&shape);
       run += warps_a_block)
    check_run(message, shape, run, &plan.checks[1 + blockIdx.y]);
  if (is_last_block(plan.checks, gridDim.y) && warp == 0)
    stamp_messages(plan, plan.stamp);
}

#endif
