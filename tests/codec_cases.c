/* Test cases for the codecs: all combinations of the values in the lists below. */
#include "tests/codec_cases.h"

#include <math.h>
#include <stdio.h>

#include "base/memory.h"

static const size_t counts[] = {0,    1,    31,   32,   33,   63,   64,    65,
                                2047, 2048, 2049, 4095, 4096, 4097, 65536, 100003};
static const char *const dtypes[] = {"float32", "bfloat16", "float16"};
static const char *const values[] = {"gradients", "edges", "overflow", "nan", "large"};

enum { count_count = 16, dtype_count = 3, value_count = VALUES_KINDS, stream_count = 3 };
enum { MAX_STREAMS = 7 };

struct codec_case {
  size_t count;
  onebit_dtype_t dtype;
  enum codec_values values;
};

static struct guarded_array input_create(const struct codec_case *c, uint32_t salt) {
  struct guarded_array array = array_create(c->count * ob_dtype_size(c->dtype));
  for (size_t i = 0; i < c->count; i++)
    ob_store(array.data, i, c->dtype, value_at(i, salt, c->values));
  return array;
}

/* Returns the arguments of a compress call, with the values that most cases use. */
static struct ob_compress_run compress_run_of(const struct codec_case *c, const void *input,
                                              const void *residual, void *out, void *bits) {
  return (struct ob_compress_run){.count = c->count,
                                  .valid = c->count,
                                  .input = input,
                                  .dtype = c->dtype,
                                  .rule = ONEBIT_SCALE_RMS,
                                  .momentum_width = 1,
                                  .momentum_scale = 0.37f,
                                  .decay = 0.9f,
                                  .scaling = 1,
                                  .weight = 0.1f,
                                  .residual = residual,
                                  .residual_scale = 0.21f,
                                  .residual_out = out,
                                  .bits = bits};
}

/* Runs compress. The result contains residuals and bits only if all values are finite. If a value
 * is not finite, the library uses only the sum and discards residuals and bits. */
