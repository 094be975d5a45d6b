/*
 * The model of examples/train_text: its gradients against finite differences, its matrix product
 * against the definition, and that no position sees what comes after it.
 */
#include "examples/random.h"
#include "examples/transformer.h"
#include "tests/support.h"

/* Sizes that no tile divides. */
static const transformer_shape_t small = {
    .vocabulary = 11, .context = 7, .width = 20, .heads = 2, .layers = 2, .sequences = 3};

static transformer_t *make_model(uint64_t seed) {
  uint64_t random = random_stream(seed, 1, 0);
  transformer_t *model = transformer_create(&small);
  cr_assert_not_null(model);
  transformer_initialise_unit(model, seed);
  for (size_t i = 0; i < small.sequences * (small.context + 1); i++)
    model->tokens[i] = (unsigned char)(random_bits(&random) % small.vocabulary);
  return model;
}

static double loss(transformer_t *model) {
  model->model.forward(&model->model, small.sequences);
  return model_loss(&model->model, small.sequences);
}

static void move(const tensor_t *tensor, const float *from, const float *direction,
                 float distance) {
  for (size_t i = 0; i < tensor->count; i++)
    tensor->value[i] = from[i] + distance * direction[i];
}

/* The slope of the loss along the direction, to the fourth order: float32 sums leave about 1e-7 of
 * noise in the loss, so the distance cannot be small. */
static double slope(transformer_t *model, const tensor_t *tensor, const float *direction,
                    float distance) {
  static const float places[] = {-2, -1, 1, 2};
  static const double weights[] = {1.0 / 12, -8.0 / 12, 8.0 / 12, -1.0 / 12};
  double sum = 0.0;
  float *from = malloc(tensor->count * sizeof(float));
  memcpy(from, tensor->value, tensor->count * sizeof(float));
  for (size_t k = 0; k < 4; k++) {
    move(tensor, from, direction, places[k] * distance);
    sum += weights[k] * loss(model);
  }
  memcpy(tensor->value, from, tensor->count * sizeof(float));
  free(from);
  return sum / (double)distance;
}

static double dot(const float *a, const float *b, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)a[i] * (double)b[i];
  return sum;
}

/* Along a random direction, the part of it along the gradient made as long as the rest: a slope
 * that would be lost in noise proves nothing. */
static void random_direction(float *direction, const float *gradient, size_t count,
                             uint64_t *random) {
  const double norm = sqrt(dot(gradient, gradient, count));
  const double length = 1.0 / sqrt((double)count);
  cr_assert_gt(norm, 0.0);
  for (size_t i = 0; i < count; i++) {
    const double uniform = 2.0 * (double)random_uniform(random) - 1.0;
    direction[i] = (float)((double)gradient[i] / norm + 1.7 * length * uniform);
  }
}

Test(transformer, gradients_are_the_slopes_of_the_loss) {
  transformer_t *model = make_model(3);
  uint64_t random = 5;
  loss(model);
  model->model.backward(&model->model, small.sequences);
  for (size_t t = 0; t < model->model.ntensors; t++)
    for (int repeat = 0; repeat < 8; repeat++) {
      const tensor_t *tensor = &model->model.tensors[t];
      float *direction = malloc(tensor->count * sizeof(float));
      random_direction(direction, tensor->gradient, tensor->count, &random);
      const double expected = slope(model, tensor, direction, 0.02f);
      const double found = dot(tensor->gradient, direction, tensor->count);
      cr_expect_float_eq(found, expected, 2e-3 * fabs(expected) + 1e-5,
                         "tensor %zu: gradient says %g, the loss %g", t, found, expected);
      free(direction);
    }
  model_destroy(&model->model);
}

Test(transformer, positions_do_not_see_what_comes_after) {
  transformer_t *model = make_model(4);
  const size_t row = small.vocabulary * sizeof(float);
  float *before = malloc(small.context * row);
  loss(model);
  memcpy(before, model->model.predicted, small.context * row);
  model->tokens[4] = (unsigned char)((model->tokens[4] + 1) % small.vocabulary);
  loss(model);
  cr_expect_arr_eq(model->model.predicted, before, 4 * row);
  cr_expect_arr_neq(model->model.predicted + 4 * small.vocabulary, before + 4 * small.vocabulary,
                    row);
  free(before);
  model_destroy(&model->model);
}

