/*
 * Tests the models that examples/ trains: their gradients against finite differences, the reports
 * of the backward pass, initial values, and the inputs on which a prediction depends. Also tests
 * the matrix product.
 */
#include "examples/model.h"
#include "examples/numbers.h"
#include "tests/support.h"

/* --- The models, in sizes that are no multiples of tiles
 * --------------------------------------- */

static const transformer_shape_t text = {
    .vocabulary = 11, .context = 7, .width = 20, .heads = 2, .layers = 2, .sequences = 3};

static model_t *make_transformer(uint64_t seed) {
  uint64_t random = random_stream(seed, 1, 0);
  transformer_t *own = transformer_create(&text);
  cr_assert_not_null(own);
  transformer_initialise_unit(own, seed);
  for (size_t i = 0; i < text.sequences * (text.context + 1); i++)
    own->tokens[i] = (unsigned char)(random_bits(&random) % text.vocabulary);
  return &own->model;
}

/* With these sizes the pooling layers cut off a row and a column. */
enum { IMAGES = 5, ROWS = 13, COLUMNS = 16, CLASSES = 7 };

static model_t *make_network(uint64_t seed) {
  const network_shape_t shape = {.rows = ROWS,
                                 .columns = COLUMNS,
                                 .channels = 5,
                                 .hidden = 11,
                                 .classes = CLASSES,
                                 .images = IMAGES};
  uint64_t random = random_stream(seed, 1, 0);
  network_t *own = network_create(&shape);
  cr_assert_not_null(own);
  network_initialise(own, seed);
  for (size_t t = 1; t < NETWORK_TENSORS; t += 2) /* makes the biases large enough to matter */
    for (size_t i = 0; i < own->model.tensors[t].count; i++)
      own->model.tensors[t].value[i] = 0.3f * (random_uniform(&random) - 0.3f);
  for (size_t i = 0; i < IMAGES * ROWS * COLUMNS; i++)
    own->pixels[i] = 2.0f * random_uniform(&random) - 0.5f;
  for (size_t i = 0; i < IMAGES; i++)
    own->model.target[i] = (uint32_t)(random_bits(&random) % CLASSES);
  return &own->model;
}

static const log_bilinear_shape_t words = {
    .vocabulary = 11, .width = 7, .context = 3, .samples = 5};

static model_t *make_log_bilinear(uint64_t seed) {
  uint64_t random = random_stream(seed, 1, 0);
  log_bilinear_t *own = log_bilinear_create(&words);
  cr_assert_not_null(own);
  log_bilinear_initialise(own, seed);
  for (size_t i = 0; i < words.samples * (words.context + 1); i++) /* the words 9 and 10 never
                                                                    * occur */
    own->words[i] = (uint32_t)(random_bits(&random) % 9);
  return &own->model;
}

/* The loss of a network is not smooth everywhere, so its finite differences use the smallest step
 * that float32 allows. The other losses are smooth, and a larger step has less rounding noise. */
static const struct subject {
  const char *name;
  model_t *(*make)(uint64_t seed);
  size_t samples;
  float distance;
  double noise; /* the rounding noise of a slope */
  float rate;   /* the learning rate with which 300 steps fit the batch */
} subjects[] = {{"transformer", make_transformer, 3, 0.02f, 1e-5, 0.1f},
                {"network", make_network, IMAGES, 1e-3f, 2e-4, 0.03f},
                {"log-bilinear", make_log_bilinear, 5, 0.1f, 2e-5, 0.3f}};

enum { SUBJECTS = sizeof subjects / sizeof *subjects };

static double compute_loss(const struct subject *of, model_t *model) {
  model->forward(model, of->samples);
  return model_loss(model, of->samples);
}

static void find_gradient(const struct subject *of, model_t *model) {
  compute_loss(of, model);
  model->backward(model, of->samples);
}

static void move_tensor(const tensor_t *tensor, const float *from, const float *direction,
                        float distance) {
  for (size_t i = 0; i < tensor->count; i++)
    tensor->value[i] = from[i] + distance * direction[i];
}

static double dot_product(const float *a, const float *b, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)a[i] * (double)b[i];
  return sum;
}

/* --- Gradients ---------------------------------------------------------------------------------*/

