/* Tests the parts and the data of the trainings of examples/. */
#include "compression/numerics.h"
#include "examples/images.h"
#include "examples/numbers.h"
#include "examples/text.h"
#include "examples/train_task.h"
#include "tests/support.h"

/* --- Numbers of 16 bits ------------------------------------------------------------------------*/

/* Tests each 16-bit value, the float32 value halfway between two of them, and the float32 values
 * next to that. */
Test(training_parts, sixteen_bits_are_those_of_the_library) {
  for (uint32_t bits = 0; bits < 1u << 16; bits++) {
    const uint16_t half = (uint16_t)bits;
    const float b = from_bfloat16(half), f = from_float16(half);
    const float library_b = ob_from_bfloat16(half), library_f = ob_from_float16(half);
    cr_assert(memcmp(&b, &library_b, 4) == 0 || (isnan(b) && isnan(library_b)), "%04x", bits);
    cr_assert(memcmp(&f, &library_f, 4) == 0 || (isnan(f) && isnan(library_f)), "%04x: %g and %g",
              bits, (double)f, (double)library_f);
    for (uint32_t low = 0; low < 4; low++) {
      static const uint32_t lower[] = {0, 0x7fff, 0x8000, 0x8001}, finer[] = {0, 0xfff, 0x1000, 1};
      const float x = float_of(bits << 16 | lower[low]);
      const float y = float_of(bits_of(f) + finer[low]);
      cr_assert_eq(to_bfloat16(x), ob_to_bfloat16(x), "%g", (double)x);
      cr_assert(to_float16(x) == ob_to_float16(x) || isnan(x), "%g", (double)x);
      cr_assert(to_float16(y) == ob_to_float16(y) || isnan(y), "%g", (double)y);
    }
  }
}

/* --- Schedules ---------------------------------------------------------------------------------*/

static float rate_at_step(size_t step) {
  const train_options_t options = {.steps = 100, .learning_rate = 2.0f, .rise = 20};
  return train_learning_rate(&options, step);
}

Test(training_parts, learning_rates_rise_and_fall) {
  cr_expect_float_eq(rate_at_step(0), 0.1f, 1e-6);
  cr_expect_float_eq(rate_at_step(19), 2.0f, 1e-6);
  cr_expect_float_eq(rate_at_step(20), 2.0f, 1e-6);
  cr_expect_float_eq(rate_at_step(60), 1.1f, 1e-6);
  cr_expect_float_eq(rate_at_step(99), 0.2f + 1.8f / 80.0f, 1e-6);
}

/* --- Command lines -----------------------------------------------------------------------------*/

enum { MOST_WORDS = 16 };

static enum tool_asked parse_line(const char *line, train_options_t *options,
                                  char error[TRAIN_ERROR]) {
  char *argv[MOST_WORDS];
  const int argc = split_line(argv, "train %s", line);
  error[0] = '\0';
  return train_options_parse(&train_kind, options, argc, argv, error);
}

Test(training_parts, options_that_are_wrong_are_named) {
  static const char *const lines[][2] = {
      {"--optimizer sgd", "--optimizer=sgd: expected efficient-adam, adam, efficient-lamb, lamb, "
                          "zero-one-adam, momentum or lion"},
      {"--steps 0", "--steps=0: expected an integer from 1 to 1000000000"},
      {"--steps -3", "--steps=-3: expected an integer"},
      {"--steps", "--steps: needs a value"},
      {"--freeze-step soon",
       "--freeze-step=soon: expected an integer from 0 to 1000000000, or auto"},
      {"--learning-rate nan",
       "--learning-rate=nan: expected a number such as 0.5 or 1e-4 from 0 to 10"},
      {"--dense=1", "--dense=1: takes no value"},
      {"--quick", "--quick: unknown option"},
      {"steps", "steps: unexpected argument"},
      {"--compare --dense", "--compare: makes both trainings; not with --dense"},
      {"--optimizer lamb --exchange step", "--exchange: is for --optimizer adam only"},
      {"--optimizer momentum --shards step", "--shards: is for --optimizer adam only"},
      {"--exchange step", "--exchange: is for --optimizer adam only"},
      {"--optimizer adam --exchange step --shards step", "--exchange step: not with --shards"},
      {"--block-size 33", "--block-size 33: not a multiple of 32"},
      {"--compare --log x", "--log x: is for one training"},
      {"--compare --checkpoint x", "--checkpoint x: is for one training"},
      {"--resume", "--resume: needs --checkpoint"},
      {"--save-every 3", "--save-every: needs --checkpoint"},
      {"--optimizer lamb --freeze-step 0", "--freeze-step 0: at least one dense step"},
      {"--optimizer momentum --freeze-step auto", "--freeze-step auto: is for adam and lamb only"},
      {"--step-seconds x",
       "--step-seconds=x: expected a number such as 0.5 or 1e-4 from 0 to 1000"},
      {"--outer-bits 1", "--outer: missing"},
      {"--outer-patience 3", "--outer: missing"},
      {"--outer 3 --outer-bits 3", "--outer-bits=3: expected auto, 1, 2, 4, 8, 32 or sparse"},
      {"--outer 3 --dense", "--outer: not with dense"},
      {"--images x", "--labels: missing"},
      {"--labels x", "--images: missing"},
      {"--side 9", "--side=9: expected an integer from 10 to 256"},
  };
  train_options_t options;
  char error[TRAIN_ERROR];
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    cr_expect_eq(parse_line(lines[i][0], &options, error), TOOL_WRONG, "%s: accepted", lines[i][0]);
    cr_expect(strstr(error, lines[i][1]), "%s: \"%s\" does not say \"%s\"", lines[i][0], error,
              lines[i][1]);
  }
}

