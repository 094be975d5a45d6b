/*
 * The arrays that an optimizer sees, where they are not the model's own: parameters and gradients
 * of 16 bits, and sums over micro-batches. The model itself computes in float32, with values that
 * are those of the rounded parameters.
 */
#ifndef EXAMPLES_TRAIN_ARRAYS_H
#define EXAMPLES_TRAIN_ARRAYS_H

#include "examples/train_task.h"

typedef struct train_arrays {
  const train_task_t *task;
  onebit_dtype_t parameter_dtype, gradient_dtype;
  size_t micro_batches;
  uint16_t **parameter, **gradient; /* of each tensor; NULL where they stay float32 */
  float **sum;                      /* NULL with one micro-batch a step */
} train_arrays_t;

/* Makes the arrays. 0, or -1 when memory is out. The parameters are rounded from here on. */
int train_arrays_create(train_arrays_t *arrays, const train_task_t *task,
                        const train_options_t *options);
void train_arrays_destroy(train_arrays_t *arrays);

/* The arrays for the optimizer. */
void *train_arrays_parameter(const train_arrays_t *arrays, size_t tensor);
const void *train_arrays_gradient(const train_arrays_t *arrays, size_t tensor);

/* Gives the model the parameters of a step. */
void train_arrays_refresh(const train_arrays_t *arrays);

/* Takes over the model's gradient of a tensor, of one micro-batch (0 is the first). The last one's
 * makes it complete: times the loss scale, and rounded. */
void train_arrays_take(const train_arrays_t *arrays, size_t tensor, size_t micro_batch,
                       float loss_scale);

#endif
