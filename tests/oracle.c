/* The oracle's collectives. A worker computes compensated values, and their signs and scales. A
 * server averages the workers' values, and computes signs and scales of the average. */
#include "tests/oracle.h"

#include <float.h>

#include "tests/support.h"

#define LANES 32

static float bfloat16_to_float(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static uint16_t float_to_bfloat16(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  if (isnan(value))
    return (uint16_t)(word >> 16 | 0x40); /* the result stays a NaN although the low bits are cut
                                           * off */
  uint32_t rest = word & 0xffff, kept = word >> 16;
  return (uint16_t)(kept + (rest > 0x8000 || (rest == 0x8000 && (kept & 1))));
}

static float float16_to_float(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float magnitude;
  if (exponent == 31)
    magnitude = fraction ? NAN : INFINITY;
  else
    magnitude =
        exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
  return bits >> 15 ? -magnitude : magnitude;
}

/* rintf rounds to nearest even. A fraction that rounds up to the next power of two carries into the
 * exponent. */
static uint16_t float_to_float16(float value) {
  unsigned sign = signbit(value) ? 0x8000 : 0, magnitude;
  float absolute = fabsf(value);
  int exponent;
  if (isnan(value)) {
    magnitude = 0x7e00;
  } else if (absolute >= 65520.0f) { /* half way between the largest float16 and 2^16 */
    magnitude = 0x7c00;
  } else if (absolute < 0x1p-14f) { /* a multiple of 2^-24 */
    magnitude = (unsigned)rintf(ldexpf(absolute, 24));
  } else {
    float fraction = frexpf(absolute, &exponent); /* in [1/2, 1) */
    magnitude = (unsigned)((exponent + 14) << 10) + (unsigned)rintf(ldexpf(fraction, 11)) - 1024;
  }
  return (uint16_t)(sign | magnitude);
}

float oracle_load(const void *array, size_t i, onebit_dtype_t dtype) {
  if (dtype == ONEBIT_FLOAT32)
    return ((const float *)array)[i];
  uint16_t bits = ((const uint16_t *)array)[i];
  return dtype == ONEBIT_BFLOAT16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}

void oracle_store(void *array, size_t i, onebit_dtype_t dtype, float value) {
  if (dtype == ONEBIT_FLOAT32)
    ((float *)array)[i] = value;
  else
    ((uint16_t *)array)[i] =
        dtype == ONEBIT_BFLOAT16 ? float_to_bfloat16(value) : float_to_float16(value);
}

void oracle_store_result(void *array, size_t i, onebit_dtype_t dtype, float value) {
  bool beyond = dtype == ONEBIT_FLOAT16 && fabsf(value) > 65504.0f;
  oracle_store(array, i, dtype, beyond ? copysignf(65504.0f, value) : value);
}

static struct oracle *create_oracle(int size, int each, const size_t *counts, size_t tensors,
                                    const onebit_plan_options_t *options) {
  struct oracle *oracle = allocate(1, sizeof *oracle);
  oracle->options = *options;
  oracle->size = size;
  oracle->each = each;
  oracle_lay_out(oracle, counts, tensors);
  size_t all = (size_t)size * oracle->elements;
  oracle->worker_error = allocate(all, sizeof(float));
  oracle->server_error = allocate(oracle->elements, sizeof(float));
  oracle->compensated = allocate(all, sizeof(float));
  oracle->decoded = allocate(all, sizeof(float));
  oracle->parts = allocate(all, sizeof(float));
  if (!oracle->options.bits)
    oracle->options.bits = 1;
  return oracle;
}

struct oracle *oracle_create_tensors(int size, int hosts, const size_t *counts, size_t tensors,
                                     const onebit_plan_options_t *options) {
  if (options->schedule != ONEBIT_SCHEDULE_HIERARCHICAL)
    return create_oracle(size, 1, counts, tensors, options);
  return create_oracle(hosts, size / hosts, counts, tensors, options);
}

struct oracle *oracle_create_hosts(int size, int hosts, size_t count,
                                   const onebit_plan_options_t *options) {
  return oracle_create_tensors(size, hosts, &count, 1, options);
}

struct oracle *oracle_create(int size, size_t count, const onebit_plan_options_t *options) {
  return oracle_create_tensors(size, 1, &count, 1, options);
}

void oracle_destroy(struct oracle *oracle) {
  if (!oracle)
    return;
  free(oracle->runs);
  free(oracle->worker_error);
  free(oracle->server_error);
  free(oracle->compensated);
  free(oracle->decoded);
  free(oracle->parts);
  free(oracle);
}

void oracle_add(struct oracle_sum *sum, float of_block) {
  sum->lane[sum->count++ % 1024] += (double)of_block;
}

double oracle_total(struct oracle_sum *sum) {
  for (int width = 512; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      sum->lane[i] += sum->lane[i + width];
  return sum->lane[0];
}

/* Returns the sum of a run's magnitudes or squares, as the scale rule requires. Each value is first
 * multiplied by `factor`. */
static float sum_magnitudes(const float *values, float factor, size_t count, onebit_scale_t rule) {
  float lane[LANES] = {0};
  for (size_t i = 0; i < count; i++) {
    float value = factor * values[i];
    lane[i % LANES] += rule == ONEBIT_SCALE_RMS ? value * value : fabsf(value);
  }
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++)
      lane[i] += lane[i + width];
  return lane[0];
}

float oracle_run_sum(const float *values, size_t count) {
  return sum_magnitudes(values, 1.0f, count, ONEBIT_SCALE_MEAN_ABSOLUTE);
}

float oracle_run_squares(const float *values, float factor, size_t count) {
  return sum_magnitudes(values, factor, count, ONEBIT_SCALE_RMS);
}

static float compute_scale(double sum, size_t count, onebit_scale_t rule) {
  double mean = sum / (double)count;
  return (float)(rule == ONEBIT_SCALE_RMS ? sqrt(mean) : mean);
}

/* Returns the scale of a whole buffer, or of a server's share of it. */
static float compute_common_scale(double sum, size_t count, onebit_scale_t rule) {
  if (rule != ONEBIT_SCALE_RMS)
    return compute_scale(sum, count, rule);
  float norm = (float)sqrt(sum), root = (float)sqrt((double)count);
  return norm / root;
}

static void decode_signs(const float *values, const struct oracle_run *run, float scale,
                         float *decoded) {
  for (size_t i = run->first; i < run->first + run->count; i++)
    decoded[i] = copysignf(scale, values[i]);
}

/* Returns the level that is nearest to `ratio`, a value divided by its scale. With 2 bits, levels
 * are odd multiples of a half. With 4 bits, they are whole numbers, with ties to even. With 8 bits,
 * they are 0 and numbers with four significant binary digits from 1.125 * 2^-15 to 1.875, with ties
 * away from zero. */
static float find_level(float ratio, int bits) {
  if (bits == 2)
    return fminf(fmaxf(rintf(ratio - 0.5f), -2), 1) + 0.5f;
  if (bits == 4)
    return fminf(fmaxf(rintf(ratio), -7), 7) + 0.0f; /* there is no -0 */
  int exponent;
  float fraction = frexpf(fabsf(ratio), &exponent); /* in [1/2, 1), or 0 */
  float level = ldexpf(roundf(ldexpf(fraction, 4)), exponent - 4);
  if (level < 1.125f * 0x1p-15f)
    return 0;
  return copysignf(fminf(level, 1.875f), ratio);
}

static float find_level_scale(const float *values, size_t count, float squares, onebit_scale_t rule,
                              int bits) {
  float limit = 0;
  for (size_t i = 0; i < count; i++)
    limit = fmaxf(limit, fabsf(values[i]));
  float reach = bits == 2 ? 1.5f : bits == 4 ? 3 : INFINITY;
  reach *= (float)sqrt((double)squares / (double)count);
  if (rule == ONEBIT_SCALE_RMS)
    limit = fminf(limit, reach);
  float scale = limit / (bits == 2 ? 1.5f : bits == 4 ? 7 : 1.875f);
  return scale < FLT_MIN ? 0 : scale;
}

/* Computes the values that a receiver decodes: levels times the scale, which is first multiplied by
 * `part`. */
static void decode_levels(const float *values, size_t count, int bits, float scale, float part,
                          float *decoded) {
  float inverse = scale > 0 ? 1 / scale : 0;
  for (size_t i = 0; i < count; i++)
    decoded[i] = find_level(values[i] * inverse, bits) * (scale * part);
}

/* Quantises consecutive runs to levels. If `parts` is not NULL, it gets the decoded values divided
 * by the number of workers. */
static bool quantize_levels(const struct oracle *oracle, const struct oracle_run *runs,
                            size_t run_count, const float *values, float *decoded, float *parts) {
  int bits = oracle->options.bits;
  for (size_t k = 0; k < run_count; k++) {
    const float *first = values + runs[k].first;
    float squares = oracle_run_squares(first, 1.0f, runs[k].count);
    if (!isfinite(squares))
      return false;
    float scale = find_level_scale(first, runs[k].count, squares, oracle->options.scale, bits);
    decode_levels(first, runs[k].count, bits, scale, 1, decoded + runs[k].first);
    if (parts)
      decode_levels(first, runs[k].count, bits, scale, 1.0f / (float)oracle->size,
                    parts + runs[k].first);
  }
  return true;
}

/* Returns the value after storing it as a result of the dtype and reading it back. */
static float round_to_dtype(float value, onebit_dtype_t dtype) {
  float room;
  oracle_store_result(&room, 0, dtype, value);
  return oracle_load(&room, 0, dtype);
}

/* Computes the values that a receiver decodes from signs, +scale or -scale, run by run. Scales are
 * rounded to `dtype`. Returns false if a sum is not finite. */
static bool quantize_runs(const struct oracle *oracle, const struct oracle_run *runs,
                          size_t run_count, const float *values, float *decoded, float *parts,
                          onebit_dtype_t dtype) {
  if (oracle->options.bits > 1)
    return quantize_levels(oracle, runs, run_count, values, decoded, parts);
  onebit_scale_t rule = oracle->options.scale;
  struct oracle_sum sums = {0};
  size_t count = 0;
  for (size_t k = 0; k < run_count; k++) {
    float sum = sum_magnitudes(values + runs[k].first, 1.0f, runs[k].count, rule);
    if (!isfinite(sum))
      return false;
    oracle_add(&sums, sum);
    count += runs[k].count;
    if (!oracle->common_scale)
      decode_signs(values, &runs[k],
                   round_to_dtype(compute_scale((double)sum, runs[k].count, rule), dtype), decoded);
  }
  double total = oracle_total(&sums);
  for (size_t k = 0; k < run_count && oracle->common_scale; k++)
    decode_signs(values, &runs[k], round_to_dtype(compute_common_scale(total, count, rule), dtype),
                 decoded);
  for (size_t k = 0; parts && k < run_count; k++)
    for (size_t i = runs[k].first; i < runs[k].first + runs[k].count; i++)
      parts[i] = decoded[i] * (1.0f / (float)oracle->size);
  return true;
}

/* Compresses the inputs of all workers: computes the compensated values, and the values that the
 * other ranks decode. */
static bool compress_workers(struct oracle *oracle, const float *const *inputs) {
  bool gathers = oracle->options.operation == ONEBIT_ALLGATHER;
  onebit_dtype_t dtype = gathers ? oracle->result_dtype : ONEBIT_FLOAT32;
  for (int r = 0; r < oracle->size; r++) {
    size_t base = (size_t)r * oracle->elements;
    float *compensated = oracle->compensated + base;
    for (size_t i = 0; i < oracle->elements; i++)
      compensated[i] = oracle->worker_error[base + i] + (i < oracle->valid ? inputs[r][i] : 0.0f);
    if (!quantize_runs(oracle, oracle->runs, oracle->run_count, compensated, oracle->decoded + base,
                       oracle->parts + base, dtype))
      return false;
  }
  return true;
}

static void keep_worker_errors(struct oracle *oracle) {
  for (size_t i = 0; i < (size_t)oracle->size * oracle->elements; i++)
    oracle->worker_error[i] = oracle->compensated[i] - oracle->decoded[i];
}

/* Computes the mean of the values that the ranks sent, added in rank order. The scales are already
 * divided by the number of ranks. */
static void average_parts(const struct oracle *oracle, float *mean) {
  for (size_t i = 0; i < oracle->elements; i++) {
    float sum = oracle->parts[i];
    for (size_t r = 1; r < (size_t)oracle->size; r++)
      sum += oracle->parts[r * oracle->elements + i];
    mean[i] = sum;
  }
}

/* Every server compresses its share of the mean. */
static bool compress_mean(struct oracle *oracle, float *total, float *result) {
  onebit_dtype_t dtype =
      oracle->options.profile == ONEBIT_PROFILE_DEFAULT ? oracle->result_dtype : ONEBIT_FLOAT32;
  for (size_t i = 0; i < oracle->elements; i++)
    total[i] += oracle->server_error[i];
  for (size_t begin = 0, end; begin < oracle->run_count; begin = end) {
    for (end = begin; end < oracle->run_count; end++)
      if (oracle->runs[end].server != oracle->runs[begin].server)
        break;
    if (!quantize_runs(oracle, oracle->runs + begin, end - begin, total, result, NULL, dtype))
      return false;
  }
  for (size_t i = 0; i < oracle->elements; i++)
    total[i] -= result[i];
  return true;
}

static bool make_allreduce(struct oracle *oracle, float *result) {
  float *total = allocate(oracle->elements, sizeof *total);
  float *padded = allocate(oracle->elements, sizeof *padded);
  average_parts(oracle, total);
  bool done = compress_mean(oracle, total, padded);
  if (done) {
    keep_worker_errors(oracle);
    memcpy(oracle->server_error, total, oracle->elements * sizeof *total);
    memcpy(result, padded, oracle->valid * sizeof *result);
  }
  free(padded);
  free(total);
  return done;
}

void oracle_reset_residuals(struct oracle *oracle) {
  memset(oracle->worker_error, 0, (size_t)oracle->size * oracle->elements * sizeof(float));
  memset(oracle->server_error, 0, oracle->elements * sizeof(float));
}

bool oracle_reduce(struct oracle *oracle, const float *const *inputs, float *mean) {
  if (!compress_workers(oracle, inputs))
    return false;
  average_parts(oracle, mean);
  return true;
}

bool oracle_serve(struct oracle *oracle, const float *values, float *result) {
  float *total = allocate(oracle->elements, sizeof *total);
  memcpy(total, values, oracle->elements * sizeof *total);
  bool done = compress_mean(oracle, total, result);
  if (done && !oracle->options.no_error_feedback)
    memcpy(oracle->server_error, total, oracle->elements * sizeof *total);
  free(total);
  return done;
}

void oracle_keep_residuals(struct oracle *oracle) {
  keep_worker_errors(oracle);
  if (oracle->options.no_error_feedback)
    oracle_reset_residuals(oracle);
}

bool oracle_exchange(struct oracle *oracle, const float *const *inputs, float *result) {
  if (!compress_workers(oracle, inputs))
    return false;
  if (oracle_has_servers(oracle)) {
    if (!make_allreduce(oracle, result))
      return false;
  } else {
    if (oracle->options.operation == ONEBIT_ALLGATHER)
      memcpy(result, oracle->decoded, oracle->result_count * sizeof *result);
    else
      average_parts(oracle, result);
    keep_worker_errors(oracle);
  }
  if (oracle->options.no_error_feedback)
    oracle_reset_residuals(oracle);
  return true;
}

/* Concatenates the values of all ranks. */
static bool gather_dense(const struct oracle *oracle, const float *const *inputs, float *result) {
  for (size_t r = 0; r < (size_t)oracle->size; r++)
    for (size_t i = 0; i < oracle->valid; i++) {
      if (!isfinite(inputs[r][i]))
        return false;
      result[r * oracle->valid + i] = inputs[r][i];
    }
  return true;
}

/* Makes a call with ONEBIT_WIRE_DENSE, which computes the mean in float32, without residuals. */
static bool exchange_dense(const struct oracle *oracle, const float *const *inputs, float *result) {
  if (oracle->options.operation == ONEBIT_ALLGATHER)
    return gather_dense(oracle, inputs, result);
  float part = 1.0f / (float)oracle->size;
  for (size_t i = 0; i < oracle->valid; i++) {
    float sum = inputs[0][i];
    bool finite = isfinite(sum);
    for (int r = 1; r < oracle->size; r++) {
      finite = finite && isfinite(inputs[r][i]);
      sum += inputs[r][i];
    }
    if (!finite || !isfinite(sum))
      return false;
    result[i] = sum * part;
  }
  return true;
}

/* Loads the input of worker w: a rank's input, or, if the worker is a host, the mean of its ranks'
 * inputs, added in rank order. */
static void load_worker(const struct oracle *oracle, const void *const *inputs, float *values) {
  onebit_dtype_t dtype = oracle->options.dtype;
  for (size_t i = 0; i < oracle->valid; i++) {
    values[i] = oracle_load(inputs[0], i, dtype);
    for (int k = 1; k < oracle->each; k++)
      values[i] += oracle_load(inputs[k], i, dtype);
    if (oracle->each > 1)
      values[i] *= 1.0f / (float)oracle->each;
  }
}

bool oracle_call(struct oracle *oracle, const void *const *inputs, void *result) {
  onebit_dtype_t dtype = oracle->options.dtype;
  float *values = allocate((size_t)oracle->size * oracle->valid, sizeof *values);
  float *output = allocate(oracle->result_count, sizeof *output);
  const float **pointers = allocate((size_t)oracle->size, sizeof *pointers);
  for (size_t r = 0; r < (size_t)oracle->size; r++) {
    pointers[r] = values + r * oracle->valid;
    load_worker(oracle, inputs + r * (size_t)oracle->each, values + r * oracle->valid);
  }
  oracle->result_dtype = dtype;
  bool done = oracle->options.wire == ONEBIT_WIRE_DENSE ? exchange_dense(oracle, pointers, output)
                                                        : oracle_exchange(oracle, pointers, output);
  for (size_t i = 0; done && i < oracle->result_count; i++)
    oracle_store_result(result, i, dtype, output[i]);
  free(pointers);
  free(output);
  free(values);
  return done;
}
