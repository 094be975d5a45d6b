/*
 * The models that the example programs train: arithmetic, common parts (tensors with gradients,
 * probabilities and the loss, memory), and three models. The struct of each model begins with a
 * model_t. Forward and backward passes are written by hand.
 *
 * Usage: create and initialise a model. In each step, fill in the input, call forward, model_loss
 * and backward, and pass the gradients to an optimizer, which changes the values in place.
 */
#ifndef EXAMPLES_MODEL_H
#define EXAMPLES_MODEL_H

#include <stddef.h>
#include <stdint.h>

/* --- Arithmetic -------------------------------------------------------------------------------*/

/* Arrays are row-major. The same input gives the same bits on every x86-64 processor, with any
 * instruction set. */

/* A matrix in memory, or the transpose of one, without a copy of the elements. */
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

/* Computes c = a b, or c += a b. a has rows x inner elements, b has inner x columns, c has rows x
 * columns. The rows of c are c_stride elements apart, and c must not overlap a or b. */
void multiply(float *c, size_t c_stride, matrix_t a, matrix_t b, size_t rows, size_t inner,
              size_t columns, product_mode_t mode);

/* Replaces each row by softmax(scale * row). With `causal`, row r uses only columns up to r, and
 * the other columns become zero. */
void softmax(float *x, size_t rows, size_t columns, float scale, int causal);

/* Replaces dp, the gradient of the loss with respect to softmax's result p, by the gradient with
 * respect to softmax's input. */
void softmax_backward(float *dp, const float *p, size_t rows, size_t columns, float scale);

/* Computes y = GELU(x). The backward function multiplies dx by the slope of GELU at x. */
void gelu(float *restrict y, const float *restrict x, size_t count);
void gelu_backward(float *restrict dx, const float *restrict x, size_t count);

/* Computes y = gain * x / rms(x) for each row. inverse_rms gets 1 / rms of each row. The backward
 * function overwrites d_gain, but adds to dx, because dx already has the gradient of the path that
 * bypasses the normalisation. Source: Zhang and Sennrich, arXiv 1910.07467. */
void normalise(float *y, float *inverse_rms, const float *x, const float *gain, size_t rows,
               size_t width);
void normalise_backward(float *dx, float *d_gain, const float *dy, const float *x,
                        const float *inverse_rms, const float *gain, size_t rows, size_t width);

/* --- A model -----------------------------------------------------------------------------------*/

/* Parameters, with the gradient of the latest backward pass. */
typedef struct tensor {
  float *value, *gradient;
  size_t count;
  int decays; /* true for weights, false for biases and gains */
  int table;  /* true for a table of outputs: its tensor gets ONEBIT_TABLE if the optimizer supports
               * tables */
} tensor_t;

typedef struct model model_t;
struct model {
  tensor_t *tensors; /* in the order of the forward pass */
  size_t ntensors;
  size_t parameters; /* the number of elements of all tensors together */
  size_t rows;       /* predictions for one sample */
  size_t classes;    /* classes of one prediction */
  float *predicted;  /* probabilities of the latest forward pass: [sample][row][class] */
  uint32_t *target;  /* [sample][row]: the class to predict */
  /* Computes `predicted` from the input. */
  void (*forward)(model_t *model, size_t samples);
  /* Computes the gradient of model_loss, which replaces the previous gradient. Overwrites
   * `predicted`, so that each backward pass needs a forward pass before it. */
  void (*backward)(model_t *model, size_t samples);
  /* If not NULL, the backward pass calls this function when the gradient of a tensor is final, with
   * the tensor's index in `tensors`. The calls are roughly in the reverse order of `tensors`. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  struct block *blocks; /* the memory of all arrays */
  int out_of_memory;
};

/* Creates a model whose struct has `size` bytes, for at most `samples` samples. Sizes and functions
 * are copied from `like`; the functions below fill in the rest. Returns NULL when out of memory. */
void *model_create(size_t size, const model_t *like, size_t samples);
/* Creates an array of zeros that the model owns; each element has `size` bytes. Returns NULL when
 * out of memory. */
void *model_array(model_t *model, size_t count, size_t size);
float *model_floats(model_t *model, size_t count);
/* Creates a tensor at index `place` of model->tensors. */
tensor_t *model_tensor(model_t *model, size_t place, size_t count, int decays);
/* Returns the model if all of its memory was allocated; otherwise destroys it and returns NULL. */
void *model_complete(model_t *model);
void model_destroy(model_t *model);

/* Draws uniform values from -most to most. */
void tensor_draw(const tensor_t *tensor, float most, uint64_t *random);

/* Returns the mean of -ln(probability of the target) of the latest forward pass. */
double model_loss(const model_t *model, size_t samples);
/* Returns the number of targets that are the most probable class. */
size_t model_correct(const model_t *model, size_t samples);
/* Replaces the probabilities by the gradient of the loss with respect to softmax's input. */
float *model_loss_backward(model_t *model, size_t samples);

/* Calls model->ready, because the gradient of a tensor is final in this backward pass. */
void model_report_ready(const model_t *model, const tensor_t *tensor);

/* Computes y = x w, or y += x w. The backward function computes dw = x' dy and dx = dy w'. */
void linear(float *y, const float *x, const tensor_t *w, size_t rows, size_t in, size_t out,
            product_mode_t mode);
