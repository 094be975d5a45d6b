/* The arrays of train_arrays.h. */
#include "examples/train_arrays.h"

#include <stdlib.h>
#include <string.h>

#include "examples/half.h"
#include "examples/vectorised.h"

VECTORISED static void narrow_bfloat16(uint16_t *restrict to, const float *restrict from,
                                       float factor, size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = to_bfloat16(from[i] * factor);
}

VECTORISED static void narrow_float16(uint16_t *restrict to, const float *restrict from,
                                      float factor, size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = to_float16(from[i] * factor);
}

static void narrow(onebit_dtype_t dtype, uint16_t *to, const float *from, float factor,
                   size_t count) {
  (dtype == ONEBIT_BFLOAT16 ? narrow_bfloat16 : narrow_float16)(to, from, factor, count);
}

static void widen(onebit_dtype_t dtype, float *restrict to, const uint16_t *restrict from,
                  size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = dtype == ONEBIT_BFLOAT16 ? from_bfloat16(from[i]) : from_float16(from[i]);
}

static void scale(float *values, float factor, size_t count) {
  for (size_t i = 0; factor != 1.0f && i < count; i++)
    values[i] *= factor;
}

/* --- Memory ------------------------------------------------------------------------------------*/

/* Makes an array for each tensor; NULL when memory is out. */
static void *create_each(const train_task_t *task, size_t size) {
  void **each = calloc(task->model->ntensors + 1, sizeof *each);
  for (size_t t = 0; each && t < task->model->ntensors; t++) {
    each[t] = calloc(task->model->tensors[t].count, size);
    if (each[t])
      continue;
    while (t-- > 0)
      free(each[t]);
    free(each);
    return NULL;
  }
  return each;
}

static void destroy_each(const train_task_t *task, void *arrays) {
  void **each = arrays;
  for (size_t t = 0; each && t < task->model->ntensors; t++)
    free(each[t]);
  free(each);
}

int train_arrays_create(train_arrays_t *arrays, const train_task_t *task,
                        const train_options_t *options) {
  *arrays = (train_arrays_t){.task = task,
                             .parameter_dtype = (onebit_dtype_t)options->parameters,
                             .gradient_dtype = (onebit_dtype_t)options->gradients,
                             .micro_batches = options->accumulate};
  const int halves = arrays->parameter_dtype != ONEBIT_FLOAT32;
  const int half_gradients = arrays->gradient_dtype != ONEBIT_FLOAT32;
  if (halves)
    arrays->parameter = create_each(task, sizeof(uint16_t));
  if (half_gradients)
    arrays->gradient = create_each(task, sizeof(uint16_t));
  if (arrays->micro_batches > 1)
    arrays->sum = create_each(task, sizeof(float));
  if ((halves && !arrays->parameter) || (half_gradients && !arrays->gradient) ||
      (arrays->micro_batches > 1 && !arrays->sum))
    return -1;
  for (size_t t = 0; halves && t < task->model->ntensors; t++)
    narrow(arrays->parameter_dtype, arrays->parameter[t], task->model->tensors[t].value, 1.0f,
           task->model->tensors[t].count);
  return 0;
}

void train_arrays_destroy(train_arrays_t *arrays) {
  destroy_each(arrays->task, arrays->parameter);
  destroy_each(arrays->task, arrays->gradient);
  destroy_each(arrays->task, arrays->sum);
}

/* --- Use ---------------------------------------------------------------------------------------*/

void *train_arrays_parameter(const train_arrays_t *arrays, size_t tensor) {
  return arrays->parameter ? (void *)arrays->parameter[tensor]
                           : (void *)arrays->task->model->tensors[tensor].value;
}

const void *train_arrays_gradient(const train_arrays_t *arrays, size_t tensor) {
  if (arrays->gradient)
    return arrays->gradient[tensor];
  return arrays->sum ? arrays->sum[tensor] : arrays->task->model->tensors[tensor].gradient;
}

void train_arrays_refresh(const train_arrays_t *arrays) {
  for (size_t t = 0; arrays->parameter && t < arrays->task->model->ntensors; t++)
    widen(arrays->parameter_dtype, arrays->task->model->tensors[t].value, arrays->parameter[t],
          arrays->task->model->tensors[t].count);
}

void train_arrays_take(const train_arrays_t *arrays, size_t tensor, size_t micro_batch,
                       float loss_scale) {
  const tensor_t *from = &arrays->task->model->tensors[tensor];
  float *gradient = arrays->sum ? arrays->sum[tensor] : from->gradient;
  if (arrays->sum && micro_batch == 0)
    memcpy(gradient, from->gradient, from->count * sizeof(float));
  for (size_t i = 0; arrays->sum && micro_batch > 0 && i < from->count; i++)
    gradient[i] += from->gradient[i];
  if (micro_batch + 1 < arrays->micro_batches)
    return;
  if (arrays->gradient)
    narrow(arrays->gradient_dtype, arrays->gradient[tensor], gradient, loss_scale, from->count);
  else
    scale(gradient, loss_scale, from->count);
}
