/* The dense Adam of train_dense.h. */
#include "examples/train_dense.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/transformer_math.h"

train_dense_t *train_dense_create(const team_t *team, const train_options_t *options,
                                  transformer_t *model) {
  train_dense_t *dense = calloc(1, sizeof *dense);
  if (!dense)
    return NULL;
  *dense = (train_dense_t){.team = team,
                           .model = model,
                           .beta1 = 0.9,
                           .beta2 = (double)options->beta2,
                           .epsilon = 1e-8f,
                           .weight_decay = options->weight_decay,
                           .gradient = calloc(model->parameters, sizeof(float)),
                           .momentum = calloc(model->parameters, sizeof(float)),
                           .variance = calloc(model->parameters, sizeof(float))};
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

void train_dense_step(train_dense_t *dense, float learning_rate) {
  const transformer_t *model = dense->model;
  const double t = (double)++dense->steps;
  adam_t adam = {.beta1 = (float)dense->beta1,
                 .beta2 = (float)dense->beta2,
                 .epsilon = dense->epsilon,
                 .gradient_factor = 1.0f / (float)dense->team->size,
                 .momentum_factor = (float)(1.0 / (1.0 - pow(dense->beta1, t))),
                 .variance_factor = (float)(1.0 / (1.0 - pow(dense->beta2, t))),
                 .learning_rate = learning_rate};
  size_t at = 0;
  for (size_t i = 0; i < model->ntensors; at += model->tensors[i++].count)
    memcpy(dense->gradient + at, model->tensors[i].gradient,
           model->tensors[i].count * sizeof(float));
  sum_with_mpi(dense->gradient, model->parameters);
  at = 0;
  for (size_t i = 0; i < model->ntensors; at += model->tensors[i++].count) {
    adam.weight_decay = model->tensors[i].is_gain ? 0.0f : dense->weight_decay;
    adam_update(&adam, model->tensors[i].value, dense->momentum + at, dense->variance + at,
                dense->gradient + at, model->tensors[i].count);
  }
}

size_t train_dense_bytes(const train_dense_t *dense) {
  return 2 * (dense->team->size - 1) * dense->model->parameters * sizeof(float) / dense->team->size;
}
