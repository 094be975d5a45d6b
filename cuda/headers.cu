/*
 * Headers, where no host looks after a call: stamped, judged and added up on the device, with the
 * functions of compression/message.h and collectives/geometry.h that the host uses too.
 *
 * Many warps compute checksums (cuda/checksum.cuh). A header is 40 bytes a message, so one warp,
 * the last that is done, does all of them: lane l has the member that is l + 1 places further, and
 * l + 33, ... What came first counts, and that is the lowest lane.
 */
#include "cuda/checksum.cuh"
#include "cuda/location.cuh"

/* The plan's pointers begin at this chunk's (of_chunk). */
static __device__ struct ob_message_shape shape_of(const struct ob_cuda_plan &plan, size_t member) {
  struct ob_message_shape shape = ob_message_blocks(&plan.geometry, segment_of(plan, member), 0);
  shape.words = ob_layout_word(&plan.geometry.layout, shape.first + shape.blocks);
  shape.words -= ob_layout_word(&plan.geometry.layout, shape.first);
  return shape;
}

/* What must be the same on all ranks. */
static __device__ uint32_t agreed_of(const struct ob_cuda_stamp &stamp) {
  return stamp.rate ? ob_bits_of(*stamp.rate) : stamp.agreed;
}

static __device__ struct ob_message_call call_of(const struct ob_cuda_plan &plan,
                                                 const struct ob_cuda_stamp &stamp) {
  return {stamp.kind, plan.state->sequence, plan.geometry.layout.elements, agreed_of(stamp)};
}

