/*
 * A decoder-only transformer over a small vocabulary, trained on one core: token and position
 * embeddings, blocks of causal multi-head attention and a GELU network of four times the width,
 * each behind an RMS normalisation, and a head of its own. No biases. Forward and backward are
 * written out by hand.
 */
#ifndef EXAMPLES_TRANSFORMER_H
#define EXAMPLES_TRANSFORMER_H

#include "examples/model.h"

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
  float *stream;               /* what the last block hands to the head */
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

#endif
