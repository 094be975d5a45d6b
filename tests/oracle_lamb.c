/* The oracle's 1-bit LAMB. Elements are computed in float32, and per-tensor coefficients in double.
 * The operations have the same order as in the public header's formulas. */
#include "tests/oracle_kinds.h"

#include "tests/support.h"

static double value_or(double given, double fallback) { return given != 0.0 ? given : fallback; }

static bool is_deepspeed(const struct oracle_lamb *lamb) {
  return lamb->state->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

static onebit_adam_options_t make_adam_options(const onebit_lamb_options_t *options) {
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

static size_t pad_count(size_t count, size_t ranks) {
  size_t multiple = ranks;
  while (multiple % 8)
    multiple += ranks;
  size_t quantum = multiple * ranks;
  return (count + quantum - 1) / quantum * quantum;
}

/* Returns one exchange of all compressed tensors. It replaces the exchanges of one tensor each. */
static struct oracle_exchange join_exchanges(struct oracle_adam *state) {
  struct oracle_exchange all = {.tensor = allocate(state->tensors, sizeof(size_t))};
  for (size_t k = 0; k < state->tensors; k++)
    if (!state->uncompressed[k]) {
      all.tensor[all.tensors++] = k;
      all.total += state->count[k];
    }
  for (size_t x = 0; x < state->exchange_count; x++) {
    oracle_destroy(state->exchanges[x].oracle);
    free(state->exchanges[x].tensor);
  }
  free(state->exchanges);
  state->exchanges = allocate(1, sizeof *state->exchanges);
  state->exchange_count = 1;
  return all;
}

/* Joins all tensors in one exchange, for profile deepspeed. The padding is added as one more
 * tensor. */
static void fuse_tensors(struct oracle_lamb *lamb) {
  struct oracle_adam *state = lamb->state;
  struct oracle_exchange all = join_exchanges(state);
  size_t *counts = allocate(all.tensors + 1, sizeof *counts);
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.profile = ONEBIT_PROFILE_DEEPSPEED;
  options.no_error_feedback = state->options.common.no_error_feedback;
  lamb->padding_count = pad_count(all.total, (size_t)state->size) - all.total;
  for (size_t k = 0; k < all.tensors; k++)
    counts[k] = state->count[all.tensor[k]];
  counts[all.tensors] = lamb->padding_count;
  all.oracle = oracle_create_tensors(state->size, 1, counts, all.tensors + 1, &options);
  state->exchanges[0] = all;
  state->weigher.share = (all.total + lamb->padding_count) / (size_t)state->size;
  free(counts);
}

static void set_limits(struct oracle_lamb *lamb, const onebit_lamb_options_t *options) {
  lamb->min_coefficient = value_or(options->min_coefficient, 0.01);
  lamb->max_coefficient = value_or(options->max_coefficient, 10.0);
  lamb->coefficient_beta = value_or(options->coefficient_beta, 0.9);
  lamb->min_factor = value_or(options->min_factor, 0.5);
  lamb->max_factor = value_or(options->max_factor,
                              options->common.profile == ONEBIT_PROFILE_DEEPSPEED ? 4.0 : 1.5);
  lamb->factor_change = value_or(options->factor_change, 0.1);
}

struct oracle_lamb *oracle_lamb_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lamb_options_t *options) {
  struct oracle_lamb *lamb = allocate(1, sizeof *lamb);
  onebit_adam_options_t adam = make_adam_options(options);
  lamb->state = oracle_adam_create(size, hosts, tensors, count, &adam);
  set_limits(lamb, options);
  if (is_deepspeed(lamb))
    fuse_tensors(lamb);
  lamb->coefficient = allocate(count, sizeof(double));
  lamb->factor = allocate(count, sizeof(double));
  lamb->scaling = allocate(count, sizeof(float));
  lamb->state->scaling = lamb->scaling;
  for (size_t k = 0; k < count; k++)
    lamb->factor[k] = lamb->scaling[k] = 1.0f;
  lamb->fresh = allocate(lamb->state->total, sizeof(float));
  lamb->update = allocate(lamb->state->total, sizeof(float));
  lamb->plain = allocate(lamb->state->total, sizeof(float));
  lamb->received = allocate(lamb->state->total, sizeof(float));
  lamb->carried = allocate(lamb->state->total, sizeof(float));
  lamb->padding = allocate(lamb->padding_count, sizeof(float));
  return lamb;
}

void oracle_lamb_destroy(struct oracle_lamb *lamb) {
  oracle_adam_destroy(lamb->state);
  free(lamb->coefficient);
  free(lamb->factor);
  free(lamb->scaling);
  free(lamb->fresh);
  free(lamb->update);
  free(lamb->plain);
  free(lamb->received);
  free(lamb->carried);
  free(lamb->padding);
  free(lamb);
}

/* --- Norms */

/* Returns the sum of squares of a tensor, summed by the runs of its exchange. `before` is the
 * number of elements that precede the tensor in the exchange. */
static double sum_exchanged_squares(const struct oracle *oracle, size_t before, size_t count,
                                    const float *values) {
  struct oracle_sum sum = {0};
  for (size_t r = 0; r < oracle->run_count; r++) {
    const struct oracle_run *run = &oracle->runs[r];
    if (run->first >= before && run->first < before + count)
      oracle_add(&sum, oracle_run_squares(values + run->first - before, 1.0f, run->count));
  }
  return oracle_total(&sum);
}

/* Returns the sum of squares of a tensor that is in no exchange, summed by blocks, or by runs if
 * the option is one scale for all blocks. */
static double sum_dense_squares(const struct oracle_lamb *lamb, size_t count, const float *values) {
  size_t length = lamb->state->options.common.block_size;
  struct oracle_sum sum = {0};
  if (length == 0 || length == ONEBIT_BLOCK_BUFFER)
    length = 2048;
  for (size_t done = 0; done < count; done += length)
    oracle_add(&sum, oracle_run_squares(values + done, 1.0f,
                                        count - done < length ? count - done : length));
  return oracle_total(&sum);
}

double oracle_lamb_squares(const struct oracle_lamb *lamb, size_t k, const float *all_values) {
  const struct oracle_adam *state = lamb->state;
  const float *values = all_values + state->first[k];
  for (size_t x = 0; x < state->exchange_count; x++)
    for (size_t j = 0, before = 0; j < state->exchanges[x].tensors; j++) {
      size_t tensor = state->exchanges[x].tensor[j];
      if (tensor == k)
        return sum_exchanged_squares(state->exchanges[x].oracle, before, state->count[k], values);
      before += state->count[tensor];
    }
  return sum_dense_squares(lamb, state->count[k], values);
}

static double clamp_value(double value, double least, double most) {
  return fmax(fmin(value, most), least);
}

static void move_tensor(struct oracle_lamb *lamb, size_t k, float learning_rate, double ratio) {
  struct oracle_adam *state = lamb->state;
  float rate = (float)((double)learning_rate * (double)state->factor[k] * ratio);
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
    state->parameter[i] = state->parameter[i] - rate * lamb->update[i];
}

/* --- Warm-up */

void oracle_lamb_whole_step(struct oracle_lamb *lamb, size_t k, float learning_rate) {
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
  oracle_lamb_move(lamb, k, learning_rate);
}

void oracle_lamb_move(struct oracle_lamb *lamb, size_t k, float learning_rate) {
  double p = sqrt(oracle_lamb_squares(lamb, k, lamb->state->parameter)),
         u = sqrt(oracle_lamb_squares(lamb, k, lamb->update));
  double ratio = 1.0;
  if (p != 0.0 && u != 0.0)
    ratio = clamp_value(p / u, lamb->min_coefficient, lamb->max_coefficient);
  if (ratio != 1.0)
    lamb->coefficient[k] =
        lamb->coefficient_beta * lamb->coefficient[k] + (1.0 - lamb->coefficient_beta) * ratio;
  move_tensor(lamb, k, learning_rate, ratio);
}

static double momentum_level(const struct oracle_lamb *lamb, size_t k) {
  size_t count = lamb->state->count[k];
  return count ? sqrt(oracle_lamb_squares(lamb, k, lamb->state->momentum) / (double)count) : 0.0;
}

/* Sets the scalings of an exchange's tensors. A tensor's scaling is the average root mean square of
 * all tensors' momenta, without those that are zero, divided by the root mean square of the
 * tensor's own momentum. */
static void scale_exchange(struct oracle_lamb *lamb, const struct oracle_exchange *exchange) {
  double sum = 0.0;
  int moving = 0;
  for (size_t j = 0; j < exchange->tensors; j++) {
    sum += momentum_level(lamb, exchange->tensor[j]);
    moving += momentum_level(lamb, exchange->tensor[j]) != 0.0;
  }
  for (size_t j = 0; j < exchange->tensors; j++)
    if (momentum_level(lamb, exchange->tensor[j]) != 0.0)
      lamb->scaling[exchange->tensor[j]] =
          (float)(sum / moving / momentum_level(lamb, exchange->tensor[j]));
}

static void freeze_variance(struct oracle_lamb *lamb) {
  struct oracle_adam *state = lamb->state;
  float correction = oracle_variance_correction(state, state->steps);
  bool shared = is_deepspeed(lamb) ? state->size > 1
                                   : state->options.common.block_size == ONEBIT_BLOCK_BUFFER;
  for (size_t x = 0; shared && x < state->exchange_count; x++)
    scale_exchange(lamb, &state->exchanges[x]);
  for (size_t k = 0; k < state->tensors; k++)
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
      float v = state->variance[i];
      bool still = v == 0.0f && !is_deepspeed(lamb);
      float denominator = sqrtf(v) * correction + (float)state->options.epsilon;
      state->reciprocal[i] = still ? 0.0f : 1.0f / denominator;
      lamb->fresh[i] = v;
      lamb->carried[i] = (float)state->options.beta1 * state->momentum[i];
    }
  state->compressed = true;
  state->freeze_step = state->steps;
}

