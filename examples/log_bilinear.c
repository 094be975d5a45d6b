/* The model of log_bilinear.h. Arrays are row-major; a row is a prediction. */
#include "examples/log_bilinear.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/random.h"
#include "examples/transformer_math.h"

static void report_ready(const log_bilinear_t *model, size_t tensor) {
  if (model->ready)
    model->ready(model->ready_context, tensor);
}

/* --- Forward and backward ----------------------------------------------------------------------*/

void log_bilinear_forward(log_bilinear_t *model, const uint32_t *words, size_t samples) {
  const log_bilinear_shape_t *shape = &model->shape;
  const log_bilinear_tensor_t *tensors = model->tensors;
  const size_t width = shape->width, context = shape->context, vocabulary = shape->vocabulary;
  for (size_t s = 0; s < samples; s++)
    for (size_t i = 0; i < context; i++)
      memcpy(model->before + (s * context + i) * width,
             tensors[CONTEXT_TABLE].value + width * words[s * (context + 1) + i],
             width * sizeof(float));
  multiply(model->mixed, width, stored(model->before, context * width),
           stored(tensors[MIXING].value, width), samples, context * width, width, REPLACE);
  for (size_t s = 0; s < samples; s++)
    memcpy(model->next + s * vocabulary, tensors[WORD_BIAS].value, vocabulary * sizeof(float));
  multiply(model->next, vocabulary, stored(model->mixed, width),
           transposed(tensors[WORD_TABLE].value, width), samples, width, vocabulary, ADD);
  softmax(model->next, samples, vocabulary, 1.0f, 0);
}

/* Place in model->next of the probability of the target. */
static size_t target(const log_bilinear_t *model, const uint32_t *words, size_t sample) {
  const size_t context = model->shape.context;
  return sample * model->shape.vocabulary + words[sample * (context + 1) + context];
}

double log_bilinear_loss(const log_bilinear_t *model, const uint32_t *words, size_t samples) {
  double sum = 0.0;
  for (size_t s = 0; s < samples; s++)
    sum -= log((double)model->next[target(model, words, s)] + (double)FLT_MIN);
  return sum / (double)samples;
}

/* Spreads gradients to the table's rows. Rows that no word of these samples has get zeros. */
static void spread(log_bilinear_t *model, const uint32_t *words, size_t samples) {
  const size_t width = model->shape.width, context = model->shape.context;
  const log_bilinear_tensor_t *table = &model->tensors[CONTEXT_TABLE];
  const float *from = model->d_before;
  memset(table->gradient, 0, table->count * sizeof(float));
  for (size_t s = 0; s < samples; s++)
    for (size_t i = 0; i < context; i++, from += width) {
      float *to = table->gradient + width * words[s * (context + 1) + i];
      for (size_t j = 0; j < width; j++)
        to[j] += from[j];
    }
}

void log_bilinear_backward(log_bilinear_t *model, const uint32_t *words, size_t samples) {
  const size_t width = model->shape.width, before = model->shape.context * width;
  const size_t vocabulary = model->shape.vocabulary;
  const log_bilinear_tensor_t *tensors = model->tensors, *bias = &tensors[WORD_BIAS];
  float *d_next = model->next;
  for (size_t s = 0; s < samples; s++)
    d_next[target(model, words, s)] -= 1.0f;
  memset(bias->gradient, 0, vocabulary * sizeof(float));
  for (size_t i = 0; i < samples * vocabulary; i++)
    bias->gradient[i % vocabulary] += d_next[i] /= (float)samples;
  report_ready(model, WORD_BIAS);
  multiply(tensors[WORD_TABLE].gradient, width, transposed(d_next, vocabulary),
           stored(model->mixed, width), vocabulary, samples, width, REPLACE);
  report_ready(model, WORD_TABLE);
  multiply(model->d_mixed, width, stored(d_next, vocabulary),
           stored(tensors[WORD_TABLE].value, width), samples, vocabulary, width, REPLACE);
  multiply(tensors[MIXING].gradient, width, transposed(model->before, before),
           stored(model->d_mixed, width), before, samples, width, REPLACE);
  report_ready(model, MIXING);
  multiply(model->d_before, before, stored(model->d_mixed, width),
           transposed(tensors[MIXING].value, width), samples, width, before, REPLACE);
  spread(model, words, samples);
  report_ready(model, CONTEXT_TABLE);
}

/* --- Memory and first values -------------------------------------------------------------------*/

/* Takes the next floats of the memory; before there is any, it only counts them. Whole cache
 * lines. */
static float *take(log_bilinear_t *model, size_t *used, size_t count) {
  float *at = model->memory ? model->memory + *used : NULL;
  *used += (count + 15) / 16 * 16;
  return at;
}

/* Assigns memory to all arrays; returns the number of floats. */
static size_t place(log_bilinear_t *model) {
  const log_bilinear_shape_t *shape = &model->shape;
  const size_t table = shape->vocabulary * shape->width, before = shape->context * shape->width;
  const size_t counts[LOG_BILINEAR_TENSORS] = {[CONTEXT_TABLE] = table,
                                               [MIXING] = before * shape->width,
                                               [WORD_TABLE] = table,
                                               [WORD_BIAS] = shape->vocabulary};
  size_t used = 0;
  model->parameters = 0;
  for (size_t t = 0; t < LOG_BILINEAR_TENSORS; t++) {
    float *value = take(model, &used, counts[t]), *gradient = take(model, &used, counts[t]);
    model->tensors[t] = (log_bilinear_tensor_t){value, gradient, counts[t]};
    model->parameters += counts[t];
  }
  model->next = take(model, &used, shape->samples * shape->vocabulary);
  model->before = take(model, &used, shape->samples * before);
  model->d_before = take(model, &used, shape->samples * before);
  model->mixed = take(model, &used, shape->samples * shape->width);
  model->d_mixed = take(model, &used, shape->samples * shape->width);
  return used;
}

log_bilinear_t *log_bilinear_create(const log_bilinear_shape_t *shape) {
  log_bilinear_t *model = calloc(1, sizeof *model);
  if (!model)
    return NULL;
  model->shape = *shape;
  model->memory = calloc(place(model), sizeof(float));
  if (model->memory) {
    place(model);
    return model;
  }
  free(model);
  return NULL;
}

void log_bilinear_destroy(log_bilinear_t *model) {
  if (!model)
    return;
  free(model->memory);
  free(model);
}

/* Draws uniform values, so that rows have variance 1 and a product with the matrix keeps it; the
 * biases, and nearly the rows of the next word, begin at zero: all words are as probable. */
void log_bilinear_initialise(log_bilinear_t *model, uint64_t seed) {
  const float before = (float)(model->shape.context * model->shape.width);
  const float deviations[WORD_BIAS] = {[CONTEXT_TABLE] = 1.0f,
                                       [MIXING] = 1.0f / sqrtf(before),
                                       [WORD_TABLE] = 0.1f / sqrtf((float)model->shape.width)};
  uint64_t random = random_stream(seed, 0, 0);
  for (size_t t = 0; t < WORD_BIAS; t++)
    for (size_t i = 0; i < model->tensors[t].count; i++)
      model->tensors[t].value[i] =
          deviations[t] * 1.7320508f * (2.0f * random_uniform(&random) - 1.0f);
  memset(model->tensors[WORD_BIAS].value, 0, model->shape.vocabulary * sizeof(float));
}
