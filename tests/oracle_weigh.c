/* Computes the oracle's factor of a step's gradients from accumulation, loss scale and clipping,
 * and changes the loss scale. */
#include <math.h>

#include "tests/oracle.h"

#define RUN 2048 /* elements whose squares are added in float32; fewer if blocks are smaller */

struct oracle_weigher oracle_weigher_of(const onebit_optimizer_options_t *options, int ranks) {
  struct oracle_weigher weigher = {.options = *options, .ranks = ranks, .loss_scale = 1.0};
  if (weigher.options.gradient_factor == 0.0)
    weigher.options.gradient_factor = 1.0;
  if (weigher.options.min_loss_scale == 0.0)
    weigher.options.min_loss_scale = 1.0;
  if (weigher.options.loss_scale_interval == 0)
    weigher.options.loss_scale_interval = 2000;
  if (weigher.options.initial_loss_scale != 0.0)
    weigher.loss_scale = weigher.options.initial_loss_scale;
  return weigher;
}

void oracle_rescale(struct oracle_weigher *weigher, bool skipped) {
  const onebit_optimizer_options_t *options = &weigher->options;
  if (options->initial_loss_scale == 0.0)
    return;
  if (skipped) {
    weigher->good_steps = 0;
    weigher->loss_scale /= 2.0;
    if (weigher->loss_scale < options->min_loss_scale)
      weigher->loss_scale = options->min_loss_scale;
  } else if (++weigher->good_steps == options->loss_scale_interval) {
    weigher->good_steps = 0;
    if (weigher->loss_scale <= ldexp(1.0, 63))
      weigher->loss_scale *= 2.0;
  }
}

/* Returns the length of a rank's share in elements, if a new run begins at each share. Otherwise
 * returns 0. Profile deepspeed pads each tensor and cuts it into one share for each rank. */
static size_t share_length(const struct oracle_weigher *weigher, size_t count) {
  size_t multiple = 8, ranks = (size_t)weigher->ranks;
  if (weigher->share || weigher->options.profile != ONEBIT_PROFILE_DEEPSPEED)
    return weigher->share;
  while (multiple % ranks)
    multiple += 8;
  multiple *= ranks;
  return (count + multiple - 1) / multiple * multiple / ranks;
}

/* Returns the sum of squares of one tensor. `before` is the number of elements of earlier
 * tensors. */
static double sum_tensor_squares(const struct oracle_weigher *weigher, const float *gradient,
                                 float factor, size_t before, size_t count) {
  size_t run = weigher->options.block_size, part = share_length(weigher, count);
  if (run == 0 || run == ONEBIT_BLOCK_BUFFER ||
      weigher->options.profile == ONEBIT_PROFILE_DEEPSPEED)
    run = RUN;
  size_t begun = weigher->share ? before % part : 0; /* elements of the tensor's first share that
                                                      * precede the tensor */
  struct oracle_sum sum = {0};
  for (size_t first = 0, length; first < count; first += length) {
    size_t into = part ? (begun + first) % part : first, left = count - first;
    length = part && part - into < left ? part - into : left;
    for (size_t at = 0; at < length; at += run)
      oracle_add(&sum, oracle_run_squares(gradient + first + at, factor,
                                          length - at < run ? length - at : run));
  }
  return oracle_total(&sum);
}

static float sum_rank_squares(const struct oracle_weigher *weigher, const float *gradient,
                              float factor, const size_t *counts, size_t tensors) {
  double sum = 0.0;
  for (size_t k = 0, before = 0; k < tensors; before += counts[k++])
    sum += sum_tensor_squares(weigher, gradient + before, factor, before, counts[k]);
  return (float)sum;
}

bool oracle_weigh(struct oracle_weigher *weigher, const float *const *gradients,
                  const size_t *counts, size_t tensors, float *factor) {
  double counted = weigher->options.gradient_factor / weigher->loss_scale;
  *factor = (float)counted;
  if (weigher->options.clip_norm == 0.0)
    return true;
  float sum = 0.0f;
  for (int r = 0; r < weigher->ranks; r++) {
    float own = sum_rank_squares(weigher, gradients[r], *factor, counts, tensors);
    sum = r == 0 ? own : sum + own;
    if (!isfinite(own))
      return false;
  }
  float mean = sum * (1.0f / (float)weigher->ranks);
  if (!isfinite(mean * mean))
    return false;
  weigher->norm = sqrt((double)mean);
  double clip = weigher->options.clip_norm / weigher->norm;
  *factor = (float)(counted * (clip < 1.0 ? clip : 1.0));
  return true;
}