/* --- Compressed */

/* Returns the input of worker w in an exchange. */
static float *make_input(const struct oracle_lamb *lamb, const struct oracle_exchange *exchange,
                         const float *const *gradients, size_t w) {
  const struct oracle_adam *state = lamb->state;
  float *input = allocate(exchange->total + lamb->padding_count, sizeof *input);
  size_t at = 0;
  for (size_t j = 0; j < exchange->tensors; j++) {
    size_t k = exchange->tensor[j];
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
      input[at++] =
          (lamb->carried[i] + oracle_own_gradient(state, gradients, w, i)) * lamb->scaling[k];
  }
  for (size_t i = 0; i < lamb->padding_count; i++)
    input[at++] = lamb->padding[i];
  return input;
}

static void store_result(struct oracle_lamb *lamb, const struct oracle_exchange *exchange,
                         const float *result) {
  const struct oracle_adam *state = lamb->state;
  size_t at = 0;
  for (size_t j = 0; j < exchange->tensors; j++)
    for (size_t k = exchange->tensor[j], i = 0; i < state->count[k]; i++)
      lamb->received[state->first[k] + i] = result[at++];
  for (size_t i = 0; i < lamb->padding_count; i++)
    lamb->padding[i] = result[at++];
}

/* Exchanges the tensors' momentum, except for a single rank in profile deepspeed, which exchanges
 * nothing. */
