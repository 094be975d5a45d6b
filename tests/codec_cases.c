/* Cases for the codecs: the product of the lists below. */
#include "tests/codec_cases.h"

#include <math.h>
#include <stdio.h>

#include "base/memory.h"

static const size_t counts[] = {0,    1,    31,   32,   33,   63,   64,    65,
                                2047, 2048, 2049, 4095, 4096, 4097, 65536, 100003};
static const char *const dtypes[] = {"float32", "bfloat16", "float16"};
static const char *const values[] = {"gradients", "edges", "overflow", "nan", "large"};

enum { count_count = 16, dtype_count = 3, value_count = VALUES_KINDS, stream_count = 3 };

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

/* With values that are not finite the new residuals are discarded by the library, and only the
 * sum tells. */
static void run_compress(const struct codec_case *c, const struct ob_codec *codec, bool momentum,
                         onebit_scale_t rule, bool stream, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       out = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = bits_create(c->count, 5);
  struct ob_compress_run run = {
      .count = c->count,
      .valid = c->values == VALUES_GRADIENTS && stream ? c->count - c->count / 3 : c->count,
      .input = input.data,
      .dtype = c->dtype,
      .rule = rule,
      .stream = stream,
      .momentum_bits = momentum ? last.data : NULL,
      .momentum_width = 1,
      .momentum_scale = 0.37f,
      .decay = 0.9f,
      .scaling = momentum && !stream ? 1.7f : 1,
      .momentum_in_residual = rule == ONEBIT_SCALE_RMS,
      .weight = momentum ? 0.1f : 1,
      .reciprocals = momentum && stream ? residual.data : NULL,
      .residual = residual.data,
      .residual_scale = 0.21f,
      .residual_out = out.data,
      .bits = bits.data,
  };
  result_add_sum(result, codec->compress(&run));
  bool finite = c->values != VALUES_NAN;
  result_add_array(result, &out, finite ? words_of(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &bits, finite ? words_of(c->count) * sizeof(uint32_t) : 0);
  array_destroy(&input);
  array_destroy(&residual);
  array_destroy(&last);
}

/* Elements whose input is not finite stay; a sum that overflows is kept as it is. */
static void run_in_place(const struct codec_case *c, const struct ob_codec *codec,
                         struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       bits = bits_create(c->count, 4);
  const struct ob_compress_run run = {.count = c->count,
                                      .valid = c->count - c->count / 3,
                                      .input = input.data,
                                      .dtype = c->dtype,
                                      .rule = ONEBIT_SCALE_RMS,
                                      .momentum_width = 1,
                                      .scaling = 1,
                                      .weight = 1,
                                      .residual = residual.data,
                                      .residual_scale = 0.21f,
                                      .residual_out = residual.data,
                                      .bits = bits.data};
  result_add_sum(result, codec->compress(&run));
  result_add_array(result, &residual, words_of(c->count) * OB_LANES * sizeof(float));
  array_destroy(&bits);
  array_destroy(&input);
}

/* Runs moments, with padding only where nothing is streamed. */
static void run_moments(const struct codec_case *c, const struct ob_codec *codec, bool stream,
                        bool momentum, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       out = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = bits_create(c->count, 5), now = moments_create(c->count, 6),
                       next = moments_create(c->count, 7);
  struct ob_compress_run run = {
      .count = c->count,
      .valid = c->count - (stream ? 0 : c->count / 3),
      .input = c->values == VALUES_EDGES && stream ? NULL : input.data,
      .dtype = c->dtype,
      .rule = stream ? ONEBIT_SCALE_RMS : ONEBIT_SCALE_MEAN_ABSOLUTE,
      .stream = stream,
      .stream_moments = stream && (uintptr_t)next.data % OB_ALIGNMENT == 0,
      .momentum_bits = momentum ? last.data : NULL,
      .momentum_width = 1,
      .momentum_scale = stream ? 0.37f : 0,
      .decay = 0.9f,
      .scaling = 1,
      .weight = 0.1f,
      .moment_rule = OB_MOMENTS_SECOND,
      .moments = now.data,
      .moments_out = next.data,
      .factor = 0.3f,
      .moment = {.beta2 = 0.97f,
                 .one_minus_beta2 = 0.03f,
                 .epsilon = 1e-4f,
                 .now = 0.11f,
                 .before = 0.33f,
                 .fresh = 0.44f,
                 .floor = 0.02f},
      .residual = residual.data,
      .residual_scale = 0.21f,
      .residual_out = out.data,
      .bits = bits.data,
  };
  const struct ob_sample sample = {words_of(c->count) / 3, words_of(c->count), 1 + c->count % 3};
  result_add_sum(result, codec->add_moments(now.data, sample));
  result_add_sum(result, codec->compress(&run));
  bool finite = c->values != VALUES_NAN && c->values != VALUES_OVERFLOW;
  result_add_array(result, &out, finite ? words_of(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &bits, finite ? words_of(c->count) * sizeof(uint32_t) : 0);
  result_add_array(result, &next, finite ? words_of(c->count) * OB_LANES * sizeof(uint16_t) : 0);
  array_destroy(&input);
  array_destroy(&residual);
  array_destroy(&last);
  array_destroy(&now);
}

static const size_t streams[stream_count] = {1, 2, 7};

/* A reduction of Lion; the direction is zero where the momentum and the sum of the streams are. */
static void run_lion(const struct codec_case *c, const struct ob_codec *codec, size_t count,
                     unsigned width, struct result *result) {
  struct guarded_array bits[7], residual = words_create(c->count, 2),
                                out = words_create(c->count, 3), word = bits_create(c->count, 4);
  const uint32_t *pointers[7];
  float scales[7];
  for (size_t s = 0; s < count; s++) {
    bits[s] = fields_create(c->count, width, 100 + (uint32_t)s);
    pointers[s] = bits[s].data;
    scales[s] = c->values == VALUES_OVERFLOW ? 1e30f : 0.1f;
  }
  for (size_t i = 0; i < c->count; i++)
    ((float *)residual.data)[i] *= (float)(i % 3 != 1);
  struct ob_reduce_run run = {.count = c->count,
                              .width = width,
                              .streams = count,
                              .bits = pointers,
                              .scales = scales,
                              .serving = {OB_SERVE_LION, {0.9f, 0.1f, 0.99f, 0.01f}},
                              .stream = c->values == VALUES_GRADIENTS,
                              .residual = residual.data,
                              .residual_scale = 0.3f,
                              .residual_out = out.data,
                              .out = word.data};
  result_add_sum(result, codec->reduce(&run));
  result_add_array(result, &out, words_of(c->count) * OB_LANES * sizeof(float));
  result_add_array(result, &word, words_of(c->count) * sizeof(uint32_t));
  array_destroy(&residual);
  for (size_t s = 0; s < count; s++)
    array_destroy(&bits[s]);
}

static void run_streams(const struct codec_case *c, const struct ob_codec *codec, size_t count,
                        bool sum, struct result *result) {
  struct guarded_array bits[7], residual = words_create(c->count, 2),
                                out = words_create(c->count, 3), word = bits_create(c->count, 4),
                                plain = input_create(c, 6);
  const uint32_t *pointers[7];
  float scales[7];
  for (size_t s = 0; s < count; s++) {
    bits[s] = bits_create(c->count, 100 + (uint32_t)s);
    pointers[s] = bits[s].data;
    scales[s] = s == 3 ? 0 : 0.1f / (float)(s + 1) * (c->values == VALUES_OVERFLOW ? 1e30f : 1);
  }
  struct ob_reduce_run reduce = {.count = c->count,
                                 .width = 1,
                                 .streams = count,
                                 .bits = pointers,
                                 .scales = scales,
                                 .rule = c->values == VALUES_EDGES ? ONEBIT_SCALE_MEAN_ABSOLUTE
                                                                   : ONEBIT_SCALE_RMS,
                                 .stream = c->values == VALUES_GRADIENTS,
                                 .residual = residual.data,
                                 .residual_scale = 0.3f,
                                 .residual_out = out.data,
                                 .out = word.data};
  struct ob_sum_run total = {c->count, count, 1, pointers, scales, plain.data, c->dtype};
  if (sum)
    codec->sum(&total);
  else
    result_add_sum(result, codec->reduce(&reduce));
  result_add_array(result, &out, words_of(c->count) * OB_LANES * sizeof(float));
  result_add_array(result, &word, words_of(c->count) * sizeof(uint32_t));
  result_add_array(result, &plain, c->count * ob_dtype_size(c->dtype));
  array_destroy(&residual);
  for (size_t s = 0; s < count; s++)
    array_destroy(&bits[s]);
}

static void run_store(const struct codec_case *c, const struct ob_codec *codec,
                      struct result *result) {
  struct guarded_array bits = bits_create(c->count, 7), out = input_create(c, 8);
  struct ob_store_run run = {c->count,
                             1,
                             c->values != VALUES_GRADIENTS,
                             bits.data,
                             c->values == VALUES_OVERFLOW ? 70000.0f : 0.123f,
                             out.data,
                             c->dtype};
  codec->store(&run);
  result_add_array(result, &out, c->count * ob_dtype_size(c->dtype));
  array_destroy(&bits);
}

/* A block's values become levels, as blocks.c has it. */
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
  result_add_array(result, &out, finite ? words_of(c->count) * OB_LANES * sizeof(float) : 0);
  result_add_array(result, &fields, finite ? words_of(c->count) * width * sizeof(uint32_t) : 0);
}

/* The error is kept as such: its scale is 0. The momentum is of the same width. */
static void run_compress_levels(const struct codec_case *c, const struct ob_codec *codec,
                                unsigned width, struct result *result) {
  struct guarded_array input = input_create(c, 1), residual = words_create(c->count, 2),
                       kept = words_create(c->count, 3), bits = bits_create(c->count, 4),
                       last = fields_create(c->count, width, 5);
  const bool momentum = c->values == VALUES_EDGES, stream = c->values == VALUES_GRADIENTS;
  struct ob_compress_run run = {.count = c->count,
                                .valid = c->count,
                                .input = input.data,
                                .dtype = c->dtype,
                                .rule = ONEBIT_SCALE_RMS,
                                .momentum_bits = momentum ? last.data : NULL,
                                .momentum_width = width,
                                .momentum_scale = 0.37f,
                                .decay = 0.9f,
                                .scaling = 1,
                                .weight = 0.1f,
                                .residual = residual.data,
                                .residual_out = kept.data,
                                .bits = bits.data};
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

static void run_streams_of_levels(const struct codec_case *c, const struct ob_codec *codec,
                                  unsigned width, size_t count, struct result *result) {
  struct guarded_array fields[7], residual = words_create(c->count, 2),
                                  kept = words_create(c->count, 3), bits = bits_create(c->count, 4),
                                  plain = input_create(c, 6), stored = input_create(c, 8);
  const uint32_t *pointers[7];
  float scales[7];
  for (size_t s = 0; s < count; s++) {
    fields[s] = fields_create(c->count, width, 100 + (uint32_t)s);
    pointers[s] = fields[s].data;
    scales[s] = s == 3 ? 0 : 0.1f / (float)(s + 1) * (c->values == VALUES_OVERFLOW ? 1e30f : 1);
  }
  struct ob_reduce_run reduce = {.count = c->count,
                                 .streams = count,
                                 .width = width,
                                 .bits = pointers,
                                 .scales = scales,
                                 .rule = ONEBIT_SCALE_RMS,
                                 .residual = residual.data,
                                 .residual_out = kept.data,
                                 .out = bits.data};
  struct ob_sum_run total = {c->count, count, width, pointers, scales, plain.data, c->dtype};
  struct ob_store_run store = {c->count,
                               width,
                               c->values != VALUES_GRADIENTS,
                               pointers[0],
                               c->values == VALUES_OVERFLOW ? 70000.0f : 0.123f,
                               stored.data,
                               c->dtype};
  result_add_sum(result, codec->reduce(&reduce));
  codec->sum(&total);
  codec->store(&store);
  result_add_array(result, &kept, words_of(c->count) * OB_LANES * sizeof(float));
  result_add_array(result, &plain, c->count * ob_dtype_size(c->dtype));
  result_add_array(result, &stored, c->count * ob_dtype_size(c->dtype));
  array_destroy(&residual);
  array_destroy(&bits);
  for (size_t s = 0; s < count; s++)
    array_destroy(&fields[s]);
}

static void run_levels(const struct codec_case *c, const struct ob_codec *codec, unsigned width,
                       struct result *result) {
  run_compress_levels(c, codec, width, result);
  for (int s = 0; s < stream_count; s++)
    run_streams_of_levels(c, codec, width, streams[s], result);
}

/* Plain arrays of float32, `count` long, not in whole words. */
static struct guarded_array floats_create(const struct codec_case *c, uint32_t salt) {
  struct codec_case plain = {c->count, ONEBIT_FLOAT32,
                             c->values == VALUES_NAN ? VALUES_GRADIENTS : c->values};
  return input_create(&plain, salt);
}

/* A pass of an optimizer. All its arrays are there; the parameters also go to the case's dtype. */
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
RUN(compress_rms, run_compress(c, codec, false, ONEBIT_SCALE_RMS, false, result))
RUN(compress_mean, run_compress(c, codec, false, ONEBIT_SCALE_MEAN_ABSOLUTE, false, result))
RUN(compress_momentum, run_compress(c, codec, true, ONEBIT_SCALE_RMS, false, result))
RUN(compress_stream, run_compress(c, codec, true, ONEBIT_SCALE_MEAN_ABSOLUTE, true, result))
RUN(reduce, for (int s = 0; s < stream_count; s++) run_streams(c, codec, streams[s], false, result))
RUN(sum, for (int s = 0; s < stream_count; s++) run_streams(c, codec, streams[s], true, result))
RUN(moments, run_moments(c, codec, false, true, result))
RUN(moments_streaming, run_moments(c, codec, true, true, result))
RUN(moments_alone, run_moments(c, codec, true, false, result))
RUN(lion, for (int s = 0; s < stream_count; s++) run_lion(c, codec, streams[s], 1, result))
RUN(levels_2, run_levels(c, codec, 2, result))
RUN(levels_4, run_levels(c, codec, 4, result))
RUN(levels_8, run_levels(c, codec, 8, result))
RUN(lion_levels, for (unsigned w = 2; w <= 8; w *= 2) run_lion(c, codec, 2, w, result))

static const struct {
  const char *name;
  run_case *run;
} kernels[] = {
    {"compress-rms", compress_rms},
    {"compress-mean-absolute", compress_mean},
    {"compress-momentum", compress_momentum},
    {"compress-stream", compress_stream},
    {"reduce", reduce},
    {"sum", sum},
    {"store", run_store},
    {"dense", run_dense},
    {"compress-moments", moments},
    {"compress-moments-streaming", moments_streaming},
    {"compress-moments-alone", moments_alone},
    {"reduce-lion", lion},
    {"levels-2", levels_2},
    {"levels-4", levels_4},
    {"levels-8", levels_8},
    {"reduce-lion-levels", lion_levels},
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
