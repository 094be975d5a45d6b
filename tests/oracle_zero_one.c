/* The oracle's 0/1 Adam, in float32. The operations have the same order as in the public header's
 * formulas. */
#include "tests/oracle_zero_one.h"
#include "tests/support.h"

enum { DENSE = ORACLE_DENSE, BITS = ORACLE_BITS, NOTHING = ORACLE_NOTHING };

static bool is_deepspeed(const struct oracle_zero_one *oracle) {
  return oracle->state->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

/* --- The exchanged values */

static float mean_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                        size_t at, size_t i) {
  const struct oracle_adam *state = context;
  (void)exchange, (void)at;
  return state->means[w * state->total + i];
}

static void exchange_bucket(struct oracle_adam *state, const struct oracle_exchange *bucket) {
  float **inputs = oracle_inputs(state, bucket, mean_input, state);
  float *output = allocate(bucket->total, sizeof *output);
  CHECK(oracle_exchange(bucket->oracle, (const float *const *)inputs, output),
        "the oracle's exchange overflows");
  oracle_scatter(state, bucket, output, state->momentum);
  oracle_free_inputs(state, inputs);
  free(output);
}

/* Sets state->momentum to the mean of the exchanged values. The exchange is compressed if `bits` is
 * true, and otherwise sends each tensor in float32. */
static void exchange_values(struct oracle_adam *state, bool bits) {
  for (size_t k = 0; k < state->tensors; k++)
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
      if (!bits || state->uncompressed[k])
        state->momentum[i] = oracle_mean_gradient(state, i);
  for (size_t k = 0; bits && k < state->exchange_count; k++)
    exchange_bucket(state, &state->exchanges[k]);
}

/* --- Elements */

static float update_momentum(const struct oracle_zero_one *oracle, float momentum, float gradient) {
  const onebit_adam_options_t *options = &oracle->state->options;
  float b1 = (float)options->beta1, w1 = (float)(1.0 - options->beta1);
  return b1 * momentum + w1 * gradient;
}

/* Returns sqrt(v^) + eps, where v^ is the bias-corrected variance. */
static float root_of(const struct oracle_zero_one *oracle, float variance, size_t updates) {
  return sqrtf(variance) * oracle_variance_correction(oracle->state, updates) +
         (float)oracle->state->options.epsilon;
}

/* Returns the denominator, or infinity for an element that never had a gradient. Such an element
 * does not move. */
static float compute_denominator(const struct oracle_zero_one *oracle, size_t i) {
  float variance = oracle->state->variance[i];
  bool still = variance == 0.0f && !is_deepspeed(oracle);
  return still ? INFINITY : root_of(oracle, variance, oracle->updates);
}

/* Limits a movement, which is a sum of steps times learning rates; `rates` is the sum of these
 * rates. The bound of each step is ONEBIT_STEP_BOUND. Profile deepspeed has no bound. */
static float bound_movement(const struct oracle_zero_one *oracle, float movement, float rates) {
  float most = ONEBIT_STEP_BOUND * rates;
  return is_deepspeed(oracle) ? movement : fmaxf(-most, fminf(most, movement));
}

/* Loops over every element of a tensor on every rank. */
#define FOR_EACH(oracle, k, r, i)                                                                  \
  for (size_t r = 0; r < (oracle)->ranks; r++)                                                     \
    for (size_t i = (oracle)->state->first[k];                                                     \
         i < (oracle)->state->first[k] + (oracle)->state->count[k]; i++)

/* Makes a step of Adam with mean gradients. The variance is the same on all ranks, so it is updated
 * only once, for the last rank. */
static void make_dense_step(struct oracle_zero_one *oracle, size_t k, float learning_rate,
                            size_t updates) {
  struct oracle_adam *state = oracle->state;
  float b2 = (float)state->options.beta2, w2 = (float)(1.0 - state->options.beta2);
  float rate = learning_rate * state->factor[k], decay = state->weight_decay[k];
  float k1 = oracle_momentum_correction(state, state->steps + 1);
  FOR_EACH(oracle, k, r, i) {
    const size_t at = r * oracle->state->total + i;
    float g = state->momentum[i], *p = &oracle->parameter[at], *m = &oracle->momentum[at];
    float v = b2 * state->variance[i] + (w2 * g) * g, denominator = root_of(oracle, v, updates);
    *m = update_momentum(oracle, *m, g);
    *p = *p - rate * (bound_movement(oracle, (*m * k1) / denominator, 1.0f) + decay * *p);
    if (r + 1 == oracle->ranks)
      state->variance[i] = v;
  }
}

