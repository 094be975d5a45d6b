/* The passes of the outer step over a fragment, once in local_steps steps (element.h). */
#include <string.h>

#include "base/memory.h"
#include "compression/codec.h"
#include "compression/numerics.h"
#include "optimizers/outer/element.h"
#include "optimizers/outer/outer.h"

#define FIXED __attribute__((always_inline)) static inline

static const void *outer_update_parameters_of(const struct ob_fragment *fragment,
                                              const struct ob_outer_piece *piece) {
  const struct onebit_outer *outer = fragment->outer;
  size_t bytes = piece->first * ob_dtype_size(outer->options.parameter_dtype);
  return (const char *)outer->tensors[piece->tensor].parameter + bytes;
}

void ob_fragment_read(struct ob_fragment *fragment) {
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const void *parameters = outer_update_parameters_of(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      fragment->consensus[piece->at + i] =
          ob_load(parameters, i, fragment->outer->options.parameter_dtype);
  }
}

/* --- Before the exchange -----------------------------------------------------------------------*/

/* Returns whether all can be sent. Called with the dtype as a constant, of which a loop is made. */
FIXED bool drift_of(const float *restrict consensus, const void *restrict parameter,
                    onebit_dtype_t dtype, float *restrict drift, size_t count) {
  unsigned wrong = 0;
  for (size_t i = 0; i < count; i++) {
    const float d = ob_outer_drift(consensus[i], drift[i], ob_load(parameter, i, dtype), dtype);
    drift[i] = d;
    wrong |= !ob_outer_sound(d);
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
    const void *parameters = outer_update_parameters_of(fragment, piece);
    float *drift = fragment->drift + piece->at;
    if (dtype == ONEBIT_FLOAT32)
      sound &= drift_of(consensus, parameters, ONEBIT_FLOAT32, drift, piece->count);
    else
      sound &= drift_of(consensus, parameters, dtype, drift, piece->count);
  }
  return sound;
}

uint32_t ob_fragment_checksum(const struct ob_fragment *fragment) {
  return fragment->outer->codec->checksum(fragment->consensus, fragment->count);
}

/* --- After the exchange ------------------------------------------------------------------------*/

/* A run of at most OB_OUTER_RUN elements; gives the sum of squares of its drifts. */
FIXED double update_run(float *restrict x, float *restrict m, const float *restrict d,
                        onebit_outer_rule_t rule, float rate, float decay, size_t count) {
  double lanes[OB_LANES] = {0};
  float none;
  for (size_t i = 0; i < count; i++) {
    x[i] -= rate * ob_outer_move(rule, rule == ONEBIT_OUTER_MEAN ? &none : &m[i], d[i], decay);
    lanes[i % OB_LANES] += (double)d[i] * (double)d[i];
  }
  for (int width = OB_LANES / 2; width > 0; width /= 2)
    for (int k = 0; k < width; k++)
      lanes[k] += lanes[k + width];
  return lanes[0];
}

FIXED void update_by(struct ob_fragment *fragment, onebit_outer_rule_t rule) {
  const struct onebit_outer *outer = fragment->outer;
  const float rate = (float)outer->options.learning_rate, decay = (float)outer->options.momentum;
  size_t runs = 0;
  for (size_t i = 0; i < fragment->count; i += OB_OUTER_RUN) {
    const size_t left = fragment->count - i, count = left < OB_OUTER_RUN ? left : OB_OUTER_RUN;
    float *momentum = rule == ONEBIT_OUTER_MEAN ? NULL : fragment->momentum + i;
    outer->sums[runs++] = update_run(fragment->consensus + i, momentum, fragment->drift + i, rule,
                                     rate, decay, count);
  }
  fragment->drift_squares = ob_add_sums(outer->sums, runs);
}

void ob_fragment_update(struct ob_fragment *fragment) {
  const onebit_outer_rule_t rule = fragment->outer->options.rule;
  if (rule == ONEBIT_OUTER_MEAN)
    update_by(fragment, ONEBIT_OUTER_MEAN);
  else if (rule == ONEBIT_OUTER_MOMENTUM)
    update_by(fragment, ONEBIT_OUTER_MOMENTUM);
  else
    update_by(fragment, ONEBIT_OUTER_NESTEROV);
}

static void set_piece(const float *consensus, const float *left, void *parameters,
                      onebit_dtype_t dtype, float mixing, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const float x = left ? consensus[i] - left[i] : consensus[i];
    const float p = mixing < 1 ? ob_load(parameters, i, dtype) : 0;
    ob_store(parameters, i, dtype, ob_outer_mix(p, x, mixing));
  }
}

void ob_fragment_set(const struct ob_fragment *fragment, double mixing) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    const float *left = fragment->keeps ? fragment->drift + piece->at : NULL;
    set_piece(fragment->consensus + piece->at, left,
              (void *)(uintptr_t)outer_update_parameters_of(fragment, piece), dtype, (float)mixing,
              piece->count);
  }
}

void ob_fragment_shift(const struct ob_fragment *fragment, const float *by) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)outer_update_parameters_of(fragment, piece);
    for (size_t i = 0; i < piece->count; i++)
      if (by[piece->at + i] != 0)
        ob_store(parameters, i, dtype, ob_load(parameters, i, dtype) - by[piece->at + i]);
  }
}

void ob_fragment_set_ahead(struct ob_fragment *fragment, const float *ahead, size_t first,
                           size_t count) {
  const onebit_dtype_t dtype = fragment->outer->options.parameter_dtype;
  const float mixing = (float)fragment->outer->options.mixing;
  memcpy(fragment->drift + first, ahead + first, count * sizeof *ahead);
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_outer_piece *piece = &fragment->piece[k];
    void *parameters = (void *)(uintptr_t)outer_update_parameters_of(fragment, piece);
    const size_t end =
        first + count < piece->at + piece->count ? first + count : piece->at + piece->count;
    const size_t begin = first > piece->at ? first : piece->at;
    for (size_t i = begin; i < end; i++) {
      const float before = ob_load(parameters, i - piece->at, dtype);
      const float p = fragment->consensus[i] - ahead[i];
      ob_store(parameters, i - piece->at, dtype,
               mixing < 1 ? (1 - mixing) * before + mixing * p : p);
    }
  }
}

/* --- The host's row ----------------------------------------------------------------------------*/

static onebit_status_t outer_update_drift(struct ob_fragment *fragment) {
  fragment->finite = ob_fragment_drift(fragment);
  fragment->checksum = ob_fragment_checksum(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update_checksum(const struct ob_fragment *fragment, uint32_t *sum) {
  *sum = ob_fragment_checksum(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update(struct ob_fragment *fragment) {
  ob_fragment_update(fragment);
  return ONEBIT_OK;
}

static onebit_status_t outer_update_set(const struct ob_fragment *fragment, double mixing) {
  ob_fragment_set(fragment, mixing);
  return ONEBIT_OK;
}

const struct ob_outer_executor ob_outer_executor_host = {.memory = &ob_memory_host,
                                                         .drift = outer_update_drift,
                                                         .checksum = outer_update_checksum,
                                                         .update = outer_update,
                                                         .set = outer_update_set};
