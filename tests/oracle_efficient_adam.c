/* The oracle's Efficient-Adam, in float32, with the formulas of the public header. */
#include "tests/oracle_kinds.h"
#include "tests/support.h"

static struct oracle_adam *create_adam(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count,
                                       const onebit_efficient_adam_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta1 = options->beta1;
  adam.beta2 = options->beta2;
  adam.epsilon = options->epsilon;
  adam.freeze_step = ONEBIT_FREEZE_NEVER;
  adam.common = options->common;
  return oracle_adam_create(size, hosts, tensors, count, &adam);
}

/* Creates the struct oracle_adam whose exchanges the warm-up uses. Its messages have more bits and
 * one scale for each block. */
static struct oracle_adam *create_warmup(int size, int hosts, const onebit_tensor_t *tensors,
                                         size_t count,
                                         const onebit_efficient_adam_options_t *options) {
  onebit_efficient_adam_options_t warm = *options;
  warm.common.bits = options->common.warmup_bits ? options->common.warmup_bits : 8;
  warm.common.max_bits = 0;
  warm.common.scale = ONEBIT_SCALE_RMS;
  if (warm.common.block_size == ONEBIT_BLOCK_BUFFER)
    warm.common.block_size = 0;
  return create_adam(size, hosts, tensors, count, &warm);
}

static struct oracle_lamb *create_lamb(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count,
                                       const onebit_efficient_adam_options_t *options) {
  onebit_lamb_options_t lamb = ONEBIT_LAMB_OPTIONS_INIT;
  lamb.beta1 = options->beta1;
  lamb.beta2 = options->beta2;
  lamb.epsilon = options->epsilon;
  lamb.freeze_step = ONEBIT_FREEZE_NEVER;
  lamb.min_coefficient = options->min_ratio;
  lamb.max_coefficient = options->max_ratio;
  lamb.common = options->common;
  return oracle_lamb_create(size, hosts, tensors, count, &lamb);
}

struct oracle_efficient_adam *oracle_efficient_adam_create(
    int size, int hosts, const onebit_tensor_t *tensors, size_t count,
    const onebit_efficient_adam_options_t *options) {
  struct oracle_efficient_adam *oracle = allocate(1, sizeof *oracle);
  oracle->lamb = options->trust_ratio ? create_lamb(size, hosts, tensors, count, options) : NULL;
  oracle->state =
      oracle->lamb ? oracle->lamb->state : create_adam(size, hosts, tensors, count, options);
  oracle->state->compressed = options->warmup_steps == ONEBIT_WARMUP_NONE;
  oracle->warmup_steps = options->warmup_steps ? options->warmup_steps : ONEBIT_WARMUP_STEPS;
  oracle->warm = create_warmup(size, hosts, tensors, count, options);
  oracle->divisor = allocate(oracle->state->total, sizeof(float));
  oracle->update = allocate(oracle->state->total, sizeof(float));
  oracle->gain = options->gain;
  oracle->moment = allocate((size_t)oracle->state->size * oracle->state->total, sizeof(float));
  oracle->table = allocate(count + 1, sizeof *oracle->table);
  for (size_t k = 0; k < count; k++)
    oracle->table[k] = tensors[k].uncompressed == ONEBIT_TABLE;
  return oracle;
}

void oracle_efficient_adam_destroy(struct oracle_efficient_adam *oracle) {
  if (oracle->lamb)
    oracle_lamb_destroy(oracle->lamb);
  else
    oracle_adam_destroy(oracle->state);
  oracle_adam_destroy(oracle->warm);
  free(oracle->divisor);
  free(oracle->update);
  free(oracle->moment);
  free(oracle->table);
  free(oracle);
}

float oracle_reciprocal_root(float value) {
  uint32_t bits;
  float guess;
  memcpy(&bits, &value, sizeof bits);
  bits = 0x5f1ffff9u - bits / 2;
  memcpy(&guess, &bits, sizeof guess);
  float square = value * guess;
  square = square * guess;
  return guess * (0.703952253f * (2.38924456f - square));
}

