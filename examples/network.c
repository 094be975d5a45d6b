/*
 * The network of network.h. Channels are the last dimension everywhere, so that every inner loop
 * runs over them; a convolution is a product of unfolded patches with the weights, by the matrix
 * product of transformer_math.h.
 */
#include "examples/network.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/random.h"
#include "examples/transformer_math.h"
#include "examples/vectorised.h"

enum { KERNEL = 3, TAPS = KERNEL * KERNEL };

/* Places in network->tensors of weights; the bias is behind. */
enum { FIRST = 0, SECOND = 2, DENSE = 4, HEAD = 6 };

/* A convolution and its successors: sums of the patches, the largest of each 2 x 2, ReLU. */
struct convolution {
  size_t rows, columns, channels; /* of what comes in */
  size_t filters;
  size_t sum_rows, sum_columns; /* after the convolution */
  size_t out_rows, out_columns; /* half of that, rounded down */
  size_t tensor;                /* place of its weights, [tap][channel][filter] */
  float *patches, *d_patches;   /* of one image: [row][column][tap][channel] */
  float *sums;                  /* [image][row][column][filter], without the bias */
  float *d_sums;                /* of one image */
  float *out, *d_out;           /* [image][row][column][filter], after the ReLU */
};

static size_t in_size(const struct convolution *c) { return c->rows * c->columns * c->channels; }
static size_t sum_positions(const struct convolution *c) { return c->sum_rows * c->sum_columns; }
static size_t patch_size(const struct convolution *c) { return TAPS * c->channels; }
static size_t out_size(const struct convolution *c) {
  return c->out_rows * c->out_columns * c->filters;
}

/* Tells that the tensors' gradients will not change any more in this backward pass. */
static void report_ready(const network_t *network, size_t weights) {
  for (size_t tensor = weights + 2; network->ready && tensor-- > weights;)
    network->ready(network->ready_context, tensor);
}

/* --- Patches -----------------------------------------------------------------------------------*/

/* Unfolds patches. The three channels-long columns of a row of a patch lie next to each other. */
static void unfold(const struct convolution *c, const float *in) {
  const size_t run = KERNEL * c->channels;
  float *patch = c->patches;
  for (size_t y = 0; y < c->sum_rows; y++)
    for (size_t x = 0; x < c->sum_columns; x++)
      for (size_t k = 0; k < KERNEL; k++, patch += run)
        memcpy(patch, in + ((y + k) * c->columns + x) * c->channels, run * sizeof(float));
}

/* Adds up the gradient of the patches where they overlap. */
VECTORISED static void fold(const struct convolution *c, float *restrict d_in) {
  const size_t run = KERNEL * c->channels;
  const float *restrict patch = c->d_patches;
  memset(d_in, 0, in_size(c) * sizeof(float));
  for (size_t y = 0; y < c->sum_rows; y++)
    for (size_t x = 0; x < c->sum_columns; x++)
      for (size_t k = 0; k < KERNEL; k++, patch += run) {
        float *to = d_in + ((y + k) * c->columns + x) * c->channels;
        for (size_t i = 0; i < run; i++)
          to[i] += patch[i];
      }
}

/* --- The largest of four -----------------------------------------------------------------------*/

static inline float larger(float a, float b) { return a > b ? a : b; }

/* max(x, 0), but not-a-number stays one. */
static inline float rectify(float x) { return x < 0.0f ? 0.0f : x; }
static inline float rectify_backward(float d, float y) { return y <= 0.0f ? 0.0f : d; }

VECTORISED static void pool(const struct convolution *c, const float *restrict sums,
                            const float *restrict bias, float *restrict out) {
  const size_t n = c->filters, row = c->sum_columns * n;
  for (size_t y = 0; y < c->out_rows; y++)
    for (size_t x = 0; x < c->out_columns; x++, out += n) {
      const float *at = sums + 2 * y * row + 2 * x * n;
      for (size_t f = 0; f < n; f++) {
        const float largest =
            larger(larger(at[f], at[n + f]), larger(at[row + f], at[row + n + f]));
        out[f] = rectify(largest + bias[f]);
      }
    }
}

/* Gives a gradient to the first of the four that is the largest, if the ReLU lets it pass. */
VECTORISED static void pool_backward(const struct convolution *c, const float *restrict sums,
                                     const float *restrict out, const float *restrict d_out,
                                     float *restrict d_sums, float *restrict d_bias) {
  const size_t n = c->filters, row = c->sum_columns * n;
  memset(d_sums, 0, sum_positions(c) * n * sizeof(float));
  for (size_t y = 0; y < c->out_rows; y++)
    for (size_t x = 0; x < c->out_columns; x++, out += n, d_out += n) {
      const float *a = sums + 2 * y * row + 2 * x * n, *b = a + row;
      float *da = d_sums + 2 * y * row + 2 * x * n, *db = da + row;
      for (size_t f = 0; f < n; f++) {
        const float largest = larger(larger(a[f], a[n + f]), larger(b[f], b[n + f]));
        const float d = rectify_backward(d_out[f], out[f]);
        const int first = a[f] == largest, second = !first & (a[n + f] == largest);
        const int third = !(first | second) & (b[f] == largest);
        da[f] = first ? d : 0.0f;
        da[n + f] = second ? d : 0.0f;
        db[f] = third ? d : 0.0f;
        db[n + f] = (first | second | third) ? 0.0f : d;
        d_bias[f] += d;
      }
    }
}

