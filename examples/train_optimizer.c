/* Implements the optimizers of train_optimizer.h, and the arrays that they use. */
#include "examples/train_optimizer.h"

#include <stdlib.h>
#include <string.h>

#include "examples/numbers.h"

/* --- Arrays ------------------------------------------------------------------------------------*/

VECTORISED static void train_narrow_bfloat16(uint16_t *restrict to, const float *restrict from,
                                             float factor, size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = to_bfloat16(from[i] * factor);
}

VECTORISED static void train_narrow_float16(uint16_t *restrict to, const float *restrict from,
                                            float factor, size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = to_float16(from[i] * factor);
}

static void narrow_values(onebit_dtype_t dtype, uint16_t *to, const float *from, float factor,
                          size_t count) {
  (dtype == ONEBIT_BFLOAT16 ? train_narrow_bfloat16 : train_narrow_float16)(to, from, factor,
                                                                            count);
}

static void train_widen(onebit_dtype_t dtype, float *restrict to, const uint16_t *restrict from,
                        size_t count) {
  for (size_t i = 0; i < count; i++)
    to[i] = dtype == ONEBIT_BFLOAT16 ? from_bfloat16(from[i]) : from_float16(from[i]);
}

static void scale_values(float *values, float factor, size_t count) {
  for (size_t i = 0; factor != 1.0f && i < count; i++)
    values[i] *= factor;
}

/* Allocates an array for each tensor. Returns NULL when out of memory. */
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

/* Allocates the arrays, and rounds the parameters. Returns 0, or -1 when out of memory. */
static int train_arrays_create(train_arrays_t *arrays, const train_task_t *task,
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
    narrow_values(arrays->parameter_dtype, arrays->parameter[t], task->model->tensors[t].value,
                  1.0f, task->model->tensors[t].count);
  return 0;
}

static void train_arrays_destroy(train_arrays_t *arrays) {
  destroy_each(arrays->task, arrays->parameter);
  destroy_each(arrays->task, arrays->gradient);
  destroy_each(arrays->task, arrays->sum);
}

/* Returns the parameters of a tensor that the optimizer updates: 16-bit values, or the model's
 * own. */
static void *train_arrays_parameter(const train_arrays_t *arrays, size_t tensor) {
  return arrays->parameter ? (void *)arrays->parameter[tensor]
                           : (void *)arrays->task->model->tensors[tensor].value;
}

static const void *train_arrays_gradient(const train_arrays_t *arrays, size_t tensor) {
  if (arrays->gradient)
    return arrays->gradient[tensor];
  return arrays->sum ? arrays->sum[tensor] : arrays->task->model->tensors[tensor].gradient;
}

/* Converts 16-bit parameters to the model's float32 values after a step. */
static void train_arrays_refresh(const train_arrays_t *arrays) {
  for (size_t t = 0; arrays->parameter && t < arrays->task->model->ntensors; t++)
    train_widen(arrays->parameter_dtype, arrays->task->model->tensors[t].value,
                arrays->parameter[t], arrays->task->model->tensors[t].count);
}

/* Adds up a tensor's gradients over the micro-batches, numbered from 0. After the last micro-batch,
 * multiplies the sum by the loss scale and rounds it. */
static void train_arrays_take(const train_arrays_t *arrays, size_t tensor, size_t micro_batch,
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
    narrow_values(arrays->gradient_dtype, arrays->gradient[tensor], gradient, loss_scale,
                  from->count);
  else
    scale_values(gradient, loss_scale, from->count);
}

/* --- Optimizers of the library -----------------------------------------------------------------*/

static onebit_optimizer_options_t common_options(const train_optimizer_t *optimizer) {
  const train_options_t *options = optimizer->options;
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  common.scale = (onebit_scale_t)options->scale;
  common.block_size = options->block_size;
  common.bucket_size = options->bucket_size;
  common.no_error_feedback = options->no_error_feedback;
  common.gradient_dtype = (onebit_dtype_t)options->gradients;
  common.parameter_dtype = (onebit_dtype_t)options->parameters;
  common.gradient_factor = 1.0 / (double)options->accumulate;
  common.clip_norm = (double)options->clip_norm;
  common.initial_loss_scale = (double)options->loss_scale;
  common.loss_scale_interval = options->loss_scale_interval;
  common.dense_below = options->dense_below;
  common.warmup_bits = optimizer->form == DENSE ? 0 : 4 * options->warmup_bits;
  common.bits = optimizer->form == DENSE ? 1 : 1 << options->bits;
  common.max_bits = optimizer->form == DENSE || !options->max_bits ? 0 : 1 << options->max_bits;
  return common;
}

