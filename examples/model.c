/* Implements the parts of model.h that all models use: arithmetic, memory and the loss. */
#include "examples/model.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/numbers.h"

/* --- The matrix product -------------------------------------------------------------------------
 *
 * c[i][j] = sum over p of a[i][p] b[p][j]. Columns are split into panels of 16, and depth into
 * slices of 256. So a panel of b (16 kB) is copied once, in the order in which it is read, and
 * stays in the first-level cache. Tiles of 6 rows of a are multiplied by it. The 6 x 16 sums of a
 * tile stay in registers: 12 of AVX2's 16, or 6 of AVX-512's 32. With every instruction set, each
 * sum is computed in the order of p. */

enum { TILE_ROWS = 6, TILE_COLUMNS = 16, SLICE = 256 };

/* Multiplies one tile. `rows` is a constant in each call, so that the loops over rows are unrolled.
 * The innermost loop must stay a loop until it is vectorised; gcc would otherwise unroll it into
 * scalar code. */
static inline __attribute__((always_inline)) void multiply_tile(
    float *c, size_t c_stride, matrix_t a, const float *restrict panel, size_t depth,
    size_t columns, product_mode_t mode, const size_t rows) {
  float sum[TILE_ROWS][TILE_COLUMNS] = {{0}};
  for (size_t p = 0; p < depth; p++) {
#pragma GCC unroll 8
    for (size_t r = 0; r < rows; r++) {
      float factor = a.data[r * a.row_stride + p * a.column_stride];
#pragma GCC unroll 1
      for (size_t j = 0; j < TILE_COLUMNS; j++)
        sum[r][j] += factor * panel[p * TILE_COLUMNS + j];
    }
  }
  for (size_t r = 0; r < rows; r++)
    for (size_t j = 0; j < columns; j++)
      c[r * c_stride + j] = sum[r][j] + (mode == ADD ? c[r * c_stride + j] : 0.0f);
}

/* Copies a panel of b. Columns beyond the matrix become zero. */
static inline __attribute__((always_inline)) void copy_panel(float *restrict panel, matrix_t b,
                                                             size_t depth, size_t columns) {
  for (size_t p = 0; p < depth; p++)
    for (size_t j = 0; j < TILE_COLUMNS; j++)
      panel[p * TILE_COLUMNS + j] =
          j < columns ? b.data[p * b.row_stride + j * b.column_stride] : 0.0f;
}

static size_t minimum(size_t a, size_t b) { return a < b ? a : b; }

static matrix_t submatrix(matrix_t a, size_t row, size_t column) {
  return (matrix_t){a.data + row * a.row_stride + column * a.column_stride, a.row_stride,
                    a.column_stride};
}

VECTORISED void multiply(float *c, size_t c_stride, matrix_t a, matrix_t b, size_t rows,
                         size_t inner, size_t columns, product_mode_t mode) {
  float panel[SLICE * TILE_COLUMNS];
  for (size_t p = 0; p < inner; p += SLICE, mode = ADD)
    for (size_t j = 0; j < columns; j += TILE_COLUMNS) {
      const size_t depth = minimum(SLICE, inner - p), width = minimum(TILE_COLUMNS, columns - j);
      size_t i = 0;
      copy_panel(panel, submatrix(b, p, j), depth, width);
      for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
        multiply_tile(c + i * c_stride + j, c_stride, submatrix(a, i, p), panel, depth, width, mode,
                      TILE_ROWS);
      for (; i < rows; i++)
        multiply_tile(c + i * c_stride + j, c_stride, submatrix(a, i, p), panel, depth, width, mode,
                      1);
    }
}

/* --- Between the products ----------------------------------------------------------------------*/

/* Returns e^x with an error of at most 2 units in the last place, for x <= 88, by arithmetic that
 * compilers vectorise. With x = k ln 2 + r and |r| <= ln 2 / 2, e^r is a Taylor polynomial (its
 * next term is 1.2e-7), and k is added to the exponent. Below -87, where e^x would be denormal, the
 * result is e^-87. */
