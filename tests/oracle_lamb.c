/* 1-bit LAMB of the oracle: elements in float32, what is a tensor's in double, one operation after
 * the other as the public header writes them. */
#include "tests/oracle_lamb.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LANES 32

static void *zeros(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  cr_assert(memory, "no memory for %zu elements", count);
  return memory;
}

static double given_or(double given, double fallback) { return given != 0.0 ? given : fallback; }

static bool deepspeed(const struct oracle_lamb *lamb) {
  return lamb->state->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

static onebit_adam_options_t adam_options(const onebit_lamb_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta1 = options->beta1;
  adam.beta2 = options->beta2;
  adam.epsilon = options->epsilon;
  adam.freeze_step = options->freeze_step;
  adam.freeze_threshold = options->freeze_threshold;
  adam.no_bias_correction = options->no_bias_correction;
  adam.common = options->common;
  return adam;
}

static size_t padded(size_t count, size_t ranks) {
  size_t multiple = ranks;
  while (multiple % 8)
    multiple += ranks;
  size_t quantum = multiple * ranks;
  return (count + quantum - 1) / quantum * quantum;
}

/* One exchange instead of one a tensor; the padding is a tensor of its own there. */
static void fuse(struct oracle_lamb *lamb) {
  struct oracle_adam *state = lamb->state;
  size_t *counts = zeros(state->tensors + 1, sizeof *counts);
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.profile = ONEBIT_PROFILE_DEEPSPEED;
  options.no_error_feedback = state->options.common.no_error_feedback;
  for (size_t k = 0; k < state->exchange_count; k++)
    oracle_destroy(state->exchanges[k].oracle);
  free(state->exchanges);
  state->exchanges = zeros(1, sizeof *state->exchanges);
  memcpy(counts, state->count, state->tensors * sizeof *counts);
  lamb->padded = padded(state->total, (size_t)state->size);
  counts[state->tensors] = lamb->padded - state->total;
  state->exchanges[0].oracle =
      oracle_create_tensors(state->size, 1, counts, state->tensors + 1, &options);
  state->exchanges[0].tensors = state->tensors;
  state->exchange_count = 1;
  free(counts);
}

struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options) {
  struct oracle_lamb *lamb = zeros(1, sizeof *lamb);
  onebit_adam_options_t adam = adam_options(options);
  lamb->state = oracle_adam_create(size, hosts, tensors, count, &adam);
  lamb->padded = lamb->state->total;
  if (deepspeed(lamb))
    fuse(lamb);
  lamb->coefficient_least = given_or(options->coefficient_least, 0.01);
  lamb->coefficient_most = given_or(options->coefficient_most, 10.0);
  lamb->coefficient_beta = given_or(options->coefficient_beta, 0.9);
  lamb->factor_least = given_or(options->factor_least, 0.5);
  lamb->factor_most = given_or(options->factor_most, 4.0);
  lamb->factor_change = given_or(options->factor_change, 0.1);
  lamb->coefficient = zeros(count, sizeof(double));
  lamb->factor = zeros(count, sizeof(double));
  lamb->ratio = zeros(count, sizeof(double));
  lamb->scaling = zeros(count, sizeof(float));
  for (size_t k = 0; k < count; k++)
    lamb->factor[k] = lamb->scaling[k] = 1.0f;
  lamb->fresh = zeros(lamb->state->total, sizeof(float));
  lamb->update = zeros(lamb->state->total, sizeof(float));
  lamb->plain = zeros(lamb->state->total, sizeof(float));
  lamb->carried = zeros(lamb->padded, sizeof(float));
  lamb->received = zeros(lamb->padded, sizeof(float));
  return lamb;
}

void oracle_lamb_destroy(struct oracle_lamb *lamb) {
  oracle_adam_destroy(lamb->state);
  free(lamb->coefficient);
  free(lamb->factor);
  free(lamb->ratio);
  free(lamb->scaling);
  free(lamb->fresh);
  free(lamb->update);
  free(lamb->plain);
  free(lamb->carried);
  free(lamb->received);
  free(lamb);
}

/* --- Norms */

/* Of one run, as scales are summed: element i goes to lane i mod 32, lanes are added by halving. */
static float run_squares(const float *values, size_t count) {
  float lane[LANES] = {0};
  for (size_t i = 0; i < count; i++)
    lane[i % LANES] += values[i] * values[i];
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lane[i] += lane[i + width];
  return lane[0];
}

