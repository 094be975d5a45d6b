/*
 * Finds the block that a warp works on, the messages and their parts, and the pieces of the
 * caller's buffers; computes a block's scale from its sum. blocks.c and collectives/geometry.h do
 * the same on the host.
 */
#ifndef OB_CUDA_LOCATION_CUH
#define OB_CUDA_LOCATION_CUH

#include "cuda/device.cuh"

/* Returns the plan for the launch of one chunk: bounds and messages begin at those of the chunk, so
 * that no thread divides by the number of slots. */
static inline struct ob_cuda_plan select_chunk(struct ob_cuda_plan plan, size_t chunk) {
  struct ob_geometry *geometry = &plan.geometry;
  const size_t slot = chunk % geometry->slots * geometry->stride;
  geometry->bounds += chunk;
  for (unsigned char **base :
       {&geometry->outgoing, &geometry->incoming, &geometry->results[0], &geometry->results[1]})
    *base = *base ? *base + slot : NULL;
  return plan;
}

/* The block of a message that a warp works on. */
struct location {
  struct ob_message_shape shape; /* of the message, except its number of words */
  struct ob_block block;
  size_t number, index; /* of the block, in the layout and in the message */
  size_t word;          /* the index of its signs in the message */
};

/* Finds the warp's block of a segment's message. Returns false if the message has no such block. */
static __device__ inline bool find_location(const struct ob_cuda_plan &plan, size_t segment,
                                            struct location *location) {
  const struct ob_geometry *geometry = &plan.geometry;
  location->shape = ob_message_blocks(geometry, segment, 0);
  location->index = warp_number();
  location->number = location->shape.first + location->index;
  if (location->index >= location->shape.blocks)
    return false;
  size_t piece = 0;
  const size_t first_word = ob_layout_block(&geometry->layout, location->shape.first, &piece).word;
  location->block = ob_layout_block(&geometry->layout, location->number, &piece);
  location->word = location->block.word - first_word;
  return true;
}

static __device__ inline size_t segment_of(const struct ob_cuda_plan &plan, size_t member) {
  return ob_segment_of(&plan.geometry, member);
}

/* --- Messages */

/* last_copy returns the number of the copy that holds the last call's results; next_copy returns
 * that of the next call's results. */
static __device__ inline uint32_t last_copy(const struct ob_cuda_plan &plan, uint32_t now) {
  return plan.results_stay ? 0 : now;
}

static __device__ inline uint32_t next_copy(const struct ob_cuda_plan &plan, uint32_t now) {
  return !last_copy(plan, now);
}

static __device__ inline unsigned char *result_of(const struct ob_cuda_plan &plan, uint32_t copy,
                                                  size_t member) {
  return ob_result_at(&plan.geometry, (int)copy, member, 0);
}

/* Returns this rank's message to a member, or its one message to all. */
static __device__ inline unsigned char *message_to(const struct ob_cuda_plan &plan, uint32_t now,
                                                   size_t member) {
  return plan.geometry.whole ? result_of(plan, next_copy(plan, now), plan.geometry.member)
                             : plan.geometry.outgoing + member * plan.geometry.peer_stride;
}

/* The members' messages to this rank; or to all. The message of member m is m strides after a base.
 * This rank's own message, those of the members before it, and those of the members after it each
 * have a base of their own. */
struct senders {
  unsigned char *own, *before, *after;
};

static __device__ inline struct senders senders_of(const struct ob_cuda_plan &plan, uint32_t now) {
  if (!plan.geometry.whole)
    return {plan.geometry.outgoing, plan.geometry.incoming, plan.geometry.incoming};
  unsigned char *results =
      plan.geometry.results[!now]; /* without momentum there is one copy only */
  if (!plan.geometry.rotated)
    return {results, results, results};
  unsigned char *own = results - plan.geometry.member * plan.geometry.peer_stride;
  return {own, own + plan.geometry.members * plan.geometry.peer_stride, own};
}

static __device__ inline unsigned char *message_from(const struct ob_cuda_plan &plan,
                                                     const struct senders &senders,
                                                     unsigned member) {
  const unsigned own = (unsigned)plan.geometry.member;
  unsigned char *base = member == own ? senders.own : member < own ? senders.before : senders.after;
  return base + member * plan.geometry.peer_stride;
}

static __device__ inline struct ob_view view_of(unsigned char *message,
                                                const struct location &location) {
  return ob_message_view(message, &location.shape);
}

