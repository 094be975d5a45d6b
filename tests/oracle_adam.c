/* 1-bit Adam of the oracle, in float32, one operation after the other as the public header writes
 * them. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/oracle.h"

static void *zeros(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  cr_assert(memory, "no memory for %zu elements", count);
  return memory;
}

static onebit_adam_options_t with_defaults(const onebit_adam_options_t *given) {
  onebit_adam_options_t options = *given;
  options.beta1 = options.beta1 != 0.0 ? options.beta1 : 0.9;
  options.beta2 = options.beta2 != 0.0 ? options.beta2 : 0.999;
  options.epsilon = options.epsilon != 0.0 ? options.epsilon : 1e-8;
  options.freeze_threshold = options.freeze_threshold != 0.0 ? options.freeze_threshold : 0.96;
  if (options.common.profile == ONEBIT_PROFILE_DEEPSPEED) {
    options.no_bias_correction = 1;
    if (options.freeze_step != ONEBIT_FREEZE_AUTOMATIC &&
        options.freeze_step != ONEBIT_FREEZE_NEVER) /* its first call made no step */
      options.freeze_step = options.freeze_step > 2 ? options.freeze_step - 1 : 1;
  }
  return options;
}

static bool deepspeed(const struct oracle_adam *adam) {
  return adam->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* The exchange of the tensors before number `end`: at least bucket_size elements, all tensors when
 * that is 0. */
static struct oracle_exchange exchange_before(const struct oracle_adam *adam, size_t end) {
  size_t first = end, elements = 0, wanted = adam->options.common.bucket_size;
  if (deepspeed(adam))
    return (struct oracle_exchange){.first = end - 1, .tensors = 1};
  while (first > 0 && (wanted == 0 || elements < wanted || adam->count[first - 1] == 0))
    elements += adam->count[--first];
  return (struct oracle_exchange){.first = first, .tensors = end - first};
}

static void make_exchanges(struct oracle_adam *adam) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.profile = adam->options.common.profile;
  options.scale = adam->options.common.scale;
  options.block_size = adam->options.common.block_size;
  options.no_error_feedback = adam->options.common.no_error_feedback;
  options.schedule = adam->options.common.schedule;
  int ranks = adam->size * adam->each;
  adam->exchanges = zeros(adam->tensors, sizeof *adam->exchanges);
  for (size_t end = adam->tensors; end > 0;) {
    struct oracle_exchange next = exchange_before(adam, end);
    const size_t *counts = adam->count + next.first;
    next.oracle = deepspeed(adam)
                      ? oracle_create(ranks, *counts, &options)
                      : oracle_create_tensors(ranks, adam->size, counts, next.tensors, &options);
    adam->exchanges[adam->exchange_count++] = next;
    end = next.first;
  }
}

static void copy_tensors(struct oracle_adam *adam, const onebit_tensor_t *tensors) {
  adam->first = zeros(adam->tensors, sizeof(size_t));
  adam->count = zeros(adam->tensors, sizeof(size_t));
  adam->weight_decay = zeros(adam->tensors, sizeof(float));
  adam->factor = zeros(adam->tensors, sizeof(float));
  for (size_t k = 0; k < adam->tensors; k++) {
    adam->first[k] = adam->total;
    adam->count[k] = tensors[k].count;
    adam->weight_decay[k] = tensors[k].weight_decay;
    adam->factor[k] = tensors[k].learning_rate_factor;
    if (adam->factor[k] == 0.0f)
      adam->factor[k] = 1.0f;
    adam->total += tensors[k].count;
  }
  adam->parameter = zeros(adam->total, sizeof(float));
  for (size_t k = 0; k < adam->tensors; k++)
    if (tensors[k].count)
      memcpy(adam->parameter + adam->first[k], tensors[k].parameter,
             tensors[k].count * sizeof(float));
}

