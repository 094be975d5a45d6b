/*
 * A decoder-only transformer over a small vocabulary, trained on one core: token and position
 * embeddings, blocks of causal multi-head attention and a GELU network of four times the width,
 * each behind an RMS normalisation, and a head of its own. No biases. Forward and backward are
 * written out by hand.
 *
 * Use: create, initialise; then per step forward, loss, backward, and give the gradients to an
 * optimizer that changes the values in place.
 */
#ifndef EXAMPLES_TRANSFORMER_H
#define EXAMPLES_TRANSFORMER_H

#include <stddef.h>
#include <stdint.h>

/* All at least 1; heads divides width. */
typedef struct transformer_shape {
  size_t vocabulary; /* different tokens, at most 256 */
  size_t context;    /* tokens that the model sees at once */
  size_t width;
  size_t heads;
  size_t layers;
  size_t sequences; /* most sequences in one forward pass */
} transformer_shape_t;

/* A matrix of parameters, or the gain of a normalisation, with the gradient of the latest
 * backward pass. */
typedef struct transformer_tensor {
  float *value;
  float *gradient;
  size_t count;
  int is_gain; /* gains are not meant to decay */
} transformer_tensor_t;

struct transformer_layer;

typedef struct transformer {
  transformer_shape_t shape;
  /* All parameters: 4 + 6 * layers tensors, in the order of the forward pass. The backward pass
   * comes to them in about the opposite order; it calls `ready`, when that is not NULL, as each
   * tensor's gradient is final, with the tensor's place in the list. */
  transformer_tensor_t *tensors;
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  size_t ntensors;
  size_t parameters; /* numbers in all tensors together */
  float *next; /* of the latest forward pass: [sequence][position][token], the probability that
                  this token comes next */

  struct transformer_layer *layers; /* the rest is the model's own */
  const transformer_tensor_t *final_gain, *head;
  float *stream;               /* what the last block hands to the head */
  float *normed, *inverse_rms; /* of the normalisation before the head */
  float *d_stream, *d_normed, *d_wide, *d_scores;
  void **allocations;
  size_t nallocations;
} transformer_t;

/* Returns the model, its values not yet initialised, or NULL when memory is out. */
transformer_t *transformer_create(const transformer_shape_t *shape);
void transformer_destroy(transformer_t *model);

/* Draws the values from the seed: the same on every rank that gives the same seed. The first begins
 * as GPT-2 does (Radford et al., 2019): embeddings and matrices of deviation 0.02, those that end
 * in the residual stream 0.02 / sqrt(2 layers). The second keeps the variance of activations at 1:
 * embeddings of deviation 1, matrices of 1 / sqrt(rows). */
void transformer_initialise(transformer_t *model, uint64_t seed);
void transformer_initialise_unit(transformer_t *model, uint64_t seed);

/* Predicts. tokens: [sequences][context + 1], each below the vocabulary; the last of each sequence
 * is only ever a target. Fills model->next. */
void transformer_forward(transformer_t *model, const unsigned char *tokens, size_t sequences);

/* The mean of -ln(probability of the token that did come next) over all positions of the latest
 * forward pass, which had the same arguments. */
double transformer_loss(const transformer_t *model, const unsigned char *tokens, size_t sequences);

/* The gradient of that loss, into the tensors' gradients, replacing what was there. Uses up
 * model->next: each backward pass needs a forward pass of its own. */
void transformer_backward(transformer_t *model, const unsigned char *tokens, size_t sequences);

#endif
