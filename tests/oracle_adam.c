/* The oracle's 1-bit Adam, in float32. The operations have the same order as in the public header's
 * formulas. */
#include "tests/oracle.h"
#include "tests/support.h"

static onebit_adam_options_t fill_defaults(const onebit_adam_options_t *given) {
  onebit_adam_options_t options = *given;
  options.beta1 = options.beta1 != 0.0 ? options.beta1 : 0.9;
  options.beta2 = options.beta2 != 0.0 ? options.beta2 : 0.999;
  options.epsilon = options.epsilon != 0.0 ? options.epsilon : 1e-8;
  options.freeze_threshold = options.freeze_threshold != 0.0 ? options.freeze_threshold : 0.96;
  if (options.common.schedule == ONEBIT_SCHEDULE_ALLGATHER) /* replicated servers */
    options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  if (options.common.profile == ONEBIT_PROFILE_DEEPSPEED) {
    options.no_bias_correction = 1;
    if (options.freeze_step != ONEBIT_FREEZE_AUTOMATIC &&
        options.freeze_step != ONEBIT_FREEZE_NEVER) /* DeepSpeed's first call makes no step */
      options.freeze_step = options.freeze_step > 2 ? options.freeze_step - 1 : 1;
  }
  return options;
}

static bool is_deepspeed(const struct oracle_adam *adam) {
  return adam->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* Returns the next exchange: the last compressed tensors before tensor *end, with at least
 * bucket_size elements, or all of these tensors if bucket_size is 0. Sets *end to the exchange's
 * first tensor. */
static struct oracle_exchange take_exchange(const struct oracle_adam *adam, size_t *end) {
  struct oracle_exchange next = {.tensor = allocate(adam->tensors, sizeof(size_t))};
  size_t wanted = is_deepspeed(adam) ? 1 : adam->options.common.bucket_size;
  for (; *end > 0; --*end) {
    size_t t = *end - 1;
    if (adam->uncompressed[t])
      continue;
    if (is_deepspeed(adam) ? next.tensors == 1
                           : wanted && next.total >= wanted && adam->count[t] > 0)
      break;
    next.tensor[next.tensors++] = t; /* in reverse order, corrected below */
    next.total += adam->count[t];
  }
  for (size_t k = 0; k < next.tensors / 2; k++) {
    size_t kept = next.tensor[k];
    next.tensor[k] = next.tensor[next.tensors - 1 - k];
    next.tensor[next.tensors - 1 - k] = kept;
  }
  return next;
}

static void make_exchange(struct oracle_adam *adam, struct oracle_exchange *exchange,
                          const onebit_plan_options_t *options) {
  int ranks = adam->size * adam->each;
  size_t *counts = allocate(exchange->tensors, sizeof *counts);
  for (size_t k = 0; k < exchange->tensors; k++)
    counts[k] = adam->count[exchange->tensor[k]];
  exchange->oracle = is_deepspeed(adam) ? oracle_create(ranks, *counts, options)
                                        : oracle_create_tensors(ranks, adam->size, counts,
                                                                exchange->tensors, options);
  free(counts);
}

static void make_exchanges(struct oracle_adam *adam) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.profile = adam->options.common.profile;
  options.scale = adam->options.common.scale;
  options.block_size = adam->options.common.block_size;
  options.no_error_feedback = adam->options.common.no_error_feedback;
  options.schedule = adam->options.common.schedule;
  options.bits = adam->options.common.bits;
  adam->exchanges = allocate(adam->tensors, sizeof *adam->exchanges);
  for (size_t end = adam->tensors; end > 0;) {
    struct oracle_exchange next = take_exchange(adam, &end);
    if (next.tensors) {
      make_exchange(adam, &next, &options);
      adam->exchanges[adam->exchange_count++] = next;
    } else {
      free(next.tensor);
    }
  }
}

