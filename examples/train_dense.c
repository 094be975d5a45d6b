/* The dense training of train_dense.h. */
#include "examples/train_dense.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/train_update.h"

train_dense_t *train_dense_create(const train_task_t *task, const train_options_t *options) {
  train_dense_t *dense = calloc(1, sizeof *dense);
  if (!dense)
    return NULL;
  *dense = (train_dense_t){.options = options,
                           .task = task,
                           .gradient = calloc(task->parameters, sizeof(float)),
                           .momentum = calloc(task->parameters, sizeof(float)),
                           .variance = calloc(task->parameters, sizeof(float))};
  if (dense->gradient && dense->momentum && dense->variance)
    return dense;
  train_dense_destroy(dense);
  return NULL;
}

void train_dense_destroy(train_dense_t *dense) {
  if (!dense)
    return;
  free(dense->gradient);
  free(dense->momentum);
  free(dense->variance);
  free(dense);
}

static update_t numbers_of(const train_dense_t *dense, float learning_rate) {
  const double t = (double)dense->steps, beta1 = 0.9, beta2 = (double)dense->options->beta2;
  return (update_t){.beta1 = dense->options->method == MOMENTUM ? dense->options->momentum
                                                                : (float)beta1,
                    .beta2 = (float)beta2,
                    .epsilon = dense->options->epsilon,
                    .gradient_factor = 1.0f / (float)dense->task->team->size,
                    .momentum_factor = (float)(1.0 / (1.0 - pow(beta1, t))),
                    .variance_factor = (float)(1.0 / (1.0 - pow(beta2, t))),
                    .learning_rate = learning_rate};
}

/* Updates one tensor, whose moments and gradient begin at `at`. */
static void update(const train_dense_t *dense, const update_t *numbers,
                   const train_tensor_t *tensor, size_t at) {
  float *gradient = dense->gradient + at, *momentum = dense->momentum + at;
  float *variance = dense->variance + at;
  if (dense->options->method == MOMENTUM)
    update_momentum(numbers, tensor->value, momentum, gradient, tensor->count);
  else if (dense->options->method == LION)
    update_lion(numbers, tensor->value, momentum, gradient, tensor->count);
  else if (dense->options->method == LAMB || dense->options->method == EFFICIENT_LAMB)
    update_lamb(numbers, tensor->value, momentum, variance, gradient, tensor->count);
  else
    update_adam(numbers, tensor->value, momentum, variance, gradient, tensor->count);
}

void train_dense_step(train_dense_t *dense, float learning_rate) {
  const train_task_t *task = dense->task;
  dense->steps++;
  update_t numbers = numbers_of(dense, learning_rate);
  size_t at = 0;
  for (size_t i = 0; i < task->ntensors; at += task->tensors[i++].count)
    memcpy(dense->gradient + at, task->tensors[i].gradient, task->tensors[i].count * sizeof(float));
  sum_with_mpi(dense->gradient, task->parameters);
  at = 0;
  for (size_t i = 0; i < task->ntensors; at += task->tensors[i++].count) {
    numbers.weight_decay = task->tensors[i].decays ? dense->options->weight_decay : 0.0f;
    update(dense, &numbers, &task->tensors[i], at);
  }
}

size_t train_dense_bytes(const train_dense_t *dense) {
  const size_t ranks = dense->task->team->size;
  return 2 * (ranks - 1) * dense->task->parameters * sizeof(float) / ranks;
}