static bool exchange_tensors(struct oracle_lamb *lamb, const struct oracle_exchange *exchange,
                             const float *const *gradients) {
  size_t size = (size_t)lamb->state->size;
  float **inputs = allocate(size, sizeof *inputs);
  float *result = allocate(exchange->total + lamb->padding_count, sizeof *result);
  for (size_t w = 0; w < size; w++)
    inputs[w] = make_input(lamb, exchange, gradients, w);
  bool alone = is_deepspeed(lamb) && size == 1, done = true;
  if (!alone)
    done = oracle_exchange(exchange->oracle, (const float *const *)inputs, result);
  if (done)
    store_result(lamb, exchange, alone ? inputs[0] : result);
  for (size_t w = 0; w < size; w++)
    free(inputs[w]);
  free(inputs);
  free(result);
  return done;
}

static bool exchange_all(struct oracle_lamb *lamb, const float *const *gradients) {
  bool done = true;
  for (size_t x = 0; x < lamb->state->exchange_count && done; x++)
    done = exchange_tensors(lamb, &lamb->state->exchanges[x], gradients);
  return done;
}

/* Computes the update and the fresh variance of tensor k. Returns the largest quotient of the
 * frozen and the fresh denominator over its elements. */
static float update_tensor(struct oracle_lamb *lamb, size_t k) {
  struct oracle_adam *state = lamb->state;
  float w1 = (float)(1.0 - state->options.beta1);
  float b2 = (float)state->options.beta2, w2 = (float)(1.0 - state->options.beta2);
  float k1 = oracle_momentum_correction(state, state->steps);
  float k2 = oracle_variance_correction(state, state->steps), largest = 0.0f;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float m = lamb->received[i] / lamb->scaling[k], *w = &lamb->fresh[i];
    float h = (m - lamb->carried[i]) / w1;
    *w = b2 * *w + (w2 * h) * h;
    float denominator = sqrtf(*w) * k2 + (float)state->options.epsilon;
    if (state->reciprocal[i] != 0.0f)
      largest = fmaxf(largest, 1.0f / (state->reciprocal[i] * denominator));
    state->momentum[i] = m;
    lamb->plain[i] = oracle_bound_step(state, (m * k1) * state->reciprocal[i]);
    lamb->update[i] = lamb->plain[i] + state->weight_decay[k] * state->parameter[i];
  }
  return largest;
}