static void copy_tensors(struct oracle_adam *adam, const onebit_tensor_t *tensors) {
  adam->first = allocate(adam->tensors, sizeof(size_t));
  adam->count = allocate(adam->tensors, sizeof(size_t));
  adam->weight_decay = allocate(adam->tensors, sizeof(float));
  adam->factor = allocate(adam->tensors, sizeof(float));
  adam->uncompressed = allocate(adam->tensors, sizeof(bool));
  for (size_t k = 0; k < adam->tensors; k++) {
    adam->first[k] = adam->total;
    adam->count[k] = tensors[k].count;
    adam->weight_decay[k] = tensors[k].weight_decay;
    adam->factor[k] = tensors[k].learning_rate_factor;
    if (adam->factor[k] == 0.0f)
      adam->factor[k] = 1.0f;
    adam->uncompressed[k] =
        tensors[k].uncompressed > 0 || tensors[k].count < adam->options.common.dense_below;
    adam->total += tensors[k].count;
  }
  adam->parameter = allocate(adam->total, sizeof(float));
  for (size_t k = 0; k < adam->tensors; k++)
    for (size_t i = 0; i < tensors[k].count; i++)
      adam->parameter[adam->first[k] + i] =
          oracle_load(tensors[k].parameter, i, adam->options.common.parameter_dtype);
}

struct oracle_adam *oracle_adam_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_adam_options_t *options) {
  struct oracle_adam *adam = allocate(1, sizeof *adam);
  adam->options = fill_defaults(options);
  adam->shares = options->shards != ONEBIT_SHARDS_NONE;
  adam->weigher = oracle_weigher_of(&options->common, size);
  adam->size = options->common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL ? hosts : size;
  adam->each = size / adam->size;
  adam->tensors = count;
  copy_tensors(adam, tensors);
  adam->momentum = allocate(adam->total, sizeof(float));
  adam->variance = allocate(adam->total, sizeof(float));
  adam->reciprocal = allocate(adam->total, sizeof(float));
  adam->step = allocate(adam->total, sizeof(float));
  adam->means = allocate((size_t)adam->size * adam->total, sizeof(float));
  make_exchanges(adam);
  return adam;
}

void oracle_adam_destroy(struct oracle_adam *adam) {
  for (size_t k = 0; k < adam->exchange_count; k++) {
    oracle_destroy(adam->exchanges[k].oracle);
    free(adam->exchanges[k].tensor);
  }
  free(adam->exchanges);
  free(adam->norms);
  free(adam->means);
  free(adam->reciprocal);
  free(adam->step);
  free(adam->variance);
  free(adam->momentum);
  free(adam->parameter);
  free(adam->factor);
  free(adam->uncompressed);
  free(adam->weight_decay);
  free(adam->count);
  free(adam->first);
  free(adam);
}

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

float oracle_bound_step(const struct oracle_adam *adam, float step) {
  return is_deepspeed(adam) ? step : fmaxf(-ONEBIT_STEP_BOUND, fminf(ONEBIT_STEP_BOUND, step));
}

/* Returns the mean of element i over `count` consecutive ranks. */
static float average_ranks(const float *const *values, float factor, int count, size_t i) {
  float sum = factor * values[0][i];
  for (int r = 1; r < count; r++)
    sum += factor * values[r][i];
  return sum * (1.0f / (float)count);
}

bool oracle_average(struct oracle_adam *adam, const float *const *values, float factor) {
  for (size_t w = 0; w < (size_t)adam->size; w++)
    for (size_t i = 0; i < adam->total; i++) {
      float mean = average_ranks(values + w * (size_t)adam->each, factor, adam->each, i);
      adam->means[w * adam->total + i] = mean;
      if (!isfinite(mean))
        return false;
    }
  return true;
}

bool oracle_average_gradients(struct oracle_adam *adam, const float *const *gradients) {
  return oracle_weigh(&adam->weigher, gradients, adam->count, adam->tensors,
                      &adam->gradient_factor) &&
         oracle_average(adam, gradients, adam->gradient_factor);
}