/* --- Convolutions ------------------------------------------------------------------------------*/

static void convolve(const network_t *network, const struct convolution *c, const float *in,
                     size_t images) {
  const size_t positions = sum_positions(c), patch = patch_size(c);
  const network_tensor_t *weights = &network->tensors[c->tensor];
  for (size_t i = 0; i < images; i++) {
    float *sums = c->sums + i * positions * c->filters;
    unfold(c, in + i * in_size(c));
    multiply(sums, c->filters, stored(c->patches, patch), stored(weights->value, c->filters),
             positions, patch, c->filters, REPLACE);
    pool(c, sums, weights[1].value, c->out + i * out_size(c));
  }
}

/* Computes the gradients, and d_in, if that is not NULL, from d_out. */
static void convolve_backward(const network_t *network, const struct convolution *c,
                              const float *in, float *d_in, size_t images) {
  const size_t positions = sum_positions(c), patch = patch_size(c);
  const network_tensor_t *weights = &network->tensors[c->tensor], *bias = weights + 1;
  memset(weights->gradient, 0, weights->count * sizeof(float));
  memset(bias->gradient, 0, bias->count * sizeof(float));
  for (size_t i = 0; i < images; i++) {
    pool_backward(c, c->sums + i * positions * c->filters, c->out + i * out_size(c),
                  c->d_out + i * out_size(c), c->d_sums, bias->gradient);
    unfold(c, in + i * in_size(c));
    multiply(weights->gradient, c->filters, transposed(c->patches, patch),
             stored(c->d_sums, c->filters), patch, positions, c->filters, ADD);
    if (!d_in)
      continue;
    multiply(c->d_patches, patch, stored(c->d_sums, c->filters),
             transposed(weights->value, c->filters), positions, c->filters, patch, REPLACE);
    fold(c, d_in + i * in_size(c));
  }
  report_ready(network, c->tensor);
}

/* --- Dense layers ------------------------------------------------------------------------------*/

static void dense(const network_tensor_t *weights, const float *x, float *y, size_t images,
                  size_t in, size_t out) {
  for (size_t i = 0; i < images; i++)
    memcpy(y + i * out, weights[1].value, out * sizeof(float));
  multiply(y, out, stored(x, in), stored(weights->value, out), images, in, out, ADD);
}

static void dense_backward(const network_t *network, size_t tensor, const float *x, float *dx,
                           const float *dy, size_t images, size_t in, size_t out) {
  const network_tensor_t *weights = &network->tensors[tensor], *bias = weights + 1;
  multiply(weights->gradient, out, transposed(x, in), stored(dy, out), in, images, out, REPLACE);
  multiply(dx, in, stored(dy, out), transposed(weights->value, out), images, out, in, REPLACE);
  memset(bias->gradient, 0, out * sizeof(float));
  for (size_t i = 0; i < images; i++)
    for (size_t j = 0; j < out; j++)
      bias->gradient[j] += dy[i * out + j];
  report_ready(network, tensor);
}

/* --- The whole ---------------------------------------------------------------------------------*/

void network_forward(network_t *network, const float *pixels, size_t images) {
  const network_shape_t *shape = &network->shape;
  const struct convolution *first = &network->convolutions[0], *second = first + 1;
  const size_t flat = out_size(second), hidden = shape->hidden;
  network->pixels = pixels;
  convolve(network, first, pixels, images);
  convolve(network, second, first->out, images);
  dense(&network->tensors[DENSE], second->out, network->hidden, images, flat, hidden);
  for (size_t i = 0; i < images * hidden; i++)
    network->hidden[i] = rectify(network->hidden[i]);
  dense(&network->tensors[HEAD], network->hidden, network->predicted, images, hidden,
        shape->classes);
  softmax(network->predicted, images, shape->classes, 1.0f, 0);
}

double network_loss(const network_t *network, const unsigned char *labels, size_t images) {
  double sum = 0.0;
  for (size_t i = 0; i < images; i++) {
    const float of_label = network->predicted[i * network->shape.classes + labels[i]];
    sum -= log((double)of_label + (double)FLT_MIN);
  }
  return sum / (double)images;
}

size_t network_correct(const network_t *network, const unsigned char *labels, size_t images) {
  const size_t classes = network->shape.classes;
  size_t correct = 0;
  for (size_t i = 0; i < images; i++) {
    const float *predicted = network->predicted + i * classes;
    size_t above = 0;
    for (size_t k = 0; k < classes; k++)
      above += predicted[k] <= predicted[labels[i]] ? 0 : 1; /* not-a-number is never right */
    correct += above == 0;
  }
  return correct;
}