float oracle_rounded_by_chance(float value, float chance) {
  uint32_t bits, low;
  memcpy(&bits, &value, sizeof bits);
  memcpy(&low, &chance, sizeof low);
  bits = (bits + low % 65536) / 65536 * 65536;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float round_to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + bits / 65536 % 2) / 65536 * 65536;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Returns a worker's unbiased estimate of the mean gradient's second moment. The worker's own
 * moment is v, and was `old` before this step. `begins` is true if the previous step of the
 * element's block was 0. */
static float estimate_moment(const struct oracle_efficient_adam *oracle, bool begins, float v,
                             float old) {
  const struct oracle_adam *state = oracle->state;
  double ranks = (double)state->size, b2 = state->options.beta2,
         step = (double)(state->steps - oracle->zero_steps) + 1.0;
  double correction = 1.0 / (1.0 - pow(b2, step));
  if (begins || state->steps == state->freeze_step)
    return (float)(correction / ranks) * v;
  double own = fmax(1.0 / (ranks * ranks), 1.0 / (4.0 * ranks));
  double others = (1.0 / ranks - own) / (1.0 - pow(b2, step - 1.0));
  return (float)(correction * own) * v + (float)others * old;
}

/* Returns the input of worker w for element i, whose residual is `error`; updates *moment. */
static float compute_input(const struct oracle_efficient_adam *oracle, size_t w, size_t i,
                           bool begins, float floor, float error, float *moment) {
  const struct oracle_adam *state = oracle->state;
  double b2 = state->options.beta2, b1 = state->options.beta1;
  float g = state->means[w * state->total + i], epsilon = (float)state->options.epsilon;
  float v = (float)b2 * *moment + ((float)(1.0 - b2) * g) * g;
  float mean = estimate_moment(oracle, begins, v, *moment) + (epsilon * epsilon + floor);
  /* In the first step after the warm-up the residual is the momentum. */
  bool first = state->steps == state->freeze_step;
  *moment = oracle_rounded_by_chance(v, first ? (float)b1 * state->momentum[i] : error);
  float weight = (float)(1.0 - b1) * (oracle->gain != 0.0 ? (float)oracle->gain : 1.0f);
  return (float)b1 * state->momentum[i] + weight * (g * oracle_reciprocal_root(mean));
}

/* Returns an array with an entry for each element of the exchange: true if the previous step of the
 * element's whole block was 0. */
static bool *find_zero_blocks(const struct oracle_adam *state,
                              const struct oracle_exchange *exchange) {
  const struct oracle *oracle = exchange->oracle;
  bool *begins = allocate(exchange->total, sizeof *begins), *zero = begins;
  for (size_t k = 0; k < exchange->tensors; k++)
    for (size_t t = exchange->tensor[k], i = 0; i < state->count[t]; i++)
      *zero++ = state->momentum[state->first[t] + i] == 0.0f;
  for (size_t k = 0; k < oracle->run_count; k++) {
    bool all = true;
    for (size_t i = 0; i < oracle->runs[k].count; i++)
      all &= begins[oracle->runs[k].first + i];
    for (size_t i = 0; i < oracle->runs[k].count; i++)
      begins[oracle->runs[k].first + i] = all;
  }
  return begins;
}

/* Finds the runs first .. end - 1, which include run k, belong to the same tensor, and are
 * compressed by the same rank of a host. */
static void find_part(const struct oracle_exchange *exchange, const size_t *tensor, size_t k,
                      size_t *first, size_t *end) {
  const struct oracle *runs = exchange->oracle;
  int part = runs->runs[k].server / runs->size;
  for (*first = k; *first > 0; (*first)--)
    if (tensor[*first - 1] != tensor[k] || runs->runs[*first - 1].server / runs->size != part)
      break;
  for (*end = k + 1; *end < runs->run_count; (*end)++)
    if (tensor[*end] != tensor[k] || runs->runs[*end].server / runs->size != part)
      break;
}

