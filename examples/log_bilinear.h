/*
 * A log-bilinear model of the next word (Mnih and Hinton, "Three new graphical models for
 * statistical language modelling", ICML 2007): the rows of a table for the words before, times a
 * matrix, give the row that the next word should have in a second table. Nearly all parameters are
 * in the two tables; of the first, a step's gradient touches the few rows whose words were drawn.
 * Forward and backward are written out by hand.
 *
 * Use: create, initialise; then per step forward, loss, backward, and give the gradients to an
 * optimizer that changes the values in place.
 */
#ifndef EXAMPLES_LOG_BILINEAR_H
#define EXAMPLES_LOG_BILINEAR_H

#include <stddef.h>
#include <stdint.h>

/* All at least 1. */
typedef struct log_bilinear_shape {
  size_t vocabulary; /* rows of a table */
  size_t width;      /* columns */
  size_t context;    /* words before the one that is predicted */
  size_t samples;    /* most predictions in one forward pass */
} log_bilinear_shape_t;

/* Rows of the words before, the matrix, rows of the next word, and its bias. */
enum { CONTEXT_TABLE, MIXING, WORD_TABLE, WORD_BIAS, LOG_BILINEAR_TENSORS };

typedef struct log_bilinear_tensor {
  float *value;
  float *gradient;
  size_t count;
} log_bilinear_tensor_t;

typedef struct log_bilinear {
  log_bilinear_shape_t shape;
  log_bilinear_tensor_t tensors[LOG_BILINEAR_TENSORS];
  /* The backward pass calls it, when it is not NULL, as each tensor's gradient is final. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  size_t parameters;
  float *next; /* of the latest forward pass: [sample][word], probabilities */

  float *before, *d_before; /* the rest is the model's own: [sample][context][width] */
  float *mixed, *d_mixed;   /* [sample][width] */
  float *memory;
} log_bilinear_t;

/* Returns the model, its values not yet initialised, or NULL when memory is out. */
log_bilinear_t *log_bilinear_create(const log_bilinear_shape_t *shape);
void log_bilinear_destroy(log_bilinear_t *model);

/* Draws the values from the seed: the same on every rank that gives the same seed. */
void log_bilinear_initialise(log_bilinear_t *model, uint64_t seed);

/* Predicts. words: [samples][context + 1], each below the vocabulary; the last is the target. */
void log_bilinear_forward(log_bilinear_t *model, const uint32_t *words, size_t samples);

/* The mean of -ln(probability of the target) of the latest forward pass, which had the same
 * arguments. */
double log_bilinear_loss(const log_bilinear_t *model, const uint32_t *words, size_t samples);

/* The gradient of that loss, into the tensors' gradients, replacing what was there. Uses up
 * model->next: each backward pass needs a forward pass of its own. */
void log_bilinear_backward(log_bilinear_t *model, const uint32_t *words, size_t samples);

#endif
