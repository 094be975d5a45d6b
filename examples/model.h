/*
 * The models of the trainings: their arithmetic, what they have in common (tensors with their
 * gradients, probabilities that are compared with targets, memory), and three of them. The struct
 * of a model begins with a model_t. Forward and backward are written out by hand.
 *
 * Use: create, initialise; then per step fill in the input, forward, model_loss, backward, and give
 * the gradients to an optimizer that changes the values in place.
 */
#ifndef EXAMPLES_MODEL_H
#define EXAMPLES_MODEL_H

#include <stddef.h>
#include <stdint.h>

/* --- Arithmetic -------------------------------------------------------------------------------*/

/* Arrays are row-major. The same input gives the same bits on every x86-64 processor, whatever
 * instructions it has. */

/* A matrix in memory, or the transpose of one, with the same elements in memory. */
typedef struct matrix {
  const float *data;
  size_t row_stride, column_stride;
} matrix_t;

static inline matrix_t stored(const float *data, size_t stride) {
  return (matrix_t){data, stride, 1};
}
static inline matrix_t transposed(const float *data, size_t stride) {
  return (matrix_t){data, 1, stride};
}

typedef enum product_mode { REPLACE, ADD } product_mode_t;

/* c = a b, or c += a b. a: rows x inner, b: inner x columns, c: rows x columns, its rows c_stride
 * apart and apart from a and b. */
void multiply(float *c, size_t c_stride, matrix_t a, matrix_t b, size_t rows, size_t inner,
              size_t columns, product_mode_t mode);

/* Each row becomes softmax(scale * row). Causal: position r attends to columns up to r; the other
 * columns get zero. */
void softmax(float *x, size_t rows, size_t columns, float scale, int causal);

/* Replaces dp, the gradient of the loss by softmax's result p, by the gradient by its input. */
void softmax_backward(float *dp, const float *p, size_t rows, size_t columns, float scale);

/* y = GELU(x); the backward multiplies dx by the slope at x. */
void gelu(float *restrict y, const float *restrict x, size_t count);
void gelu_backward(float *restrict dx, const float *restrict x, size_t count);

/* y = gain * x / rms(x) for each row; inverse_rms: 1 / rms of each row. The backward replaces
 * d_gain and adds to dx, because the residual stream goes past every normalisation. Source: Zhang
 * and Sennrich, arXiv 1910.07467. */
void normalise(float *y, float *inverse_rms, const float *x, const float *gain, size_t rows,
               size_t width);
void normalise_backward(float *dx, float *d_gain, const float *dy, const float *x,
                        const float *inverse_rms, const float *gain, size_t rows, size_t width);

/* --- A model -----------------------------------------------------------------------------------*/

/* Parameters, with the gradient of the latest backward pass. */
typedef struct tensor {
  float *value, *gradient;
  size_t count;
  int decays; /* set for weights, not for biases and gains */
  int table;  /* a table of outputs: ONEBIT_TABLE, if the optimizer has tables */
} tensor_t;

typedef struct model model_t;
struct model {
  tensor_t *tensors; /* in the order of the forward pass */
  size_t ntensors;
  size_t parameters; /* numbers in all tensors together */
  size_t rows;       /* predictions for a sample */
  size_t classes;    /* of a prediction */
  float *predicted;  /* of the latest forward pass: [sample][row][class], probabilities */
  uint32_t *target;  /* [sample][row]: the class to predict */
  /* Predicts. */
  void (*forward)(model_t *model, size_t samples);
  /* Computes the gradient of model_loss, replacing what was there. Uses up `predicted`: each
   * backward pass needs a forward pass of its own. */
  void (*backward)(model_t *model, size_t samples);
  /* If not NULL, the backward pass calls it when a tensor's gradient is final, with the tensor's
   * place in the list; the order is about the opposite of the list's. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  struct block *blocks; /* the memory of all arrays */
  int out_of_memory;
};

/* Creates a model whose struct has `size` bytes, for at most `samples`. `like` has the
 * numbers and functions; the functions below fill in the rest. NULL when memory is out. */
void *model_create(size_t size, const model_t *like, size_t samples);
/* Makes an array of zeros that the model owns, of `size` bytes each; NULL when memory is out. */
void *model_array(model_t *model, size_t count, size_t size);
float *model_floats(model_t *model, size_t count);
/* Makes a tensor in its place in the list. */
tensor_t *model_tensor(model_t *model, size_t place, size_t count, int decays);
/* Returns the model if it has all of its memory; else destroys it and returns NULL. */
void *model_complete(model_t *model);
void model_destroy(model_t *model);

/* Draws uniform values between -most and most. */
void tensor_draw(const tensor_t *tensor, float most, uint64_t *random);

/* Returns the mean of -ln(probability of the target) of the latest forward pass. */
double model_loss(const model_t *model, size_t samples);
/* Returns the number of targets that are the most probable class. */
size_t model_correct(const model_t *model, size_t samples);
/* Replaces the probabilities by the gradient of the loss by softmax's input. */
float *model_loss_backward(model_t *model, size_t samples);

/* Tells that the gradient of a tensor is final in this backward pass. */
void model_report_ready(const model_t *model, const tensor_t *tensor);

