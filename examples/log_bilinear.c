/* Implements the log-bilinear model of model.h. Arrays are row-major, with one row for each
 * prediction. */
#include "examples/model.h"

#include <math.h>
#include <string.h>

#include "examples/numbers.h"

static const log_bilinear_t *log_bilinear_of(const model_t *model) {
  return (const log_bilinear_t *)(const void *)model;
}

/* --- Forward and backward ----------------------------------------------------------------------*/

/* Copies the table's rows for the words before each target. */
static void gather_rows(const log_bilinear_t *own, size_t samples) {
  const size_t width = own->shape.width, context = own->shape.context;
  const float *table = own->model.tensors[CONTEXT_TABLE].value;
  for (size_t s = 0; s < samples; s++) {
    const uint32_t *words = own->words + s * (context + 1);
    for (size_t i = 0; i < context; i++)
      memcpy(own->before + (s * context + i) * width, table + width * words[i],
             width * sizeof(float));
    own->model.target[s] = words[context];
  }
}

static void log_bilinear_forward(model_t *model, size_t samples) {
  const log_bilinear_t *own = log_bilinear_of(model);
  const tensor_t *tensors = model->tensors;
  const size_t width = own->shape.width, vocabulary = own->shape.vocabulary;
  gather_rows(own, samples);
  linear(own->mixed, own->before, &tensors[MIXING], samples, own->shape.context * width, width,
         REPLACE);
  for (size_t s = 0; s < samples; s++)
    memcpy(model->predicted + s * vocabulary, tensors[WORD_BIAS].value, vocabulary * sizeof(float));
  multiply(model->predicted, vocabulary, stored(own->mixed, width),
           transposed(tensors[WORD_TABLE].value, width), samples, width, vocabulary, ADD);
  softmax(model->predicted, samples, vocabulary, 1.0f, 0);
}

/* Computes the gradient of the table: the gradients of the words before each target are added to
 * their rows. Rows of words that occur in no sample have a zero gradient. */
static void spread_gradients(const log_bilinear_t *own, size_t samples) {
  const size_t width = own->shape.width, context = own->shape.context;
  const tensor_t *table = &own->model.tensors[CONTEXT_TABLE];
  const float *from = own->d_before;
  memset(table->gradient, 0, table->count * sizeof(float));
  for (size_t s = 0; s < samples; s++)
    for (size_t i = 0; i < context; i++, from += width) {
      float *to = table->gradient + width * own->words[s * (context + 1) + i];
      for (size_t j = 0; j < width; j++)
        to[j] += from[j];
    }
}

static void log_bilinear_backward(model_t *model, size_t samples) {
  const log_bilinear_t *own = log_bilinear_of(model);
  const size_t width = own->shape.width, vocabulary = own->shape.vocabulary;
  const tensor_t *tensors = model->tensors, *bias = &tensors[WORD_BIAS];
  const float *d_next = model_loss_backward(model, samples);
  memset(bias->gradient, 0, vocabulary * sizeof(float));
  for (size_t i = 0; i < samples * vocabulary; i++)
    bias->gradient[i % vocabulary] += d_next[i];
  model_report_ready(model, bias);
  multiply(tensors[WORD_TABLE].gradient, width, transposed(d_next, vocabulary),
           stored(own->mixed, width), vocabulary, samples, width, REPLACE);
  model_report_ready(model, &tensors[WORD_TABLE]);
  multiply(own->d_mixed, width, stored(d_next, vocabulary),
           stored(tensors[WORD_TABLE].value, width), samples, vocabulary, width, REPLACE);
  linear_backward(own->d_before, own->d_mixed, own->before, &tensors[MIXING], samples,
                  own->shape.context * width, width);
  model_report_ready(model, &tensors[MIXING]);
  spread_gradients(own, samples);
  model_report_ready(model, &tensors[CONTEXT_TABLE]);
}

/* --- Memory and first values -------------------------------------------------------------------*/

log_bilinear_t *log_bilinear_create(const log_bilinear_shape_t *shape) {
  const size_t table = shape->vocabulary * shape->width, before = shape->context * shape->width;
  const model_t like = {.ntensors = LOG_BILINEAR_TENSORS,
                        .rows = 1,
                        .classes = shape->vocabulary,
                        .forward = log_bilinear_forward,
                        .backward = log_bilinear_backward};
  log_bilinear_t *own = model_create(sizeof *own, &like, shape->samples);
  if (!own)
    return NULL;
  model_t *model = &own->model;
  own->shape = *shape;
  model_tensor(model, CONTEXT_TABLE, table, 1);
  model_tensor(model, MIXING, before * shape->width, 1);
  model_tensor(model, WORD_TABLE, table, 1);
  model_tensor(model, WORD_BIAS, shape->vocabulary, 0);
  own->words = model_array(model, shape->samples * (shape->context + 1), sizeof *own->words);
  own->before = model_floats(model, shape->samples * before);
  own->d_before = model_floats(model, shape->samples * before);
  own->mixed = model_floats(model, shape->samples * shape->width);
  own->d_mixed = model_floats(model, shape->samples * shape->width);
  return model_complete(model);
}

/* Draws uniform values, so that rows have variance 1, and a product with the matrix has variance 1
 * too. The biases start at zero, and the rows of the next word near zero, so that all words are
 * about equally probable. */
void log_bilinear_initialise(log_bilinear_t *model, uint64_t seed) {
  const float before = (float)(model->shape.context * model->shape.width);
  const float deviations[WORD_BIAS] = {[CONTEXT_TABLE] = 1.0f,
                                       [MIXING] = 1.0f / sqrtf(before),
                                       [WORD_TABLE] = 0.1f / sqrtf((float)model->shape.width)};
  const tensor_t *tensors = model->model.tensors;
  uint64_t random = random_stream(seed, 0, 0);
  for (size_t t = 0; t < WORD_BIAS; t++)
    tensor_draw(&tensors[t], deviations[t] * 1.7320508f, &random);
  memset(tensors[WORD_BIAS].value, 0, model->shape.vocabulary * sizeof(float));
}