static void run_compress(const struct codec_case *c, const struct ob_codec *codec, bool momentum,
                         onebit_scale_t rule, bool stream, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       out = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = bits_create(c->count, 5);
  struct ob_compress_run run = compress_run_of(c, input.data, residual.data, out.data, bits.data);
  run.valid -= c->values == VALUES_GRADIENTS && stream ? c->count / 3 : 0;
  run.rule = rule;
  run.stream = stream;
  run.momentum_bits = momentum ? last.data : NULL;
  run.scaling = momentum && !stream ? 1.7f : 1;
  run.momentum_in_residual = rule == ONEBIT_SCALE_RMS;
  run.weight = momentum ? 0.1f : 1;
  run.reciprocals = momentum && stream ? residual.data : NULL;
  result_add_sum(result, codec->compress(&run));
  bool finite = c->values != VALUES_NAN;
  result_add_array(result, &out, finite ? count_words(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &bits, finite ? count_words(c->count) * sizeof(uint32_t) : 0);
  array_destroy(&input);
  array_destroy(&residual);
  array_destroy(&last);
}

/* Runs compress with new residuals written over the old ones. An element whose input is not finite
 * keeps its residual. A sum that overflows is stored in the result unchanged. */
static void run_in_place(const struct codec_case *c, const struct ob_codec *codec,
                         struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       bits = bits_create(c->count, 4);
  struct ob_compress_run run =
      compress_run_of(c, input.data, residual.data, residual.data, bits.data);
  run.valid -= c->count / 3;
  run.weight = 1;
  result_add_sum(result, codec->compress(&run));
  result_add_array(result, &residual, count_words(c->count) * OB_LANES * sizeof(float));
  array_destroy(&bits);
  array_destroy(&input);
}

/* Runs compress with second moments. The array ends in padding only if `stream` is false. */
static void run_moments(const struct codec_case *c, const struct ob_codec *codec, bool stream,
                        bool momentum, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       out = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = bits_create(c->count, 5), now = moments_create(c->count, 6),
                       next = moments_create(c->count, 7);
  struct ob_compress_run run = compress_run_of(c, input.data, residual.data, out.data, bits.data);
  run.valid -= stream ? 0 : c->count / 3;
  run.input = c->values == VALUES_EDGES && stream ? NULL : input.data;
  run.rule = stream ? ONEBIT_SCALE_RMS : ONEBIT_SCALE_MEAN_ABSOLUTE;
  run.stream = stream;
  run.stream_moments = stream && (uintptr_t)next.data % OB_ALIGNMENT == 0;
  run.momentum_bits = momentum ? last.data : NULL;
  run.momentum_scale = stream ? 0.37f : 0;
  run.moment_rule = OB_MOMENTS_SECOND;
  run.moments = now.data;
  run.moments_out = next.data;
  run.factor = 0.3f;
  run.moment = (struct ob_moment_factors){.beta2 = 0.97f,
                                          .one_minus_beta2 = 0.03f,
                                          .epsilon = 1e-4f,
                                          .now = 0.11f,
                                          .before = 0.33f,
                                          .fresh = 0.44f,
                                          .floor = 0.02f};
  const struct ob_sample sample = {count_words(c->count) / 3, count_words(c->count),
                                   1 + c->count % 3};
  result_add_sum(result, codec->add_moments(now.data, sample));
  result_add_sum(result, codec->compress(&run));
  bool finite = c->values != VALUES_NAN && c->values != VALUES_OVERFLOW;
  result_add_array(result, &out, finite ? count_words(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &bits, finite ? count_words(c->count) * sizeof(uint32_t) : 0);
  result_add_array(result, &next, finite ? count_words(c->count) * OB_LANES * sizeof(uint16_t) : 0);
  array_destroy(&input);
  array_destroy(&residual);
  array_destroy(&last);
  array_destroy(&now);
}

static const size_t stream_counts[stream_count] = {1, 2, MAX_STREAMS};

struct streams {
  struct guarded_array fields[MAX_STREAMS];
  const uint32_t *pointers[MAX_STREAMS];
  float scales[MAX_STREAMS];
};

static void streams_create(struct streams *streams, const struct codec_case *c, size_t count,
                           unsigned width, bool equal) {
  const float overflow = c->values == VALUES_OVERFLOW ? 1e30f : 1;
  for (size_t s = 0; s < count; s++) {
    streams->fields[s] = fields_create(c->count, width, 100 + (uint32_t)s);
    streams->pointers[s] = streams->fields[s].data;
    streams->scales[s] = equal ? 0.1f * overflow : s == 3 ? 0 : 0.1f / (float)(s + 1) * overflow;
  }
}

/* Runs reduce, with Lion's update if `lion` is true. Lion's direction is zero where both the
 * momentum and the sum of the streams are zero. With several bits per element, the residual is
 * stored without a scale, and the message is encoded from it later. */
static void run_reduce(const struct codec_case *c, const struct ob_codec *codec, size_t count,
                       unsigned width, bool lion, struct result *result) {
  const bool bits = width == 1 || lion, mean = width == 1 && c->values == VALUES_EDGES && !lion;
  struct guarded_array residual = words_create(c->count, 2), out = words_create(c->count, 3),
                       word = bits_create(c->count, 4);
  struct streams streams;
  streams_create(&streams, c, count, width, lion);
  for (size_t i = 0; lion && i < c->count; i++)
    ((float *)residual.data)[i] *= (float)(i % 3 != 1);
  struct ob_reduce_run run = {.count = c->count,
                              .width = width,
                              .streams = count,
                              .bits = streams.pointers,
                              .scales = streams.scales,
                              .rule = mean ? ONEBIT_SCALE_MEAN_ABSOLUTE : ONEBIT_SCALE_RMS,
                              .stream = bits && c->values == VALUES_GRADIENTS,
                              .residual = residual.data,
                              .residual_scale = bits ? 0.3f : 0,
                              .residual_out = out.data,
                              .out = word.data};
  if (lion)
    run.serving = (struct ob_serving){OB_SERVE_LION, {0.9f, 0.1f, 0.99f, 0.01f}};
  result_add_sum(result, codec->reduce(&run));
  result_add_array(result, &out, count_words(c->count) * OB_LANES * sizeof(float));
  result_add_array(result, &word, bits ? count_words(c->count) * sizeof(uint32_t) : 0);
  array_destroy(&residual);
  for (size_t s = 0; s < count; s++)
    array_destroy(&streams.fields[s]);
}

/* Runs sum on several streams, and then store, which decodes the first stream alone. */
static void run_sum(const struct codec_case *c, const struct ob_codec *codec, size_t count,
                    unsigned width, struct result *result) {
  struct guarded_array plain = input_create(c, 6), stored = input_create(c, 8);
  struct streams streams;
  streams_create(&streams, c, count, width, false);
  struct ob_sum_run total = {c->count,       count,      width,   streams.pointers,
                             streams.scales, plain.data, c->dtype};
  struct ob_store_run store = {c->count,
                               width,
                               c->values != VALUES_GRADIENTS,
                               streams.pointers[0],
                               c->values == VALUES_OVERFLOW ? 70000.0f : 0.123f,
                               stored.data,
                               c->dtype};
  codec->sum(&total);
  codec->store(&store);
  result_add_array(result, &plain, c->count * ob_dtype_size(c->dtype));
  result_add_array(result, &stored, c->count * ob_dtype_size(c->dtype));
  for (size_t s = 0; s < count; s++)
    array_destroy(&streams.fields[s]);
}

static void run_reductions(const struct codec_case *c, const struct ob_codec *codec, unsigned width,
                           bool lion, struct result *result) {
  for (int s = 0; s < stream_count; s++)
    run_reduce(c, codec, stream_counts[s], width, lion, result);
}

static void run_sums(const struct codec_case *c, const struct ob_codec *codec, unsigned width,
                     struct result *result) {
  for (int s = 0; s < stream_count; s++)
    run_sum(c, codec, stream_counts[s], width, result);
}

/* Quantises a block to levels (several bits per element), as blocks.c does. */
static void quantise_case(const struct codec_case *c, const struct ob_codec *codec, unsigned width,
                          onebit_scale_t rule, bool stream, const float *kept, float sum,
                          struct result *result) {
  struct guarded_array out = words_create(c->count, 3), fields = fields_create(c->count, width, 4);
  const float largest = c->count ? codec->largest(kept, c->count) : 0;
  const bool finite = ob_is_finite(sum);
  const struct ob_quantise_run run = {
      .count = c->count,
      .width = width,
      .values = kept,
      .scale = finite && c->count ? ob_level_scale(sum, c->count, largest, rule, width) : 0,
      .stream = stream,
      .residual_out = out.data,
      .fields = fields.data};
  codec->quantise(&run);
  result_add_sum(result, largest);
  result_add_sum(result, run.scale);
  result_add_array(result, &out, finite ? count_words(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &fields, finite ? count_words(c->count) * width * sizeof(uint32_t) : 0);
}

/* Compresses a block to levels. The residual is stored without a scale. The momentum has as many
 * bits per element as the levels. */
static void run_compress_levels(const struct codec_case *c, const struct ob_codec *codec,
                                unsigned width, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       kept = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = fields_create(c->count, width, 5);
  const bool momentum = c->values == VALUES_EDGES, stream = c->values == VALUES_GRADIENTS;
  struct ob_compress_run run = compress_run_of(c, input.data, residual.data, kept.data, bits.data);
  run.momentum_bits = momentum ? last.data : NULL;
  run.momentum_width = width;
  run.residual_scale = 0;
  const float sum = codec->compress(&run);
  result_add_sum(result, sum);
  for (int rule = ONEBIT_SCALE_RMS; rule <= ONEBIT_SCALE_LARGEST; rule++)
    if (rule != ONEBIT_SCALE_MEAN_ABSOLUTE)
      quantise_case(c, codec, width, (onebit_scale_t)rule, stream, kept.data, sum, result);
  array_destroy(&input);
  array_destroy(&residual);
  array_destroy(&kept);
  array_destroy(&bits);
  array_destroy(&last);
}

static void run_levels(const struct codec_case *c, const struct ob_codec *codec, unsigned width,
                       struct result *result) {
  run_compress_levels(c, codec, width, result);
  run_reductions(c, codec, width, false, result);
  run_sums(c, codec, width, result);
}

/* Creates an array of exactly c->count float32 values, which need not be a whole number of
 * words. */
static struct guarded_array floats_create(const struct codec_case *c, uint32_t salt) {
  struct codec_case plain = {c->count, ONEBIT_FLOAT32,
                             c->values == VALUES_NAN ? VALUES_GRADIENTS : c->values};
  return input_create(&plain, salt);
}

/* Runs one optimizer update with all its arrays. The kernel also stores the parameters in the
 * case's dtype. */
static void run_pass(const struct codec_case *c, const struct ob_codec *codec,
                     enum ob_pass_kind kind, struct result *result) {
  const unsigned width = c->values == VALUES_LARGE ? 8 : c->values == VALUES_NAN ? 4 : 1;
  struct guarded_array arrays[OB_ARRAYS],
      p = floats_create(c, 12), copy = input_create(c, 13), g = input_create(c, 9),
      bits = fields_create(c->count, width, 14), last = bits_create(c->count, 15);
  struct ob_pass_run run = {.kind = kind,
                            .stream = c->values != VALUES_EDGES,
                            .width = width,
                            .last_width = 1,
                            .count = c->count,
                            .parameter = p.data,
                            .copy = copy.data,
                            .copy_dtype = c->dtype,
                            .gradient = c->values == VALUES_LARGE ? NULL : g.data,
                            .gradient_dtype = c->dtype,
                            .message = bits.data,
                            .message_scale = 0.3f,
                            .last = c->values == VALUES_EDGES ? NULL : last.data,
                            .last_scale = 0.4f,
                            .factors = {.adam = {0.9f, 0.99f, 0.1f, 0.01f, 1.7f, 3.3f, 1e-8f},
                                        .lion = {0.9f, 0.1f, 0.99f, 0.01f},
                                        .gradient_factor = 0.7f,
                                        .learning_rate = 1e-2f,
                                        .weight_decay = c->values == VALUES_EDGES ? 0.1f : 0,
                                        .scaling = 1.3f,
                                        .rate_sum = 0.7f,
                                        .anchor_decay = 0.03f,
                                        .bound = c->values == VALUES_LARGE ? INFINITY : 3,
                                        .keep_zero = c->values != VALUES_OVERFLOW,
                                        .adds_up = c->values == VALUES_LARGE}};
  for (int slot = 0; slot < OB_ARRAYS; slot++) {
    arrays[slot] = floats_create(c, 20 + (uint32_t)slot);
    run.arrays[slot] = arrays[slot].data;
  }
  run.last_values = arrays[OB_SCRATCH].data;
  for (size_t i = 0; i < c->count; i++) {
    float *variance = arrays[OB_VARIANCE].data, *fresh = arrays[OB_FRESH].data;
    variance[i] = i % 5 == 3 ? 0 : fabsf(variance[i]);
    fresh[i] = fabsf(fresh[i]);
  }
  codec->pass(&run);
  for (int k = 0; k < OB_SUMS; k++)
    result_add_sum(result, run.sums[k]);
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    result_add_numbers(result, &arrays[slot], c->count);
  bool finite = c->values == VALUES_GRADIENTS;
  result_add_array(result, &copy, finite ? c->count * ob_dtype_size(c->dtype) : 0);
  result_add_numbers(result, &p, c->count);
  array_destroy(&g);
  array_destroy(&bits);
  array_destroy(&last);
}

static void run_dense(const struct codec_case *c, const struct ob_codec *codec,
                      struct result *result) {
  struct guarded_array a = input_create(c, 15), x = floats_create(c, 16), y = floats_create(c, 17),
                       out = input_create(c, 18);
  bool finite = codec->load(a.data, c->dtype, 0.7f, c->count, x.data);
  result_add(result, &finite, sizeof finite);
  if (finite) {
    const float *inputs[3] = {x.data, y.data, x.data};
    bool small = codec->mean(inputs, 3, 1 / 3.0f, c->count, y.data);
    result_add(result, &small, sizeof small);
    codec->convert(x.data, c->count, out.data, c->dtype);
  }
  result_add_array(result, &y, finite ? c->count * sizeof(float) : 0);
  result_add_array(result, &out, finite ? c->count * ob_dtype_size(c->dtype) : 0);
  array_destroy(&a);
  array_destroy(&x);
}

#define NAMED(name) "pass " #name,
static const char *const passes[] = {OB_PASS_KINDS(NAMED)};

typedef void run_case(const struct codec_case *c, const struct ob_codec *codec,
                      struct result *result);

#define RUN(name, ...)                                                                             \
  static void name(const struct codec_case *c, const struct ob_codec *codec,                       \
                   struct result *result) {                                                        \
    __VA_ARGS__;                                                                                   \
  }
RUN(case_compress_rms, run_compress(c, codec, false, ONEBIT_SCALE_RMS, false, result))
RUN(case_compress_mean, run_compress(c, codec, false, ONEBIT_SCALE_MEAN_ABSOLUTE, false, result))
RUN(case_compress_momentum, run_compress(c, codec, true, ONEBIT_SCALE_RMS, false, result))
RUN(case_compress_stream, run_compress(c, codec, true, ONEBIT_SCALE_MEAN_ABSOLUTE, true, result))
RUN(case_reduce, run_reductions(c, codec, 1, false, result))
RUN(case_sum, run_sums(c, codec, 1, result))
RUN(case_moments, run_moments(c, codec, false, true, result))
RUN(case_moments_streaming, run_moments(c, codec, true, true, result))
RUN(case_moments_alone, run_moments(c, codec, true, false, result))
RUN(case_lion, run_reductions(c, codec, 1, true, result))
RUN(case_levels_2, run_levels(c, codec, 2, result))
RUN(case_levels_4, run_levels(c, codec, 4, result))
RUN(case_levels_8, run_levels(c, codec, 8, result))
RUN(case_lion_levels, for (unsigned w = 2; w <= 8; w *= 2) run_reduce(c, codec, 2, w, true, result))

static const struct {
  const char *name;
  run_case *run;
} kernels[] = {
    {"compress-rms", case_compress_rms},
    {"compress-mean-absolute", case_compress_mean},
    {"compress-momentum", case_compress_momentum},
    {"compress-stream", case_compress_stream},
    {"reduce", case_reduce},
    {"sum-and-store", case_sum},
    {"dense", run_dense},
    {"compress-moments", case_moments},
    {"compress-moments-streaming", case_moments_streaming},
    {"compress-moments-alone", case_moments_alone},
    {"reduce-lion", case_lion},
    {"levels-2", case_levels_2},
    {"levels-4", case_levels_4},
    {"levels-8", case_levels_8},
    {"reduce-lion-levels", case_lion_levels},
    {"compress-in-place", run_in_place},
};
enum { kernel_count = sizeof kernels / sizeof kernels[0], all_count = kernel_count + OB_PASSES };

struct sample codec_cases_sample(void) {
  const size_t sizes[] = {all_count, count_count, dtype_count, value_count};
  return sample_product("codec", 1, sizes, sizeof sizes / sizeof sizes[0]);
}

static struct codec_case case_at(size_t index, size_t *kernel) {
  *kernel = index % all_count;
  index /= all_count;
  struct codec_case c = {.count = counts[index % count_count]};
  index /= count_count;
  c.dtype = (onebit_dtype_t)(index % dtype_count);
  c.values = (enum codec_values)(index / dtype_count);
  return c;
}

void codec_case_name(size_t index, char *name, size_t size) {
  size_t kernel;
  struct codec_case c = case_at(index, &kernel);
  snprintf(name, size, "%s/%s/%s/%zu",
           kernel < kernel_count ? kernels[kernel].name : passes[kernel - kernel_count],
           dtypes[c.dtype], values[c.values], c.count);
}

size_t codec_case_run(size_t index, const struct ob_codec *codec, unsigned char **bytes) {
  size_t kernel;
  struct codec_case c = case_at(index, &kernel);
  struct result result = {NULL, 0};
  if (kernel < kernel_count)
    kernels[kernel].run(&c, codec, &result);
  else
    run_pass(&c, codec, (enum ob_pass_kind)(kernel - kernel_count), &result);
  *bytes = result.bytes;
  return result.size;
}