/* Measures the slope of the loss along a direction, by differences at four points. */
static double measure_slope(const struct subject *of, model_t *model, const tensor_t *tensor,
                            const float *direction) {
  static const float places[] = {-2, -1, 1, 2};
  static const double weights[] = {1.0 / 12, -8.0 / 12, 8.0 / 12, -1.0 / 12};
  double sum = 0.0;
  float *from = malloc(tensor->count * sizeof(float));
  memcpy(from, tensor->value, tensor->count * sizeof(float));
  for (size_t k = 0; k < 4; k++) {
    move_tensor(tensor, from, direction, places[k] * of->distance);
    sum += weights[k] * compute_loss(of, model);
  }
  memcpy(tensor->value, from, tensor->count * sizeof(float));
  free(from);
  return sum / (double)of->distance;
}

/* Draws a random direction whose part along the gradient is as long as the rest. Otherwise the
 * slope could be lost in noise, and the test would prove nothing. */
static void draw_direction(float *direction, const tensor_t *tensor, uint64_t *random) {
  const double norm = sqrt(dot_product(tensor->gradient, tensor->gradient, tensor->count));
  const double length = 1.7 / sqrt((double)tensor->count);
  cr_assert_gt(norm, 0.0);
  for (size_t i = 0; i < tensor->count; i++)
    direction[i] = (float)((double)tensor->gradient[i] / norm +
                           length * (2.0 * (double)random_uniform(random) - 1.0));
}

static void check_slopes(const struct subject *of, model_t *model, const tensor_t *tensor,
                         uint64_t *random) {
  float *direction = malloc(tensor->count * sizeof(float));
  for (int repeat = 0; repeat < 8; repeat++) {
    draw_direction(direction, tensor, random);
    const double expected = measure_slope(of, model, tensor, direction);
    const double found = dot_product(tensor->gradient, direction, tensor->count);
    cr_expect_float_eq(found, expected, 2e-3 * fabs(expected) + of->noise,
                       "%s, tensor %td: gradient says %g, the loss %g", of->name,
                       tensor - model->tensors, found, expected);
  }
  free(direction);
}

Test(models, gradients_are_the_slopes_of_the_loss) {
  for (const struct subject *of = subjects; of < subjects + SUBJECTS; of++) {
    model_t *model = of->make(3);
    uint64_t random = 5;
    find_gradient(of, model);
    for (size_t t = 0; t < model->ntensors; t++)
      check_slopes(of, model, &model->tensors[t], &random);
    model_destroy(model);
  }
}

Test(models, steps_along_the_gradient_learn_the_batch) {
  for (const struct subject *of = subjects; of < subjects + SUBJECTS; of++) {
    model_t *model = of->make(6);
    const double start = compute_loss(of, model);
    cr_expect_gt(start, 0.8 * log((double)model->classes), "%s: %g", of->name, start);
    for (int step = 0; step < 300; step++) {
      find_gradient(of, model);
      for (size_t t = 0; t < model->ntensors; t++)
        move_tensor(&model->tensors[t], model->tensors[t].value, model->tensors[t].gradient,
                    -of->rate);
    }
    cr_expect_lt(compute_loss(of, model), 0.2 * start, "%s: %g", of->name, compute_loss(of, model));
    if (of->make != make_log_bilinear) /* the log-bilinear batch may have a context twice */
      cr_expect_eq(model_correct(model, of->samples), of->samples * model->rows);
    model_destroy(model);
  }
}

/* The backward pass reports each tensor once, and must not change the tensor's gradient
 * afterwards. */
enum { MOST_TENSORS = 16 };
static float last_sums[MOST_TENSORS];
static int told[MOST_TENSORS];
static float gradient_sum(const tensor_t *tensor) {
  float result = 0.0f;
  for (size_t i = 0; i < tensor->count; i++)
    result += tensor->gradient[i] * (float)(i % 17);
  return result;
}
static void note_final_gradient(void *context, size_t tensor) {
  last_sums[tensor] = gradient_sum(&((const model_t *)context)->tensors[tensor]);
  told[tensor]++;
}

Test(models, backward_tells_of_gradients_that_are_final) {
  for (const struct subject *of = subjects; of < subjects + SUBJECTS; of++) {
    model_t *model = of->make(4);
    model->ready = note_final_gradient;
    model->ready_context = model;
    memset(told, 0, sizeof told);
    find_gradient(of, model);
    for (size_t t = 0; t < model->ntensors; t++) {
      cr_expect_eq(told[t], 1, "%s, tensor %zu: told of %d times", of->name, t, told[t]);
      cr_expect_eq(last_sums[t], gradient_sum(&model->tensors[t]),
                   "%s, tensor %zu: changed afterwards", of->name, t);
    }
    model_destroy(model);
  }
}

/* --- Values and predictions --------------------------------------------------------------------*/