Test(training_parts, defaults_follow_other_options) {
  train_options_t options;
  char error[TRAIN_ERROR];
  cr_expect_eq(parse_line("--steps 1000", &options, error), TOOL_RUN);
  cr_expect(options.freeze == 200 && options.rise == 101);
  cr_expect_eq(options.method, EFFICIENT_ADAM);
  cr_expect_float_eq(options.learning_rate, 8e-3f, 1e-9);
  cr_expect_eq(parse_line("--optimizer adam", &options, error), TOOL_RUN);
  cr_expect_float_eq(options.learning_rate, 8e-3f, 1e-9, "not the rate of the default");
  cr_expect_eq(parse_line("--optimizer momentum", &options, error), TOOL_RUN);
  cr_expect_eq(options.freeze, 0);
  cr_expect_gt(options.learning_rate, 1e-2f);
  cr_expect_eq(parse_line("--freeze-step auto --steps=7", &options, error), TOOL_RUN);
  cr_expect(options.freeze == FREEZE_AUTOMATIC && options.steps == 7);
}

/* --- Programs ----------------------------------------------------------------------------------*/

Test(training_parts, programs_say_what_came_of_it) {
  const char *small = "--ranks 2 --steps 6 --freeze-step 3 --batch 2";
  const char *said = program(0, "examples/train_images --drawn 60 --side 12 --json %s", small);
  expect_output(said,
                "2 ranks; 60 drawn digits of 12 x 12 pixels, 12 of them held out, 10 classes");
  expect_output(said, "Efficient-Adam, ");
  expect_output(said, "of 12 held-out images");
  expect_output(said, "parameters: the same bits on all 2 ranks, checksum ");
  expect_output(said, "in all: 6 steps in ");
  expect_output(said, "the warm-up's bits: 6, one bit: 0, nothing: 0");
  expect_output(said, "\n{\"training\":\"images\",\"name\":\"Efficient-Adam\","
                      "\"optimizer\":\"efficient-adam\",");
  said = program(0, "examples/train_images --drawn 60 --side 12 --optimizer adam --json %s", small);
  expect_output(said, "1-bit Adam, ");
  expect_output(said, "full precision: 3, one bit: 3, nothing: 0");
  expect_output(said, "\n{\"training\":\"images\",\"name\":\"1-bit Adam\",\"optimizer\":\"adam\",");
  said = program(0, "examples/train_images --drawn 60 --side 12 --compare %s", small);
  expect_output(said, "* of Efficient-Adam in its warm-up, which has not ended");
  said = program(0, "examples/train_images --drawn 60 --side 12 --compare --outer 2 %s", small);
  expect_output(said, "local Adam, ");
  expect_output(said, "outer step: every 2 steps; mean, rate 1, momentum 0; 1 bits; 1 fragments");
  expect_output(said, " of float32 sums in each step");
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--optimizer momentum --compare %s",
                 small);
  expect_output(said, "dense SGD, ");
  expect_output(said, "validation loss   ");
  expect_output(said, "* of 1-bit SGD in its compressed stage, after 3 steps of warm-up");
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--optimizer lion --quiet --json %s 2>/dev/null", /* hides the library's advice */
                 small);
  cr_expect_eq(strncmp(said, "{\"training\":\"text\"", 18), 0, "%s", said);
  said = program(0,
                 "examples/train_text --data README.md --width 16 --layers 1 --context 8 "
                 "--held-out 50 %s",
                 small);
  expect_output(said, " over 56 bytes of held-out text");
  said = program(0, "examples/train_words --data README.md --width 8 --vocabulary 100 --json %s",
                 small);
  expect_output(said, " words, of 100 kinds");
  expect_output(said, "Efficient-Adam, 1956 parameters in 4 tensors");
  expect_output(said, " held-out words");
  expect_output(said, "\n{\"training\":\"words\",\"name\":\"Efficient-Adam\",");
}

