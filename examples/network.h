/*
 * A small convolutional network for gray images: two convolutions of 3 x 3, each with its largest
 * values of 2 x 2 and a ReLU, a dense layer with a ReLU, and a dense one to the classes. Forward
 * and backward are written out by hand.
 *
 * Use: create, initialise; then per step forward, loss, backward, and give the gradients to an
 * optimizer that changes the values in place.
 */
#ifndef EXAMPLES_NETWORK_H
#define EXAMPLES_NETWORK_H

#include <stddef.h>
#include <stdint.h>

/* All at least 1; rows and columns at least 10. */
typedef struct network_shape {
  size_t rows, columns; /* of an image */
  size_t channels;      /* of the first convolution; the second has twice as many */
  size_t hidden;        /* units of the dense layer between */
  size_t classes;       /* at most 256 */
  size_t images;        /* most images in one forward pass */
} network_shape_t;

typedef struct network_tensor {
  float *value;
  float *gradient;
  size_t count;
  int is_bias; /* biases are not meant to decay */
} network_tensor_t;

/* Weights, then the bias, of each layer. */
enum { NETWORK_LAYERS = 4, NETWORK_TENSORS = 2 * NETWORK_LAYERS };

struct convolution;

typedef struct network {
  network_shape_t shape;
  network_tensor_t tensors[NETWORK_TENSORS];
  /* The backward pass calls it, when it is not NULL, as each tensor's gradient is final. */
  void (*ready)(void *context, size_t tensor);
  void *ready_context;
  size_t parameters;
  float *predicted; /* of the latest forward pass: [image][class], probabilities */

  const float *pixels; /* the rest is the network's own */
  struct convolution *convolutions;
  float *hidden, *d_hidden; /* [image][hidden], after the ReLU */
  float *d_flat;            /* [image][what the second convolution hands on] */
  void *memory;
} network_t;

/* Returns the network, its values not yet initialised, or NULL when memory is out. */
network_t *network_create(const network_shape_t *shape);
void network_destroy(network_t *network);

/* Draws the values from the seed: the same on every rank that gives the same seed. */
void network_initialise(network_t *network, uint64_t seed);

/* Predicts. pixels: [images][rows][columns]. They are the caller's, and stay until the backward
 * pass. */
void network_forward(network_t *network, const float *pixels, size_t images);

/* Results of the latest forward pass: the mean of -ln(probability of the label), and the number of
 * images without a class that is more probable than their label. */
double network_loss(const network_t *network, const unsigned char *labels, size_t images);
size_t network_correct(const network_t *network, const unsigned char *labels, size_t images);

/* The gradient of that loss, into the tensors' gradients, replacing what was there. Uses up
 * network->predicted: each backward pass needs a forward pass of its own. */
void network_backward(network_t *network, const unsigned char *labels, size_t images);

#endif