Test(models, same_seed_same_model) {
  for (const struct subject *of = subjects; of < subjects + SUBJECTS; of++) {
    model_t *a = of->make(7), *b = of->make(7), *c = of->make(8);
    for (size_t t = 0; t < a->ntensors; t++) {
      const size_t bytes = a->tensors[t].count * sizeof(float);
      cr_expect_arr_eq(a->tensors[t].value, b->tensors[t].value, bytes);
      cr_expect(!a->tensors[t].decays || memcmp(a->tensors[t].value, c->tensors[t].value, bytes));
    }
    model_destroy(a);
    model_destroy(b);
    model_destroy(c);
  }
}

/* The second and fourth matrix of a block are initialised with a standard deviation of 0.02 /
 * sqrt(2 layers). */
Test(models, a_transformer_begins_as_gpt2_does) {
  model_t *model = make_transformer(9);
  transformer_initialise((transformer_t *)(void *)model, 9);
  for (size_t t = 0; t < model->ntensors; t++) {
    const tensor_t *tensor = &model->tensors[t];
    const size_t in_layer = t < 2 || t >= model->ntensors - 2 ? 0 : (t - 2) % 6;
    const double expected = !tensor->decays ? 1.0 : in_layer == 2 || in_layer == 5 ? 0.01 : 0.02;
    const double found =
        sqrt(dot_product(tensor->value, tensor->value, tensor->count) / (double)tensor->count);
    cr_expect_float_eq(found, expected, 0.1 * expected, "tensor %zu: %g", t, found);
  }
  model_destroy(model);
}

Test(models, positions_do_not_see_what_comes_after) {
  model_t *model = make_transformer(4);
  unsigned char *tokens = ((transformer_t *)(void *)model)->tokens;
  const size_t row = text.vocabulary * sizeof(float);
  float *before = malloc(text.context * row);
  compute_loss(&subjects[0], model);
  memcpy(before, model->predicted, text.context * row);
  tokens[4] = (unsigned char)((tokens[4] + 1) % text.vocabulary);
  compute_loss(&subjects[0], model);
  cr_expect_arr_eq(model->predicted, before, 4 * row);
  cr_expect_arr_neq(model->predicted + 4 * text.vocabulary, before + 4 * text.vocabulary, row);
  free(before);
  model_destroy(model);
}

/* The gradient of a batch of five images is the mean over the images, whatever their order. */
Test(models, an_image_counts_the_same_wherever_it_stands) {
  model_t *model = make_network(7);
  float *pixels = ((network_t *)(void *)model)->pixels;
  const double all = compute_loss(&subjects[1], model);
  double sum = 0.0;
  float predicted[IMAGES * CLASSES];
  memcpy(predicted, model->predicted, sizeof predicted);
  for (size_t i = 0; i < IMAGES; i++) {
    memmove(pixels, pixels + (i > 0) * ROWS * COLUMNS,
            (IMAGES - i) * ROWS * COLUMNS * sizeof(float));
    model->target[0] = model->target[i];
    model->forward(model, 1);
    sum += model_loss(model, 1);
    cr_expect_arr_eq(model->predicted, predicted + i * CLASSES, CLASSES * sizeof(float));
  }
  cr_expect_float_eq(sum / IMAGES, all, 1e-9);
  model_destroy(model);
}

Test(models, what_is_not_a_number_is_not_right) {
  model_t *model = make_network(8);
  model->tensors[0].value[0] = NAN;
  compute_loss(&subjects[1], model);
  cr_expect_eq(model_correct(model, IMAGES), 0);
  model_destroy(model);
}

/* --- The matrix product ------------------------------------------------------------------------*/

/* Returns integers that are so small that every sum is exact, so that results can be compared for
 * equality. */
static float *whole_numbers(size_t count, uint64_t *random) {
  float *x = malloc(count * sizeof(float));
  for (size_t i = 0; i < count; i++)
    x[i] = (float)(random_bits(random) % 15) - 7.0f;
  return x;
}

static float matrix_entry(matrix_t a, size_t row, size_t column) {
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
        sum += matrix_entry(left, i, p) * matrix_entry(right, p, j);
      cr_assert_float_eq(c[i * stride + j], sum, 0.0f, "%zu x %zu x %zu, flags %d: [%zu][%zu]",
                         rows, inner, columns, flags, i, j);
    }
  free(a);
  free(b);
  free(c);
  free(before);
}

Test(models, product_is_the_sum_of_products) {
  static const size_t sizes[][3] = {{1, 1, 1},    {6, 256, 16},  {7, 257, 17},
                                    {5, 255, 15}, {13, 600, 33}, {64, 20, 96}};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
    for (int flags = 0; flags < 8; flags++)
      check_product(sizes[s][0], sizes[s][1], sizes[s][2], flags);
}