/* y = x w, or y += x w, and its backward: dw = x' dy, dx = dy w'. */
void linear(float *y, const float *x, const tensor_t *w, size_t rows, size_t in, size_t out,
            product_mode_t mode);
void linear_backward(float *dx, const float *dy, const float *x, const tensor_t *w, size_t rows,
                     size_t in, size_t out);

/*
 * --- transformer.c: a decoder-only transformer over a small vocabulary, trained on one core: token
 * and position embeddings, blocks of causal multi-head attention and a GELU network of four times
 * the width, each behind an RMS normalisation, and a head of its own. No biases.
 */

/* All at least 1; heads divides width. */
typedef struct transformer_shape {
  size_t vocabulary; /* different tokens, at most 256 */
  size_t context;    /* tokens that the model sees at once */
  size_t width;
  size_t heads;
  size_t layers;
  size_t sequences; /* most sequences in one forward pass */
} transformer_shape_t;

struct transformer_layer;

typedef struct transformer {
  model_t model; /* of 4 + 6 * layers tensors */
  transformer_shape_t shape;
  unsigned char *tokens; /* to be filled in: [sequence][context + 1], each below the vocabulary; the
                            last of each sequence is only ever a target */

  struct transformer_layer *layers; /* the rest is the model's own */
  const tensor_t *final_gain, *head;
  float *stream;               /* the output of the last block */
  float *normed, *inverse_rms; /* of the normalisation before the head */
  float *d_stream, *d_normed, *d_wide, *d_scores;
} transformer_t;

/* Returns the model, its values not yet initialised, or NULL when memory is out. */
transformer_t *transformer_create(const transformer_shape_t *shape);

/* Draws the values from the seed: the same on every rank that gives the same seed. The first begins
 * as GPT-2 does (Radford et al., 2019): embeddings and matrices of deviation 0.02, those that end
 * in the residual stream 0.02 / sqrt(2 layers). The second keeps the variance of activations at 1:
 * embeddings of deviation 1, matrices of 1 / sqrt(rows). */
void transformer_initialise(transformer_t *model, uint64_t seed);
void transformer_initialise_unit(transformer_t *model, uint64_t seed);

/*
 * --- network.c: a small convolutional network for gray images: two convolutions of 3 x 3, each
 * with its largest values of 2 x 2 and a ReLU, a dense layer with a ReLU, and a dense one to the
 * classes.
 */

/* All at least 1; rows and columns at least 10. */
typedef struct network_shape {
  size_t rows, columns; /* of an image */
  size_t channels;      /* of the first convolution; the second has twice as many */
  size_t hidden;        /* units of the dense layer between */
  size_t classes;       /* at most 256 */
  size_t images;        /* most images in one forward pass */
} network_shape_t;

/* Weights, then the bias, of each layer. */
enum { NETWORK_LAYERS = 4, NETWORK_TENSORS = 2 * NETWORK_LAYERS };

struct convolution;

typedef struct network {
  model_t model; /* its targets are the images' labels, to be filled in */
  network_shape_t shape;
  float *pixels; /* to be filled in: [image][row][column] */

  struct convolution *convolutions; /* the rest is the network's own */
  float *hidden, *d_hidden;         /* [image][hidden], after the ReLU */
} network_t;

/* Returns the network, its values not yet initialised, or NULL when memory is out. */
network_t *network_create(const network_shape_t *shape);

/* Draws the values from the seed: the same on every rank that gives the same seed. */
void network_initialise(network_t *network, uint64_t seed);

/*
 * --- log_bilinear.c: a log-bilinear model of the next word (Mnih and Hinton, "Three new graphical
 * models for statistical language modelling", ICML 2007): the rows of a table for the words before,
 * times a matrix, give the row that the next word should have in a second table. Nearly all
 * parameters are in the two tables; of the first, a step's gradient touches the few rows whose
 * words were drawn.
 */

/* All at least 1. */
typedef struct log_bilinear_shape {
  size_t vocabulary; /* rows of a table */
  size_t width;      /* columns */
  size_t context;    /* words before the one that is predicted */
  size_t samples;    /* the largest number of predictions in one forward pass */
} log_bilinear_shape_t;

/* Rows of the words before, the matrix, rows of the next word, and its bias. */
enum { CONTEXT_TABLE, MIXING, WORD_TABLE, WORD_BIAS, LOG_BILINEAR_TENSORS };

typedef struct log_bilinear {
  model_t model;
  log_bilinear_shape_t shape;
  uint32_t *words; /* to be filled in: [sample][context + 1], each below the vocabulary; the last is
                      the target */

  float *before, *d_before; /* the rest is the model's own: [sample][context][width] */
  float *mixed, *d_mixed;   /* [sample][width] */
} log_bilinear_t;

/* Returns the model, its values not yet initialised, or NULL when memory is out. */
log_bilinear_t *log_bilinear_create(const log_bilinear_shape_t *shape);

/* Draws the values from the seed: the same on every rank that gives the same seed. */
void log_bilinear_initialise(log_bilinear_t *model, uint64_t seed);

#endif