static inline __attribute__((always_inline)) float exponential(float x) {
  const float rounder = 0x1.8p23f; /* adding this number rounds to an integer */
  const float ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f; /* k ln2_high is exact */
  x = x < -87.0f ? -87.0f : x;
  const float k = x * 0x1.715476p0f + rounder - rounder;
  const float r = x - k * ln2_high - k * ln2_low;
  float e = 1.0f + r * (1.0f / 6.0f);
  e = 1.0f / 120.0f + r * (1.0f / 720.0f);
  e = 1.0f / 24.0f + r * e;
  e = 1.0f / 6.0f + r * e;
  e = 0.5f + r * e;
  e = 1.0f + r * (1.0f + r * e);
  /* If x is a NaN, e is a NaN, and so is the result. k is a NaN too, so its exponent is replaced by
   * 0. */
  const uint32_t bits = (uint32_t)((int32_t)(k == k ? k : 0.0f) + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return e * power;
}

VECTORISED void softmax(float *x, size_t rows, size_t columns, float scale, int causal) {
  for (size_t r = 0; r < rows; r++, x += columns) {
    const size_t seen = causal ? r + 1 : columns;
    float largest = x[0], sum = 0.0f;
    for (size_t j = 1; j < seen; j++)
      largest = x[j] > largest ? x[j] : largest;
    for (size_t j = 0; j < seen; j++)
      x[j] = exponential(scale * (x[j] - largest));
    for (size_t j = 0; j < seen; j++)
      sum += x[j];
    for (size_t j = 0; j < columns; j++)
      x[j] = j < seen ? x[j] / sum : 0.0f;
  }
}

void softmax_backward(float *dp, const float *p, size_t rows, size_t columns, float scale) {
  for (size_t r = 0; r < rows; r++, dp += columns, p += columns) {
    float dot = 0.0f;
    for (size_t j = 0; j < columns; j++)
      dot += p[j] * dp[j];
    for (size_t j = 0; j < columns; j++)
      dp[j] = scale * p[j] * (dp[j] - dot);
  }
}

/* GELU(x) = x / (1 + e^(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of Hendrycks
 * and Gimpel, arXiv 1606.08415. */
static inline __attribute__((always_inline)) float gelu_gate(float x) {
  const float u = 0.7978845608f * x * (1.0f + 0.044715f * x * x);
  return 1.0f / (1.0f + exponential(-2.0f * (u < -43.0f ? -43.0f : u)));
}

VECTORISED void gelu(float *restrict y, const float *restrict x, size_t count) {
  for (size_t i = 0; i < count; i++)
    y[i] = x[i] * gelu_gate(x[i]);
}

VECTORISED void gelu_backward(float *restrict dx, const float *restrict x, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const float gate = gelu_gate(x[i]);
    const float slope = 2.0f * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x[i] * x[i]);
    dx[i] *= gate + x[i] * gate * (1.0f - gate) * slope;
  }
}

void normalise(float *y, float *inverse_rms, const float *x, const float *gain, size_t rows,
               size_t width) {
  for (size_t r = 0; r < rows; r++, x += width, y += width) {
    float squares = 0.0f;
    for (size_t j = 0; j < width; j++)
      squares += x[j] * x[j];
    inverse_rms[r] = 1.0f / sqrtf(squares / (float)width + 1e-6f);
    for (size_t j = 0; j < width; j++)
      y[j] = gain[j] * x[j] * inverse_rms[r];
  }
}

void normalise_backward(float *dx, float *d_gain, const float *dy, const float *x,
                        const float *inverse_rms, const float *gain, size_t rows, size_t width) {
  memset(d_gain, 0, width * sizeof(float));
  for (size_t r = 0; r < rows; r++, x += width, dx += width, dy += width) {
    float dot = 0.0f;
    for (size_t j = 0; j < width; j++)
      dot += dy[j] * gain[j] * x[j];
    dot *= inverse_rms[r] * inverse_rms[r] / (float)width;
    for (size_t j = 0; j < width; j++) {
      d_gain[j] += dy[j] * x[j] * inverse_rms[r];
      dx[j] += inverse_rms[r] * (dy[j] * gain[j] - x[j] * dot);
    }
  }
}