struct oracle_adam *oracle_adam_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_adam_options_t *options) {
  struct oracle_adam *adam = zeros(1, sizeof *adam);
  adam->options = with_defaults(options);
  adam->size = options->common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL ? hosts : size;
  adam->each = size / adam->size;
  adam->tensors = count;
  copy_tensors(adam, tensors);
  adam->momentum = zeros(adam->total, sizeof(float));
  adam->variance = zeros(adam->total, sizeof(float));
  adam->reciprocal = zeros(adam->total, sizeof(float));
  adam->means = zeros((size_t)adam->size * adam->total, sizeof(float));
  adam->local = zeros((size_t)adam->size * adam->total, sizeof(float));
  make_exchanges(adam);
  return adam;
}

void oracle_adam_destroy(struct oracle_adam *adam) {
  for (size_t k = 0; k < adam->exchange_count; k++)
    oracle_destroy(adam->exchanges[k].oracle);
  free(adam->exchanges);
  free(adam->norms);
  free(adam->local);
  free(adam->means);
  free(adam->reciprocal);
  free(adam->variance);
  free(adam->momentum);
  free(adam->parameter);
  free(adam->factor);
  free(adam->weight_decay);
  free(adam->count);
  free(adam->first);
  free(adam);
}

/* 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), or 1 without bias correction. */
float oracle_momentum_correction(const struct oracle_adam *adam, size_t t) {
  if (adam->options.no_bias_correction)
    return 1.0f;
  return (float)(1.0 / (1.0 - pow(adam->options.beta1, (double)t)));
}

float oracle_variance_correction(const struct oracle_adam *adam, size_t t) {
  if (adam->options.no_bias_correction)
    return 1.0f;
  return (float)(1.0 / sqrt(1.0 - pow(adam->options.beta2, (double)t)));
}

/* The mean of element i over consecutive ranks or workers. */
static float mean_of(const float *const *values, int count, size_t i) {
  float sum = values[0][i];
  for (int r = 1; r < count; r++)
    sum += values[r][i];
  return sum * (1.0f / (float)count);
}

bool oracle_take_gradients(struct oracle_adam *adam, const float *const *gradients) {
  for (size_t w = 0; w < (size_t)adam->size; w++)
    for (size_t i = 0; i < adam->total; i++) {
      float mean = mean_of(gradients + w * (size_t)adam->each, adam->each, i);
      adam->means[w * adam->total + i] = mean;
      if (!isfinite(mean))
        return false;
    }
  return true;
}

float oracle_mean_gradient(const struct oracle_adam *adam, size_t i) {
  float sum = adam->means[i];
  for (size_t w = 1; w < (size_t)adam->size; w++)
    sum += adam->means[w * adam->total + i];
  return sum * (1.0f / (float)adam->size);
}

/* Remembers the norm of the variance after step t = steps, as the freeze compares it. */
static void keep_norm(struct oracle_adam *adam) {
  double sum = 0.0, t = (double)adam->steps;
  for (size_t i = 0; i < adam->total; i++)
    sum += (double)adam->variance[i];
  if (!adam->options.no_bias_correction)
    sum /= 1.0 - pow(adam->options.beta2, t);
  if (adam->steps >= adam->norms_capacity) {
    adam->norms_capacity = 2 * adam->steps + 16;
    adam->norms = realloc(adam->norms, adam->norms_capacity * sizeof(double));
    cr_assert(adam->norms, "no memory for norms");
  }
  adam->norms[adam->steps] = sum;
}

/* 1 / (1 - beta2) rounded up, where a whole number that double makes a little larger is that
 * number. */
static size_t freeze_distance(double beta2) {
  double steps = 1.0 / (1.0 - beta2), whole = round(steps);
  return (size_t)(fabs(steps - whole) < 1e-6 ? whole : ceil(steps));
}

bool oracle_must_freeze(struct oracle_adam *adam) {
  const onebit_adam_options_t *options = &adam->options;
  keep_norm(adam);
  if (options->freeze_step == ONEBIT_FREEZE_NEVER)
    return false;
  size_t distance = freeze_distance(options->beta2), t = adam->steps;
  if (t > distance)
    adam->variance_ratio = adam->norms[t - distance] / adam->norms[t];
  if (options->freeze_step != ONEBIT_FREEZE_AUTOMATIC)
    return t >= options->freeze_step;
  double threshold = options->freeze_threshold;
  return t > distance && adam->variance_ratio >= threshold &&
         adam->variance_ratio <= 1.0 / threshold;
}

