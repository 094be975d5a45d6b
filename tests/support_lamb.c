/* Cases of 1-bit LAMB against the oracle. */
#include "tests/support_lamb.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

onebit_lamb_options_t lamb_options(const struct adam_case *what) {
  const struct lamb_more *more = what->more;
  onebit_lamb_options_t options = ONEBIT_LAMB_OPTIONS_INIT;
  if (more)
    options = more->options;
  options.size = sizeof options;
  options.beta1 = what->options.beta1;
  options.beta2 = what->options.beta2;
  options.epsilon = what->options.epsilon;
  options.freeze_step = what->options.freeze_step;
  options.freeze_threshold = what->options.freeze_threshold;
  options.no_bias_correction = what->options.no_bias_correction;
  options.common = what->options.common;
  return options;
}

static size_t uncompressed_of(const struct adam_case *what) {
  const struct lamb_more *more = what->more;
  return more ? more->uncompressed : 0;
}

static onebit_status_t create(onebit_comm_t comm, onebit_tensor_t *tensors,
                              const struct adam_case *what, onebit_optimizer_t *optimizer) {
  onebit_lamb_options_t options = lamb_options(what);
  for (size_t k = 0; k < uncompressed_of(what); k++)
    tensors[k].uncompressed = 1;
  return onebit_lamb_create(comm, tensors, what->tensors->count, &options, optimizer);
}

/* Two oracles: tensors that stay uncompressed are such that never freeze. */
struct pair {
  struct oracle_lamb *dense, *sent;
};

static void *create_oracles(const struct adam_case *what, const onebit_tensor_t *tensors) {
  size_t first = uncompressed_of(what);
  int hosts = what->hosts ? what->hosts : 1;
  struct pair *pair = allocate(1, sizeof *pair);
  onebit_lamb_options_t options = lamb_options(what);
  pair->sent = oracle_lamb_create(what->size, hosts, tensors + first, what->tensors->count - first,
                                  &options);
  options.freeze_step = ONEBIT_FREEZE_NEVER;
  if (options.common.profile == ONEBIT_PROFILE_DEEPSPEED) { /* which does not compress them */
    options.common.profile = ONEBIT_PROFILE_DEFAULT;
    options.common.block_size = ONEBIT_BLOCK_BUFFER;
    options.no_bias_correction = 1;
  }
  pair->dense = oracle_lamb_create(what->size, hosts, tensors, first, &options);
  return pair;
}

static bool step(void *oracles, const float *const *gradients, float learning_rate) {
  struct pair *pair = oracles;
  size_t ranks = (size_t)(pair->sent->state->size * pair->sent->state->each);
  const float **behind = allocate(ranks, sizeof *behind);
  for (size_t r = 0; r < ranks; r++)
    behind[r] = gradients[r] + pair->dense->state->total;
  bool done = oracle_lamb_step(pair->dense, gradients, learning_rate) &&
              oracle_lamb_step(pair->sent, behind, learning_rate);
  free(behind);
  return done;
}

static struct adam_moment moment(const void *oracles) {
  const struct pair *pair = oracles;
  struct adam_moment dense = adam_moment_of(pair->dense->state);
  struct adam_moment all = adam_moment_of(pair->sent->state);
  size_t before = pair->dense->state->total, behind = pair->sent->state->total;
  dense.parameters = realloc(dense.parameters, (before + behind + 1) * sizeof(float));
  if (behind)
    memcpy(dense.parameters + before, all.parameters, behind * sizeof(float));
  free(all.parameters);
  all.parameters = dense.parameters;
  all.momentum_norm = hypot(all.momentum_norm, dense.momentum_norm);
  free(dense.error_norm);
  return all;
}

static void destroy(void *oracles) {
  struct pair *pair = oracles;
  oracle_lamb_destroy(pair->dense);
  oracle_lamb_destroy(pair->sent);
  free(pair);
}

const struct optimizer_kind lamb = {"lamb", create, create_oracles, step, moment, destroy};