static void make_compressed_step(struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  const struct oracle_adam *state = oracle->state;
  float rate = learning_rate * state->factor[k], decay = state->weight_decay[k];
  float k1 = oracle_momentum_correction(state, state->steps + 1);
  FOR_EACH(oracle, k, r, i) {
    const size_t at = r * oracle->state->total + i;
    float *p = &oracle->parameter[at], *m = &oracle->momentum[at];
    float denominator = compute_denominator(oracle, i);
    *m = isinf(denominator) ? 0.0f : update_momentum(oracle, *m, state->momentum[i]);
    *p = *p - rate * (bound_movement(oracle, (*m * k1) / denominator, 1.0f) + decay * *p);
  }
}

/* The result of a local step for one element on one rank: the new momentum, and the movement of the
 * parameter. */
struct moved {
  float momentum, move;
};

static struct moved compute_local_move(const struct oracle_zero_one *oracle, size_t k, size_t at,
                                       size_t i, float gradient, float learning_rate) {
  const struct oracle_adam *state = oracle->state;
  float rate = learning_rate * state->factor[k], decay = state->weight_decay[k];
  float k1 = oracle_momentum_correction(state, state->steps + 1);
  float momentum =
      update_momentum(oracle, oracle->momentum[at], oracle->gradient_factor * gradient);
  float step = bound_movement(oracle, (momentum * k1) / oracle->denominator[i], 1.0f);
  return (struct moved){momentum, -rate * (step + decay * oracle->parameter[at])};
}

static void make_local_step(struct oracle_zero_one *oracle, size_t k, const float *const *gradients,
                            float learning_rate, const onebit_status_t *statuses) {
  FOR_EACH(oracle, k, r, i) {
    const size_t at = r * oracle->state->total + i;
    struct moved to = compute_local_move(oracle, k, at, i, gradients[r][i], learning_rate);
    if (statuses[r] != ONEBIT_OK)
      continue;
    oracle->momentum[at] = to.momentum;
    oracle->parameter[at] += to.move;
    oracle->moved[at] += to.move;
  }
}

/* Returns the factor by which weight decay reduces the anchor (the parameter at the last
 * synchronisation). It is 0 in profile deepspeed, where the exchanged movements include the
 * decay. */
static float anchor_decay(const struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  const struct oracle_adam *state = oracle->state;
  float rates = (float)(oracle->rates + (double)learning_rate);
  return is_deepspeed(oracle) ? 0.0f : state->weight_decay[k] * (rates * state->factor[k]);
}

static void set_movement(struct oracle_zero_one *oracle, size_t k, const float *const *gradients,
                         float learning_rate) {
  float decayed = anchor_decay(oracle, k, learning_rate);
  FOR_EACH(oracle, k, r, i) {
    const size_t at = r * oracle->state->total + i;
    struct moved to = compute_local_move(oracle, k, at, i, gradients[r][i], learning_rate);
    float p = oracle->parameter[at], a = oracle->anchor[i], d = oracle->denominator[i];
    float moved =
        is_deepspeed(oracle) ? oracle->moved[at] + to.move : p + to.move - a + decayed * a;
    float still = isfinite(moved) ? 0.0f : NAN;
    float own = oracle->gradient_factor * gradients[r][i];
    oracle->sent[at] = !isfinite(own * own) ? NAN : isinf(d) ? still : moved * d;
  }
}

static double correct_rate(const struct oracle_zero_one *oracle, float learning_rate) {
  return (double)learning_rate *
         (double)oracle_momentum_correction(oracle->state, oracle->state->steps + 1);
}