Test(transformer, predictions_are_probabilities) {
  transformer_t *model = make_model(5);
  loss(model);
  for (size_t r = 0; r < small.sequences * small.context; r++) {
    double sum = 0.0;
    for (size_t j = 0; j < small.vocabulary; j++)
      sum += (double)model->model.predicted[r * small.vocabulary + j];
    cr_expect_float_eq(sum, 1.0, 1e-6);
  }
  model_destroy(&model->model);
}

Test(transformer, same_seed_same_model) {
  transformer_t *a = make_model(7), *b = make_model(7), *c = make_model(8);
  for (size_t t = 0; t < a->model.ntensors; t++) {
    const size_t bytes = a->model.tensors[t].count * sizeof(float);
    cr_expect_arr_eq(a->model.tensors[t].value, b->model.tensors[t].value, bytes);
    cr_expect(!a->model.tensors[t].decays ||
              memcmp(a->model.tensors[t].value, c->model.tensors[t].value, bytes));
  }
  model_destroy(&a->model);
  model_destroy(&b->model);
  model_destroy(&c->model);
}

static double deviation(const tensor_t *tensor) {
  return sqrt(dot(tensor->value, tensor->value, tensor->count) / (double)tensor->count);
}

/* The second and fourth matrix of a block begin with 0.02 / sqrt(2 layers). */
Test(transformer, it_begins_as_gpt2_does) {
  transformer_t *model = make_model(9);
  transformer_initialise(model, 9);
  for (size_t t = 0; t < model->model.ntensors; t++) {
    const size_t in_layer = t < 2 || t >= model->model.ntensors - 2 ? 0 : (t - 2) % 6;
    const int ends_in_stream = in_layer == 2 || in_layer == 5;
    const double expected = !model->model.tensors[t].decays ? 1.0 : ends_in_stream ? 0.01 : 0.02;
    cr_expect_float_eq(deviation(&model->model.tensors[t]), expected, 0.1 * expected,
                       "tensor %zu: %g", t, deviation(&model->model.tensors[t]));
  }
  model_destroy(&model->model);
}

/* Whole numbers small enough that every sum is exact, so that the check is for equality. */
static float *whole_numbers(size_t count, uint64_t *random) {
  float *x = malloc(count * sizeof(float));
  for (size_t i = 0; i < count; i++)
    x[i] = (float)(random_bits(random) % 15) - 7.0f;
  return x;
}

static float entry(matrix_t a, size_t row, size_t column) {
  return a.data[row * a.row_stride + column * a.column_stride];
}

static void check_product(size_t rows, size_t inner, size_t columns, int flags) {
  uint64_t random = 9;
  const size_t stride = columns + 3;
  float *a = whole_numbers(rows * inner, &random), *b = whole_numbers(inner * columns, &random);
  float *c = whole_numbers(rows * stride, &random);
  float *before = malloc(rows * stride * sizeof(float));
  const matrix_t left = flags & 1 ? transposed(a, rows) : stored(a, inner);
  const matrix_t right = flags & 2 ? transposed(b, inner) : stored(b, columns);
  memcpy(before, c, rows * stride * sizeof(float));
  multiply(c, stride, left, right, rows, inner, columns, flags & 4 ? ADD : REPLACE);
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < stride; j++) {
      float sum = j >= columns || flags & 4 ? before[i * stride + j] : 0.0f;
      for (size_t p = 0; j < columns && p < inner; p++)
        sum += entry(left, i, p) * entry(right, p, j);
      cr_assert_float_eq(c[i * stride + j], sum, 0.0f, "%zu x %zu x %zu, flags %d: [%zu][%zu]",
                         rows, inner, columns, flags, i, j);
    }
  free(a);
  free(b);
  free(c);
  free(before);
}

Test(transformer, product_is_the_sum_of_products) {
  static const size_t sizes[][3] = {{1, 1, 1},    {6, 256, 16},  {7, 257, 17},
                                    {5, 255, 15}, {13, 600, 33}, {64, 20, 96}};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
    for (int flags = 0; flags < 8; flags++)
      check_product(sizes[s][0], sizes[s][1], sizes[s][2], flags);
}