float oracle_mean_gradient(const struct oracle_adam *adam, size_t i) {
  float sum = adam->means[i];
  for (size_t w = 1; w < (size_t)adam->size; w++)
    sum += adam->means[w * adam->total + i];
  return sum * (1.0f / (float)adam->size);
}

/* Records the norm of the variance after the current step, for the decision when to freeze. */
static void record_norm(struct oracle_adam *adam) {
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

/* Returns 1 / (1 - beta2) rounded up. A result just above a whole number, which is an error of
 * double arithmetic, is rounded to that number. */
static size_t freeze_distance(double beta2) {
  double steps = 1.0 / (1.0 - beta2), whole = round(steps);
  return (size_t)(fabs(steps - whole) < 1e-6 ? whole : ceil(steps));
}

/* True if recent gradients are larger than the variance indicates. */
static bool variance_lags(const struct oracle_adam *adam) {
  double power = 0.0, variance = 0.0;
  if (is_deepspeed(adam) || adam->options.shards || !adam->total)
    return false;
  for (size_t i = 0; i < adam->total; i++) {
    power += (double)adam->momentum[i] * (double)adam->momentum[i];
    variance += (double)adam->variance[i];
  }
  double k1 = (double)oracle_momentum_correction(adam, adam->steps);
  double k2 = (double)oracle_variance_correction(adam, adam->steps);
  return variance == 0.0 || power * k1 * k1 > 4.0 * variance * k2 * k2;
}

bool oracle_must_freeze(struct oracle_adam *adam) {
  const onebit_adam_options_t *options = &adam->options;
  record_norm(adam);
  if (options->freeze_step == ONEBIT_FREEZE_NEVER)
    return false;
  size_t distance = freeze_distance(options->beta2), t = adam->steps;
  if (t > distance)
    adam->variance_ratio = adam->norms[t - distance] / adam->norms[t];
  if (options->freeze_step != ONEBIT_FREEZE_AUTOMATIC)
    return t >= options->freeze_step && !variance_lags(adam);
  double threshold = options->freeze_threshold;
  bool settled =
      t > distance && adam->variance_ratio >= threshold && adam->variance_ratio <= 1.0 / threshold;
  return (settled || t >= ONEBIT_FREEZE_LATEST * distance) && !variance_lags(adam);
}

/* True if the step m / (sqrt(v^) + eps) is exchanged instead of the momentum. */
static bool exchanges_step(const struct oracle_adam *adam) {
  return adam->options.exchange == ONEBIT_ADAM_EXCHANGE_STEP &&
         !(is_deepspeed(adam) && adam->size == 1);
}

void oracle_freeze(struct oracle_adam *adam) {
  float correction = oracle_variance_correction(adam, adam->steps);
  float epsilon = (float)adam->options.epsilon;
  for (size_t i = 0; i < adam->total; i++) {
    bool still = adam->variance[i] == 0.0f && !is_deepspeed(adam);
    float denominator = sqrtf(adam->variance[i]) * correction + epsilon;
    adam->reciprocal[i] = still ? 0.0f : 1.0f / denominator;
  }
  for (size_t k = 0; k < adam->tensors; k++)
    for (size_t i = adam->first[k]; i < adam->first[k] + adam->count[k]; i++)
      if (exchanges_step(adam) && !adam->uncompressed[k])
        adam->momentum[i] = adam->momentum[i] * adam->reciprocal[i];
  adam->compressed = true;
  adam->freeze_step = adam->steps;
}

void oracle_adam_whole_step(struct oracle_adam *adam, size_t k, float learning_rate) {
  float b1 = (float)adam->options.beta1, w1 = (float)(1.0 - adam->options.beta1);
  float b2 = (float)adam->options.beta2, w2 = (float)(1.0 - adam->options.beta2);
  float epsilon = (float)adam->options.epsilon;
  float k1 = oracle_momentum_correction(adam, adam->steps),
        k2 = oracle_variance_correction(adam, adam->steps);
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

static void make_warmup_step(struct oracle_adam *adam, float learning_rate) {
  for (size_t k = 0; k < adam->tensors; k++)
    oracle_adam_whole_step(adam, k, learning_rate);
  if (oracle_must_freeze(adam))
    oracle_freeze(adam);
}

/* True for a single rank in profile deepspeed. It exchanges nothing, so that its momentum stays
 * exact. */
static bool is_alone(const struct oracle_adam *adam) {
  return is_deepspeed(adam) && adam->size == 1;
}

float oracle_own_gradient(const struct oracle_adam *adam, const float *const *gradients, size_t w,
                          size_t i) {
  float w1 = (float)(1.0 - adam->options.beta1);
  bool mean = adam->options.common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL || is_alone(adam);
  return mean ? w1 * adam->means[w * adam->total + i]
              : (w1 * adam->gradient_factor) * gradients[w][i];
}

float **oracle_inputs(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                      oracle_value *value, const void *context) {
  float **inputs = allocate((size_t)adam->size, sizeof *inputs);
  for (size_t w = 0, at = 0; w < (size_t)adam->size; w++, at = 0) {
    inputs[w] = allocate(exchange->total, sizeof(float));
    for (size_t k = 0; k < exchange->tensors; k++)
      for (size_t t = exchange->tensor[k], i = 0; i < adam->count[t]; i++, at++)
        inputs[w][at] = value(context, exchange, w, at, adam->first[t] + i);
  }
  return inputs;
}

void oracle_free_inputs(const struct oracle_adam *adam, float **inputs) {
  for (size_t w = 0; w < (size_t)adam->size; w++)
    free(inputs[w]);
  free(inputs);
}

void oracle_scatter(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                    const float *from, float *to) {
  for (size_t k = 0; k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = 0; i < adam->count[t]; i++)
      to[adam->first[t] + i] = *from++;
}

void oracle_gather(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                   const float *from, float *to) {
  for (size_t k = 0; k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = 0; i < adam->count[t]; i++)
      *to++ = from[adam->first[t] + i];
}

static bool exchange_tensors(struct oracle_adam *adam, const struct oracle_exchange *exchange,
                             oracle_value *value, const void *context) {
  float **inputs = oracle_inputs(adam, exchange, value, context);
  float *output = allocate(exchange->total, sizeof(float));
  bool alone = is_alone(adam);
  bool done = alone || oracle_exchange(exchange->oracle, (const float *const *)inputs, output);
  if (done)
    oracle_scatter(adam, exchange, alone ? inputs[0] : output, adam->momentum);
  oracle_free_inputs(adam, inputs);
  free(output);
  return done;
}

bool oracle_exchange_all(struct oracle_adam *adam, oracle_value *value, const void *context) {
  bool done = true;
  for (size_t k = 0; k < adam->exchange_count && done; k++)
    done = exchange_tensors(adam, &adam->exchanges[k], value, context);
  return done;
}

/* A step's gradients of all ranks. */
struct given {
  const struct oracle_adam *adam;
  const float *const *gradients;
};

/* Returns worker w's own momentum, or step, of element i. */
static float momentum_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                            size_t at, size_t i) {
  const struct given *given = context;
  const struct oracle_adam *adam = given->adam;
  float b1 = (float)adam->options.beta1;
  float own = oracle_own_gradient(adam, given->gradients, w, i);
  (void)exchange, (void)at;
  return b1 * adam->momentum[i] + (exchanges_step(adam) ? own * adam->reciprocal[i] : own);
}

/* --- Sharded state: ranks send gradients, and receive steps or parameters */

static float gradient_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                            size_t at, size_t i) {
  const struct given *given = context;
  (void)exchange, (void)at;
  return given->adam->gradient_factor * given->gradients[w][i];
}

