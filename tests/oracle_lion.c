/* The oracle's Lion and 1-bit momentum SGD, with the formulas of the public headers. They use the
 * tensors, exchanges and parameters of a struct oracle_adam, but make their own steps. Its option
 * beta1 holds the momentum factor, and its option beta2 holds Lion's beta3. */
#include "tests/oracle_kinds.h"
#include "tests/support.h"

/* ---- Momentum SGD ---- */

struct oracle_adam *oracle_momentum_create(int size, int hosts, const onebit_tensor_t *tensors,
                                           size_t count, const onebit_momentum_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.common = options->common;
  adam.beta1 = options->momentum;
  adam.freeze_step = options->warmup_steps;
  struct oracle_adam *oracle = oracle_adam_create(size, hosts, tensors, count, &adam);
  oracle->compressed = options->warmup_steps == ONEBIT_WARMUP_NONE;
  return oracle;
}

static float momentum_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                            size_t at, size_t i) {
  const struct oracle_adam *oracle = context;
  (void)exchange, (void)at;
  return (float)oracle->options.beta1 * oracle->momentum[i] + oracle->means[w * oracle->total + i];
}

static void update_dense_momentum(struct oracle_adam *oracle, size_t k) {
  for (size_t i = oracle->first[k]; i < oracle->first[k] + oracle->count[k]; i++)
    oracle->momentum[i] =
        (float)oracle->options.beta1 * oracle->momentum[i] + oracle_mean_gradient(oracle, i);
}

bool oracle_momentum_step(struct oracle_adam *oracle, const float *const *gradients,
                          float learning_rate) {
  bool made = oracle_average_gradients(oracle, gradients) &&
              (!oracle->compressed || oracle_exchange_all(oracle, momentum_input, oracle));
  oracle_rescale(&oracle->weigher, !made);
  if (!made)
    return false;
  oracle->steps++;
  for (size_t k = 0; k < oracle->tensors; k++) {
    if (!oracle->compressed || oracle->uncompressed[k])
      update_dense_momentum(oracle, k);
    oracle_apply_step(oracle, k, oracle->momentum, learning_rate);
  }
  if (!oracle->compressed && oracle->steps >= oracle->options.freeze_step) {
    oracle->compressed = true;
    oracle->freeze_step = oracle->steps;
  }
  return true;
}

/* ---- Lion ---- */

struct oracle_lion *oracle_lion_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_lion_options_t *options) {
  struct oracle_lion *lion = allocate(1, sizeof *lion);
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.common = options->common;
  adam.beta1 = options->beta1;
  adam.beta2 = options->beta3;
  adam.epsilon = options->epsilon;
  lion->state = oracle_adam_create(size, hosts, tensors, count, &adam);
  lion->state->compressed = lion->state->shares = true;
  lion->beta2 = options->beta2 != 0.0 ? options->beta2 : 0.99;
  lion->moment = allocate((size_t)lion->state->size * lion->state->total, sizeof(float));
  return lion;
}

void oracle_lion_destroy(struct oracle_lion *lion) {
  oracle_adam_destroy(lion->state);
  free(lion->moment);
  free(lion);
}

/* Returns a worker's normalised gradient, and updates the worker's moment. The low half of the
 * residual determines how the moment is rounded. */
static float gradient_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                            size_t at, size_t i) {
  const struct oracle_lion *lion = context;
  const struct oracle_adam *state = lion->state;
  const double beta3 = state->options.beta2;
  const float epsilon = (float)state->options.epsilon;
  const float g = state->means[w * state->total + i];
  const double share = 1.0 / (1.0 - pow(beta3, (double)state->steps + 1.0)) / state->size;
  float *kept = &lion->moment[w * state->total + i];
  const float moment = (float)beta3 * *kept + ((float)(1.0 - beta3) * g) * g;
  *kept = oracle_rounded_by_chance(
      moment, exchange->oracle->worker_error[w * exchange->oracle->elements + at]);
  return g * oracle_reciprocal_root((float)share * moment + epsilon * epsilon);
}

/* Returns the direction of an element, and updates its momentum. */
static float take_direction(struct oracle_lion *lion, size_t i, float mean) {
  const double beta1 = lion->state->options.beta1;
  float *momentum = &lion->state->momentum[i];
  const float before = *momentum;
  *momentum = (float)lion->beta2 * before + (float)(1.0 - lion->beta2) * mean;
  return (float)beta1 * before + (float)(1.0 - beta1) * mean;
}

/* Computes steps with one scale for each block, or with one scale for a server's whole share.
 * Elements whose direction is zero get alternate signs, + and -. If all directions are zero, no
 * element moves. */
static void compute_steps(const struct oracle_run *runs, size_t count, const float *directions,
                          float *steps) {
  float most = 0.0f;
  for (size_t r = 0; r < count; r++)
    for (size_t i = runs[r].first; i < runs[r].first + runs[r].count; i++)
      most = fmaxf(most, fabsf(directions[i]));
  for (size_t r = 0; r < count; r++)
    for (size_t i = 0; i < runs[r].count; i++) {
      const float c = directions[runs[r].first + i], turn = i % 2 ? -1.0f : 1.0f;
      steps[runs[r].first + i] = copysignf(most > 0.0f ? 1.0f : 0.0f, c != 0.0f ? c : turn);
    }
}

static bool exchange_tensors(struct oracle_lion *lion, const struct oracle_exchange *exchange) {
  struct oracle_adam *state = lion->state;
  struct oracle *oracle = exchange->oracle;
  float **inputs = oracle_inputs(state, exchange, gradient_input, lion);
  float *values = allocate(exchange->total, sizeof *values);
  float *steps = allocate(exchange->total, sizeof *steps);
  bool done = oracle_reduce(oracle, (const float *const *)inputs, values);
  for (size_t k = 0, at = 0; done && k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = 0; i < state->count[t]; i++, at++)
      values[at] = take_direction(lion, state->first[t] + i, values[at]);
  for (size_t begin = 0, end = 0; done && begin < oracle->run_count; begin = end) {
    do
      end++;
    while (oracle->common_scale && end < oracle->run_count &&
           oracle->runs[end].server == oracle->runs[begin].server);
    compute_steps(oracle->runs + begin, end - begin, values, steps);
  }
  if (done) {
    oracle_keep_residuals(oracle);
    oracle_scatter(state, exchange, steps, state->step);
  }
  oracle_free_inputs(state, inputs);
  free(steps);
  free(values);
  return done;
}

static void compute_dense_steps(struct oracle_lion *lion, size_t k) {
  struct oracle_adam *state = lion->state;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    const float c = take_direction(lion, i, oracle_mean_gradient(state, i));
    state->step[i] = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;
  }
}

bool oracle_lion_step(struct oracle_lion *lion, const float *const *gradients,
                      float learning_rate) {
  struct oracle_adam *state = lion->state;
  bool made = oracle_average_gradients(state, gradients);
  for (size_t k = 0; made && k < state->exchange_count; k++)
    made = exchange_tensors(lion, &state->exchanges[k]);
  oracle_rescale(&state->weigher, !made);
  if (!made)
    return false;
  state->steps++;
  for (size_t k = 0; k < state->tensors; k++) {
    if (state->uncompressed[k])
      compute_dense_steps(lion, k);
    oracle_apply_step(state, k, state->step, learning_rate);
  }
  return true;
}