/* Returns an array with the tensor of each run; tensors are numbered within the exchange. */
static size_t *find_tensors(const struct oracle_adam *state,
                            const struct oracle_exchange *exchange) {
  const struct oracle *runs = exchange->oracle;
  size_t *tensor = allocate(runs->run_count + 1, sizeof *tensor), at = 0, end = 0;
  for (size_t k = 0; k < runs->run_count; k++) {
    while (runs->runs[k].first >= end && at < exchange->tensors)
      end += state->count[exchange->tensor[at++]];
    tensor[k] = at - 1;
  }
  return tensor;
}

/* Returns the mean moment of a sample of words of 32 elements, from word `start` on, within
 * elements first .. end - 1. Adds the elements of each lane first, and then the lanes. */
static float average_sample(const float *moment, size_t first, size_t end, size_t start,
                            size_t step) {
  size_t words = 0, total = (end - first + 31) / 32;
  float *sample = allocate(32 * (total + 1), sizeof *sample);
  for (size_t word = start; word < total; word += step, words++)
    for (size_t i = 0; i < 32 && first + 32 * word + i < end; i++)
      sample[32 * words + i] = moment[first + 32 * word + i];
  float mean = oracle_run_sum(sample, 32 * words) / (float)(32 * words);
  free(sample);
  return mean;
}

/* Returns the lower limits of moments, for each worker and element of the exchange. In a table the
 * limit is the mean of the table's moments; in other tensors it is 0. */
static float *find_floors(const struct oracle_efficient_adam *oracle,
                          const struct oracle_exchange *exchange) {
  const struct oracle_adam *state = oracle->state;
  const struct oracle *runs = exchange->oracle;
  size_t size = (size_t)state->size, total = exchange->total;
  double t = (double)(state->steps - oracle->zero_steps) + 1.0;
  float all_new = (float)(1.0 / (1.0 - pow(state->options.beta2, t)) / (double)state->size);
  float *floors = allocate(size * total, sizeof *floors);
  float *moment = allocate(total, sizeof *moment);
  size_t *tensor = find_tensors(state, exchange);
  for (size_t w = 0; w < size; w++) {
    oracle_gather(state, exchange, oracle->moment + w * state->total, moment);
    for (size_t k = 0; k < runs->run_count; k++) {
      size_t first, end;
      if (!oracle->table[exchange->tensor[tensor[k]]])
        continue;
      find_part(exchange, tensor, k, &first, &end);
      size_t from = runs->runs[first].first,
             upto = runs->runs[end - 1].first + runs->runs[end - 1].count,
             words = (upto - from + 31) / 32, step = words > 64 ? words / 64 : 1;
      float mean = average_sample(moment, from, upto, k % step, step);
      for (size_t i = 0; i < runs->runs[k].count; i++)
        floors[w * total + runs->runs[k].first + i] = all_new * mean;
    }
  }
  free(tensor);
  free(moment);
  return floors;
}

/* The data of a step. step_input also updates the moments. */
struct step {
  const struct oracle_efficient_adam *oracle;
  const bool *begins;
  const float *floors;
  float *moments;
};

static float step_input(const void *context, const struct oracle_exchange *exchange, size_t w,
                        size_t at, size_t i) {
  const struct step *step = context;
  float error = exchange->oracle->worker_error[w * exchange->oracle->elements + at];
  return compute_input(step->oracle, w, i, step->begins[at], step->floors[w * exchange->total + at],
                       error, &step->moments[w * step->oracle->state->total + i]);
}