/* Computes the new momentum and the step of an exchange's elements, in their order in the exchange.
 * The new momentum replaces the mean gradient in `mean`. */
static void compute_share(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                          float *mean, float *step) {
  float b1 = (float)adam->options.beta1, w1 = (float)(1.0 - adam->options.beta1);
  float k1 = oracle_momentum_correction(adam, adam->steps + 1);
  for (size_t k = 0, at = 0; k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = 0; i < adam->count[t]; i++, at++) {
      mean[at] = b1 * adam->momentum[adam->first[t] + i] + w1 * mean[at];
      step[at] = (mean[at] * k1) * adam->reciprocal[adam->first[t] + i];
      if (fabsf(step[at]) > 1.0f)
        step[at] = copysignf(1.0f, step[at]);
    }
}

/* Sends every worker's gradients to the servers, which store the momentum. With
 * ONEBIT_ADAM_EXCHANGE_STEP the servers send the steps back compressed. */
static bool exchange_shares(struct oracle_adam *adam, const struct oracle_exchange *exchange,
                            const struct given *given) {
  float **inputs = oracle_inputs(adam, exchange, gradient_input, given);
  float *mean = allocate(exchange->total, sizeof(float)),
        *step = allocate(exchange->total, sizeof(float));
  bool done = oracle_reduce(exchange->oracle, (const float *const *)inputs, mean);
  if (done)
    compute_share(adam, exchange, mean, step);
  if (done && adam->options.shards == ONEBIT_SHARDS_STEP)
    done = oracle_serve(exchange->oracle, step, step);
  if (done) {
    oracle_keep_residuals(exchange->oracle);
    oracle_scatter(adam, exchange, mean, adam->momentum);
    oracle_scatter(adam, exchange, step, adam->step);
  }
  oracle_free_inputs(adam, inputs);
  free(mean);
  free(step);
  return done;
}