/*
 * Tests the data of examples/train_images: files in MNIST's format, and drawn digits.
 */

/* --- Files -------------------------------------------------------------------------------------*/

/* A file of 2 x 3 x 4 bytes that count up from 0. */
enum { HEADER = 16, ELEMENTS = 24, PLAIN = HEADER + ELEMENTS };
static const unsigned char plain[PLAIN] = {0,  0,  8,  3,  0,  0,  0,  2,  0,  0,  0,  3, 0,  0,
                                           0,  4,  0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11,
                                           12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23};
static char path[64];

static void write_file(const void *bytes, size_t count) {
  strcpy(path, "/tmp/onebit-test-XXXXXX");
  const int file = mkstemp(path);
  cr_assert(file >= 0 && write(file, bytes, count) == (ssize_t)count && close(file) == 0);
}

static void remove_file(void) {
  if (path[0])
    unlink(path);
}

TestSuite(images, .fini = remove_file);

/* Checks that a file of these bytes is refused, with a message that contains `part`. */
static void check_file_refused(const void *bytes, size_t count, size_t dimensions,
                               const char *part) {
  idx_t idx;
  char error[IDX_ERROR] = "";
  write_file(bytes, count);
  cr_expect_eq(idx_read(&idx, path, dimensions, error), -1, "accepted, where \"%s\" was to be said",
               part);
  cr_expect(strstr(error, part) && strstr(error, path), "\"%s\" does not say \"%s\"", error, part);
  cr_expect_null(idx.data);
  remove_file();
}

Test(images, files_are_read) {
  idx_t idx;
  char error[IDX_ERROR] = "";
  write_file(plain, sizeof plain);
  cr_assert_eq(idx_read(&idx, path, 3, error), 0, "%s", error);
  cr_expect(idx.size[0] == 2 && idx.size[1] == 3 && idx.size[2] == 4, "%zu x %zu x %zu",
            idx.size[0], idx.size[1], idx.size[2]);
  for (size_t i = 0; i < ELEMENTS; i++)
    cr_expect_eq(idx.data[i], i, "element %zu is %d", i, idx.data[i]);
  idx_free(&idx);
}

Test(images, files_that_end_too_early_or_too_late_are_refused) {
  unsigned char longer[PLAIN + 1] = {0};
  memcpy(longer, plain, PLAIN);
  check_file_refused(longer, sizeof longer, 3, "is longer than its header announces");
  for (size_t count = HEADER; count < PLAIN; count++)
    check_file_refused(plain, count, 3, "is shorter than its header announces");
  for (size_t count = 4; count < HEADER; count++)
    check_file_refused(plain, count, 3, "is no IDX file of images");
  check_file_refused(plain, 3, 3, "is no IDX file of images");
  check_file_refused(plain, 0, 3, "is no IDX file of images");
}

Test(images, files_of_another_kind_are_refused) {
  unsigned char other[PLAIN];
  memcpy(other, plain, PLAIN);
  check_file_refused(plain, PLAIN, 1, "is no IDX file of labels");
  other[2] = 0x0d;
  check_file_refused(other, PLAIN, 3, "is no IDX file of images");
  memcpy(other, plain, PLAIN);
  other[4] = 0xff; /* 4,278,190,082 images */
  check_file_refused(other, PLAIN, 3, "more than a gigabyte");
  check_file_refused("\x1f\x8b\b", 3, 3, "is compressed; gunzip it");
  check_file_refused("P5 28 28 255 ", 13, 3, "is no IDX file of images");
  strcpy(path, "/nowhere/images");
  idx_t idx;
  char error[IDX_ERROR] = "";
  cr_expect_eq(idx_read(&idx, path, 3, error), -1);
  cr_expect(strstr(error, "/nowhere/images: No such file"), "%s", error);
}

static void write_pair(char images_path[64], char labels_path[64], unsigned char labels,
                       unsigned char side) {
  const unsigned char head[] = {0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, side, 0, 0, 0, side};
  unsigned char file[16 + 3 * 256] = {0},
                              label_file[12] = {0, 0, 8, 1, 0, 0, 0, labels, 4, 0, 2, 1};
  memcpy(file, head, sizeof head);
  write_file(file, 16u + 3u * side * side);
  strcpy(images_path, path);
  write_file(label_file, 8u + labels);
  strcpy(labels_path, path);
}

