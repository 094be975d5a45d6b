/* 1-bit momentum SGD of the oracle, in float32, as the public header writes it. */
#include "tests/oracle_momentum.h"

#include <math.h>
#include <stdlib.h>

#include "tests/support.h"

struct oracle_momentum oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                              size_t count,
                                              const onebit_momentum_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.common = options->common;
  double decay = options->momentum != 0.0 ? options->momentum : 0.9;
  double factor = options->common.gradient_factor;
  return (struct oracle_momentum){.state = oracle_adam_create(size, hosts, tensors, count, &adam),
                                  .decay = (float)decay,
                                  .gradient_factor = factor != 0.0 ? (float)factor : 1.0f,
                                  .warmup_steps = options->warmup_steps};
}

void oracle_momentum_destroy(struct oracle_momentum *oracle) {
  oracle_adam_destroy(oracle->state);
  oracle->state = NULL;
}

/* The mean over `count` arrays, in their order, each times `factor`. */
static bool mean_into(float *mean, const float *const *values, int count, size_t elements,
                      float factor) {
  bool finite = true;
  for (size_t i = 0; i < elements; i++) {
    float sum = factor * values[0][i];
    for (int r = 1; r < count; r++)
      sum += factor * values[r][i];
    mean[i] = sum * (1.0f / (float)count);
    finite = finite && isfinite(mean[i]);
  }
  return finite;
}

/* The gradient of each worker: a rank's, or the mean of a host's. */
static bool take_gradients(struct oracle_momentum *oracle, const float *const *gradients) {
  struct oracle_adam *state = oracle->state;
  bool finite = true;
  for (size_t w = 0; w < (size_t)state->size; w++)
    finite &= mean_into(state->means + w * state->total, gradients + w * (size_t)state->each,
                        state->each, state->total, oracle->gradient_factor);
  return finite;
}

static void dense_momentum(struct oracle_momentum *oracle) {
  struct oracle_adam *state = oracle->state;
  const float **workers = allocate((size_t)state->size, sizeof *workers);
  float *mean = allocate(state->total, sizeof *mean);
  for (size_t w = 0; w < (size_t)state->size; w++)
    workers[w] = state->means + w * state->total;
  mean_into(mean, workers, state->size, state->total, 1.0f);
  for (size_t i = 0; i < state->total; i++)
    state->momentum[i] = oracle->decay * state->momentum[i] + mean[i];
  free(mean);
  free(workers);
}

/* One exchange: of its tensors, one after the other. */
static bool exchange_tensors(struct oracle_momentum *oracle,
                             const struct oracle_exchange *exchange) {
  struct oracle_adam *state = oracle->state;
  size_t workers = (size_t)state->size;
  float *own = allocate(workers * exchange->total, sizeof *own);
  float *output = allocate(exchange->total, sizeof *output);
  const float **inputs = allocate(workers, sizeof *inputs);
  for (size_t w = 0; w < workers; w++) {
    float *next = own + w * exchange->total;
    inputs[w] = next;
    for (size_t k = 0; k < exchange->tensors; k++)
      for (size_t t = exchange->tensor[k], i = state->first[t];
           i < state->first[t] + state->count[t]; i++)
        *next++ = oracle->decay * state->momentum[i] + state->means[w * state->total + i];
  }
  bool done = oracle_exchange(exchange->oracle, inputs, output);
  const float *result = output;
  for (size_t k = 0; done && k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = state->first[t]; i < state->first[t] + state->count[t];
         i++)
      state->momentum[i] = *result++;
  free(inputs);
  free(output);
  free(own);
  return done;
}

static bool exchanged_momentum(struct oracle_momentum *oracle) {
  bool done = true;
  for (size_t k = 0; k < oracle->state->exchange_count && done; k++)
    done = exchange_tensors(oracle, &oracle->state->exchanges[k]);
  return done;
}

bool oracle_momentum_step(struct oracle_momentum *oracle, const float *const *gradients,
                          float learning_rate) {
  struct oracle_adam *state = oracle->state;
  if (!take_gradients(oracle, gradients))
    return false;
  if (state->steps < oracle->warmup_steps)
    dense_momentum(oracle);
  else if (!exchanged_momentum(oracle))
    return false;
  for (size_t k = 0; k < state->tensors; k++) {
    float rate = learning_rate * state->factor[k], decay = state->weight_decay[k];
    for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
      float *p = &state->parameter[i];
      *p = *p - rate * (state->momentum[i] + decay * *p);
    }
  }
  state->steps++;
  return true;
}
