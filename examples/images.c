/* The images of images.h. */
#include "examples/images.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/digits.h"
#include "examples/idx.h"
#include "examples/random.h"

static int refuse(char *words, const char *what, const char *why) {
  snprintf(words, IMAGE_WORDS, "%.500s: %.500s", what, why);
  return -1;
}

/* Checks that the two files belong together. */
static int check(const idx_t *pixels, const idx_t *labels, const char *images_path,
                 const char *labels_path, char *words) {
  char why[200];
  if (pixels->size[0] != labels->size[0]) {
    snprintf(why, sizeof why, "%zu labels for %zu images in %.100s", labels->size[0],
             pixels->size[0], images_path);
    return refuse(words, labels_path, why);
  }
  if (pixels->size[0] < 2)
    return refuse(words, images_path, "fewer than two images");
  if (pixels->size[1] >= IMAGE_LEAST && pixels->size[2] >= IMAGE_LEAST)
    return 0;
  snprintf(why, sizeof why, "images of %zu x %zu pixels; at least %d a side are needed",
           pixels->size[1], pixels->size[2], IMAGE_LEAST);
  return refuse(words, images_path, why);
}

static size_t count_classes(const unsigned char *label, size_t count) {
  size_t classes = 0;
  for (size_t i = 0; i < count; i++)
    classes = label[i] >= classes ? label[i] + 1u : classes;
  return classes;
}

int images_load(images_t *images, const char *images_path, const char *labels_path,
                char words[IMAGE_WORDS]) {
  idx_t pixels, labels = {{0}, NULL};
  *images = (images_t){0};
  int result = idx_read(&pixels, images_path, 3, words);
  if (result == 0)
    result = idx_read(&labels, labels_path, 1, words);
  if (result == 0)
    result = check(&pixels, &labels, images_path, labels_path, words);
  if (result != 0) {
    idx_free(&pixels);
    idx_free(&labels);
    return -1;
  }
  *images = (images_t){.count = pixels.size[0],
                       .rows = pixels.size[1],
                       .columns = pixels.size[2],
                       .training = pixels.size[0],
                       .classes = count_classes(labels.data, labels.size[0]),
                       .pixel = pixels.data,
                       .label = labels.data};
  return 0;
}

int images_draw(images_t *images, size_t count, size_t side, char words[IMAGE_WORDS]) {
  *images = (images_t){.count = count,
                       .rows = side,
                       .columns = side,
                       .training = count,
                       .classes = DIGITS,
                       .pixel = malloc(count * side * side),
                       .label = malloc(count)};
  if (!images->pixel || !images->label) {
    images_free(images);
    return refuse(words, "drawn images", "out of memory");
  }
  for (size_t i = 0; i < count; i++) {
    uint64_t random = random_stream(0, 0, i);
    images->label[i] = (unsigned char)(random_bits(&random) % DIGITS);
    digit_draw(images->pixel + i * side * side, side, images->label[i], &random);
  }
  return 0;
}

void images_free(images_t *images) {
  free(images->pixel);
  free(images->label);
  *images = (images_t){0};
}

/* --- Orders ------------------------------------------------------------------------------------*/

/* The place from which the element in place `last` comes: any up to it (Fisher and Yates). */
static size_t partner(size_t last, uint64_t *random) {
  return (size_t)(random_bits(random) % (last + 1));
}

void shuffle(uint32_t *order, size_t count, uint64_t *random) {
  for (size_t i = 0; i < count; i++) {
    const size_t j = partner(i, random);
    order[i] = order[j];
    order[j] = (uint32_t)i;
  }
}

static void swap(unsigned char *a, unsigned char *b, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const unsigned char byte = a[i];
    a[i] = b[i];
    b[i] = byte;
  }
}

void images_split(images_t *images, size_t held_out) {
  const size_t size = images->rows * images->columns;
  uint64_t random = random_stream(0, 1, 0);
  for (size_t i = images->count; i-- > 1;) {
    const size_t j = partner(i, &random);
    swap(images->pixel + i * size, images->pixel + j * size, size);
    swap(images->label + i, images->label + j, 1);
  }
  images->training = images->count - held_out;
}
