/*
 * The arithmetic of the outer step: passes over a fragment, once in local_steps steps. float32
 * throughout, one rounding an operation; so with the same mean drift all ranks come to the same
 * consensus, to the bit.
 */
#include <string.h>

#include "base/hash.h"
#include "compression/codec.h"
#include "compression/numerics.h"
#include "optimizers/outer/outer.h"

/* Drifts beyond it are no training any more; the sum of squares of a block is still a float32. */
#define LARGEST_DRIFT 1e16f

static const void *parameters_of(const struct ob_fragment *fragment,
                                 const struct ob_outer_piece *piece) {
  const struct onebit_outer *outer = fragment->outer;
  size_t bytes = piece->first * ob_dtype_size(outer->options.parameter_dtype);
  return (const char *)outer->tensors[piece->tensor].parameter + bytes;
}

void ob_fragment_read(struct ob_fragment *fragment) {
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const void *parameters = parameters_of(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      fragment->consensus[piece->at + i] =
          ob_load(parameters, i, fragment->outer->options.parameter_dtype);
  }
}

/* --- Before the exchange -----------------------------------------------------------------------*/

/* Returns whether all can be sent: also false for what is not a number. */
static bool drift_of_floats(const float *restrict consensus, const float *restrict parameter,
                            float *restrict drift, size_t count) {
  unsigned wrong = 0;
  for (size_t i = 0; i < count; i++) {
    const float d = consensus[i] - drift[i] - parameter[i];
    drift[i] = d;
    wrong |= !(d <= LARGEST_DRIFT && d >= -LARGEST_DRIFT);
  }
  return !wrong;
}

/* The parameters were set to rounded numbers: what rounding took is no drift. */
static bool drift_of_halves(const float *consensus, const void *parameter, onebit_dtype_t dtype,
                            float *drift, size_t count) {
  bool wrong = false;
  for (size_t i = 0; i < count; i++) {
    const float d = ob_round(consensus[i] - drift[i], dtype) - ob_load(parameter, i, dtype);
    drift[i] = d;
    wrong |= !(d <= LARGEST_DRIFT && d >= -LARGEST_DRIFT);
  }
  return !wrong;
}

bool ob_fragment_drift(struct ob_fragment *fragment) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  bool sound = true;
  if (!fragment->keeps)
    memset(fragment->drift, 0, fragment->count * sizeof(float));
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const float *consensus = fragment->consensus + piece->at;
    const void *parameters = parameters_of(fragment, piece);
    float *drift = fragment->drift + piece->at;
    if (dtype == ONEBIT_FLOAT32)
      sound &= drift_of_floats(consensus, parameters, drift, piece->count);
    else
      sound &= drift_of_halves(consensus, parameters, dtype, drift, piece->count);
  }
  return sound;
}

uint32_t ob_fragment_checksum(const struct ob_fragment *fragment) {
  return fragment->outer->codec->checksum(fragment->consensus, fragment->count);
}

/* --- After the exchange ------------------------------------------------------------------------*/

/* Returns the sum of squares of the drift, for onebit_outer_get_info. */
static double add_mean(float *restrict x, const float *restrict d, float rate, size_t count) {
  double squares = 0;
  for (size_t i = 0; i < count; i++) {
    x[i] -= rate * d[i];
    squares += (double)d[i] * (double)d[i];
  }
  return squares;
}

static double add_momentum(float *restrict x, float *restrict m, const float *restrict d,
                           float rate, float decay, size_t count) {
  double squares = 0;
  for (size_t i = 0; i < count; i++) {
    m[i] = decay * m[i] + d[i];
    x[i] -= rate * m[i];
    squares += (double)d[i] * (double)d[i];
  }
  return squares;
}

static double add_nesterov(float *restrict x, float *restrict m, const float *restrict d,
                           float rate, float decay, size_t count) {
  double squares = 0;
  for (size_t i = 0; i < count; i++) {
    m[i] = decay * m[i] + d[i];
    x[i] -= rate * (d[i] + decay * m[i]);
    squares += (double)d[i] * (double)d[i];
  }
  return squares;
}

void ob_fragment_update(struct ob_fragment *fragment) {
  const onebit_outer_options_t *options = &fragment->outer->options;
  const float rate = (float)options->learning_rate, decay = (float)options->momentum;
  const size_t count = fragment->count;
  if (options->rule == ONEBIT_OUTER_MEAN)
    fragment->drift_squares = add_mean(fragment->consensus, fragment->drift, rate, count);
  else if (options->rule == ONEBIT_OUTER_MOMENTUM)
    fragment->drift_squares =
        add_momentum(fragment->consensus, fragment->momentum, fragment->drift, rate, decay, count);
  else
    fragment->drift_squares =
        add_nesterov(fragment->consensus, fragment->momentum, fragment->drift, rate, decay, count);
}

static void set_piece(const float *consensus, const float *left, void *parameters,
                      onebit_dtype_t dtype, float mixing, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const float x = left ? consensus[i] - left[i] : consensus[i];
    float p = x;
    if (mixing < 1)
      p = (1 - mixing) * ob_load(parameters, i, dtype) + mixing * x;
    ob_store(parameters, i, dtype, p);
  }
}

void ob_fragment_set(const struct ob_fragment *fragment, double mixing) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const float *left = fragment->keeps ? fragment->drift + piece->at : NULL;
    set_piece(fragment->consensus + piece->at, left,
              (void *)(uintptr_t)parameters_of(fragment, piece), dtype, (float)mixing,
              piece->count);
  }
}

void ob_fragment_shift(const struct ob_fragment *fragment, const float *by) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)parameters_of(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      if (by[piece->at + i] != 0)
        ob_store(parameters, i, dtype, ob_load(parameters, i, dtype) - by[piece->at + i]);
  }
}

void ob_fragment_set_ahead(const struct ob_fragment *fragment, const float *ahead, size_t first,
                           size_t count) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)parameters_of(fragment, piece);
    const size_t end =
        first + count < piece->at + piece->count ? first + count : piece->at + piece->count;
    for (size_t i = first > piece->at ? first : piece->at; i < end; i++)
      ob_store(parameters, i - piece->at, dtype, fragment->consensus[i] - ahead[i]);
  }
}
