/*
 * The parts of each member's message that a warp needs to add members up.
 */
#ifndef OB_CUDA_PARTS_CUH
#define OB_CUDA_PARTS_CUH

#include "cuda/location.cuh"

/* Members whose parts a warp knows at once. */
constexpr unsigned known_members = OB_LANES;

/* The signs or levels of the block, and the scale times the member's share of the mean. */
struct part {
  const uint32_t *words;
  float scale;
};

/* The members' messages, and what the warp knows of them. */
struct parts {
  struct senders senders;
  float weight;
  struct part *known;
};

/* The parts of the members from `first` on. Past the last one it has all signs negative and the
 * scale 0: to add -0 changes no sum, and costs less than to ask. (Of levels -0 would not be all
 * that it gives, and their sums ask.) */
template <unsigned width = 1>
static __device__ inline void find_parts(const struct ob_cuda_plan &plan,
                                         const struct location &location, const struct parts &parts,
                                         unsigned first) {
  const unsigned member = first + lane_number(), last = (unsigned)plan.geometry.members - 1;
  const struct ob_view view = view_of(sent_by(plan, parts.senders, min(member, last)), location);
  const float scale = scale_of(view, location) * parts.weight;
  __syncwarp();
  parts.known[lane_number()] = {view.words + location.word * width, member <= last ? scale : -0.0f};
  __syncwarp();
}

/* A member's share of the mean, which goes into its scale. */
static inline float weight_of_mean(const struct ob_cuda_plan &plan) {
  return (float)(1.0 / (double)plan.geometry.members);
}

#endif