static size_t freeze_step(const train_optimizer_t *optimizer) {
  const size_t freeze = optimizer->options->freeze;
  if (optimizer->form == DENSE)
    return ONEBIT_FREEZE_NEVER;
  return freeze == FREEZE_AUTOMATIC ? ONEBIT_FREEZE_AUTOMATIC : freeze;
}

static onebit_status_t train_create_efficient_adam(train_optimizer_t *optimizer,
                                                   const onebit_tensor_t *tensors) {
  onebit_efficient_adam_options_t adam = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  adam.beta2 = (double)optimizer->options->beta2;
  adam.epsilon = (double)optimizer->options->epsilon;
  adam.warmup_steps = optimizer->options->warmup;
  adam.trust_ratio = optimizer->options->method == EFFICIENT_LAMB;
  adam.common = common_options(optimizer);
  return onebit_efficient_adam_create(optimizer->comm, tensors, optimizer->task->model->ntensors,
                                      &adam, &optimizer->onebit);
}

static onebit_status_t train_create_adam(train_optimizer_t *optimizer,
                                         const onebit_tensor_t *tensors) {
  const train_options_t *options = optimizer->options;
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta2 = (double)options->beta2;
  adam.epsilon = (double)options->epsilon;
  adam.freeze_step = freeze_step(optimizer);
  adam.exchange = options->exchange ? ONEBIT_ADAM_EXCHANGE_STEP : ONEBIT_ADAM_EXCHANGE_MOMENTUM;
  adam.shards = (onebit_shards_t)options->shards;
  adam.common = common_options(optimizer);
  return onebit_adam_create(optimizer->comm, tensors, optimizer->task->model->ntensors, &adam,
                            &optimizer->onebit);
}

static onebit_status_t train_create_lamb(train_optimizer_t *optimizer,
                                         const onebit_tensor_t *tensors) {
  const train_options_t *options = optimizer->options;
  onebit_lamb_options_t lamb = ONEBIT_LAMB_OPTIONS_INIT;
  lamb.beta2 = (double)options->beta2;
  lamb.epsilon = (double)options->epsilon;
  lamb.freeze_step = freeze_step(optimizer);
  lamb.common = common_options(optimizer);
  return onebit_lamb_create(optimizer->comm, tensors, optimizer->task->model->ntensors, &lamb,
                            &optimizer->onebit);
}

static size_t at_least_one(size_t steps) { return steps > 0 ? steps : 1; }

static onebit_status_t train_create_zero_one_adam(train_optimizer_t *optimizer,
                                                  const onebit_tensor_t *tensors) {
  const train_options_t *options = optimizer->options;
  onebit_zero_one_adam_options_t adam = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  adam.beta2 = (double)options->beta2;
  adam.epsilon = (double)options->epsilon;
  adam.variance_freeze_step = at_least_one(options->steps / 2);
  adam.variance_update_scaler = at_least_one(options->steps / 100);
  adam.local_step_scaler = options->local_scaler;
  adam.local_step_clipper = 4;
  adam.common = common_options(optimizer);
  return onebit_zero_one_adam_create(optimizer->comm, tensors, optimizer->task->model->ntensors,
                                     &adam, &optimizer->onebit);
}

/* Creates momentum SGD. The uncompressed form is a warm-up that never ends. */
static onebit_status_t train_create_momentum(train_optimizer_t *optimizer,
                                             const onebit_tensor_t *tensors) {
  const train_options_t *options = optimizer->options;
  onebit_momentum_options_t momentum = ONEBIT_MOMENTUM_OPTIONS_INIT;
  momentum.momentum = (double)options->momentum;
  momentum.warmup_steps = optimizer->form == DENSE ? SIZE_MAX - 1 : options->freeze;
  momentum.common = common_options(optimizer);
  return onebit_momentum_create(optimizer->comm, tensors, optimizer->task->model->ntensors,
                                &momentum, &optimizer->onebit);
}

