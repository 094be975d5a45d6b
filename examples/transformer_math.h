/*
 * The arithmetic of a transformer on row-major arrays of floats. The same input gives the same bits
 * on every x86-64 processor, whatever instructions it has.
 */
#ifndef EXAMPLES_TRANSFORMER_MATH_H
#define EXAMPLES_TRANSFORMER_MATH_H

#include <stddef.h>

/* A matrix in memory, or its transpose without moving anything. */
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

/* c = a b, or c += a b. a: rows x inner, b: inner x columns, c: rows x columns, its rows c_stride
 * apart and apart from a and b. */
void multiply(float *c, size_t c_stride, matrix_t a, matrix_t b, size_t rows, size_t inner,
              size_t columns, product_mode_t mode);

/* Each row becomes softmax(scale * row). Causal: row r is a position that sees the columns up to r;
 * the others get zero. */
void softmax(float *x, size_t rows, size_t columns, float scale, int causal);

/* dp, the gradient of softmax's result p, becomes the gradient of what it was given. */
void softmax_backward(float *dp, const float *p, size_t rows, size_t columns, float scale);

/* y = GELU(x); the backward multiplies dx by the slope at x. */
void gelu(float *restrict y, const float *restrict x, size_t count);
void gelu_backward(float *restrict dx, const float *restrict x, size_t count);

/* y = gain * x / rms(x) for each row; inverse_rms: 1 / rms of each row. The backward replaces
 * d_gain and adds to dx, because the residual stream goes past every normalisation. Source: Zhang
 * and Sennrich, arXiv 1910.07467. */
void normalise(float *y, float *inverse_rms, const float *x, const float *gain, size_t rows,
               size_t width);
void normalise_backward(float *dx, float *d_gain, const float *dy, const float *x,
                        const float *inverse_rms, const float *gain, size_t rows, size_t width);

#endif