/* --- Memory ------------------------------------------------------------------------------------*/

typedef struct block {
  struct block *next;
  size_t unused; /* aligns `values` as calloc aligns its memory */
  float values[];
} block_t;

void *model_array(model_t *model, size_t count, size_t size) {
  block_t *block = model->out_of_memory ? NULL : calloc(1, sizeof *block + count * size);
  if (!block) {
    model->out_of_memory = 1;
    return NULL;
  }
  block->next = model->blocks;
  model->blocks = block;
  return block->values;
}

float *model_floats(model_t *model, size_t count) {
  return model_array(model, count, sizeof(float));
}

void *model_create(size_t size, const model_t *like, size_t samples) {
  model_t *model = calloc(1, size);
  if (!model)
    return NULL;
  *model = *like;
  model->tensors = model_array(model, model->ntensors, sizeof *model->tensors);
  model->predicted = model_floats(model, samples * model->rows * model->classes);
  model->target = model_array(model, samples * model->rows, sizeof *model->target);
  return model_complete(model);
}

tensor_t *model_tensor(model_t *model, size_t place, size_t count, int decays) {
  float *value = model_floats(model, count), *gradient = model_floats(model, count);
  model->tensors[place] = (tensor_t){value, gradient, count, decays, 0};
  model->parameters += count;
  return &model->tensors[place];
}

void *model_complete(model_t *model) {
  if (!model->out_of_memory)
    return model;
  model_destroy(model);
  return NULL;
}

void model_destroy(model_t *model) {
  while (model && model->blocks) {
    block_t *block = model->blocks;
    model->blocks = block->next;
    free(block);
  }
  free(model);
}

void tensor_draw(const tensor_t *tensor, float most, uint64_t *random) {
  for (size_t i = 0; i < tensor->count; i++)
    tensor->value[i] = most * (2.0f * random_uniform(random) - 1.0f);
}

/* --- The loss ----------------------------------------------------------------------------------*/

double model_loss(const model_t *model, size_t samples) {
  const size_t rows = samples * model->rows;
  double sum = 0.0;
  for (size_t r = 0; r < rows; r++)
    sum -= log((double)model->predicted[r * model->classes + model->target[r]] + (double)FLT_MIN);
  return sum / (double)rows;
}

size_t model_correct(const model_t *model, size_t samples) {
  size_t correct = 0;
  for (size_t r = 0; r < samples * model->rows; r++) {
    const float *predicted = model->predicted + r * model->classes;
    size_t above = 0;
    for (size_t k = 0; k < model->classes; k++) /* a NaN never counts as correct */
      above += predicted[k] <= predicted[model->target[r]] ? 0 : 1;
    correct += above == 0;
  }
  return correct;
}

float *model_loss_backward(model_t *model, size_t samples) {
  const size_t rows = samples * model->rows;
  for (size_t r = 0; r < rows; r++)
    model->predicted[r * model->classes + model->target[r]] -= 1.0f;
  for (size_t i = 0; i < rows * model->classes; i++)
    model->predicted[i] /= (float)rows;
  return model->predicted;
}

void model_report_ready(const model_t *model, const tensor_t *tensor) {
  if (model->ready)
    model->ready(model->ready_context, (size_t)(tensor - model->tensors));
}

/* --- Products with tensors ---------------------------------------------------------------------*/

void linear(float *y, const float *x, const tensor_t *w, size_t rows, size_t in, size_t out,
            product_mode_t mode) {
  multiply(y, out, stored(x, in), stored(w->value, out), rows, in, out, mode);
}

void linear_backward(float *dx, const float *dy, const float *x, const tensor_t *w, size_t rows,
                     size_t in, size_t out) {
  multiply(w->gradient, out, transposed(x, in), stored(dy, out), in, rows, out, REPLACE);
  multiply(dx, in, stored(dy, out), transposed(w->value, out), rows, out, in, REPLACE);
}