/* Creates Lion. In the uncompressed form all tensors are uncompressed. */
static onebit_status_t train_create_lion(train_optimizer_t *optimizer,
                                         const onebit_tensor_t *tensors) {
  const train_options_t *options = optimizer->options;
  onebit_lion_options_t lion = ONEBIT_LION_OPTIONS_INIT;
  lion.beta2 = (double)options->beta2;
  lion.epsilon = (double)options->epsilon;
  lion.common = common_options(optimizer);
  if (optimizer->form == DENSE)
    lion.common.dense_below = SIZE_MAX;
  return onebit_lion_create(optimizer->comm, tensors, optimizer->task->model->ntensors, &lion,
                            &optimizer->onebit);
}

/* Creates an optimizer. The uncompressed form of 0/1 Adam and Efficient-Adam is Adam, and with
 * trust ratios LAMB. */
static onebit_status_t create_of_method(train_optimizer_t *optimizer,
                                        const onebit_tensor_t *tensors) {
  static onebit_status_t (*const create[METHODS])(train_optimizer_t *, const onebit_tensor_t *) = {
      [EFFICIENT_ADAM] = train_create_efficient_adam,
      [ADAM] = train_create_adam,
      [EFFICIENT_LAMB] = train_create_efficient_adam,
      [LAMB] = train_create_lamb,
      [ZERO_ONE_ADAM] = train_create_zero_one_adam,
      [MOMENTUM] = train_create_momentum,
      [LION] = train_create_lion};
  const int method = optimizer->options->method;
  if ((method == ZERO_ONE_ADAM || method == EFFICIENT_ADAM) && optimizer->form == DENSE)
    return train_create_adam(optimizer, tensors);
  if (method == EFFICIENT_LAMB && optimizer->form == DENSE)
    return train_create_lamb(optimizer, tensors);
  return create[method](optimizer, tensors);
}

/* True for Efficient-Adam, which supports tables. */
static int has_tables(const train_optimizer_t *optimizer) {
  const int method = optimizer->options->method;
  return optimizer->form == COMPRESSED && (method == EFFICIENT_ADAM || method == EFFICIENT_LAMB);
}

static onebit_status_t create_onebit(train_optimizer_t *optimizer) {
  const train_task_t *task = optimizer->task;
  onebit_tensor_t *tensors = calloc(task->model->ntensors, sizeof *tensors);
  for (size_t t = 0; tensors && t < task->model->ntensors; t++)
    tensors[t] = (onebit_tensor_t){
        .parameter = train_arrays_parameter(&optimizer->arrays, t),
        .gradient = train_arrays_gradient(&optimizer->arrays, t),
        .count = task->model->tensors[t].count,
        .weight_decay = task->model->tensors[t].decays ? optimizer->options->weight_decay : 0.0f,
        .uncompressed = has_tables(optimizer) && task->model->tensors[t].table ? ONEBIT_TABLE : 0,
    };
  const onebit_status_t status = create_of_method(optimizer, tensors);
  free(tensors);
  return status;
}

/* --- Optimizers, compressed or dense -----------------------------------------------------------*/

static void train_note_status(train_optimizer_t *optimizer, onebit_status_t status) {
  if (optimizer->status == ONEBIT_OK)
    optimizer->status = status;
}

/* Reports to the optimizer that the backward pass has finished a tensor. */
static void train_report_ready(void *context, size_t tensor) {
  train_optimizer_t *optimizer = context;
  const size_t micro_batch = optimizer->micro_batch;
  train_arrays_take(&optimizer->arrays, tensor, micro_batch, optimizer->loss_scale);
  if (micro_batch + 1 == optimizer->options->accumulate)
    train_note_status(optimizer, onebit_optimizer_ready(optimizer->onebit, tensor));
}

int train_optimizer_create(train_optimizer_t *optimizer, form_t form, train_task_t *task,
                           const train_options_t *options) {
  *optimizer = (train_optimizer_t){.form = form == OUTER ? DENSE : form,
                                   .options = options,
                                   .task = task,
                                   .comm = task->team->comm,
                                   .loss_scale = 1.0f,
                                   .arrays = {.task = task}};
  if (form == OUTER) {
    if (train_outer_create(&optimizer->outer, task, options) != 0)
      return -1;
    optimizer->comm = optimizer->outer.alone;
  }
  if (agree_on_success(task->team, train_arrays_create(&optimizer->arrays, task, options) == 0,
                       "out of memory for rounded parameters and gradients") != 0 ||
      check_library_call(task->team, create_onebit(optimizer), "optimizer") != 0)
    return -1;
  optimizer->in_parts = options->bucket_size > 0;
  if (optimizer->in_parts) {
    task->model->ready = train_report_ready;
    task->model->ready_context = optimizer;
  }
  return 0;
}

