/* The optimizers of train_optimizer.h. */
#include "examples/train_optimizer.h"

#include <stdlib.h>

static onebit_status_t create_onebit(train_optimizer_t *optimizer, const train_options_t *options) {
  const train_model_t *model = optimizer->model;
  const size_t ntensors = model->host->ntensors;
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta2 = (double)options->beta2;
  adam.freeze_step = optimizer->kind == ADAM ? ONEBIT_FREEZE_NEVER : options->freeze;
  adam.common.scale = (onebit_scale_t)options->scale;
  adam.common.block_size = options->block_size;
  adam.common.bucket_size = options->bucket_size;
  adam.common.no_error_feedback = options->no_error_feedback;
  adam.common.device = model->device->memory;
  onebit_tensor_t *tensors = calloc(ntensors, sizeof *tensors);
  for (size_t t = 0; tensors && t < ntensors; t++)
    tensors[t] = (onebit_tensor_t){
        .parameter = model->tensors[t].value,
        .gradient = model->tensors[t].gradient,
        .count = model->tensors[t].count,
        .weight_decay = model->tensors[t].is_gain ? 0.0f : options->weight_decay,
    };
  const onebit_status_t status =
      onebit_adam_create(optimizer->team->gradients, tensors, ntensors, &adam, &optimizer->onebit);
  free(tensors);
  return status;
}

/* The backward pass has come to a tensor. */
static void tell(void *context, size_t tensor) {
  train_optimizer_t *optimizer = context;
  const onebit_status_t status = onebit_optimizer_ready(optimizer->onebit, tensor);
  if (optimizer->status == ONEBIT_OK)
    optimizer->status = status;
}

int train_optimizer_create(train_optimizer_t *optimizer, int kind, const team_t *team,
                           const train_options_t *options, train_model_t *model) {
  *optimizer = (train_optimizer_t){.kind = kind, .team = team, .model = model};
  if (kind == DENSE_MPI) {
    optimizer->dense = train_dense_create(team, options, model->host);
    return agree(team, optimizer->dense != NULL, "out of memory for dense Adam");
  }
  if (check(team, create_onebit(optimizer, options), "optimizer") != 0)
    return -1;
  optimizer->in_parts = options->bucket_size > 0;
  if (optimizer->in_parts) {
    model->host->ready = tell;
    model->host->ready_context = optimizer;
  }
  return 0;
}

void train_optimizer_destroy(train_optimizer_t *optimizer) {
  onebit_optimizer_destroy(optimizer->onebit);
  train_dense_destroy(optimizer->dense);
}

onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate) {
  optimizer->status = ONEBIT_OK;
  return optimizer->in_parts ? onebit_optimizer_begin(optimizer->onebit, learning_rate) : ONEBIT_OK;
}

onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate) {
  if (optimizer->dense) {
    train_dense_step(optimizer->dense, learning_rate);
    return ONEBIT_OK;
  }
  train_model_t *model = optimizer->model;
  const onebit_status_t status = model->device->step(model, optimizer->onebit, learning_rate);
  return optimizer->status != ONEBIT_OK ? optimizer->status : status;
}

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  if (optimizer->onebit)
    onebit_optimizer_get_info(optimizer->onebit, &info);
  return info;
}

uint64_t train_optimizer_sent(const train_optimizer_t *optimizer) {
  if (optimizer->dense)
    return optimizer->dense->steps * train_dense_bytes(optimizer->dense);
  return onebit_comm_bytes_sent(optimizer->team->gradients);
}