/* Of a tensor: the runs of its exchange that are its own, added in double. */
static double squares(const struct oracle_lamb *lamb, size_t k, const float *values) {
  const struct oracle_adam *state = lamb->state;
  double sum = 0.0;
  for (size_t x = 0; x < state->exchange_count; x++) {
    const struct oracle_exchange *exchange = &state->exchanges[x];
    if (k < exchange->first || k >= exchange->first + exchange->tensors)
      continue;
    size_t base = state->first[exchange->first], end = state->first[k] + state->count[k];
    for (size_t r = 0; r < exchange->oracle->run_count; r++) {
      const struct oracle_run *run = &exchange->oracle->runs[r];
      if (base + run->first >= state->first[k] && base + run->first < end)
        sum += (double)run_squares(values + base + run->first, run->count);
    }
  }
  return sum;
}

static double clamp(double value, double least, double most) {
  return fmax(fmin(value, most), least);
}

static void move(struct oracle_lamb *lamb, size_t k, float learning_rate, double ratio) {
  struct oracle_adam *state = lamb->state;
  float rate = (float)((double)learning_rate * (double)state->factor[k] * ratio);
  lamb->ratio[k] = ratio;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
    state->parameter[i] = state->parameter[i] - rate * lamb->update[i];
}

/* --- Warm-up */

static void warm_up_tensor(struct oracle_lamb *lamb, size_t k, float learning_rate) {
  struct oracle_adam *state = lamb->state;
  float b1 = (float)state->options.beta1, w1 = (float)(1.0 - state->options.beta1);
  float b2 = (float)state->options.beta2, w2 = (float)(1.0 - state->options.beta2);
  float k1 = oracle_momentum_correction(state, state->steps);
  float k2 = oracle_variance_correction(state, state->steps);
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float g = oracle_mean_gradient(state, i), *m = &state->momentum[i], *v = &state->variance[i];
    *m = b1 * *m + w1 * g;
    *v = b2 * *v + (w2 * g) * g;
    float denominator = sqrtf(*v) * k2 + (float)state->options.epsilon;
    lamb->update[i] = (*m * k1) / denominator + state->weight_decay[k] * state->parameter[i];
  }
  double p = sqrt(squares(lamb, k, state->parameter)), u = sqrt(squares(lamb, k, lamb->update));
  double ratio = 1.0;
  if (p != 0.0 && u != 0.0)
    ratio = clamp(p / u, lamb->coefficient_least, lamb->coefficient_most);
  if (ratio != 1.0)
    lamb->coefficient[k] =
        lamb->coefficient_beta * lamb->coefficient[k] + (1.0 - lamb->coefficient_beta) * ratio;
  move(lamb, k, learning_rate, ratio);
}

/* The root mean square of each tensor's momentum over those of its exchange. */
static void scale_exchange(struct oracle_lamb *lamb, const struct oracle_exchange *exchange) {
  const struct oracle_adam *state = lamb->state;
  double *level = zeros(state->tensors, sizeof *level), sum = 0.0;
  int moving = 0;
  for (size_t k = exchange->first; k < exchange->first + exchange->tensors; k++) {
    if (state->count[k])
      level[k] = sqrt(squares(lamb, k, state->momentum) / (double)state->count[k]);
    sum += level[k];
    moving += level[k] != 0.0;
  }
  for (size_t k = exchange->first; k < exchange->first + exchange->tensors; k++)
    if (level[k] != 0.0)
      lamb->scaling[k] = (float)(sum / moving / level[k]);
  free(level);
}

static void freeze(struct oracle_lamb *lamb) {
  struct oracle_adam *state = lamb->state;
  float correction = oracle_variance_correction(state, state->steps);
  bool shared =
      deepspeed(lamb) ? state->size > 1 : state->options.common.block_size == ONEBIT_BLOCK_BUFFER;
  for (size_t x = 0; shared && x < state->exchange_count; x++)
    scale_exchange(lamb, &state->exchanges[x]);
  for (size_t k = 0; k < state->tensors; k++)
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
      float v = state->variance[i];
      bool still = v == 0.0f && !deepspeed(lamb);
      float denominator = sqrtf(v) * correction + (float)state->options.epsilon;
      state->reciprocal[i] = still ? 0.0f : 1.0f / denominator;
      lamb->fresh[i] = v;
      lamb->carried[i] = (float)state->options.beta1 * state->momentum[i] * lamb->scaling[k];
    }
  state->compressed = true;
  state->freeze_step = state->steps;
}

/* --- Compressed */

