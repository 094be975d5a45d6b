/* 0/1 Adam of the oracle, in float32, one operation after the other as the public header writes
 * them. */
#include "tests/oracle_zero_one.h"
#include "tests/support.h"

enum { DENSE = ORACLE_DENSE, BITS = ORACLE_BITS, NOTHING = ORACLE_NOTHING };

static bool is_deepspeed(const struct oracle_zero_one *oracle) {
  return oracle->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* --- The exchanged values */

/* Fills the workers' inputs from values[r] of rank r: a rank's own values, or the mean of a host's
 * ranks. Returns false if an input is not finite. */
static bool load_worker_values(struct oracle_zero_one *oracle, const float *const *values,
                               float factor) {
  bool finite = true;
  for (size_t w = 0; w < (size_t)oracle->workers; w++)
    for (size_t i = 0; i < oracle->total; i++) {
      const float *const *of_worker = values + w * (size_t)oracle->each;
      float sum = factor * of_worker[0][i];
      for (int r = 1; r < oracle->each; r++)
        sum += factor * of_worker[r][i];
      oracle->means[w * oracle->total + i] = sum * (1.0f / (float)oracle->each);
      finite = finite && isfinite(oracle->means[w * oracle->total + i]);
    }
  return finite;
}

static void write_mean(struct oracle_zero_one *oracle, size_t k) {
  for (size_t i = oracle->first[k]; i < oracle->first[k] + oracle->count[k]; i++) {
    float sum = oracle->means[i];
    for (size_t w = 1; w < (size_t)oracle->workers; w++)
      sum += oracle->means[w * oracle->total + i];
    oracle->mean[i] = sum * (1.0f / (float)oracle->workers);
  }
}

static void exchange_bucket(struct oracle_zero_one *oracle,
                            const struct oracle_zero_one_bucket *bucket) {
  size_t workers = (size_t)oracle->workers;
  float **inputs = allocate(workers, sizeof *inputs), *output = allocate(bucket->total, 4);
  for (size_t w = 0; w < workers; w++) {
    inputs[w] = allocate(bucket->total, sizeof(float));
    for (size_t k = 0, at = 0; k < bucket->tensors; at += oracle->count[bucket->tensor[k++]])
      memcpy(inputs[w] + at, oracle->means + w * oracle->total + oracle->first[bucket->tensor[k]],
             oracle->count[bucket->tensor[k]] * sizeof(float));
  }
  CHECK(oracle_exchange(bucket->oracle, (const float *const *)inputs, output),
        "the oracle's exchange overflows");
  for (size_t k = 0, at = 0; k < bucket->tensors; at += oracle->count[bucket->tensor[k++]])
    memcpy(oracle->mean + oracle->first[bucket->tensor[k]], output + at,
           oracle->count[bucket->tensor[k]] * sizeof(float));
  for (size_t w = 0; w < workers; w++)
    free(inputs[w]);
  free(inputs);
  free(output);
}

/* Sets `mean` to the mean of the exchanged values: compressed, or each tensor in float32. */
static void exchange_values(struct oracle_zero_one *oracle, bool bits) {
  for (size_t k = 0; k < oracle->tensors; k++)
    if (!bits || oracle->uncompressed[k])
      write_mean(oracle, k);
  for (size_t k = 0; bits && k < oracle->bucket_count; k++)
    exchange_bucket(oracle, &oracle->buckets[k]);
}

/* --- Elements */

/* Return 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), or 1 without bias correction. */
static float momentum_correction(const struct oracle_zero_one *oracle, size_t t) {
  if (oracle->options.no_bias_correction)
    return 1.0f;
  return (float)(1.0 / (1.0 - pow(oracle->options.beta1, (double)t)));
}

static float variance_correction(const struct oracle_zero_one *oracle, size_t t) {
  if (oracle->options.no_bias_correction)
    return 1.0f;
  return (float)(1.0 / sqrt(1.0 - pow(oracle->options.beta2, (double)t)));
}

static float update_momentum(const struct oracle_zero_one *oracle, float momentum, float gradient) {
  float b1 = (float)oracle->options.beta1, w1 = (float)(1.0 - oracle->options.beta1);
  return b1 * momentum + w1 * gradient;
}

/* Returns sqrt(v^) + eps, or infinity for an element that never had a gradient, which then does not
 * move. */
static float compute_denominator(const struct oracle_zero_one *oracle, float variance,
                                 size_t updates) {
  if (variance == 0.0f && !is_deepspeed(oracle))
    return INFINITY;
  return sqrtf(variance) * variance_correction(oracle, updates) + (float)oracle->options.epsilon;
}

/* Bounds a movement: the sum of steps at these rates, each at most ONEBIT_STEP_BOUND except in
 * profile deepspeed. */
static float bound_movement(const struct oracle_zero_one *oracle, float movement, float rates) {
  float most = ONEBIT_STEP_BOUND * rates;
  return is_deepspeed(oracle) ? movement : fmaxf(-most, fminf(most, movement));
}

/* Loops over every element of a tensor on every rank. */
#define FOR_EACH(oracle, k, r, i)                                                                  \
  for (size_t r = 0; r < (size_t)(oracle)->ranks; r++)                                             \
    for (size_t i = (oracle)->first[k]; i < (oracle)->first[k] + (oracle)->count[k]; i++)

/* Makes a step of Adam with mean gradients. All ranks have the same variance: it is updated for the
 * last of them. */
static void make_dense_step(struct oracle_zero_one *oracle, size_t k, float learning_rate,
                            size_t updates) {
  float b2 = (float)oracle->options.beta2, w2 = (float)(1.0 - oracle->options.beta2);
  float rate = learning_rate * oracle->factor[k], decay = oracle->weight_decay[k];
  float k1 = momentum_correction(oracle, oracle->steps + 1);
  FOR_EACH(oracle, k, r, i) {
    float g = oracle->mean[i], *p = &oracle->parameter[r * oracle->total + i];
    float *m = &oracle->momentum[r * oracle->total + i];
    float v = b2 * oracle->variance[i] + (w2 * g) * g;
    float denominator =
        sqrtf(v) * variance_correction(oracle, updates) + (float)oracle->options.epsilon;
    *m = update_momentum(oracle, *m, g);
    *p = *p - rate * (bound_movement(oracle, (*m * k1) / denominator, 1.0f) + decay * *p);
    if (r + 1 == (size_t)oracle->ranks)
      oracle->variance[i] = v;
  }
}

static void make_compressed_step(struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  float rate = learning_rate * oracle->factor[k], decay = oracle->weight_decay[k];
  float k1 = momentum_correction(oracle, oracle->steps + 1);
  FOR_EACH(oracle, k, r, i) {
    float *p = &oracle->parameter[r * oracle->total + i];
    float *m = &oracle->momentum[r * oracle->total + i];
    float denominator = compute_denominator(oracle, oracle->variance[i], oracle->updates);
    *m = isinf(denominator) ? 0.0f : update_momentum(oracle, *m, oracle->mean[i]);
    *p = *p - rate * (bound_movement(oracle, (*m * k1) / denominator, 1.0f) + decay * *p);
  }
}

/* The new momentum of one element of one rank in a local step, and the movement of its
 * parameter. */
struct moved {
  float momentum, move;
};

static struct moved compute_local_move(const struct oracle_zero_one *oracle, size_t k, size_t at,
                                       size_t i, float gradient, float learning_rate) {
  float rate = learning_rate * oracle->factor[k], decay = oracle->weight_decay[k];
  float k1 = momentum_correction(oracle, oracle->steps + 1);
  float momentum = update_momentum(oracle, oracle->momentum[at],
                                   (float)oracle->options.common.gradient_factor * gradient);
  float step = bound_movement(oracle, (momentum * k1) / oracle->denominator[i], 1.0f);
  return (struct moved){momentum, -rate * (step + decay * oracle->parameter[at])};
}

static void make_local_step(struct oracle_zero_one *oracle, size_t k, const float *const *gradients,
                            float learning_rate, const onebit_status_t *statuses) {
  FOR_EACH(oracle, k, r, i) {
    size_t at = r * oracle->total + i;
    struct moved to = compute_local_move(oracle, k, at, i, gradients[r][i], learning_rate);
    if (statuses[r] != ONEBIT_OK)
      continue;
    oracle->momentum[at] = to.momentum;
    oracle->parameter[at] += to.move;
    oracle->moved[at] += to.move;
  }
}

/* Returns the factor by which weight decay reduces the anchor: 0 in profile deepspeed, where the
 * exchanged movements include the decay. */
static float anchor_decay(const struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  float rates = (float)(oracle->rates + (double)learning_rate);
  return is_deepspeed(oracle) ? 0.0f : oracle->weight_decay[k] * (rates * oracle->factor[k]);
}

static void set_movement(struct oracle_zero_one *oracle, size_t k, const float *const *gradients,
                         float learning_rate) {
  float decayed = anchor_decay(oracle, k, learning_rate);
  FOR_EACH(oracle, k, r, i) {
    size_t at = r * oracle->total + i;
    struct moved to = compute_local_move(oracle, k, at, i, gradients[r][i], learning_rate);
    float p = oracle->parameter[at], a = oracle->anchor[i], d = oracle->denominator[i];
    float moved =
        is_deepspeed(oracle) ? oracle->moved[at] + to.move : p + to.move - a + decayed * a;
    float still = isfinite(moved) ? 0.0f : NAN;
    float own = (float)oracle->options.common.gradient_factor * gradients[r][i];
    oracle->sent[at] = !isfinite(own * own) ? NAN : isinf(d) ? still : moved * d;
  }
}

static double correct_rate(const struct oracle_zero_one *oracle, float learning_rate) {
  return (double)learning_rate * (double)momentum_correction(oracle, oracle->steps + 1);
}

static void synchronize_tensor(struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  float decayed = anchor_decay(oracle, k, learning_rate);
  float rates = (float)(oracle->corrected_rates + correct_rate(oracle, learning_rate));
  rates *= oracle->factor[k];
  for (size_t i = oracle->first[k]; i < oracle->first[k] + oracle->count[k]; i++) {
    float a = oracle->anchor[i], u = oracle->mean[i];
    float p = a + bound_movement(oracle, u / oracle->denominator[i], rates) - decayed * a;
    oracle->anchor[i] = p;
    for (size_t at = i; at < (size_t)oracle->ranks * oracle->total; at += oracle->total) {
      oracle->momentum[at] = rates > 0.0f ? -(u / rates) : 0.0f;
      oracle->parameter[at] = p;
      oracle->moved[at] = 0.0f;
    }
  }
}

/* --- Steps */

static void skip_step(const struct oracle_zero_one *oracle, onebit_status_t *statuses) {
  for (int r = 0; r < oracle->ranks; r++)
    statuses[r] = ONEBIT_SKIPPED;
}

/* True if one rank's gradient is finite, except in tensors that stay uncompressed. */
static bool is_finite(const struct oracle_zero_one *oracle, const float *gradient) {
  for (size_t k = 0; k < oracle->tensors; k++)
    for (size_t i = oracle->first[k]; i < oracle->first[k] + oracle->count[k]; i++)
      if (!oracle->uncompressed[k] && !isfinite(gradient[i]))
        return false;
  return true;
}

static void freeze_variance(struct oracle_zero_one *oracle) {
  for (size_t i = 0; i < oracle->total; i++) {
    oracle->denominator[i] = compute_denominator(oracle, oracle->variance[i], oracle->updates);
    oracle->anchor[i] = oracle->parameter[i];
  }
  for (size_t k = 0; k < oracle->bucket_count; k++) {
    struct oracle *bucket = oracle->buckets[k].oracle;
    memset(bucket->worker_error, 0,
           (size_t)bucket->size * bucket->elements * sizeof *bucket->worker_error);
    memset(bucket->server_error, 0, bucket->elements * sizeof *bucket->server_error);
  }
  oracle->freeze_step = oracle->steps;
}

static void count_step(struct oracle_zero_one *oracle, int sends, float learning_rate) {
  bool was_local = oracle->clock.local;
  oracle->rates += (double)learning_rate;
  oracle->corrected_rates += correct_rate(oracle, learning_rate);
  if (!was_local || sends == BITS)
    oracle->rates = oracle->corrected_rates = 0.0;
  oracle->steps++;
  oracle->exchanges[sends]++;
  oracle_zero_one_clock_advance(&oracle->clock);
  if (oracle->clock.local && !was_local)
    freeze_variance(oracle);
}

/* Prepares the exchange of gradients, or in a synchronisation step of the movements of compressed
 * tensors. Returns false if a value is not finite. */
static bool prepare_exchange(struct oracle_zero_one *oracle, const float *const *gradients,
                             float learning_rate) {
  const float **values = allocate((size_t)oracle->ranks, sizeof *values);
  bool synchronizes = oracle->clock.local;
  float factor = (float)oracle->options.common.gradient_factor;
  for (size_t k = 0; synchronizes && k < oracle->tensors; k++) {
    if (!oracle->uncompressed[k])
      set_movement(oracle, k, gradients, learning_rate);
    FOR_EACH(oracle, k, r, i)
    if (oracle->uncompressed[k])
      oracle->sent[r * oracle->total + i] = factor * gradients[r][i];
  }
  for (size_t r = 0; r < (size_t)oracle->ranks; r++)
    values[r] = synchronizes ? oracle->sent + r * oracle->total : gradients[r];
  bool finite = load_worker_values(oracle, values, synchronizes ? 1.0f : factor);
  free(values);
  return finite;
}

/* Prepares a local step, in which only the tensors that stay uncompressed are exchanged. */
static bool prepare_local_step(struct oracle_zero_one *oracle, const float *const *gradients) {
  float factor = (float)oracle->options.common.gradient_factor;
  for (size_t k = 0; k < oracle->tensors; k++)
    FOR_EACH(oracle, k, r, i) {
      size_t at = r * oracle->total + i;
      oracle->sent[at] = oracle->uncompressed[k] ? factor * gradients[r][i] : 0.0f;
    }
  const float **values = allocate((size_t)oracle->ranks, sizeof *values);
  for (size_t r = 0; r < (size_t)oracle->ranks; r++)
    values[r] = oracle->sent + r * oracle->total;
  bool finite = load_worker_values(oracle, values, 1.0f);
  free(values);
  return finite;
}

static void step_tensor(struct oracle_zero_one *oracle, size_t k, int sends,
                        const float *const *gradients, float learning_rate,
                        const onebit_status_t *statuses) {
  if (oracle->uncompressed[k])
    make_dense_step(oracle, k, learning_rate, oracle->steps + 1);
  else if (sends == DENSE)
    make_dense_step(oracle, k, learning_rate, oracle->updates);
  else if (sends == NOTHING)
    make_local_step(oracle, k, gradients, learning_rate, statuses);
  else if (oracle->clock.local)
    synchronize_tensor(oracle, k, learning_rate);
  else
    make_compressed_step(oracle, k, learning_rate);
}

void oracle_zero_one_step(struct oracle_zero_one *oracle, const float *const *gradients,
                          float learning_rate, onebit_status_t *statuses) {
  int sends = oracle_zero_one_clock_next(&oracle->clock);
  bool finite = sends == NOTHING ? prepare_local_step(oracle, gradients)
                                 : prepare_exchange(oracle, gradients, learning_rate);
  for (int r = 0; r < oracle->ranks; r++)
    statuses[r] = is_finite(oracle, gradients[r]) ? ONEBIT_OK : ONEBIT_SKIPPED;
  if (!finite) {
    skip_step(oracle, statuses);
    return;
  }
  exchange_values(oracle, sends == BITS);
  oracle->updates += sends == DENSE;
  for (size_t k = 0; k < oracle->tensors; k++)
    step_tensor(oracle, k, sends, gradients, learning_rate, statuses);
  count_step(oracle, sends, learning_rate);
}
