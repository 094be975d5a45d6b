/* Implements images.h: reads IDX files, draws digits, and shuffles images. */
#include "examples/images.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/numbers.h"

/* --- IDX files ---------------------------------------------------------------------------------*/

enum { MAX_BYTES = 1 << 30 }; /* MNIST's largest file has 47 million */

/* Reads the header. Returns the number of elements, or -1 with the reason in *why. */
static long read_header(FILE *file, idx_t *idx, size_t dimensions, const char **why) {
  const unsigned char start[] = {0, 0, 8, (unsigned char)dimensions};
  unsigned char header[4 + 4 * IDX_DIMENSIONS] = {0};
  const size_t wanted = 4 + 4 * dimensions, got = fread(header, 1, wanted, file);
  long elements = 1;
  *why = header[0] == 0x1f && header[1] == 0x8b ? "is compressed; gunzip it"
         : dimensions == 1                      ? "is no IDX file of labels"
                                                : "is no IDX file of images";
  if (got < wanted || memcmp(header, start, sizeof start) != 0)
    return -1;
  *why = "its header announces more than a gigabyte";
  for (size_t d = 0; d < dimensions; d++) {
    const unsigned char *at = header + 4 + 4 * d;
    idx->size[d] = (size_t)at[0] << 24 | (size_t)at[1] << 16 | (size_t)at[2] << 8 | at[3];
    if (idx->size[d] > 0 && (size_t)elements > MAX_BYTES / idx->size[d])
      return -1;
    elements *= (long)idx->size[d];
  }
  return elements;
}

static int idx_refuse(char error[IDX_ERROR], const char *path, const char *why) {
  snprintf(error, IDX_ERROR, "%.300s: %.200s", path, why);
  return -1;
}

int idx_read(idx_t *idx, const char *path, size_t dimensions, char error[IDX_ERROR]) {
  const char *why;
  *idx = (idx_t){{0}, NULL};
  FILE *file = fopen(path, "rb");
  if (!file)
    return idx_refuse(error, path, strerror(errno));
  const long elements = read_header(file, idx, dimensions, &why);
  if (elements >= 0) {
    const size_t size = (size_t)elements;
    idx->data = malloc(size + 1);
    why = !idx->data                               ? "out of memory"
          : fread(idx->data, 1, size, file) < size ? "is shorter than its header announces"
          : fgetc(file) != EOF                     ? "is longer than its header announces"
                                                   : NULL;
  }
  if (ferror(file))
    why = strerror(errno);
  fclose(file);
  if (!why)
    return 0;
  idx_free(idx);
  return idx_refuse(error, path, why);
}

void idx_free(idx_t *idx) {
  free(idx->data);
  *idx = (idx_t){{0}, NULL};
}

/* --- Drawn digits ------------------------------------------------------------------------------*/

enum { MOST_LINES = 16, GRID = 8 };

typedef struct point {
  float x, y; /* from 0 to 1; x to the right, y down */
} point_t;

typedef struct line {
  point_t from, to;
} line_t;

/* The stroke of each digit, as a list of points on a grid. Each point is two characters: x (to the
 * right) and y (down). */
static const char *const glyphs[DIGITS] = {
    "40 21 13 15 27 48 67 75 73 61 40", "32 40 48",    "12 21 40 61 63 45 18 68",
    "11 40 61 63 44 65 67 48 17",       "58 50 15 75", "60 20 24 43 65 67 48 17",
    "60 31 14 16 38 57 66 55 34 15",    "10 60 38",    "44 23 21 40 61 63 44 25 27 48 67 65 44",
    "63 44 23 21 40 61 63 55 48",
};

static float digit_between(float least, float most, uint64_t *random) {
  return least + (most - least) * random_uniform(random);
}

/* A random affine map from the grid to the image: it scales, slants, rotates and shifts the
 * digit. */
typedef struct map {
  float xx, xy, yx, yy, x, y;
} map_t;

static map_t draw_map(uint64_t *random) {
  return (map_t){.xx = digit_between(0.5f, 0.8f, random),
                 .xy = digit_between(-0.25f, 0.25f, random),
                 .yx = digit_between(-0.2f, 0.2f, random),
                 .yy = digit_between(0.55f, 0.8f, random),
                 .x = digit_between(0.4f, 0.6f, random),
                 .y = digit_between(0.4f, 0.6f, random)};
}

/* Maps a point of the grid, with a small random error. */
static point_t map_point(const map_t *map, const char *at, uint64_t *random) {
  const float x = (float)(at[0] - '0') / GRID - 0.5f + digit_between(-0.08f, 0.08f, random);
  const float y = (float)(at[1] - '0') / GRID - 0.5f + digit_between(-0.08f, 0.08f, random);
  return (point_t){map->x + map->xx * x + map->xy * y, map->y + map->yx * x + map->yy * y};
}

/* Stores the lines of the digit, and one stray line. */
static size_t draw_lines(line_t lines[MOST_LINES], const char *glyph, uint64_t *random) {
  const map_t map = draw_map(random);
  size_t count = 0;
  point_t from = map_point(&map, glyph, random);
  for (const char *at = glyph + 2; *at == ' '; at += 3, count++) {
    const point_t to = map_point(&map, at + 1, random);
    lines[count] = (line_t){from, to};
    from = to;
  }
  const point_t start = {random_uniform(random), random_uniform(random)};
  const point_t end = {start.x + digit_between(-0.25f, 0.25f, random),
                       start.y + digit_between(-0.25f, 0.25f, random)};
  lines[count++] = (line_t){start, end};
  return count;
}