/* Returns the magnitude that the block's sign bits stand for. */
static __device__ inline float scale_of(const struct ob_view &view,
                                        const struct location &location) {
  return location.shape.one_scale ? view.header->scale : view.scales[location.index];
}

/* --- Residuals */

/* Returns the block's values in an array with the layout of residuals. */
template <typename T>
static __device__ inline T *values_of(const struct ob_cuda_residual &residual, T *array,
                                      const struct ob_block &block) {
  return array + (block.word - residual.first_word) * OB_LANES;
}

static __device__ inline float *values_of(const struct ob_cuda_residual &residual, uint32_t copy,
                                          const struct ob_block &block) {
  return values_of(residual, residual.values[copy], block);
}

static __device__ inline float residual_scale(const struct ob_cuda_residual &residual, uint32_t now,
                                              const struct location &location) {
  return residual.scales[now][location.shape.one_scale ? 0 : location.number - residual.first];
}

/* --- The caller's buffers */

/* Returns the block's address in its piece, or NULL if the piece has no address; such a piece has
 * no elements. */
static __device__ inline char *block_address(const struct ob_cuda_pieces &pieces,
                                             size_t first_piece, const struct ob_block &block,
                                             size_t element) {
  const size_t piece = first_piece + block.piece;
  char *base = pieces.each ? (char *)pieces.each[piece] : pieces.base + piece * pieces.step;
  return base ? base + block.offset * element : NULL;
}

/* --- Scales */

static __device__ inline void note_flags(struct ob_cuda_state *state, uint32_t flags) {
  if (flags)
    atomicOr(&state->flags, flags);
}

/* Notes the flags of a scale, and returns the scale to send: for a scale that is not finite, 0,
 * with OB_FLAG_NOT_FINITE. */
static __device__ inline float note_scale(struct ob_cuda_state *state, float scale, bool server) {
  if (!ob_is_finite(scale)) {
    note_flags(state, OB_FLAG_NOT_FINITE);
    return 0;
  }
  if (scale >= OB_LARGE_SCALE) {
    note_flags(state, OB_FLAG_LARGE);
    if (server)
      atomicOr(&state->server_flags, (uint32_t)OB_FLAG_LARGE);
  }
  return scale;
}

/* Computes a block's scale from the sum of its magnitudes, and stores it in the message and with
 * the residuals. With one scale for all blocks it stores the sum for ob_cuda_finish. Called by one
 * lane. */
static __device__ inline void set_scale(const struct ob_cuda_plan &plan, uint32_t now, bool server,
                                        const struct location &location, const struct ob_view &out,
                                        float sum) {
  const struct ob_cuda_residual &residual = server ? plan.server : plan.worker;
  if (location.shape.one_scale) {
    residual.sums[location.number - residual.first] = (double)sum;
    return;
  }
  const enum ob_serve_rule rule = residual.serving.rule;
  const float exact =
      ob_scale((double)sum, location.block.count, ob_serve_scale_rule(rule, plan.rule));
  const float scale = note_scale(plan.state, ob_round(exact, residual.result_dtype), server);
  residual.scales[!now][location.number - residual.first] = scale;
  out.scales[location.index] = ob_serve_scale(rule, scale);
}

/* --- The parts of each member's message that a warp needs to add members up */

/* The number of members whose parts a warp holds at once. */
constexpr unsigned known_members = OB_LANES;

/* The signs or levels of the block, and the scale times the member's weight in the mean. */
struct part {
  const uint32_t *words;
  float scale;
};

/* The members' messages, and the parts that the warp has read. */
struct parts {
  struct senders senders;
  float weight;
  struct part *known;
};

/* Gets the parts of the members from `first` on. A member past the last one has only negative signs
 * and the scale 0: adding -0 changes no sum, and costs less than a branch. (Levels can also give
 * +0, so their sums do branch.) */
template <unsigned width = 1>
static __device__ inline void find_parts(const struct ob_cuda_plan &plan,
                                         const struct location &location, const struct parts &parts,
                                         unsigned first) {
  const unsigned member = first + lane_number(), last = (unsigned)plan.geometry.members - 1;
  const struct ob_view view =
      view_of(message_from(plan, parts.senders, min(member, last)), location);
  const float scale = scale_of(view, location) * parts.weight;
  __syncwarp();
  parts.known[lane_number()] = {view.words + location.word * width, member <= last ? scale : -0.0f};
  __syncwarp();
}

/* Returns a member's weight in the mean, by which its scale is multiplied. */
static inline float weight_of_mean(const struct ob_cuda_plan &plan) {
  return (float)(1.0 / (double)plan.geometry.members);
}

#endif
