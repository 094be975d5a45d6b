/* The mean of dense messages, one a member, in their order: for a server, and inside a host. */
#ifndef OB_CUDA_MEAN_CUH
#define OB_CUDA_MEAN_CUH

#include "cuda/location.cuh"

constexpr unsigned words_at_once = 4, members_at_once = 4;

/* An element of a message. Those of 16 bits are inputs as they were, still without their factor. */
template <onebit_dtype_t dtype>
static __device__ inline float load_value(const struct ob_view &message, size_t i, float factor) {
  if (dtype == ONEBIT_FLOAT32)
    return __ldcs(&message.values[i]);
  return factor * load_one<dtype>(message.halves + i, 0);
}

/* The lane's elements of a member's message, four words of the block from `word` on, which is
 * element `first` of the message. Past the last word, as past the last member, what was there is
 * loaded again: that costs less than to ask. */
template <onebit_dtype_t dtype>
static __device__ inline void load_words(const struct ob_view &message, size_t first, float factor,
                                         unsigned word, unsigned words,
                                         float (&value)[words_at_once]) {
  OB_UNROLL
  for (unsigned w = 0; w < words_at_once; w++)
    value[w] = load_value<dtype>(message, first + min(word + w, words - 1) * OB_LANES, factor);
}

/* The sum of the members' values. */
template <onebit_dtype_t dtype>
static __device__ inline void sum_words(const struct ob_cuda_plan &plan,
                                        const struct senders &senders,
                                        const struct location &location, float factor,
                                        unsigned word, unsigned words,
                                        float (&total)[words_at_once]) {
  const unsigned members = (unsigned)plan.geometry.members;
  const size_t at = location.word * OB_LANES + lane_number();
  OB_UNROLL
  for (unsigned w = 0; w < words_at_once; w++)
    total[w] = -0.0f; /* what leaves the first term as it is, be it -0 */
  for (unsigned member = 0; member < members; member += members_at_once) {
    float term[members_at_once][words_at_once];
    OB_UNROLL
    for (unsigned s = 0; s < members_at_once; s++) {
      unsigned char *message = sent_by(plan, senders, min(member + s, members - 1));
      load_words<dtype>(view_of(message, location), at, factor, word, words, term[s]);
    }
    OB_UNROLL
    for (unsigned i = 0; i < members_at_once * words_at_once; i++)
      if (member + i / words_at_once < members)
        total[i % words_at_once] += term[i / words_at_once][i % words_at_once];
  }
}

/* The block's mean to `values`, where those of its message begin; of messages of this type. Its sum of squares says whether
 * its values are finite, and the squares that an optimizer makes of them. */
template <onebit_dtype_t dtype>
static __device__ inline void write_mean(const struct ob_cuda_plan &plan,
                                         const struct senders &senders,
                                         const struct location &location, float factor,
                                         float weight, float *values) {
  float *out = values + location.word * OB_LANES + lane_number();
  const unsigned words = whole_words((unsigned)location.block.count) / OB_LANES;
  float lane = 0;
  for (unsigned word = 0; word < words; word += words_at_once) {
    float mean[words_at_once];
    sum_words<dtype>(plan, senders, location, factor, word, words, mean);
    OB_UNROLL
    for (unsigned w = 0; w < words_at_once && word + w < words; w++) {
      mean[w] *= weight;
      lane += mean[w] * mean[w];
      __stcs(&out[(word + w) * OB_LANES], mean[w]);
    }
  }
  const float sum = sum_lanes(lane);
  if (lane_number() == 0 && !ob_is_finite(sum))
    note(plan.state, OB_FLAG_NOT_FINITE);
}

#endif
