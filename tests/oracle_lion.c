/* Lion in one bit, in the plainest way. */
#include "tests/oracle_lion.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support.h"

/* What a worker keeps and has made of its gradients: a rank, or the ranks of a host. */
struct worker {
  float *gradient, *error, *moment, *sent; /* one an element */
};

struct oracle_lion {
  int workers, each;
  const onebit_lion_options_t *options;
  onebit_tensor_t *tensors;
  size_t tensor_count, total;
  float *parameter, *momentum, *mean;
  struct worker *worker;
  uint64_t steps;
};

static float *zeros(size_t count) { return allocate(count + 1, sizeof(float)); }

struct oracle_lion *oracle_lion_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lion_options_t *options,
                                       const float *start) {
  struct oracle_lion *lion = allocate(1, sizeof *lion);
  *lion = (struct oracle_lion){.workers = hosts > 1 ? hosts : size,
                               .each = hosts > 1 ? size / hosts : 1,
                               .options = options,
                               .tensors = allocate(count + 1, sizeof *tensors),
                               .tensor_count = count};
  if (hosts == 1 && options->common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL) {
    lion->workers = 1;
    lion->each = size;
  }
  for (size_t t = 0; t < count; t++)
    lion->total += (lion->tensors[t] = tensors[t]).count;
  lion->parameter = zeros(lion->total);
  lion->momentum = zeros(lion->total);
  lion->mean = zeros(lion->total);
  memcpy(lion->parameter, start, lion->total * sizeof *start);
  lion->worker = allocate((size_t)lion->workers, sizeof *lion->worker);
  for (int w = 0; w < lion->workers; w++)
    lion->worker[w] = (struct worker){zeros(lion->total), zeros(lion->total), zeros(lion->total),
                                      zeros(lion->total)};
  return lion;
}

void oracle_lion_destroy(struct oracle_lion *lion) {
  for (int w = 0; w < lion->workers; w++) {
    free(lion->worker[w].gradient);
    free(lion->worker[w].error);
    free(lion->worker[w].moment);
    free(lion->worker[w].sent);
  }
  free(lion->worker);
  free(lion->mean);
  free(lion->momentum);
  free(lion->parameter);
  free(lion->tensors);
  free(lion);
}

const float *oracle_lion_parameters(const struct oracle_lion *lion) { return lion->parameter; }

static double norm(const float *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}

double oracle_lion_momentum_norm(const struct oracle_lion *lion) {
  return norm(lion->momentum, lion->total);
}

double oracle_lion_residual_norm(const struct oracle_lion *lion, int worker) {
  return norm(lion->worker[worker].error, lion->total);
}

static double or_default(double value, double fallback) { return value != 0.0 ? value : fallback; }

/* --- What a worker sends */

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float reciprocal_root(float value) {
  const float guess = float_of(0x5f1ffff9 - (bits_of(value) >> 1));
  return guess * (0.703952253f * (2.38924456f - value * guess * guess));
}

static double one_minus_power(double base, uint64_t exponent) {
  double power = 1.0;
  for (; exponent; exponent >>= 1, base *= base)
    if (exponent & 1)
      power *= base;
  return 1.0 - power;
}

/* The error that was kept plus the normalised gradient; the moment is rounded to its upper half by
 * the lower half of the error. */
static void compensate(const struct oracle_lion *lion, struct worker *worker, size_t i) {
  const double beta3 = or_default(lion->options->beta3, 0.999);
  const float epsilon = (float)or_default(lion->options->epsilon, 1e-8);
  const float share = (float)(1.0 / one_minus_power(beta3, lion->steps + 1) / lion->workers);
  const float g = worker->gradient[i], kept = worker->error[i];
  const float moment = (float)beta3 * worker->moment[i] + ((float)(1.0 - beta3) * g) * g;
  const float mean = share * moment;
  worker->moment[i] = float_of((bits_of(moment) + (bits_of(kept) & 0xffff)) & 0xffff0000);
  worker->error[i] = kept + g * reciprocal_root(mean + epsilon * epsilon);
}

