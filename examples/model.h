/*
 * Models of the trainings have this in common: tensors with their gradients, probabilities that are
 * held against targets, and memory. A model's own struct begins with a model_t.
 *
 * Use: create, initialise; then per step fill in the input, forward, model_loss, backward, and give
 * the gradients to an optimizer that changes the values in place.
 */
#ifndef EXAMPLES_MODEL_H
#define EXAMPLES_MODEL_H

#include <stdint.h>

#include "examples/transformer_math.h"

/* Parameters, with the gradient of the latest backward pass. */
typedef struct tensor {
  float *value, *gradient;
  size_t count;
  int decays; /* weights do; biases and gains are not meant to */
  int table;  /* of outputs: ONEBIT_TABLE, where the optimizer has that */
} tensor_t;

typedef struct model model_t;
struct model {
  tensor_t *tensors; /* in the order of the forward pass */
  size_t ntensors;
  size_t parameters; /* numbers in all tensors together */
  size_t rows;       /* predictions for a sample */
  size_t classes;    /* of a prediction */
  float *predicted;  /* of the latest forward pass: [sample][row][class], probabilities */
  uint32_t *target;  /* [sample][row]: the class that was to be predicted */
  /* Predicts. */
  void (*forward)(model_t *model, size_t samples);
  /* Computes the gradient of model_loss, replacing what was there. Uses up `predicted`: each
   * backward pass needs a forward pass of its own. */
  void (*backward)(model_t *model, size_t samples);
  /* When not NULL, the backward pass calls it as each tensor's gradient is final, with the tensor's
   * place in the list: in about the opposite order. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  struct block *blocks; /* the memory of all arrays */
  int out_of_memory;
};

/* Creates a model whose struct has so many bytes, for at most `samples`. The others fill in the
 * rest: `like` has the numbers and functions. NULL when memory is out. */
void *model_create(size_t size, const model_t *like, size_t samples);
/* Makes an array of zeros that the model owns, of `size` bytes each; NULL when memory is out. */
void *model_array(model_t *model, size_t count, size_t size);
float *model_floats(model_t *model, size_t count);
/* Makes a tensor in its place in the list. */
tensor_t *model_tensor(model_t *model, size_t place, size_t count, int decays);
/* Returns the model if it has all of its memory; else destroys it and returns NULL. */
void *model_complete(model_t *model);
void model_destroy(model_t *model);

/* Draws uniform values up to `most` and down to its negative. */
void tensor_draw(const tensor_t *tensor, float most, uint64_t *random);

/* Returns the mean of -ln(probability of the target) of the latest forward pass. */
double model_loss(const model_t *model, size_t samples);
/* Returns how many targets have no class that is more probable. */
size_t model_correct(const model_t *model, size_t samples);
/* Replaces the probabilities by the gradient of the loss by what softmax was given. */
float *model_loss_backward(model_t *model, size_t samples);

/* Tells that the gradient of a tensor is final in this backward pass. */
void model_report_ready(const model_t *model, const tensor_t *tensor);

/* y = x w, or y += x w, and its backward: dw = x' dy, dx = dy w'. */
void linear(float *y, const float *x, const tensor_t *w, size_t rows, size_t in, size_t out,
            product_mode_t mode);
void linear_backward(float *dx, const float *dy, const float *x, const tensor_t *w, size_t rows,
                     size_t in, size_t out);

#endif