void linear_backward(float *dx, const float *dy, const float *x, const tensor_t *w, size_t rows,
                     size_t in, size_t out);

/*
 * --- transformer.c: a decoder-only transformer over a small vocabulary, trained on one core. It
 * has token and position embeddings, blocks, and a separate output matrix. A block has causal
 * multi-head attention and a GELU network of four times the width, each after an RMS normalisation.
 * The model has no biases.
 */

/* All members are at least 1. `width` is a multiple of `heads`. */
typedef struct transformer_shape {
  size_t vocabulary; /* different tokens, at most 256 */
  size_t context;    /* tokens that the model processes at once */
  size_t width;
  size_t heads;
  size_t layers;
  size_t sequences; /* the largest number of sequences in one forward pass */
} transformer_shape_t;

struct transformer_layer;

typedef struct transformer {
  model_t model; /* has 4 + 6 * layers tensors */
  transformer_shape_t shape;
  unsigned char *tokens; /* filled in by the caller: [sequence][context + 1], each less than
                          * `vocabulary`; the last token of a sequence is only a target */

  struct transformer_layer *layers; /* not used by the caller, like the next ones */
  const tensor_t *final_gain, *head;
  float *stream;               /* the output of the last block */
  float *normed, *inverse_rms; /* results of the normalisation before `head` */
  float *d_stream, *d_normed, *d_wide, *d_scores;
} transformer_t;

/* Returns the model with uninitialised values, or NULL when out of memory. */
transformer_t *transformer_create(const transformer_shape_t *shape);

/* Draws the values from the seed. Ranks that give the same seed get the same values. The first
 * function initialises as GPT-2 does (Radford et al., 2019): embeddings and matrices have standard
 * deviation 0.02, and matrices that write to the residual stream have 0.02 / sqrt(2 layers). The
 * second keeps the variance of activations at 1: embeddings have standard deviation 1, and matrices
 * 1 / sqrt(rows). */
void transformer_initialise(transformer_t *model, uint64_t seed);
void transformer_initialise_unit(transformer_t *model, uint64_t seed);

/*
 * --- network.c: a small convolutional network for gray images. It has two convolutions of 3 x 3,
 * each with 2 x 2 max pooling and a ReLU, a dense layer with a ReLU, and a dense layer to the
 * classes.
 */

/* All members are at least 1, rows and columns at least 10. */
typedef struct network_shape {
  size_t rows, columns; /* the size of an image in pixels */
  size_t channels;      /* channels after the first convolution; the second has twice as many */
  size_t hidden;        /* units of the dense layer in the middle */
  size_t classes;       /* at most 256 */
  size_t images;        /* the largest number of images in one forward pass */
} network_shape_t;

/* Each layer has two tensors: weights, then the bias. */
enum { NETWORK_LAYERS = 4, NETWORK_TENSORS = 2 * NETWORK_LAYERS };

struct convolution;

typedef struct network {
  model_t model; /* the caller fills in its targets: the images' labels */
  network_shape_t shape;
  float *pixels; /* filled in by the caller: [image][row][column] */

  struct convolution *convolutions; /* not used by the caller, like the next ones */
  float *hidden, *d_hidden;         /* [image][hidden], after the ReLU */
} network_t;

/* Returns the network with uninitialised values, or NULL when out of memory. */
network_t *network_create(const network_shape_t *shape);

/* Draws the values from the seed. Ranks that give the same seed get the same values. */
void network_initialise(network_t *network, uint64_t seed);

/*
 * --- log_bilinear.c: a log-bilinear model of the next word (Mnih and Hinton, "Three new graphical
 * models for statistical language modelling", ICML 2007): It multiplies the table rows of the
 * preceding words by a matrix. The product predicts the next word's row in a second table. Nearly
 * all parameters are in the two tables. In the first table, a step's gradient is nonzero only in
 * the few rows whose words are in the batch.
 */

/* All members are at least 1. */
typedef struct log_bilinear_shape {
  size_t vocabulary; /* rows of a table */
  size_t width;      /* columns */
  size_t context;    /* the number of words before the predicted one */
  size_t samples;    /* the largest number of predictions in one forward pass */
} log_bilinear_shape_t;

/* The tensors: the table of preceding words, the matrix, the table of next words, and the next
 * words' biases. */
enum { CONTEXT_TABLE, MIXING, WORD_TABLE, WORD_BIAS, LOG_BILINEAR_TENSORS };

typedef struct log_bilinear {
  model_t model;
  log_bilinear_shape_t shape;
  uint32_t *words; /* filled in by the caller: [sample][context + 1], each less than `vocabulary`;
                    * the last word is the target */

  float *before, *d_before; /* not used by the caller: [sample][context][width] */
  float *mixed, *d_mixed;   /* [sample][width] */
} log_bilinear_t;

/* Returns the model with uninitialised values, or NULL when out of memory. */
log_bilinear_t *log_bilinear_create(const log_bilinear_shape_t *shape);

/* Draws the values from the seed. Ranks that give the same seed get the same values. */
void log_bilinear_initialise(log_bilinear_t *model, uint64_t seed);

#endif