/* The sum of the magnitudes in 32 lanes, which are added by halves. */
static float magnitude(const struct oracle_lion *lion, const float *values, size_t count) {
  const bool squares = lion->options->common.scale == ONEBIT_SCALE_RMS;
  float lanes[32] = {0};
  for (size_t i = 0; i < count; i++)
    lanes[i % 32] += squares ? values[i] * values[i] : fabsf(values[i]);
  for (int width = 16; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lanes[i] += lanes[i + width];
  return lanes[0];
}

static void send(struct worker *worker, size_t first, size_t count, float scale, bool forget) {
  for (size_t i = first; i < first + count; i++) {
    worker->sent[i] = signbit(worker->error[i]) ? -scale : scale;
    worker->error[i] = forget ? 0.0f : worker->error[i] - worker->sent[i];
  }
}

/* --- Servers and parameters */

static float rate_of(const onebit_tensor_t *tensor, float learning_rate) {
  const float factor = tensor->learning_rate_factor;
  return learning_rate * (factor != 0.0f ? factor : 1.0f);
}

/* The direction of an element, whose momentum moves on. */
static float direction(struct oracle_lion *lion, size_t i) {
  const double beta1 = or_default(lion->options->beta1, 0.9);
  const double beta2 = or_default(lion->options->beta2, 0.99);
  const float before = lion->momentum[i];
  lion->momentum[i] = (float)beta2 * before + (float)(1.0 - beta2) * lion->mean[i];
  return (float)beta1 * before + (float)(1.0 - beta1) * lion->mean[i];
}

static void move(struct oracle_lion *lion, const onebit_tensor_t *tensor, size_t i, float step,
                 float learning_rate) {
  float *p = &lion->parameter[i];
  *p = *p - rate_of(tensor, learning_rate) * (step + tensor->weight_decay * *p);
}

static void serve_block(struct oracle_lion *lion, const onebit_tensor_t *tensor, size_t first,
                        size_t count, float learning_rate) {
  float *directions = zeros(count), most = 0.0f;
  const float share = (float)(1.0 / lion->workers);
  for (size_t i = 0; i < count; i++) {
    float sum = lion->worker[0].sent[first + i] * share;
    for (int w = 1; w < lion->workers; w++)
      sum += lion->worker[w].sent[first + i] * share;
    lion->mean[first + i] = sum;
    directions[i] = direction(lion, first + i);
    most = fmaxf(most, fabsf(directions[i]));
  }
  for (size_t i = 0; i < count; i++) {
    float step = directions[i] != 0.0f ? copysignf(1.0f, directions[i]) : i % 2 ? -1.0f : 1.0f;
    move(lion, tensor, first + i, most > 0.0f ? step : 0.0f, learning_rate);
  }
  free(directions);
}

static void compressed_tensor(struct oracle_lion *lion, const onebit_tensor_t *tensor, size_t first,
                              float learning_rate) {
  const onebit_optimizer_options_t *common = &lion->options->common;
  const size_t block = common->block_size ? common->block_size : 2048;
  for (size_t at = 0; at < tensor->count; at += block) {
    const size_t count = tensor->count - at < block ? tensor->count - at : block;
    for (int w = 0; w < lion->workers; w++) {
      struct worker *worker = &lion->worker[w];
      for (size_t i = first + at; i < first + at + count; i++)
        compensate(lion, worker, i);
      double mean = (double)magnitude(lion, worker->error + first + at, count) / (double)count;
      const float scale = (float)(common->scale == ONEBIT_SCALE_RMS ? sqrt(mean) : mean);
      send(worker, first + at, count, scale, common->no_error_feedback);
    }
    serve_block(lion, tensor, first + at, count, learning_rate);
  }
}

static void dense_tensor(struct oracle_lion *lion, const onebit_tensor_t *tensor, size_t first,
                         float learning_rate) {
  for (size_t i = first; i < first + tensor->count; i++) {
    float sum = lion->worker[0].gradient[i];
    for (int w = 1; w < lion->workers; w++)
      sum += lion->worker[w].gradient[i];
    lion->mean[i] = sum * (1.0f / (float)lion->workers);
    const float c = direction(lion, i);
    move(lion, tensor, i, c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f, learning_rate);
  }
}

/* The mean over the ranks of each worker. */
static void take_gradients(struct oracle_lion *lion, const float *const *gradients) {
  const float factor = (float)or_default(lion->options->common.gradient_factor, 1.0);
  for (int w = 0; w < lion->workers; w++)
    for (size_t i = 0; i < lion->total; i++) {
      float sum = factor * gradients[w * lion->each][i];
      for (int r = 1; r < lion->each; r++)
        sum += factor * gradients[w * lion->each + r][i];
      lion->worker[w].gradient[i] = sum * (1.0f / (float)lion->each);
    }
}

void oracle_lion_step(struct oracle_lion *lion, const float *const *gradients,
                      float learning_rate) {
  size_t first = 0;
  take_gradients(lion, gradients);
  for (size_t t = 0; t < lion->tensor_count; first += lion->tensors[t++].count)
    if (lion->tensors[t].uncompressed)
      dense_tensor(lion, &lion->tensors[t], first, learning_rate);
    else
      compressed_tensor(lion, &lion->tensors[t], first, learning_rate);
  lion->steps++;
}
