/*
 * A small convolutional network for gray images: two convolutions of 3 x 3, each with its largest
 * values of 2 x 2 and a ReLU, a dense layer with a ReLU, and a dense one to the classes. Forward
 * and backward are written out by hand.
 */
#ifndef EXAMPLES_NETWORK_H
#define EXAMPLES_NETWORK_H

#include "examples/model.h"

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

#endif