/* A rank that cannot take part tells why it cannot, and not what it hears of others. */
static __device__ uint16_t flags_of(const struct ob_cuda_plan &plan, bool failed) {
  const struct ob_cuda_state *state = plan.state;
  uint32_t flags = state->flags | ob_payload_flags(plan.geometry.dense, plan.geometry.half);
  if (failed || state->status != ONEBIT_OK)
    flags |= OB_FLAG_ERROR;
  if (!failed && state->status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  return (uint16_t)flags;
}

static __device__ int32_t origin_of(const struct ob_cuda_plan &plan, size_t member) {
  return (int32_t)(plan.origin + member * plan.origin_step);
}

/* A learning rate that cannot be one, where only the device has it: this rank cannot take part. */
static __device__ void note_rate(const struct ob_cuda_plan &plan,
                                 const struct ob_cuda_stamp &stamp) {
  struct ob_cuda_state *state = plan.state;
  if (!stamp.rate || (*stamp.rate >= 0 && ob_is_finite(*stamp.rate)) || state->status != ONEBIT_OK)
    return;
  state->status = ONEBIT_ERROR_ARGUMENT;
  state->origin = origin_of(plan, plan.geometry.member);
  state->agreed = agreed_of(stamp);
}

/* Who met a value that is not finite: the first, as steps.c has it. For one lane. */
static __device__ void note_own(const struct ob_cuda_plan &plan) {
  if (plan.state->flags & OB_FLAG_NOT_FINITE && plan.state->not_finite < 0)
    plan.state->not_finite = origin_of(plan, plan.geometry.member);
}

/* The messages that are about to leave: number i goes to member i; or one, to all. */
static __host__ __device__ size_t sent_count(const struct ob_cuda_plan &plan,
                                             enum ob_message_kind kind) {
  return kind == OB_MESSAGE_SERVER ? 1 : plan.geometry.members;
}

static __device__ unsigned char *sent(const struct ob_cuda_plan &plan, enum ob_message_kind kind,
                                      size_t i, struct ob_message_shape *shape) {
  const uint32_t now = plan.state->now;
  const bool server = kind == OB_MESSAGE_SERVER;
  *shape = shape_of(plan, server ? plan.geometry.member : i);
  return server ? result_of(plan, next_of(plan, now), plan.geometry.member) : sent_to(plan, now, i);
}

static __device__ void stamp_headers(const struct ob_cuda_plan &plan,
                                     const struct ob_cuda_stamp &stamp) {
  const bool server = stamp.kind == OB_MESSAGE_SERVER;
  const float scale =
      server && !plan.geometry.whole ? plan.state->server_scale : plan.state->worker_scale;
  const struct ob_message_call call = call_of(plan, stamp);
  for (size_t i = lane_number(); i < sent_count(plan, stamp.kind); i += OB_LANES) {
    struct ob_message_shape shape;
    struct ob_header *header = (struct ob_header *)sent(plan, stamp.kind, i, &shape);
    *header = ob_header_make(&shape, &call, flags_of(plan, stamp.failed), scale);
    header->checksum = ob_header_sum(header) + atomicExch(&plan.checks[1 + i], 0u);
  }
}

static __global__ void seal(const struct ob_cuda_plan plan, const struct ob_cuda_stamp stamp) {
  struct ob_message_shape shape;
  unsigned char *message = sent(plan, stamp.kind, blockIdx.y, &shape);
  check_run(message, shape, warp_number(), &plan.checks[1 + blockIdx.y]);
  if (!is_last_warp(plan.checks))
    return;
  if (lane_number() == 0) {
    note_rate(plan, stamp);
    note_own(plan);
  }
  __syncwarp();
  stamp_headers(plan, stamp);
}

/* What is wrong with a message, beside what it says of its sender: as ob_message_check, but for its
 * length, which the transport has matched. */
static __device__ onebit_status_t judge(const struct ob_cuda_plan &plan,
                                        const struct ob_cuda_stamp &stamp,
                                        const struct ob_header &header,
                                        const struct ob_message_shape &shape, uint32_t payload) {
  const struct ob_message_call call = call_of(plan, stamp);
  if (header.checksum != ob_header_sum(&header) + payload ||
      ob_header_check(&header, &shape, &call) != OB_HEADER_SOUND)
    return ONEBIT_ERROR_MESSAGE;
  return ob_header_disagrees(header.flags, header.agreed, agreed_of(stamp)) ? ONEBIT_ERROR_MISMATCH
                                                                            : ONEBIT_OK;
}

/* The lowest lane that says so, or -1. */
static __device__ int first_lane(bool says) {
  return __ffs((int)__ballot_sync(all_lanes, says)) - 1;
}

/* What a member sent to this rank, or to all. */
static __device__ unsigned char *received(const struct ob_cuda_plan &plan,
                                          enum ob_message_kind kind, size_t member,
                                          struct ob_message_shape *shape) {
  const uint32_t now = plan.state->now;
  const bool server = kind == OB_MESSAGE_SERVER;
  *shape = shape_of(plan, server ? member : plan.geometry.member);
  return server ? result_of(plan, next_of(plan, now), member)
                : sent_by(plan, senders_of(plan, now), (unsigned)member);
}

/* The members from `distance` on, one a lane. All lanes take part. */
static __device__ void hear(const struct ob_cuda_plan &plan, const struct ob_cuda_stamp &stamp,
                            size_t distance) {
  struct ob_cuda_state *state = plan.state;
  const bool there = distance + lane_number() < plan.geometry.members;
  const size_t member = ob_neighbour(&plan.geometry, distance + lane_number());
  struct ob_header header = {};
  onebit_status_t status = ONEBIT_OK;
  if (there) {
    struct ob_message_shape shape;
    header = *(const struct ob_header *)received(plan, stamp.kind, member, &shape);
    status =
        judge(plan, stamp, header, shape, atomicExch(&plan.checks[distance + lane_number()], 0u));
  }
  const bool heard = there && status == ONEBIT_OK;
  const int lane = (int)lane_number();
  const int bad = first_lane(there && !heard);
  const int failed = first_lane(heard && header.flags & OB_FLAG_ERROR);
  const int not_finite = first_lane(heard && header.flags & OB_FLAG_NOT_FINITE);
  if (lane == bad && atomicCAS(&state->status, (int)ONEBIT_OK, (int)status) == ONEBIT_OK) {
    state->origin = origin_of(plan, member);
    state->agreed = header.agreed;
    state->refused |= status == ONEBIT_ERROR_MESSAGE;
  }
  if (lane == failed && state->failed < 0)
    state->failed = origin_of(plan, member);
  if (lane == not_finite && state->not_finite < 0)
    state->not_finite = origin_of(plan, member);
}

/* By one warp: the call fails unless the scales of a member's message are sound. */
static __device__ void check_scales(const struct ob_cuda_plan &plan, unsigned char *message,
                                    const struct ob_message_shape &shape, size_t member) {
  const float *scales = ob_message_view(message, &shape).scales;
  bool bad = false;
  for (size_t i = lane_number(); i < ob_message_scales(&shape); i += OB_LANES)
    bad |= !ob_scale_is_sound(scales[i]);
  if (__ballot_sync(all_lanes, bad) && lane_number() == 0 &&
      atomicCAS(&plan.state->status, (int)ONEBIT_OK, (int)ONEBIT_ERROR_MESSAGE) == ONEBIT_OK) {
    plan.state->origin = origin_of(plan, member);
    plan.state->refused = 1;
  }
}

/* Number y of the grid looks at the message of the member y + 1 places further. */
static __global__ void open_messages(const struct ob_cuda_plan plan,
                                     const struct ob_cuda_stamp stamp) {
  const size_t away = 1 + blockIdx.y, member = ob_neighbour(&plan.geometry, away);
  struct ob_message_shape shape;
  unsigned char *message = received(plan, stamp.kind, member, &shape);
  check_run(message, shape, warp_number(), &plan.checks[away]);
  if (warp_number() == 0)
    check_scales(plan, message, shape, member);
  if (is_last_warp(plan.checks))
    for (size_t distance = 1; distance < plan.geometry.members; distance += OB_LANES)
      hear(plan, stamp, distance);
}

static __device__ bool is_worse(int32_t status, int32_t than) {
  return status != ONEBIT_OK && status != than && (than == ONEBIT_OK || than == ONEBIT_SKIPPED);
}

/* As steps.c decides. A rank that could not take part has said so to its caller. */
static __global__ void decide(const struct ob_cuda_plan plan, const struct ob_cuda_stamp stamp) {
  struct ob_cuda_state *state = plan.state;
  if (lane_number() != 0)
    return;
  note_own(plan);
  const onebit_status_t status =
      ob_call_verdict((onebit_status_t)state->status, state->failed, state->not_finite);
  if (state->status == ONEBIT_OK && status != ONEBIT_OK)
    state->origin = status == ONEBIT_SKIPPED ? state->not_finite : state->failed;
  state->status = status;
  state->stop = stamp.failed || state->status != ONEBIT_OK;
}

/* How the call ended, for whoever asks later; after all that could change it. */
static __global__ void conclude(const struct ob_cuda_plan plan, const struct ob_cuda_stamp stamp) {
  const struct ob_cuda_state *state = plan.state;
  struct ob_cuda_outcome *outcome = &plan.state->outcome;
  if (lane_number() != 0)
    return;
  outcome->calls += !state->stop;
  outcome->skipped += state->stop && !stamp.failed && state->status == ONEBIT_SKIPPED;
  if (stamp.failed || !is_worse(state->status, outcome->status))
    return;
  outcome->status = state->status;
  outcome->origin = state->origin;
  outcome->agreed = state->agreed;
}

/* A call that would have ended well, but for another: its status is that one's. */
static __global__ void join(struct ob_cuda_state *const *states, size_t count) {
  const struct ob_cuda_state *first = NULL;
  if (lane_number() != 0)
    return;
  for (size_t i = 0; i < count; i++)
    if (states[i]->stop && (!first || is_worse(states[i]->status, first->status)))
      first = states[i];
  for (size_t i = 0; first && i < count; i++) {
    states[i]->stop = 1;
    states[i]->status = first->status;
    states[i]->origin = first->origin;
    states[i]->agreed = first->agreed;
  }
}

static __global__ void adam_count(struct ob_cuda_state *state, double beta1, double beta2,
                                  double ranks) {
  if (lane_number() != 0)
    return;
  const uint64_t step = state->before + state->outcome.calls + 1;
  state->momentum_factor = ob_adam_momentum_factor(beta1, step);
  state->variance_factor = ob_adam_variance_factor(beta2, step);
  ob_moment_correct(&state->moment, beta2, ranks, step);
}

/* --- Launching */

cudaError_t ob_cuda_seal(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return launch(seal, check_runs(plan.geometry), sent_count(plan, stamp.kind), stream,
                of_chunk(plan, chunk), stamp);
}

cudaError_t ob_cuda_open(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp, size_t chunk,
                         cudaStream_t stream) {
  return plan.geometry.members == 1
             ? cudaSuccess
             : launch(open_messages, check_runs(plan.geometry), plan.geometry.members - 1, stream,
                      of_chunk(plan, chunk), stamp);
}

cudaError_t ob_cuda_decide(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp,
                           cudaStream_t stream) {
  return launch_one_warp(decide, stream, plan, stamp);
}

cudaError_t ob_cuda_conclude(struct ob_cuda_plan plan, struct ob_cuda_stamp stamp,
                             cudaStream_t stream) {
  return launch_one_warp(conclude, stream, plan, stamp);
}

cudaError_t ob_cuda_join(struct ob_cuda_state *const *states, size_t count, cudaStream_t stream) {
  return launch_one_warp(join, stream, states, count);
}

cudaError_t ob_cuda_adam_count(struct ob_cuda_plan plan, double beta1, double beta2,
                               cudaStream_t stream) {
  return launch_one_warp(adam_count, stream, plan.state, beta1, beta2,
                         (double)plan.geometry.members);
}
