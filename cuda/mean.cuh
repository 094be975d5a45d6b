/* The mean of dense messages, one a member, in their order: for a server, and inside a host. */
#ifndef OB_CUDA_MEAN_CUH
#define OB_CUDA_MEAN_CUH

#include "cuda/location.cuh"

/* Values lie behind a header of 40 bytes, so accesses are of 8: four of a member, and those of four
 * members before the first addition, are 128 bytes a thread in flight. */
constexpr unsigned mean_pairs = 4, mean_elements = mean_pairs * 2 * OB_LANES, members_at_once = 4;

/* The sum of the members' values, those of 16 bits times their factor, of the lane's pairs from
 * `first` on: of those before `end`. Past the last member it is loaded again: that costs less than
 * to ask. */
template <onebit_dtype_t dtype>
static __device__ inline void sum_pairs(const struct ob_cuda_plan &plan,
                                        const struct senders &senders,
                                        const struct location &location, float factor,
                                        unsigned first, unsigned end,
                                        float (&total)[mean_pairs][2]) {
  const unsigned members = (unsigned)plan.geometry.members;
  OB_UNROLL
  for (unsigned i = 0; i < mean_pairs * 2; i++)
    total[i / 2][i % 2] = -0.0f; /* what leaves the first term as it is, be it -0 */
  for (unsigned member = 0; member < members; member += members_at_once) {
    float term[members_at_once][mean_pairs][2] = {};
    OB_UNROLL
    for (unsigned s = 0; s < members_at_once; s++) {
      unsigned char *message = sent_by(plan, senders, min(member + s, members - 1));
      const struct ob_view view = view_of(message, location);
      const size_t at = location.word * OB_LANES;
      const void *values = dtype == ONEBIT_FLOAT32 ? (const void *)(view.values + at)
                                                   : (const void *)(view.halves + at);
      OB_UNROLL
      for (unsigned k = 0; k < mean_pairs; k++)
        if (first + k * 2 * OB_LANES < end)
          load_some<dtype, true>(values, first + k * 2 * OB_LANES, end, true, term[s][k]);
    }
    OB_UNROLL
    for (unsigned i = 0; i < members_at_once * mean_pairs * 2; i++) {
      const unsigned s = i / (mean_pairs * 2), k = i / 2 % mean_pairs;
      if (member + s < members)
        total[k][i % 2] += dtype == ONEBIT_FLOAT32 ? term[s][k][i % 2] : factor * term[s][k][i % 2];
    }
  }
}

/* The block's mean to `values`, where those of its message begin; of messages of this type. Its sum
 * of squares says whether its values are finite, and the squares that an optimizer makes of them:
 * it is used for nothing else, so its order is free. */
template <onebit_dtype_t dtype>
static __device__ inline void write_mean(const struct ob_cuda_plan &plan,
                                         const struct senders &senders,
                                         const struct location &location, float factor,
                                         float weight, float *values) {
  float *out = values + location.word * OB_LANES;
  const unsigned end = whole_words((unsigned)location.block.count);
  float lane = 0;
  for (unsigned first = 2 * lane_number(); first < end; first += mean_elements) {
    float mean[mean_pairs][2];
    sum_pairs<dtype>(plan, senders, location, factor, first, end, mean);
    OB_UNROLL
    for (unsigned k = 0; k < mean_pairs && first + k * 2 * OB_LANES < end; k++) {
      mean[k][0] *= weight;
      mean[k][1] *= weight;
      lane += mean[k][0] * mean[k][0] + mean[k][1] * mean[k][1];
      store_some<ONEBIT_FLOAT32, true>(out, first + k * 2 * OB_LANES, end, true, mean[k]);
    }
  }
  const float sum = sum_lanes(lane);
  if (lane_number() == 0 && !ob_is_finite(sum))
    note(plan.state, OB_FLAG_NOT_FINITE);
}

#endif