static float squared_distance(const line_t *line, float x, float y) {
  const float dx = line->to.x - line->from.x, dy = line->to.y - line->from.y;
  const float px = x - line->from.x, py = y - line->from.y;
  float along = (px * dx + py * dy) / (dx * dx + dy * dy + 1e-12f);
  along = along < 0.0f ? 0.0f : along > 1.0f ? 1.0f : along;
  const float ex = px - along * dx, ey = py - along * dy;
  return ex * ex + ey * ey;
}

/* Returns the ink at a point: full within the pen's radius, and fading over one more pixel. */
static float ink_at(const line_t *lines, size_t count, float x, float y, float radius,
                    float pixel) {
  float nearest = 4.0f;
  for (size_t i = 0; i < count; i++) {
    const float squared = squared_distance(&lines[i], x, y);
    nearest = squared < nearest ? squared : nearest;
  }
  const float beyond = (sqrtf(nearest) - radius) / pixel;
  return beyond < 0.0f ? 1.0f : beyond > 1.0f ? 0.0f : 1.0f - beyond;
}

/* Draws a digit of side x side pixels; 0 is the background. */
static void digit_draw(unsigned char *pixel, size_t side, unsigned digit, uint64_t *random) {
  line_t lines[MOST_LINES];
  const size_t count = draw_lines(lines, glyphs[digit], random);
  const float radius = digit_between(0.02f, 0.06f, random),
              strength = digit_between(0.5f, 0.9f, random);
  const float noise = digit_between(0.05f, 0.4f, random), step = 1.0f / (float)side;
  const float hidden_x = random_uniform(random), hidden_y = random_uniform(random);
  for (size_t i = 0; i < side * side; i++) {
    const float x = ((float)(i % side) + 0.5f) * step, y = ((float)(i / side) + 0.5f) * step;
    const int hidden = fabsf(x - hidden_x) < 0.12f && fabsf(y - hidden_y) < 0.12f;
    float value = hidden ? 0.0f : strength * ink_at(lines, count, x, y, radius, step);
    value += noise * digit_between(-1.0f, 1.0f, random);
    value = value < 0.0f ? 0.0f : value > 1.0f ? 1.0f : value;
    pixel[i] = (unsigned char)(255.0f * value);
  }
}

/* --- Images ------------------------------------------------------------------------------------*/

static int images_refuse(char *error, const char *what, const char *why) {
  snprintf(error, IMAGE_ERROR, "%.500s: %.500s", what, why);
  return -1;
}

/* Checks that the file of labels belongs to the file of images. */
static int images_check(const idx_t *pixels, const idx_t *labels, const char *images_path,
                        const char *labels_path, char *error) {
  char why[200];
  if (pixels->size[0] != labels->size[0]) {
    snprintf(why, sizeof why, "%zu labels for %zu images in %.100s", labels->size[0],
             pixels->size[0], images_path);
    return images_refuse(error, labels_path, why);
  }
  if (pixels->size[0] < 2)
    return images_refuse(error, images_path, "fewer than two images");
  if (pixels->size[1] >= IMAGE_LEAST && pixels->size[2] >= IMAGE_LEAST)
    return 0;
  snprintf(why, sizeof why, "images of %zu x %zu pixels; at least %d a side are needed",
           pixels->size[1], pixels->size[2], IMAGE_LEAST);
  return images_refuse(error, images_path, why);
}

static size_t count_classes(const unsigned char *label, size_t count) {
  size_t classes = 0;
  for (size_t i = 0; i < count; i++)
    classes = label[i] >= classes ? label[i] + 1u : classes;
  return classes;
}

int images_load(images_t *images, const char *images_path, const char *labels_path,
                char error[IMAGE_ERROR]) {
  idx_t pixels, labels = {{0}, NULL};
  *images = (images_t){0};
  int result = idx_read(&pixels, images_path, 3, error);
  if (result == 0)
    result = idx_read(&labels, labels_path, 1, error);
  if (result == 0)
    result = images_check(&pixels, &labels, images_path, labels_path, error);
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

int images_draw(images_t *images, size_t count, size_t side, char error[IMAGE_ERROR]) {
  *images = (images_t){.count = count,
                       .rows = side,
                       .columns = side,
                       .training = count,
                       .classes = DIGITS,
                       .pixel = malloc(count * side * side),
                       .label = malloc(count)};
  if (!images->pixel || !images->label) {
    images_free(images);
    return images_refuse(error, "drawn images", "out of memory");
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

/* Returns a random index from 0 to `last`: the element there is exchanged with element `last`
 * (Fisher-Yates shuffle). */
static size_t draw_partner(size_t last, uint64_t *random) {
  return (size_t)(random_bits(random) % (last + 1));
}

void shuffle(uint32_t *order, size_t count, uint64_t *random) {
  for (size_t i = 0; i < count; i++) {
    const size_t j = draw_partner(i, random);
    order[i] = order[j];
    order[j] = (uint32_t)i;
  }
}

static void images_swap(unsigned char *a, unsigned char *b, size_t count) {
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
    const size_t j = draw_partner(i, &random);
    images_swap(images->pixel + i * size, images->pixel + j * size, size);
    images_swap(images->label + i, images->label + j, 1);
  }
  images->training = images->count - held_out;
}