static int load_pair(images_t *images, unsigned char labels, unsigned char side,
                     char error[IMAGE_ERROR]) {
  char images_path[64], labels_path[64];
  write_pair(images_path, labels_path, labels, side);
  const int result = images_load(images, images_path, labels_path, error);
  unlink(images_path);
  unlink(labels_path);
  return result;
}

Test(images, images_and_labels_must_go_together) {
  images_t images;
  char error[IMAGE_ERROR];
  cr_assert_eq(load_pair(&images, 3, 10, error), 0);
  cr_expect(images.count == 3 && images.rows == 10 && images.classes == 5);
  images_free(&images);
  cr_expect_eq(load_pair(&images, 4, 10, error), -1);
  cr_expect(strstr(error, "4 labels for 3 images"), "%s", error);
  cr_expect_eq(load_pair(&images, 3, 9, error), -1);
  cr_expect(strstr(error, "9 x 9 pixels"), "%s", error);
}

/* --- Drawn digits
 * ------------------------------------------------------------------------------ */

static images_t draw_digits(size_t count) {
  images_t images;
  char error[IMAGE_ERROR];
  cr_assert_eq(images_draw(&images, count, 16, error), 0);
  return images;
}

static uint64_t image_hash(const images_t *images, size_t image) {
  uint64_t sum = images->label[image];
  for (size_t i = 0; i < 256; i++)
    sum = sum * 1099511628211u + images->pixel[image * 256 + i];
  return sum;
}

static int compare_numbers(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

Test(images, drawn_digits_are_the_same_every_time_and_all_different) {
  enum { COUNT = 500 };
  images_t a = draw_digits(COUNT), b = draw_digits(COUNT);
  uint64_t sums[COUNT];
  size_t of_class[DIGITS] = {0};
  cr_expect_arr_eq(a.pixel, b.pixel, COUNT * 256);
  cr_expect_arr_eq(a.label, b.label, COUNT);
  for (size_t i = 0; i < COUNT; i++) {
    sums[i] = image_hash(&a, i);
    of_class[a.label[i]]++;
  }
  qsort(sums, COUNT, sizeof *sums, compare_numbers);
  for (size_t i = 1; i < COUNT; i++)
    cr_expect_neq(sums[i], sums[i - 1]);
  for (size_t k = 0; k < DIGITS; k++)
    cr_expect_gt(of_class[k], COUNT / DIGITS / 2, "%zu times %zu", of_class[k], k);
  images_free(&a);
  images_free(&b);
}

Test(images, splitting_keeps_every_image_with_its_label) {
  enum { COUNT = 300 };
  images_t images = draw_digits(COUNT);
  uint64_t before[COUNT], after[COUNT];
  size_t moved = 0;
  for (size_t i = 0; i < COUNT; i++)
    before[i] = image_hash(&images, i);
  images_split(&images, 60);
  for (size_t i = 0; i < COUNT; i++) {
    after[i] = image_hash(&images, i);
    moved += before[i] != after[i];
  }
  cr_expect_eq(images.training, 240);
  cr_expect_gt(moved, 280);
  qsort(before, COUNT, sizeof *before, compare_numbers);
  qsort(after, COUNT, sizeof *after, compare_numbers);
  cr_expect_arr_eq(before, after, COUNT);
  images_free(&images);
}

/*
 * Tests the words of examples/train_words, which numbers the words of a text by how often each
 * occurs.
 */

/* Splits a text in which each byte is a token. */
static words_t split_words(const char *bytes, size_t most) {
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
  words_t words = split_words(bytes, most);
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

/* A word that occurs only in the held-out tenth is not in the vocabulary. */
Test(words, come_from_what_there_is_to_learn) {
  words_t words = split_words("a b a b a b a b a new", 10);
  cr_expect_eq(words.training, 9);
  cr_expect_eq(words.vocabulary, 3);
  cr_expect_eq(words.word[9], 0);
  words_free(&words);
}

/* Uses many words, so that the hash table has collisions. */
Test(words, that_differ_have_numbers_that_differ) {
  enum { KINDS = 3000 };
  static char bytes[2 * KINDS * 6 + 1];
  for (int i = 0; i < 2 * KINDS; i++)
    snprintf(bytes + (size_t)i * 6, 7, "%05d ", i % KINDS);
  words_t words = split_words(bytes, 2 * KINDS);
  cr_assert_eq(words.length, 2 * KINDS);
  cr_expect_eq(words.vocabulary, KINDS + 1);
  for (size_t i = 1; i < KINDS; i++) {
    cr_expect_eq(words.word[i], words.word[i + KINDS]);
    cr_expect_neq(words.word[i], words.word[i - 1]);
  }
  words_free(&words);
}
