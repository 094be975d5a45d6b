/*
 * A log-bilinear model of the next word (Mnih and Hinton, "Three new graphical models for
 * statistical language modelling", ICML 2007): the rows of a table for the words before, times a
 * matrix, give the row that the next word should have in a second table. Nearly all parameters are
 * in the two tables; of the first, a step's gradient touches the few rows whose words were drawn.
 * Forward and backward are written out by hand.
 */
#ifndef EXAMPLES_LOG_BILINEAR_H
#define EXAMPLES_LOG_BILINEAR_H

#include "examples/model.h"

/* All at least 1. */
typedef struct log_bilinear_shape {
  size_t vocabulary; /* rows of a table */
  size_t width;      /* columns */
  size_t context;    /* words before the one that is predicted */
  size_t samples;    /* most predictions in one forward pass */
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