static bool exchange_tensors(struct oracle_efficient_adam *oracle,
                             const struct oracle_exchange *exchange) {
  struct oracle_adam *state = oracle->state;
  size_t bytes = (size_t)state->size * state->total * sizeof(float);
  float *moments = allocate(bytes, 1), *output = allocate(exchange->total, sizeof *output);
  bool *begins = find_zero_blocks(state, exchange);
  float *floors = find_floors(oracle, exchange);
  memcpy(moments, oracle->moment, bytes);
  float **inputs =
      oracle_inputs(state, exchange, step_input, &(struct step){oracle, begins, floors, moments});
  bool done = oracle_exchange(exchange->oracle, (const float *const *)inputs, output);
  if (done) {
    oracle_scatter(state, exchange, output, state->momentum);
    memcpy(oracle->moment, moments, bytes);
  }
  oracle_free_inputs(state, inputs);
  free(begins);
  free(floors);
  free(moments);
  free(output);
  return done;
}

static bool exchange_all(struct oracle_efficient_adam *oracle) {
  bool done = true;
  for (size_t k = 0; k < oracle->state->exchange_count && done; k++)
    done = exchange_tensors(oracle, &oracle->state->exchanges[k]);
  return done;
}

/* Returns the norm of the parameters divided by the norm of the step. This step has 2/3 of the
 * momentum. */
static double compute_trust_ratio(struct oracle_lamb *lamb, size_t k) {
  const struct oracle_adam *state = lamb->state;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
    lamb->update[i] =
        2.0f / 3.0f * state->momentum[i] + state->weight_decay[k] * state->parameter[i];
  double p = sqrt(oracle_lamb_squares(lamb, k, state->parameter));
  double u = sqrt(oracle_lamb_squares(lamb, k, lamb->update));
  if (p == 0.0 || u == 0.0)
    return 1.0;
  return fmax(fmin(p / u, lamb->max_coefficient), lamb->min_coefficient);
}

static void apply_step(struct oracle_efficient_adam *oracle, size_t k, float learning_rate) {
  struct oracle_adam *state = oracle->state;
  float rate = learning_rate * state->factor[k], decay = state->weight_decay[k];
  if (oracle->lamb)
    rate = (float)((double)learning_rate * (double)state->factor[k] *
                   compute_trust_ratio(oracle->lamb, k));
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float *p = &state->parameter[i];
    *p = *p - rate * (state->momentum[i] + decay * *p);
  }
}

/* --- The warm-up: gradients are divided by the root of moments that are the same on all workers */

/* Computes the divisors of step t from the moments before step t. */
static void find_divisors(struct oracle_efficient_adam *oracle,
                          const struct oracle_exchange *exchange, double t) {
  const struct oracle_adam *state = oracle->state;
  const struct oracle *runs = exchange->oracle;
  float *v = allocate(exchange->total, sizeof *v), *divisor = allocate(exchange->total, sizeof *v);
  float before = t > 1.0 ? (float)(1.0 / (1.0 - pow(state->options.beta2, t - 1.0))) : 1.0f,
        epsilon = (float)state->options.epsilon;
  oracle_gather(state, exchange, state->variance, v);
  for (size_t k = 0; k < runs->run_count; k++) {
    size_t first = runs->runs[k].first, count = runs->runs[k].count;
    double mean = (double)oracle_run_sum(v + first, count) / (double)count;
    for (size_t i = first; i < first + count; i++) {
      float moment = v[i] * before + 0.03f * before * (float)mean;
      divisor[i] = moment > 0.0f ? sqrtf(moment + epsilon * epsilon) : 1.0f;
    }
  }
  oracle_scatter(state, exchange, divisor, oracle->divisor);
  free(divisor);
  free(v);
}

static float divided_gradient(const void *context, const struct oracle_exchange *exchange, size_t w,
                              size_t at, size_t i) {
  const struct oracle_efficient_adam *oracle = context;
  float limit = 50.0f * sqrtf((float)oracle->state->size),
        x = oracle->state->means[w * oracle->state->total + i] * (1.0f / oracle->divisor[i]);
  (void)exchange, (void)at;
  return fminf(fmaxf(x, -limit), limit);
}

/* Exchanges the divided gradients. The result becomes the `momentum` of oracle->warm. */
static bool exchange_divided(struct oracle_efficient_adam *oracle) {
  struct oracle_adam *state = oracle->state;
  for (size_t k = 0; k < state->exchange_count; k++)
    find_divisors(oracle, &state->exchanges[k], (double)(state->steps - oracle->zero_steps) + 1.0);
  return oracle_exchange_all(oracle->warm, divided_gradient, oracle);
}