void network_backward(network_t *network, const unsigned char *labels, size_t images) {
  const network_shape_t *shape = &network->shape;
  const struct convolution *first = &network->convolutions[0], *second = first + 1;
  const size_t flat = out_size(second), hidden = shape->hidden, classes = shape->classes;
  float *d_logits = network->predicted;
  for (size_t i = 0; i < images; i++)
    d_logits[i * classes + labels[i]] -= 1.0f;
  for (size_t i = 0; i < images * classes; i++)
    d_logits[i] /= (float)images;
  dense_backward(network, HEAD, network->hidden, network->d_hidden, d_logits, images, hidden,
                 classes);
  for (size_t i = 0; i < images * hidden; i++)
    network->d_hidden[i] = rectify_backward(network->d_hidden[i], network->hidden[i]);
  dense_backward(network, DENSE, second->out, second->d_out, network->d_hidden, images, flat,
                 hidden);
  convolve_backward(network, second, first->out, first->d_out, images);
  convolve_backward(network, first, network->pixels, NULL, images);
}

/* --- Memory and first values -------------------------------------------------------------------*/

static struct convolution describe(size_t rows, size_t columns, size_t channels, size_t filters,
                                   size_t tensor) {
  const size_t sum_rows = rows - KERNEL + 1, sum_columns = columns - KERNEL + 1;
  return (struct convolution){.rows = rows,
                              .columns = columns,
                              .channels = channels,
                              .filters = filters,
                              .sum_rows = sum_rows,
                              .sum_columns = sum_columns,
                              .out_rows = sum_rows / 2,
                              .out_columns = sum_columns / 2,
                              .tensor = tensor};
}

/* Takes the next floats of the memory; before there is any, it only counts them. Whole cache
 * lines. */
static float *take(network_t *network, size_t *used, size_t count) {
  float *at = network->memory ? (float *)network->memory + *used : NULL;
  *used += (count + 15) / 16 * 16;
  return at;
}

static void place_layer(network_t *network, size_t *used, size_t weights, size_t in, size_t out) {
  const size_t counts[2] = {in * out, out};
  for (size_t i = 0; i < 2; i++)
    network->tensors[weights + i] = (network_tensor_t){.value = take(network, used, counts[i]),
                                                       .gradient = take(network, used, counts[i]),
                                                       .count = counts[i],
                                                       .is_bias = i == 1};
}

static void place_convolution(network_t *network, size_t *used, struct convolution *c) {
  const size_t images = network->shape.images, sums = sum_positions(c) * c->filters;
  place_layer(network, used, c->tensor, patch_size(c), c->filters);
  c->patches = take(network, used, sum_positions(c) * patch_size(c));
  c->d_patches = take(network, used, sum_positions(c) * patch_size(c));
  c->sums = take(network, used, images * sums);
  c->d_sums = take(network, used, sums);
  c->out = take(network, used, images * out_size(c));
  c->d_out = take(network, used, images * out_size(c));
}

/* Assigns memory to all arrays; returns the number of floats. */
static size_t place_all(network_t *network) {
  const network_shape_t *shape = &network->shape;
  struct convolution *second = &network->convolutions[1];
  size_t used = 0;
  place_convolution(network, &used, &network->convolutions[0]);
  place_convolution(network, &used, second);
  place_layer(network, &used, DENSE, out_size(second), shape->hidden);
  place_layer(network, &used, HEAD, shape->hidden, shape->classes);
  network->hidden = take(network, &used, shape->images * shape->hidden);
  network->d_hidden = take(network, &used, shape->images * shape->hidden);
  network->predicted = take(network, &used, shape->images * shape->classes);
  return used;
}

network_t *network_create(const network_shape_t *shape) {
  network_t *network = calloc(1, sizeof *network);
  struct convolution *convolutions = calloc(2, sizeof *convolutions);
  if (network && convolutions) {
    const size_t channels = shape->channels;
    network->shape = *shape;
    network->convolutions = convolutions;
    convolutions[0] = describe(shape->rows, shape->columns, 1, channels, FIRST);
    convolutions[1] = describe(convolutions[0].out_rows, convolutions[0].out_columns, channels,
                               2 * channels, SECOND);
    network->memory = calloc(place_all(network), sizeof(float));
    if (network->memory) {
      place_all(network);
      for (size_t t = 0; t < NETWORK_TENSORS; t++)
        network->parameters += network->tensors[t].count;
      return network;
    }
  }
  free(convolutions);
  free(network);
  return NULL;
}

void network_destroy(network_t *network) {
  if (!network)
    return;
  free(network->convolutions);
  free(network->memory);
  free(network);
}

/* Draws uniform values with the standard deviation sqrt(2 / inputs), which keeps the variance
 * through a ReLU (He et al., arXiv 1502.01852). */
void network_initialise(network_t *network, uint64_t seed) {
  uint64_t random = random_stream(seed, 0, 0);
  for (size_t t = 0; t < NETWORK_TENSORS; t += 2) {
    const network_tensor_t *weights = &network->tensors[t], *bias = weights + 1;
    const float width = sqrtf(6.0f * (float)bias->count / (float)weights->count);
    for (size_t i = 0; i < weights->count; i++)
      weights->value[i] = width * (2.0f * random_uniform(&random) - 1.0f);
    memset(bias->value, 0, bias->count * sizeof(float));
  }
}
