/* What the gradients of a step count as, by the oracle: their share of a batch, the loss scale,
 * clipping; and how the loss scale goes on. */
#include <math.h>
#include <stdlib.h>

#include "tests/oracle.h"

#define LANES 32
#define RUN   2048 /* elements whose squares are added in float32, where blocks are not smaller */

struct oracle_weigher oracle_weigher_of(const onebit_optimizer_options_t *options, int ranks) {
  struct oracle_weigher weigher = {.options = *options, .ranks = ranks, .loss_scale = 1.0};
  if (weigher.options.gradient_factor == 0.0)
    weigher.options.gradient_factor = 1.0;
  if (weigher.options.loss_scale_least == 0.0)
    weigher.options.loss_scale_least = 1.0;
  if (weigher.options.loss_scale_interval == 0)
    weigher.options.loss_scale_interval = 2000;
  if (weigher.options.loss_scale_first != 0.0)
    weigher.loss_scale = weigher.options.loss_scale_first;
  return weigher;
}

void oracle_rescale(struct oracle_weigher *weigher, bool skipped) {
  const onebit_optimizer_options_t *options = &weigher->options;
  if (options->loss_scale_first == 0.0)
    return;
  if (skipped) {
    weigher->good_steps = 0;
    weigher->loss_scale /= 2.0;
    if (weigher->loss_scale < options->loss_scale_least)
      weigher->loss_scale = options->loss_scale_least;
  } else if (++weigher->good_steps == options->loss_scale_interval) {
    weigher->good_steps = 0;
    if (weigher->loss_scale <= ldexp(1.0, 63))
      weigher->loss_scale *= 2.0;
  }
}

static float run_of_squares(const float *gradient, float factor, size_t count) {
  float lane[LANES] = {0};
  for (size_t i = 0; i < count; i++) {
    float counted = factor * gradient[i];
    lane[i % LANES] += counted * counted;
  }
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lane[i] += lane[i + width];
  return lane[0];
}

/* Runs begin anew with each part of a tensor: profile deepspeed pads it and cuts it in a part a
 * rank. */
static double squares_of_tensor(const struct oracle_weigher *weigher, const float *gradient,
                                float factor, size_t count) {
  size_t length = weigher->options.block_size, part = count, ranks = (size_t)weigher->ranks;
  bool deepspeed = weigher->options.profile == ONEBIT_PROFILE_DEEPSPEED;
  if (length == 0 || length == ONEBIT_BLOCK_BUFFER || deepspeed)
    length = RUN;
  if (deepspeed) {
    size_t multiple = 8;
    while (multiple % ranks)
      multiple += 8;
    multiple *= ranks;
    part = (count + multiple - 1) / multiple * multiple / ranks;
  }
  double sum = 0.0;
  for (size_t first = 0; first < count; first += part)
    for (size_t at = first; at < first + part && at < count; at += length) {
      size_t end = first + part < count ? first + part : count;
      size_t left = end - at < length ? end - at : length;
      sum += (double)run_of_squares(gradient + at, factor, left);
    }
  return sum;
}

static float squares_of_rank(const struct oracle_weigher *weigher, const float *gradient,
                             float factor, const size_t *counts, size_t tensors) {
  double sum = 0.0;
  for (size_t k = 0; k < tensors; gradient += counts[k++])
    sum += squares_of_tensor(weigher, gradient, factor, counts[k]);
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
    float own = squares_of_rank(weigher, gradients[r], *factor, counts, tensors);
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