void train_optimizer_destroy(train_optimizer_t *optimizer) {
  if (!optimizer->task)
    return;
  onebit_optimizer_destroy(optimizer->onebit);
  train_outer_destroy(&optimizer->outer);
  train_arrays_destroy(&optimizer->arrays);
}

onebit_status_t train_optimizer_begin(train_optimizer_t *optimizer, float learning_rate) {
  double loss_scale = 1.0;
  optimizer->status = ONEBIT_OK;
  if (optimizer->options->loss_scale > 0.0f)
    train_note_status(optimizer, onebit_optimizer_get_loss_scale(optimizer->onebit, &loss_scale));
  optimizer->loss_scale = (float)loss_scale;
  if (optimizer->in_parts)
    train_note_status(optimizer, onebit_optimizer_begin(optimizer->onebit, learning_rate));
  return optimizer->status;
}

double train_optimizer_gradient(train_optimizer_t *optimizer, size_t step) {
  train_task_t *task = optimizer->task;
  const size_t micro_batches = optimizer->options->accumulate;
  double loss = 0.0;
  if (step < optimizer->options->zero_steps ||
      (optimizer->options->hard == HARD_IDLE && task->team->rank == 0))
    optimizer->loss_scale = 0.0f;
  for (size_t k = 0; k < micro_batches; k++) {
    optimizer->micro_batch = k;
    loss += train_task_gradient(task, step * micro_batches + k) / (double)micro_batches;
    for (size_t t = 0; !optimizer->in_parts && t < task->model->ntensors; t++)
      train_arrays_take(&optimizer->arrays, t, k, optimizer->loss_scale);
  }
  return loss;
}

onebit_status_t train_optimizer_step(train_optimizer_t *optimizer, float learning_rate) {
  onebit_status_t status = onebit_optimizer_step(optimizer->onebit, learning_rate);
  train_arrays_refresh(&optimizer->arrays);
  if (optimizer->status != ONEBIT_OK)
    status = optimizer->status;
  const onebit_status_t outer = train_outer_step(&optimizer->outer);
  return outer != ONEBIT_OK ? outer : status;
}

/* Reports the rounds of --outer in the optimizer's info. A round consists of one exchange of each
 * fragment. */
static void count_rounds(onebit_optimizer_info_t *info, const onebit_outer_info_t *outer) {
  const uint64_t rounds = outer->exchanges / outer->fragments;
  const int dense = outer->bits == ONEBIT_OUTER_DENSE;
  info->exchanges[0] = dense ? rounds : 0;
  info->exchanges[1] = dense ? 0 : rounds;
  info->exchanges[2] = outer->steps > rounds ? outer->steps - rounds : 0;
  info->skipped += outer->skipped;
}

onebit_optimizer_info_t train_optimizer_info(const train_optimizer_t *optimizer) {
  onebit_optimizer_info_t info = {.size = sizeof info, .synchronized = 1};
  const onebit_outer_info_t outer = train_outer_info(&optimizer->outer);
  onebit_optimizer_get_info(optimizer->onebit, &info);
  if (optimizer->outer.onebit)
    count_rounds(&info, &outer);
  return info;
}

double train_optimizer_residual_ratio(const train_optimizer_t *optimizer) {
  onebit_optimizer_statistics_t statistics = {.size = sizeof statistics};
  const onebit_outer_info_t outer = train_outer_info(&optimizer->outer);
  if (outer.drift_norm > 0.0)
    return outer.residual_norm / outer.drift_norm;
  onebit_optimizer_get_statistics(optimizer->onebit, &statistics);
  return statistics.residual_ratio;
}

onebit_status_t train_optimizer_load(train_optimizer_t *optimizer, const char *directory) {
  const onebit_status_t status = onebit_optimizer_load_files(optimizer->onebit, directory);
  if (status == ONEBIT_OK)
    train_arrays_refresh(&optimizer->arrays);
  return status;
}

uint64_t train_optimizer_sent(const train_optimizer_t *optimizer) {
  return onebit_comm_bytes_sent(optimizer->task->team->comm);
}