static void step_compressed(struct oracle_lamb *lamb, size_t k, float learning_rate) {
  double f = (double)update_tensor(lamb, k), last = lamb->factor[k];
  if (lamb->state->weight_decay[k] > 0.0f) {
    double q = sqrt(oracle_lamb_squares(lamb, k, lamb->plain)),
           u = sqrt(oracle_lamb_squares(lamb, k, lamb->update));
    double s = u == 0.0 ? 1.0 : fmin(1.0, q / u);
    f = f * s + (1.0 - s);
  }
  f = clamp_value(f, lamb->min_factor, lamb->max_factor);
  f = clamp_value(f, last * (1.0 - lamb->factor_change), last * (1.0 + lamb->factor_change));
  lamb->factor[k] = f;
  move_tensor(lamb, k, learning_rate, lamb->coefficient[k] * f);
}

/* Averages the gradients and exchanges the momentum. Returns false if a value overflows. */
static bool prepare_step(struct oracle_lamb *lamb, const float *const *gradients) {
  return oracle_average_gradients(lamb->state, gradients) &&
         (!lamb->state->compressed || exchange_all(lamb, gradients));
}

bool oracle_lamb_step(struct oracle_lamb *lamb, const float *const *gradients,
                      float learning_rate) {
  struct oracle_adam *state = lamb->state;
  bool made = prepare_step(lamb, gradients);
  oracle_rescale(&state->weigher, !made);
  if (!made)
    return false;
  state->steps++;
  for (size_t k = 0; k < state->tensors; k++)
    if (state->compressed && !state->uncompressed[k])
      step_compressed(lamb, k, learning_rate);
    else
      oracle_lamb_whole_step(lamb, k, learning_rate);
  for (size_t i = 0; i < state->total; i++) /* the momentum of the padding is not multiplied by
                                             * beta1 */
    lamb->carried[i] = (float)state->options.beta1 * state->momentum[i];
  if (!state->compressed && oracle_must_freeze(state))
    freeze_variance(lamb);
  return true;
}
