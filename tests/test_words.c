/*
 * The parts of examples/train_words: texts as words, and the log-bilinear model's gradients against
 * finite differences.
 */
#include "examples/log_bilinear.h"
#include "examples/random.h"
#include "examples/words.h"
#include "tests/support.h"

/* --- Words -------------------------------------------------------------------------------------*/

/* The bytes are their own tokens. */
static words_t split(const char *bytes, size_t most) {
  static text_t text;
  words_t words;
  text.tokens = (unsigned char *)(uintptr_t)bytes;
  text.length = strlen(bytes);
  for (size_t i = 0; i < 256; i++)
    text.bytes[i] = (unsigned char)i;
  cr_assert_eq(words_split(&words, &text, most), 0);
  return words;
}

static void expect_words(const char *bytes, size_t most, size_t vocabulary, size_t count,
                         const uint32_t *expected) {
  words_t words = split(bytes, most);
  cr_expect_eq(words.vocabulary, vocabulary, "\"%s\": %zu kinds", bytes, words.vocabulary);
  cr_assert_eq(words.length, count, "\"%s\": %zu words", bytes, words.length);
  for (size_t i = 0; i < count; i++)
    cr_expect_eq(words.word[i], expected[i], "\"%s\": word %zu is %u", bytes, i, words.word[i]);
  words_free(&words);
}

Test(words, are_numbered_by_how_often_they_are_met) {
  expect_words("b a b c a b", 10, 4, 6, (uint32_t[]){1, 2, 1, 3, 2, 1});
  expect_words("b a b c a b", 3, 3, 6, (uint32_t[]){1, 2, 1, 0, 2, 1});
  expect_words("  x_1+=x_1;\n\xc3\xa4 \xc3\xa4x ", 10, 7, 7, (uint32_t[]){1, 2, 3, 1, 4, 5, 6});
  expect_words("", 10, 1, 0, NULL);
}

/* A word that only the held-out tenth has is not in the vocabulary. */
Test(words, come_from_what_there_is_to_learn) {
  words_t words = split("a b a b a b a b a new", 10);
  cr_expect_eq(words.training, 9);
  cr_expect_eq(words.vocabulary, 3);
  cr_expect_eq(words.word[9], 0);
  words_free(&words);
}

/* Many words: the hash table's collisions. */
Test(words, that_differ_have_numbers_that_differ) {
  enum { KINDS = 3000 };
  static char bytes[2 * KINDS * 6 + 1];
  for (int i = 0; i < 2 * KINDS; i++)
    snprintf(bytes + (size_t)i * 6, 7, "%05d ", i % KINDS);
  words_t words = split(bytes, 2 * KINDS);
  cr_assert_eq(words.length, 2 * KINDS);
  cr_expect_eq(words.vocabulary, KINDS + 1);
  for (size_t i = 1; i < KINDS; i++) {
    cr_expect_eq(words.word[i], words.word[i + KINDS]);
    cr_expect_neq(words.word[i], words.word[i - 1]);
  }
  words_free(&words);
}

/* --- The model ---------------------------------------------------------------------------------*/

/* Sizes that no tile divides; the words 9 and 10 are met nowhere. */
static const log_bilinear_shape_t small = {
    .vocabulary = 11, .width = 7, .context = 3, .samples = 5};
enum { WORDS = 5 * 4 };

static log_bilinear_t *make_model(uint64_t seed) {
  uint64_t random = random_stream(seed, 1, 0);
  log_bilinear_t *model = log_bilinear_create(&small);
  cr_assert_not_null(model);
  log_bilinear_initialise(model, seed);
  for (size_t i = 0; i < WORDS; i++)
    model->words[i] = (uint32_t)(random_bits(&random) % 9);
  return model;
}

static double loss(log_bilinear_t *model) {
  model->model.forward(&model->model, small.samples);
  return model_loss(&model->model, small.samples);
}

/* The slope by one element, to the fourth order: float32 sums leave about 1e-7 of noise in the
 * loss. */
static double slope(log_bilinear_t *model, float *element) {
  static const double weights[] = {1.0 / 12, -8.0 / 12, 8.0 / 12, -1.0 / 12};
  static const float places[] = {-0.2f, -0.1f, 0.1f, 0.2f};
  const float from = *element;
  double sum = 0.0;
  for (size_t k = 0; k < 4; k++) {
    *element = from + places[k];
    sum += weights[k] * loss(model);
  }
  *element = from;
  return sum / 0.1;
}

Test(words, gradients_are_the_slopes_of_the_loss) {
  log_bilinear_t *model = make_model(3);
  loss(model);
  model->model.backward(&model->model, small.samples);
  for (size_t t = 0; t < LOG_BILINEAR_TENSORS; t++)
    for (size_t i = 0; i < model->model.tensors[t].count; i++) {
      const double found = (double)model->model.tensors[t].gradient[i];
      const double expected = slope(model, &model->model.tensors[t].value[i]);
      cr_expect_float_eq(found, expected, 1e-3 * fabs(expected) + 2e-5,
                         "tensor %zu, %zu: gradient says %g, the loss %g", t, i, found, expected);
    }
  const float *unused = model->model.tensors[CONTEXT_TABLE].gradient + 9 * small.width;
  for (size_t i = 0; i < 2 * small.width; i++)
    cr_expect_eq(unused[i], 0.0f, "a row that was not drawn has a gradient");
  model_destroy(&model->model);
}

/* Each tensor once, and its gradient is not changed any more. */
static float last_sums[LOG_BILINEAR_TENSORS];
static int told[LOG_BILINEAR_TENSORS];
static float sum(const tensor_t *tensor) {
  float result = 0.0f;
  for (size_t i = 0; i < tensor->count; i++)
    result += tensor->gradient[i] * (float)(i % 17);
  return result;
}
static void ready(void *context, size_t tensor) {
  const log_bilinear_t *model = context;
  last_sums[tensor] = sum(&model->model.tensors[tensor]);
  told[tensor]++;
}

Test(words, backward_tells_of_gradients_that_are_final) {
  log_bilinear_t *model = make_model(4);
  model->model.ready = ready;
  model->model.ready_context = model;
  loss(model);
  model->model.backward(&model->model, small.samples);
  for (size_t t = 0; t < LOG_BILINEAR_TENSORS; t++) {
    cr_expect_eq(told[t], 1, "tensor %zu: told of %d times", t, told[t]);
    cr_expect_eq(last_sums[t], sum(&model->model.tensors[t]), "tensor %zu: changed afterwards", t);
  }
  model_destroy(&model->model);
}
