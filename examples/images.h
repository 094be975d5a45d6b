/*
 * Images to train on. They are gray and have one size, and each has a label. They come from files
 * in MNIST's format, or are drawn digits.
 */
#ifndef EXAMPLES_IMAGES_H
#define EXAMPLES_IMAGES_H

#include <stddef.h>
#include <stdint.h>

typedef struct images {
  size_t count, rows, columns;
  size_t training;      /* the number of training images, which come first */
  size_t classes;       /* labels are numbers below this */
  unsigned char *pixel; /* [count][rows][columns], 0 is the background */
  unsigned char *label; /* [count] */
} images_t;

enum { IMAGE_ERROR = 1100 };
enum { IMAGE_LEAST = 10 }; /* the least number of pixels per side: the network halves it twice */

/* Reads a pair of IDX files. Returns 0, or -1 with an error message that names the file. */
int images_load(images_t *images, const char *images_path, const char *labels_path,
                char error[IMAGE_ERROR]);

/* Draws digits, which are the same ones every time. */
int images_draw(images_t *images, size_t count, size_t side, char error[IMAGE_ERROR]);

/* Shuffles the images, always in the same way. The last `held_out` images do not count as training
 * images. */
void images_split(images_t *images, size_t held_out);

void images_free(images_t *images);

/* Stores a random order of the numbers below `count`. random: the state of a generator. */
void shuffle(uint32_t *order, size_t count, uint64_t *random);

/* A file in MNIST's IDX format, uncompressed, contains an array of unsigned bytes. It begins with
 * two zero bytes, the type (8), the number of dimensions, and the size of each dimension in 32
 * bits, highest byte first. The elements follow in row-major order. */

enum { IDX_DIMENSIONS = 3, IDX_ERROR = 512 };

typedef struct idx {
  size_t size[IDX_DIMENSIONS];
  unsigned char *data;
} idx_t;

/* Reads an array of 1 or 3 dimensions. Returns 0, or -1 with an error message. */
int idx_read(idx_t *idx, const char *path, size_t dimensions, char error[IDX_ERROR]);
void idx_free(idx_t *idx);

/* Drawn digits are strokes of a pen. They are bent, moved and of any thickness, and have a stray
 * line, a hidden patch and noise, so that a small network reads most of them but not all. The same
 * state gives the same image. */
enum { DIGITS = 10 };

#endif