/* What worker w sends. */
static void fill_input(const struct oracle_lamb *lamb, size_t w, float *input) {
  const struct oracle_adam *state = lamb->state;
  float w1 = (float)(1.0 - state->options.beta1);
  for (size_t k = 0; k < state->tensors; k++)
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
      input[i] = lamb->carried[i] + (w1 * lamb->scaling[k]) * state->means[w * state->total + i];
  for (size_t i = state->total; i < lamb->padded; i++)
    input[i] = lamb->carried[i];
}

static bool exchange_all(struct oracle_lamb *lamb, float *const *inputs) {
  const struct oracle_adam *state = lamb->state;
  const float **parts = zeros((size_t)state->size, sizeof *parts);
  bool done = true;
  for (size_t x = 0; x < state->exchange_count && done; x++) {
    size_t at = state->tensors ? state->first[state->exchanges[x].first] : 0;
    for (size_t w = 0; w < (size_t)state->size; w++)
      parts[w] = inputs[w] + at;
    done = oracle_exchange(state->exchanges[x].oracle, parts, lamb->received + at);
  }
  free(parts);
  return done;
}

/* One rank of profile deepspeed has nobody to exchange with. */
static bool exchange(struct oracle_lamb *lamb) {
  size_t size = (size_t)lamb->state->size;
  float **inputs = zeros(size, sizeof *inputs);
  for (size_t w = 0; w < size; w++) {
    inputs[w] = zeros(lamb->padded, sizeof(float));
    fill_input(lamb, w, inputs[w]);
  }
  bool alone = deepspeed(lamb) && size == 1, done = alone || exchange_all(lamb, inputs);
  if (alone)
    memcpy(lamb->received, inputs[0], lamb->padded * sizeof(float));
  for (size_t w = 0; w < size; w++)
    free(inputs[w]);
  free(inputs);
  return done;
}

/* The update and the fresh variance; returns the largest quotient of denominators. */
static float compare(struct oracle_lamb *lamb, size_t k) {
  struct oracle_adam *state = lamb->state;
  float w1 = (float)(1.0 - state->options.beta1);
  float b2 = (float)state->options.beta2, w2 = (float)(1.0 - state->options.beta2);
  float k1 = oracle_momentum_correction(state, state->steps);
  float k2 = oracle_variance_correction(state, state->steps), largest = 0.0f;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float m = lamb->received[i] / lamb->scaling[k], *w = &lamb->fresh[i];
    float h = (m - lamb->carried[i] / lamb->scaling[k]) / w1;
    *w = b2 * *w + (w2 * h) * h;
    float denominator = sqrtf(*w) * k2 + (float)state->options.epsilon;
    if (state->reciprocal[i] != 0.0f)
      largest = fmaxf(largest, 1.0f / (state->reciprocal[i] * denominator));
    state->momentum[i] = m;
    lamb->plain[i] = (m * k1) * state->reciprocal[i];
    lamb->update[i] = lamb->plain[i] + state->weight_decay[k] * state->parameter[i];
  }
  return largest;
}

static void compressed_tensor(struct oracle_lamb *lamb, size_t k, float learning_rate) {
  double f = (double)compare(lamb, k), last = lamb->factor[k];
  if (lamb->state->weight_decay[k] > 0.0f) {
    double q = sqrt(squares(lamb, k, lamb->plain)), u = sqrt(squares(lamb, k, lamb->update));
    double s = u == 0.0 ? 1.0 : fmin(1.0, q / u);
    f = f * s + (1.0 - s);
  }
  f = clamp(f, lamb->factor_least, lamb->factor_most);
  f = clamp(f, last * (1.0 - lamb->factor_change), last * (1.0 + lamb->factor_change));
  lamb->factor[k] = f;
  move(lamb, k, learning_rate, lamb->coefficient[k] * f);
}

/* The padding is not decayed. */
static void carry(struct oracle_lamb *lamb) {
  for (size_t i = 0; i < lamb->padded; i++)
    lamb->carried[i] = i < lamb->state->total
                           ? (float)lamb->state->options.beta1 * lamb->received[i]
                           : lamb->received[i];
}

bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients,
                      float learning_rate) {
  struct oracle_adam *state = lamb->state;
  if (!oracle_take_gradients(state, gradients))
    return false;
  if (state->compressed && !exchange(lamb))
    return false; /* as in oracle_adam_step */
  state->steps++;
  for (size_t k = 0; k < state->tensors; k++)
    if (state->compressed)
      compressed_tensor(lamb, k, learning_rate);
    else
      warm_up_tensor(lamb, k, learning_rate);
  if (state->compressed)
    carry(lamb);
  else if (oracle_must_freeze(state))
    freeze(lamb);
  return true;
}