/* Exchanges every worker's own momentum. The state's `momentum` becomes the new common momentum. */
static bool exchange_momentum(struct oracle_adam *adam, const float *const *gradients) {
  const struct given given = {adam, gradients};
  bool done = true;
  if (!adam->options.shards)
    return oracle_exchange_all(adam, momentum_input, &given);
  for (size_t k = 0; k < adam->exchange_count && done; k++)
    done = exchange_shares(adam, &adam->exchanges[k], &given);
  return done;
}

void oracle_apply_step(struct oracle_adam *adam, size_t k, const float *step, float learning_rate) {
  float rate = learning_rate * adam->factor[k], decay = adam->weight_decay[k];
  for (size_t i = adam->first[k]; i < adam->first[k] + adam->count[k]; i++) {
    float *p = &adam->parameter[i];
    *p = *p - rate * (step[i] + decay * *p);
  }
}

static void make_compressed_step(struct oracle_adam *adam, float learning_rate) {
  float k1 = oracle_momentum_correction(adam, adam->steps);
  for (size_t i = 0; i < adam->total && !adam->options.shards; i++) {
    float step = adam->momentum[i] * k1;
    adam->step[i] =
        oracle_bound_step(adam, exchanges_step(adam) ? step : step * adam->reciprocal[i]);
  }
  for (size_t k = 0; k < adam->tensors; k++)
    if (adam->uncompressed[k])
      oracle_adam_whole_step(adam, k, learning_rate);
    else
      oracle_apply_step(adam, k, adam->step, learning_rate);
}

/* Averages the gradients and exchanges the momentum. Returns false if a value overflows. Tests in
 * which values overflow have a single exchange, so that nothing has changed then. */
static bool prepare_step(struct oracle_adam *adam, const float *const *gradients) {
  return oracle_average_gradients(adam, gradients) &&
         (!adam->compressed || exchange_momentum(adam, gradients));
}

bool oracle_adam_step(struct oracle_adam *adam, const float *const *gradients,
                      float learning_rate) {
  bool made = prepare_step(adam, gradients);
  oracle_rescale(&adam->weigher, !made);
  if (!made)
    return false;
  adam->steps++;
  if (adam->compressed)
    make_compressed_step(adam, learning_rate);
  else
    make_warmup_step(adam, learning_rate);
  return true;
}