static void apply_divided(struct oracle_efficient_adam *oracle, size_t k, float learning_rate) {
  struct oracle_adam *state = oracle->state;
  float *update = oracle->lamb ? oracle->lamb->update : oracle->update;
  double b1 = state->options.beta1, b2 = state->options.beta2;
  double t = (double)(state->steps - oracle->zero_steps);
  float k1 = (float)(1.0 / (1.0 - pow(b1, t))), k2 = (float)(1.0 / sqrt(1.0 - pow(b2, t))),
        epsilon = (float)state->options.epsilon;
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++) {
    float *m = &state->momentum[i], *v = &state->variance[i];
    float g = oracle->warm->momentum[i] * oracle->divisor[i];
    *v = (float)b2 * *v + ((float)(1.0 - b2) * g) * g;
    float moment = *v * k2 * k2 + epsilon * epsilon;
    *m = (float)b1 * *m + (float)(1.0 - b1) * (moment > 0.0f ? g / sqrtf(moment) : 0.0f);
    update[i] = *m * k1 + state->weight_decay[k] * state->parameter[i];
  }
  if (oracle->lamb) {
    oracle_lamb_move(oracle->lamb, k, learning_rate);
    return;
  }
  for (size_t i = state->first[k]; i < state->first[k] + state->count[k]; i++)
    state->parameter[i] = state->parameter[i] - learning_rate * state->factor[k] * update[i];
}

/* Ends the warm-up after its last step. Every worker's second moments start as the second moments
 * of the mean gradient, times the number of workers. */
static void end_warm_up(struct oracle_efficient_adam *oracle) {
  struct oracle_adam *state = oracle->state;
  bool quiet = true;
  for (size_t i = 0; i < state->total; i++)
    quiet &= state->variance[i] == 0.0f;
  if (quiet)
    oracle->zero_steps = state->steps;
  for (size_t k = 0; k < oracle->warm->exchange_count && state->steps - oracle->zero_steps == 1;
       k++)
    oracle_reset_residuals(oracle->warm->exchanges[k].oracle);
  if (state->steps - oracle->zero_steps < oracle->warmup_steps)
    return;
  for (size_t i = 0; i < (size_t)state->size * state->total; i++)
    oracle->moment[i] = round_to_bfloat16((float)state->size * state->variance[i % state->total]);
  state->compressed = true;
  state->freeze_step = state->steps;
}

/* Makes the dense step of an uncompressed tensor. Its step number counts from the first step with a
 * gradient, too. */
static void step_uncompressed(struct oracle_efficient_adam *oracle, size_t k, float learning_rate) {
  struct oracle_adam *state = oracle->state;
  state->steps -= oracle->zero_steps;
  if (oracle->lamb)
    oracle_lamb_whole_step(oracle->lamb, k, learning_rate);
  else
    oracle_adam_whole_step(state, k, learning_rate);
  state->steps += oracle->zero_steps;
}

bool oracle_efficient_adam_step(struct oracle_efficient_adam *oracle, const float *const *gradients,
                                float learning_rate) {
  struct oracle_adam *state = oracle->state;
  bool made = oracle_average_gradients(state, gradients);
  bool compressed = state->compressed;
  made = made && (compressed ? exchange_all(oracle) : exchange_divided(oracle));
  oracle_rescale(&state->weigher, !made);
  if (!made)
    return false;
  state->steps++;
  for (size_t k = 0; k < state->tensors; k++)
    if (!state->uncompressed[k] && !compressed)
      apply_divided(oracle, k, learning_rate);
    else if (!state->uncompressed[k])
      apply_step(oracle, k, learning_rate);
    else
      step_uncompressed(oracle, k, learning_rate);
  if (!compressed)
    end_warm_up(oracle);
  return true;
}
