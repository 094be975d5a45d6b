/*
 * Implements the convolutional network of model.h. Channels are the last dimension of all arrays,
 * so that every inner loop runs over them. A convolution is a product of unfolded patches and
 * weights, computed by the matrix product of model.c.
 */
#include "examples/model.h"

#include <math.h>
#include <string.h>

#include "examples/numbers.h"

enum { KERNEL = 3, TAPS = KERNEL * KERNEL };

/* Indices of the weights among the tensors. Each is followed by the index of its bias. */
enum { FIRST = 0, SECOND = 2, DENSE = 4, HEAD = 6 };

/* A convolution layer: a weighted sum of each patch, the maximum of each 2 x 2 sums, and a ReLU. */
struct convolution {
  size_t rows, columns, channels; /* the layer's input */
  size_t filters;
  size_t sum_rows, sum_columns; /* the size after the convolution */
  size_t out_rows, out_columns; /* the size after pooling: half of it, rounded down */
  size_t tensor;                /* the index of the weights' tensor, [tap][channel][filter] */
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

static const network_t *network_of(const model_t *model) {
  return (const network_t *)(const void *)model;
}

static const tensor_t *weights_at(const network_t *network, size_t place) {
  return &network->model.tensors[place];
}

/* Reports that the gradients of weights and their bias are final. */
static void network_report_ready(const network_t *network, size_t weights) {
  model_report_ready(&network->model, weights_at(network, weights + 1));
  model_report_ready(&network->model, weights_at(network, weights));
}

/* --- Patches -----------------------------------------------------------------------------------*/

/* Copies the patches of an image to c->patches. A row of a patch is three columns of `channels`
 * elements, which are contiguous in the image. */
static void unfold_patches(const struct convolution *c, const float *in) {
  const size_t run = KERNEL * c->channels;
  float *patch = c->patches;
  for (size_t y = 0; y < c->sum_rows; y++)
    for (size_t x = 0; x < c->sum_columns; x++)
      for (size_t k = 0; k < KERNEL; k++, patch += run)
        memcpy(patch, in + ((y + k) * c->columns + x) * c->channels, run * sizeof(float));
}

/* Computes d_in from the gradients of the patches, which overlap. */
VECTORISED static void fold_gradients(const struct convolution *c, float *restrict d_in) {
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

/* --- Max pooling
 * ------------------------------------------------------------------------------- */

static inline float network_larger(float a, float b) { return a > b ? a : b; }

/* Returns max(x, 0). A NaN stays a NaN. */
static inline float rectify(float x) { return x < 0.0f ? 0.0f : x; }
static inline float rectify_backward(float d, float y) { return y <= 0.0f ? 0.0f : d; }

VECTORISED static void pool_sums(const struct convolution *c, const float *restrict sums,
                                 const float *restrict bias, float *restrict out) {
  const size_t n = c->filters, row = c->sum_columns * n;
  for (size_t y = 0; y < c->out_rows; y++)
    for (size_t x = 0; x < c->out_columns; x++, out += n) {
      const float *at = sums + 2 * y * row + 2 * x * n;
      for (size_t f = 0; f < n; f++) {
        const float largest = network_larger(network_larger(at[f], at[n + f]),
                                             network_larger(at[row + f], at[row + n + f]));
        out[f] = rectify(largest + bias[f]);
      }
    }
}

/* Adds each output's gradient to the gradient of the first maximum among its four sums, if the
 * ReLU's output is positive. */
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
        const float largest =
            network_larger(network_larger(a[f], a[n + f]), network_larger(b[f], b[n + f]));
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
  const tensor_t *weights = weights_at(network, c->tensor);
  for (size_t i = 0; i < images; i++) {
    float *sums = c->sums + i * positions * c->filters;
    unfold_patches(c, in + i * in_size(c));
    multiply(sums, c->filters, stored(c->patches, patch), stored(weights->value, c->filters),
             positions, patch, c->filters, REPLACE);
    pool_sums(c, sums, weights[1].value, c->out + i * out_size(c));
  }
}

/* Computes the gradients of weights and bias from d_out, and the gradient d_in, unless d_in is
 * NULL. */
static void convolve_backward(const network_t *network, const struct convolution *c,
                              const float *in, float *d_in, size_t images) {
  const size_t positions = sum_positions(c), patch = patch_size(c);
  const tensor_t *weights = weights_at(network, c->tensor), *bias = weights + 1;
  memset(weights->gradient, 0, weights->count * sizeof(float));
  memset(bias->gradient, 0, bias->count * sizeof(float));
  for (size_t i = 0; i < images; i++) {
    pool_backward(c, c->sums + i * positions * c->filters, c->out + i * out_size(c),
                  c->d_out + i * out_size(c), c->d_sums, bias->gradient);
    unfold_patches(c, in + i * in_size(c));
    multiply(weights->gradient, c->filters, transposed(c->patches, patch),
             stored(c->d_sums, c->filters), patch, positions, c->filters, ADD);
    if (!d_in)
      continue;
    multiply(c->d_patches, patch, stored(c->d_sums, c->filters),
             transposed(weights->value, c->filters), positions, c->filters, patch, REPLACE);
    fold_gradients(c, d_in + i * in_size(c));
  }
  network_report_ready(network, c->tensor);
}

/* --- Dense layers ------------------------------------------------------------------------------*/

static void apply_dense(const tensor_t *weights, const float *x, float *y, size_t images, size_t in,
                        size_t out) {
  for (size_t i = 0; i < images; i++)
    memcpy(y + i * out, weights[1].value, out * sizeof(float));
  linear(y, x, weights, images, in, out, ADD);
}

static void dense_backward(const network_t *network, size_t tensor, const float *x, float *dx,
                           const float *dy, size_t images, size_t in, size_t out) {
  const tensor_t *weights = weights_at(network, tensor), *bias = weights + 1;
  linear_backward(dx, dy, x, weights, images, in, out);
  memset(bias->gradient, 0, out * sizeof(float));
  for (size_t i = 0; i < images; i++)
    for (size_t j = 0; j < out; j++)
      bias->gradient[j] += dy[i * out + j];
  network_report_ready(network, tensor);
}

/* --- The whole network
 * ------------------------------------------------------------------------- */

static void network_forward(model_t *model, size_t images) {
  const network_t *network = network_of(model);
  const struct convolution *first = &network->convolutions[0], *second = first + 1;
  const size_t flat = out_size(second), hidden = network->shape.hidden;
  convolve(network, first, network->pixels, images);
  convolve(network, second, first->out, images);
  apply_dense(weights_at(network, DENSE), second->out, network->hidden, images, flat, hidden);
  for (size_t i = 0; i < images * hidden; i++)
    network->hidden[i] = rectify(network->hidden[i]);
  apply_dense(weights_at(network, HEAD), network->hidden, model->predicted, images, hidden,
              model->classes);
  softmax(model->predicted, images, model->classes, 1.0f, 0);
}

static void network_backward(model_t *model, size_t images) {
  const network_t *network = network_of(model);
  const struct convolution *first = &network->convolutions[0], *second = first + 1;
  const size_t flat = out_size(second), hidden = network->shape.hidden;
  dense_backward(network, HEAD, network->hidden, network->d_hidden,
                 model_loss_backward(model, images), images, hidden, model->classes);
  for (size_t i = 0; i < images * hidden; i++)
    network->d_hidden[i] = rectify_backward(network->d_hidden[i], network->hidden[i]);
  dense_backward(network, DENSE, second->out, second->d_out, network->d_hidden, images, flat,
                 hidden);
  convolve_backward(network, second, first->out, first->d_out, images);
  convolve_backward(network, first, network->pixels, NULL, images);
}

/* --- Memory and first values -------------------------------------------------------------------*/

static void network_create_layer(network_t *network, size_t weights, size_t in, size_t out) {
  model_tensor(&network->model, weights, in * out, 1);
  model_tensor(&network->model, weights + 1, out, 0);
}

static void create_convolution(network_t *network, struct convolution *c, struct convolution like) {
  const size_t images = network->shape.images;
  model_t *model = &network->model;
  *c = like;
  c->sum_rows = c->rows - KERNEL + 1;
  c->sum_columns = c->columns - KERNEL + 1;
  c->out_rows = c->sum_rows / 2;
  c->out_columns = c->sum_columns / 2;
  network_create_layer(network, c->tensor, patch_size(c), c->filters);
  c->patches = model_floats(model, sum_positions(c) * patch_size(c));
  c->d_patches = model_floats(model, sum_positions(c) * patch_size(c));
  c->sums = model_floats(model, images * sum_positions(c) * c->filters);
  c->d_sums = model_floats(model, sum_positions(c) * c->filters);
  c->out = model_floats(model, images * out_size(c));
  c->d_out = model_floats(model, images * out_size(c));
}

static void create_layers(network_t *network) {
  const network_shape_t *shape = &network->shape;
  struct convolution *first = network->convolutions, *second = first + 1;
  create_convolution(network, first,
                     (struct convolution){.rows = shape->rows,
                                          .columns = shape->columns,
                                          .channels = 1,
                                          .filters = shape->channels,
                                          .tensor = FIRST});
  create_convolution(network, second,
                     (struct convolution){.rows = first->out_rows,
                                          .columns = first->out_columns,
                                          .channels = shape->channels,
                                          .filters = 2 * shape->channels,
                                          .tensor = SECOND});
  network_create_layer(network, DENSE, out_size(second), shape->hidden);
  network_create_layer(network, HEAD, shape->hidden, shape->classes);
}

network_t *network_create(const network_shape_t *shape) {
  const model_t like = {.ntensors = NETWORK_TENSORS,
                        .rows = 1,
                        .classes = shape->classes,
                        .forward = network_forward,
                        .backward = network_backward};
  network_t *network = model_create(sizeof *network, &like, shape->images);
  if (!network)
    return NULL;
  network->shape = *shape;
  network->convolutions = model_array(&network->model, 2, sizeof *network->convolutions);
  if (network->convolutions)
    create_layers(network);
  network->pixels = model_floats(&network->model, shape->images * shape->rows * shape->columns);
  network->hidden = model_floats(&network->model, shape->images * shape->hidden);
  network->d_hidden = model_floats(&network->model, shape->images * shape->hidden);
  return model_complete(&network->model);
}

/* Draws uniform values with the standard deviation sqrt(2 / inputs). A layer with a ReLU then keeps
 * the variance (He et al., arXiv 1502.01852). */
void network_initialise(network_t *network, uint64_t seed) {
  uint64_t random = random_stream(seed, 0, 0);
  for (size_t t = 0; t < NETWORK_TENSORS; t += 2) {
    const tensor_t *weights = weights_at(network, t), *bias = weights + 1;
    tensor_draw(weights, sqrtf(6.0f * (float)bias->count / (float)weights->count), &random);
    memset(bias->value, 0, bias->count * sizeof(float));
  }
}
