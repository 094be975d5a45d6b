/*
 * The kernels of transformer_cuda.cu: all that lies between the matrix products, each next to its
 * backward. Arrays are row-major. `Number` is what the products read and write, bfloat16 or float;
 * the arithmetic is float. Every sum has an order of its own, so there are no atomics.
 *
 * A row is the work of a warp, whose lanes take every 32nd column; what has no rows is the work of
 * a thread an element.
 */
#ifndef EXAMPLES_TRANSFORMER_KERNELS_CUH
#define EXAMPLES_TRANSFORMER_KERNELS_CUH

#include <cuda_runtime.h>
#include <float.h>
#include <stddef.h>
#include <stdint.h>

namespace on_device {

constexpr unsigned WARP = 32, THREADS = 128; /* of a block: four rows */

/* --- Numbers -----------------------------------------------------------------------------------*/

/* The upper half of a float. */
struct bfloat16 {
  uint16_t bits;
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bfloat16 x) { return __uint_as_float((uint32_t)x.bits << 16); }

__device__ inline void store(float *y, float x) { *y = x; }

/* To the nearest, ties to even. What is not a number stays so: rounding might carry it into an
 * infinity. */
__device__ inline void store(bfloat16 *y, float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u;
  y->bits = (uint16_t)(rounded >> 16);
}

/* --- Who does what -----------------------------------------------------------------------------*/

__device__ inline size_t this_element() { return (size_t)blockIdx.x * THREADS + threadIdx.x; }
__device__ inline size_t this_row() { return this_element() / WARP; }
__device__ inline size_t this_lane() { return threadIdx.x % WARP; }

/* Of the lanes' numbers, in every lane. */
__device__ inline float sum(float x) {
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

__device__ inline float largest(float x) {
  for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

/* --- Copies ------------------------------------------------------------------------------------*/

template <typename Number> __global__ void round_values(Number *y, const float *x, size_t count) {
  const size_t i = this_element();
  if (i < count)
    store(&y[i], x[i]);
}

/* y[i] = x[0][i] + x[1][i] + ..., in this order. */
static __global__ void sum_slices(float *y, const float *x, size_t slices, size_t count) {
  const size_t i = this_element();
  float total = 0.0f;
  for (size_t s = 0; i < count && s < slices; s++)
    total += x[s * count + i];
  if (i < count)
    y[i] = total;
}

/* Where a head of a row lies: with the heads of a row together, [row][part][head][column], or with
 * the rows of a head together, [part][sequence][head][position][column], as products of one head
 * after the other want it. The parts are query, key and value, or just one. */
struct head_layout {
  size_t parts, rows, context, heads, columns;
};

__device__ inline size_t split_place(head_layout at, size_t head_of_row) {
  const size_t head = head_of_row % at.heads, part = head_of_row / at.heads % at.parts;
  const size_t row = head_of_row / at.heads / at.parts;
  const size_t sequence = part * (at.rows / at.context) + row / at.context;
  return ((sequence * at.heads + head) * at.context + row % at.context) * at.columns;
}

template <typename Number>
__global__ void split_heads(Number *split, const Number *together, head_layout at) {
  const size_t head = this_row();
  if (head >= at.rows * at.parts * at.heads)
    return;
  for (size_t j = this_lane(); j < at.columns; j += WARP)
    split[split_place(at, head) + j] = together[head * at.columns + j];
}

template <typename Number>
__global__ void join_heads(Number *together, const Number *split, head_layout at) {
  const size_t head = this_row();
  if (head >= at.rows * at.parts * at.heads)
    return;
  for (size_t j = this_lane(); j < at.columns; j += WARP)
    together[head * at.columns + j] = split[split_place(at, head) + j];
}

/* --- Embedding ---------------------------------------------------------------------------------*/

/* The token of a row, and the one that comes next: tokens is [sequence][context + 1]. */
__device__ inline size_t token_of(const unsigned char *tokens, size_t row, size_t context) {
  return tokens[row + row / context];
}
__device__ inline size_t target_of(const unsigned char *tokens, size_t row, size_t context) {
  return tokens[row + row / context + 1];
}

static __global__ void embed(float *x, const float *token, const float *position,
                             const unsigned char *tokens, size_t rows, size_t context,
                             size_t width) {
  const size_t row = this_row();
  if (row >= rows)
    return;
  token += token_of(tokens, row, context) * width;
  position += row % context * width;
  for (size_t j = this_lane(); j < width; j += WARP)
    x[row * width + j] = token[j] + position[j];
}

/* Rows of zeros with a one at the token: the transpose of this times the gradient of the rows adds
 * up, for each token, the gradients of its rows. */
template <typename Number>
__global__ void one_hot(Number *y, const unsigned char *tokens, size_t rows, size_t context,
                        size_t vocabulary) {
  const size_t row = this_row();
  if (row >= rows)
    return;
  for (size_t j = this_lane(); j < vocabulary; j += WARP)
    store(&y[row * vocabulary + j], j == token_of(tokens, row, context) ? 1.0f : 0.0f);
}

/* --- Normalisation: transformer_math.h ---------------------------------------------------------*/

template <typename Number>
__global__ void normalise(Number *y, float *inverse_rms, const float *x, const float *gain,
                          size_t rows, size_t width) {
  const size_t row = this_row();
  float squares = 0.0f;
  if (row >= rows)
    return;
  x += row * width;
  for (size_t j = this_lane(); j < width; j += WARP)
    squares += x[j] * x[j];
  const float inverse = 1.0f / sqrtf(sum(squares) / (float)width + 1e-6f);
  for (size_t j = this_lane(); j < width; j += WARP)
    store(&y[row * width + j], gain[j] * x[j] * inverse);
  if (this_lane() == 0)
    inverse_rms[row] = inverse;
}

/* Adds to dx, and rounds the sum for the products that come next. */
template <typename Number>
__global__ void normalise_backward(float *dx, Number *rounded, const float *dy, const float *x,
                                   const float *inverse_rms, const float *gain, size_t rows,
                                   size_t width) {
  const size_t row = this_row(), start = row * width;
  float dot = 0.0f;
  if (row >= rows)
    return;
  const float inverse = inverse_rms[row];
  for (size_t j = this_lane(); j < width; j += WARP)
    dot += dy[start + j] * gain[j] * x[start + j];
  dot = sum(dot) * inverse * inverse / (float)width;
  for (size_t j = this_lane(); j < width; j += WARP) {
    const float total = dx[start + j] + inverse * (dy[start + j] * gain[j] - x[start + j] * dot);
    dx[start + j] = total;
    store(&rounded[start + j], total);
  }
}

/* Rows are added up in slices, block y a slice, and then the slices by sum_slices: enough threads,
 * and yet one order. */
constexpr size_t SLICES = 64;

static __global__ void gain_slices(float *slices, const float *dy, const float *x,
                                   const float *inverse_rms, size_t rows, size_t width) {
  const size_t j = this_element(), slice = blockIdx.y;
  float total = 0.0f;
  if (j >= width)
    return;
  for (size_t row = rows * slice / SLICES; row < rows * (slice + 1) / SLICES; row++)
    total += dy[row * width + j] * x[row * width + j] * inverse_rms[row];
  slices[slice * width + j] = total;
}

/* --- Attention weights -------------------------------------------------------------------------*/

/* Row r of a head is a position that sees the columns up to r % context. */
template <typename Number>
__global__ void attention_weights(Number *weights, const float *scores, size_t rows, size_t context,
                                  float scale) {
  const size_t row = this_row(), seen = row % context + 1;
  float most = -FLT_MAX, total = 0.0f;
  if (row >= rows)
    return;
  scores += row * context;
  for (size_t j = this_lane(); j < seen; j += WARP)
    most = fmaxf(most, scores[j]);
  most = largest(most);
  for (size_t j = this_lane(); j < seen; j += WARP)
    total += expf(scale * (scores[j] - most));
  total = sum(total);
  for (size_t j = this_lane(); j < context; j += WARP)
    store(&weights[row * context + j], j < seen ? expf(scale * (scores[j] - most)) / total : 0.0f);
}

template <typename Number>
__global__ void attention_weights_backward(Number *d_scores, const float *d_weights,
                                           const Number *weights, size_t rows, size_t context,
                                           float scale) {
  const size_t row = this_row(), start = row * context;
  float dot = 0.0f;
  if (row >= rows)
    return;
  for (size_t j = this_lane(); j < context; j += WARP)
    dot += widen(weights[start + j]) * d_weights[start + j];
  dot = sum(dot);
  for (size_t j = this_lane(); j < context; j += WARP)
    store(&d_scores[start + j], scale * widen(weights[start + j]) * (d_weights[start + j] - dot));
}

/* --- GELU: transformer_math.c ------------------------------------------------------------------*/

__device__ inline float gelu_gate(float x) {
  return 1.0f / (1.0f + expf(-2.0f * 0.7978845608f * x * (1.0f + 0.044715f * x * x)));
}

template <typename Number> __global__ void gelu(Number *y, const Number *x, size_t count) {
  const size_t i = this_element();
  if (i < count)
    store(&y[i], widen(x[i]) * gelu_gate(widen(x[i])));
}

template <typename Number>
__global__ void gelu_backward(Number *dx, const Number *x, size_t count) {
  const size_t i = this_element();
  if (i >= count)
    return;
  const float value = widen(x[i]), gate = gelu_gate(value);
  const float slope = 2.0f * 0.7978845608f * (1.0f + 3.0f * 0.044715f * value * value);
  store(&dx[i], widen(dx[i]) * (gate + value * gate * (1.0f - gate) * slope));
}

/* --- Prediction and loss -----------------------------------------------------------------------*/

/* Logits become probabilities, where they are; loss: -ln(that of the token that did come next). */
static __global__ void predict(float *next, float *loss, const unsigned char *tokens, size_t rows,
                               size_t context, size_t vocabulary) {
  const size_t row = this_row();
  float most = -FLT_MAX, total = 0.0f;
  if (row >= rows)
    return;
  next += row * vocabulary;
  for (size_t j = this_lane(); j < vocabulary; j += WARP)
    most = fmaxf(most, next[j]);
  most = largest(most);
  if (this_lane() == 0)
    loss[row] = most - next[target_of(tokens, row, context)];
  __syncwarp();
  for (size_t j = this_lane(); j < vocabulary; j += WARP)
    total += next[j] = expf(next[j] - most);
  total = sum(total);
  for (size_t j = this_lane(); j < vocabulary; j += WARP)
    next[j] /= total;
  if (this_lane() == 0)
    loss[row] += logf(total);
}

/* Of the mean of the rows' losses. */
template <typename Number>
__global__ void predict_backward(Number *d_logits, const float *next, const unsigned char *tokens,
                                 size_t rows, size_t context, size_t vocabulary) {
  const size_t row = this_row(), start = row * vocabulary;
  if (row >= rows)
    return;
  for (size_t j = this_lane(); j < vocabulary; j += WARP) {
    const float truth = j == target_of(tokens, row, context) ? 1.0f : 0.0f;
    store(&d_logits[start + j], (next[start + j] - truth) / (float)rows);
  }
}

} /* namespace on_device */

#endif
