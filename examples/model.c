/* The models of model.h. */
#include "examples/model.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "examples/random.h"

/* --- Memory ------------------------------------------------------------------------------------*/

typedef struct block {
  struct block *next;
  size_t unused; /* so that the values are aligned as calloc aligns */
  float values[];
} block_t;

void *model_array(model_t *model, size_t count, size_t size) {
  block_t *block = model->out_of_memory ? NULL : calloc(1, sizeof *block + count * size);
  if (!block) {
    model->out_of_memory = 1;
    return NULL;
  }
  block->next = model->blocks;
  model->blocks = block;
  return block->values;
}

float *model_floats(model_t *model, size_t count) {
  return model_array(model, count, sizeof(float));
}

void *model_create(size_t size, const model_t *like, size_t samples) {
  model_t *model = calloc(1, size);
  if (!model)
    return NULL;
  *model = *like;
  model->tensors = model_array(model, model->ntensors, sizeof *model->tensors);
  model->predicted = model_floats(model, samples * model->rows * model->classes);
  model->target = model_array(model, samples * model->rows, sizeof *model->target);
  return model_complete(model);
}

tensor_t *model_tensor(model_t *model, size_t place, size_t count, int decays) {
  float *value = model_floats(model, count), *gradient = model_floats(model, count);
  model->tensors[place] = (tensor_t){value, gradient, count, decays, 0};
  model->parameters += count;
  return &model->tensors[place];
}

void *model_complete(model_t *model) {
  if (!model->out_of_memory)
    return model;
  model_destroy(model);
  return NULL;
}

void model_destroy(model_t *model) {
  while (model && model->blocks) {
    block_t *block = model->blocks;
    model->blocks = block->next;
    free(block);
  }
  free(model);
}

void tensor_draw(const tensor_t *tensor, float most, uint64_t *random) {
  for (size_t i = 0; i < tensor->count; i++)
    tensor->value[i] = most * (2.0f * random_uniform(random) - 1.0f);
}

/* --- The loss ----------------------------------------------------------------------------------*/

double model_loss(const model_t *model, size_t samples) {
  const size_t rows = samples * model->rows;
  double sum = 0.0;
  for (size_t r = 0; r < rows; r++)
    sum -= log((double)model->predicted[r * model->classes + model->target[r]] + (double)FLT_MIN);
  return sum / (double)rows;
}

size_t model_correct(const model_t *model, size_t samples) {
  size_t correct = 0;
  for (size_t r = 0; r < samples * model->rows; r++) {
    const float *predicted = model->predicted + r * model->classes;
    size_t above = 0;
    for (size_t k = 0; k < model->classes; k++) /* not-a-number is never right */
      above += predicted[k] <= predicted[model->target[r]] ? 0 : 1;
    correct += above == 0;
  }
  return correct;
}

float *model_loss_backward(model_t *model, size_t samples) {
  const size_t rows = samples * model->rows;
  for (size_t r = 0; r < rows; r++)
    model->predicted[r * model->classes + model->target[r]] -= 1.0f;
  for (size_t i = 0; i < rows * model->classes; i++)
    model->predicted[i] /= (float)rows;
  return model->predicted;
}

void model_report_ready(const model_t *model, const tensor_t *tensor) {
  if (model->ready)
    model->ready(model->ready_context, (size_t)(tensor - model->tensors));
}

/* --- Products with tensors ---------------------------------------------------------------------*/

void linear(float *y, const float *x, const tensor_t *w, size_t rows, size_t in, size_t out,
            product_mode_t mode) {
  multiply(y, out, stored(x, in), stored(w->value, out), rows, in, out, mode);
}

void linear_backward(float *dx, const float *dy, const float *x, const tensor_t *w, size_t rows,
                     size_t in, size_t out) {
  multiply(w->gradient, out, transposed(x, in), stored(dy, out), in, rows, out, REPLACE);
  multiply(dx, in, stored(dy, out), transposed(w->value, out), rows, out, in, REPLACE);
}