static void synchronize_tensor(struct oracle_zero_one *oracle, size_t k, float learning_rate) {
  const struct oracle_adam *state = oracle->state;
  float decayed = anchor_decay(oracle, k, learning_rate);
  float rates = (float)(oracle->corrected_rates + correct_rate(oracle, learning_rate));
  rates *= state->factor[k];
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float a = oracle->anchor[i], u = state->momentum[i];
    float p = a + bound_movement(oracle, u / oracle->denominator[i], rates) - decayed * a;
    oracle->anchor[i] = p;
    for (size_t at = i; at < oracle->ranks * state->total; at += state->total) {
      oracle->momentum[at] = rates > 0.0f ? -(u / rates) : 0.0f;
      oracle->parameter[at] = p;
      oracle->moved[at] = 0.0f;
    }
  }
}

/* --- Steps */

/* True if one rank's gradients of the compressed tensors are finite. */
static bool is_finite(const struct oracle_adam *state, const float *gradient) {
  for (size_t k = 0; k < state->tensors; k++)
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
      if (!state->uncompressed[k] && !isfinite(gradient[i]))
        return false;
  return true;
}

static void freeze_variance(struct oracle_zero_one *oracle) {
  struct oracle_adam *state = oracle->state;
  for (size_t i = 0; i < state->total; i++) {
    oracle->denominator[i] = compute_denominator(oracle, i);
    oracle->anchor[i] = oracle->parameter[i];
  }
  for (size_t k = 0; k < state->exchange_count; k++)
    oracle_reset_residuals(state->exchanges[k].oracle);
  state->freeze_step = state->steps;
}

static void count_step(struct oracle_zero_one *oracle, int sends, float learning_rate) {
  bool was_local = oracle->clock.local;
  oracle->rates += (double)learning_rate;
  oracle->corrected_rates += correct_rate(oracle, learning_rate);
  if (!was_local || sends == BITS)
    oracle->rates = oracle->corrected_rates = 0.0;
  oracle->state->steps++;
  oracle->exchanges[sends]++;
  oracle_zero_one_clock_advance(&oracle->clock);
  if (oracle->clock.local && !was_local)
    freeze_variance(oracle);
}

/* Prepares the exchange. Before the local stage, gradients are exchanged. In the local stage,
 * uncompressed tensors exchange gradients, and in synchronisation steps the other tensors exchange
 * movements. Returns false if a value is not finite. */
static bool prepare_exchange(struct oracle_zero_one *oracle, int sends,
                             const float *const *gradients, float learning_rate) {
  struct oracle_adam *state = oracle->state;
  const float **values = allocate(oracle->ranks, sizeof *values);
  bool local = oracle->clock.local;
  for (size_t k = 0; local && k < state->tensors; k++) {
    FOR_EACH(oracle, k, r, i) {
      const float own = oracle->gradient_factor * gradients[r][i];
      oracle->sent[r * state->total + i] = state->uncompressed[k] ? own : 0.0f;
    }
    if (sends == BITS && !state->uncompressed[k])
      set_movement(oracle, k, gradients, learning_rate);
  }
  for (size_t r = 0; r < oracle->ranks; r++)
    values[r] = local ? oracle->sent + r * state->total : gradients[r];
  bool finite = oracle_average(state, values, local ? 1.0f : oracle->gradient_factor);
  free(values);
  return finite;
}

static void step_tensor(struct oracle_zero_one *oracle, size_t k, int sends,
                        const float *const *gradients, float learning_rate,
                        const onebit_status_t *statuses) {
  if (oracle->state->uncompressed[k])
    make_dense_step(oracle, k, learning_rate, oracle->state->steps + 1);
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
  bool finite = prepare_exchange(oracle, sends, gradients, learning_rate);
  for (size_t r = 0; r < oracle->ranks; r++)
    statuses[r] = finite && is_finite(oracle->state, gradients[r]) ? ONEBIT_OK : ONEBIT_SKIPPED;
  if (!finite)
    return;
  exchange_values(oracle->state, sends == BITS);
  oracle->updates += sends == DENSE;
  for (size_t k = 0; k < oracle->state->tensors; k++)
    step_tensor(oracle, k, sends, gradients, learning_rate, statuses);
  count_step(oracle, sends, learning_rate);
}
