/*
 * The data of examples/train_images: files in MNIST's format, and drawn digits.
 */
#include "examples/images.h"
#include "examples/numbers.h"
#include "tests/support.h"

/* --- Files -------------------------------------------------------------------------------------*/

/* 2 x 3 x 4 bytes that count up from 0. */
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

/* The bytes as a file of so many dimensions are refused with a message that contains the part. */
static void refused(const void *bytes, size_t count, size_t dimensions, const char *part) {
  idx_t idx;
  char words[IDX_WORDS] = "";
  write_file(bytes, count);
  cr_expect_eq(idx_read(&idx, path, dimensions, words), -1, "accepted, where \"%s\" was to be said",
               part);
  cr_expect(strstr(words, part) && strstr(words, path), "\"%s\" does not say \"%s\"", words, part);
  cr_expect_null(idx.data);
  remove_file();
}

Test(images, files_are_read) {
  idx_t idx;
  char words[IDX_WORDS] = "";
  write_file(plain, sizeof plain);
  cr_assert_eq(idx_read(&idx, path, 3, words), 0, "%s", words);
  cr_expect(idx.size[0] == 2 && idx.size[1] == 3 && idx.size[2] == 4, "%zu x %zu x %zu",
            idx.size[0], idx.size[1], idx.size[2]);
  for (size_t i = 0; i < ELEMENTS; i++)
    cr_expect_eq(idx.data[i], i, "element %zu is %d", i, idx.data[i]);
  idx_free(&idx);
}

Test(images, files_that_end_too_early_or_too_late_are_refused) {
  unsigned char longer[PLAIN + 1] = {0};
  memcpy(longer, plain, PLAIN);
  refused(longer, sizeof longer, 3, "more bytes than its header announces");
  for (size_t count = HEADER; count < PLAIN; count++)
    refused(plain, count, 3, "its header announces 24 bytes");
  for (size_t count = 4; count < HEADER; count++)
    refused(plain, count, 3, "cut short within its header");
  refused(plain, 3, 3, "begins with 00 00 08 00");
  refused(plain, 0, 3, "begins with 00 00 00 00");
}

Test(images, files_of_another_kind_are_refused) {
  unsigned char other[PLAIN];
  memcpy(other, plain, PLAIN);
  refused(plain, PLAIN, 1, "begins with 00 00 08 03, not 00 00 08 01");
  other[2] = 0x0d;
  refused(other, PLAIN, 3, "begins with 00 00 0d 03");
  memcpy(other, plain, PLAIN);
  other[4] = 0xff; /* 4,278,190,082 images */
  refused(other, PLAIN, 3, "more than a gigabyte");
  refused("\x1f\x8b\b", 3, 3, "is compressed; gunzip it");
  refused("P5 28 28 255 ", 13, 3, "begins with 50 35 20 32");
  strcpy(path, "/nowhere/images");
  idx_t idx;
  char words[IDX_WORDS] = "";
  cr_expect_eq(idx_read(&idx, path, 3, words), -1);
  cr_expect(strstr(words, "/nowhere/images: No such file"), "%s", words);
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
                     char words[IMAGE_WORDS]) {
  char images_path[64], labels_path[64];
  write_pair(images_path, labels_path, labels, side);
  const int result = images_load(images, images_path, labels_path, words);
  unlink(images_path);
  unlink(labels_path);
  return result;
}

Test(images, images_and_labels_must_go_together) {
  images_t images;
  char words[IMAGE_WORDS];
  cr_assert_eq(load_pair(&images, 3, 10, words), 0);
  cr_expect(images.count == 3 && images.rows == 10 && images.classes == 5);
  images_free(&images);
  cr_expect_eq(load_pair(&images, 4, 10, words), -1);
  cr_expect(strstr(words, "4 labels for 3 images"), "%s", words);
  cr_expect_eq(load_pair(&images, 3, 9, words), -1);
  cr_expect(strstr(words, "9 x 9 pixels"), "%s", words);
}

/* --- Drawn ones --------------------------------------------------------------------------------*/

static images_t draw(size_t count) {
  images_t images;
  char words[IMAGE_WORDS];
  cr_assert_eq(images_draw(&images, count, 16, words), 0);
  return images;
}

static uint64_t sum_of(const images_t *images, size_t image) {
  uint64_t sum = images->label[image];
  for (size_t i = 0; i < 256; i++)
    sum = sum * 1099511628211u + images->pixel[image * 256 + i];
  return sum;
}

static int ascending(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

Test(images, drawn_digits_are_the_same_every_time_and_all_different) {
  enum { COUNT = 500 };
  images_t a = draw(COUNT), b = draw(COUNT);
  uint64_t sums[COUNT];
  size_t of_class[DIGITS] = {0};
  cr_expect_arr_eq(a.pixel, b.pixel, COUNT * 256);
  cr_expect_arr_eq(a.label, b.label, COUNT);
  for (size_t i = 0; i < COUNT; i++) {
    sums[i] = sum_of(&a, i);
    of_class[a.label[i]]++;
  }
  qsort(sums, COUNT, sizeof *sums, ascending);
  for (size_t i = 1; i < COUNT; i++)
    cr_expect_neq(sums[i], sums[i - 1]);
  for (size_t k = 0; k < DIGITS; k++)
    cr_expect_gt(of_class[k], COUNT / DIGITS / 2, "%zu times %zu", of_class[k], k);
  images_free(&a);
  images_free(&b);
}

Test(images, splitting_keeps_every_image_with_its_label) {
  enum { COUNT = 300 };
  images_t images = draw(COUNT);
  uint64_t before[COUNT], after[COUNT];
  size_t moved = 0;
  for (size_t i = 0; i < COUNT; i++)
    before[i] = sum_of(&images, i);
  images_split(&images, 60);
  for (size_t i = 0; i < COUNT; i++) {
    after[i] = sum_of(&images, i);
    moved += before[i] != after[i];
  }
  cr_expect_eq(images.training, 240);
  cr_expect_gt(moved, 280);
  qsort(before, COUNT, sizeof *before, ascending);
  qsort(after, COUNT, sizeof *after, ascending);
  cr_expect_arr_eq(before, after, COUNT);
  images_free(&images);
}