static void freeze(struct oracle_adam *adam) {
  float correction = oracle_variance_correction(adam, adam->steps);
  float epsilon = (float)adam->options.epsilon;
  for (size_t i = 0; i < adam->total; i++) {
    bool still = adam->variance[i] == 0.0f && !deepspeed(adam);
    float denominator = sqrtf(adam->variance[i]) * correction + epsilon;
    adam->reciprocal[i] = still ? 0.0f : 1.0f / denominator;
  }
  adam->compressed = true;
  adam->freeze_step = adam->steps;
}

static void warm_up(struct oracle_adam *adam, float learning_rate) {
  float b1 = (float)adam->options.beta1, w1 = (float)(1.0 - adam->options.beta1);
  float b2 = (float)adam->options.beta2, w2 = (float)(1.0 - adam->options.beta2);
  float epsilon = (float)adam->options.epsilon;
  float k1 = oracle_momentum_correction(adam, adam->steps),
        k2 = oracle_variance_correction(adam, adam->steps);
  for (size_t k = 0; k < adam->tensors; k++) {
    float rate = learning_rate * adam->factor[k], decay = adam->weight_decay[k];
    for (size_t i = adam->first[k]; i < adam->first[k] + adam->count[k]; i++) {
      float g = oracle_mean_gradient(adam, i), *m = &adam->momentum[i];
      float *v = &adam->variance[i], *p = &adam->parameter[i];
      *m = b1 * *m + w1 * g;
      *v = b2 * *v + (w2 * g) * g;
      float denominator = sqrtf(*v) * k2 + epsilon;
      *p = *p - rate * ((*m * k1) / denominator + decay * *p);
    }
  }
  if (oracle_must_freeze(adam))
    freeze(adam);
}

/* Every worker's own momentum, exchanged: the new common momentum in `momentum`. One rank of
 * profile deepspeed has nobody to exchange with and keeps its momentum exact. */
static bool exchange_momentum(struct oracle_adam *adam) {
  float b1 = (float)adam->options.beta1, w1 = (float)(1.0 - adam->options.beta1);
  const float **inputs = zeros((size_t)adam->size, sizeof *inputs);
  for (size_t r = 0; r < (size_t)adam->size; r++)
    for (size_t i = 0; i < adam->total; i++)
      adam->local[r * adam->total + i] =
          b1 * adam->momentum[i] + w1 * adam->means[r * adam->total + i];
  bool done = true;
  for (size_t k = 0; k < adam->exchange_count && done; k++) {
    const struct oracle_exchange *exchange = &adam->exchanges[k];
    size_t at = adam->first[exchange->first];
    for (size_t r = 0; r < (size_t)adam->size; r++)
      inputs[r] = adam->local + r * adam->total + at;
    float *output = adam->momentum + at;
    if (deepspeed(adam) && adam->size == 1)
      memcpy(output, inputs[0], adam->count[exchange->first] * sizeof *output);
    else
      done = oracle_exchange(exchange->oracle, inputs, output);
  }
  free(inputs);
  return done;
}

static void compressed_update(struct oracle_adam *adam, float learning_rate) {
  float k1 = oracle_momentum_correction(adam, adam->steps);
  for (size_t k = 0; k < adam->tensors; k++) {
    float rate = learning_rate * adam->factor[k], decay = adam->weight_decay[k];
    for (size_t i = adam->first[k]; i < adam->first[k] + adam->count[k]; i++) {
      float *p = &adam->parameter[i];
      *p = *p - rate * ((adam->momentum[i] * k1) * adam->reciprocal[i] + decay * *p);
    }
  }
}

bool oracle_adam_step(struct oracle_adam *adam, const float *const *gradients,
                      float learning_rate) {
  if (!oracle_take_gradients(adam, gradients))
    return false;
  if (adam->compressed && !exchange_momentum(adam))
    return false; /* values that overflow: tests of these use one exchange, which then changed
                     nothing */
  adam->steps++;
  if (adam->compressed)
    compressed_update(adam, learning_rate);
  else
    warm_up(adam, learning_rate);
  return true;
}
