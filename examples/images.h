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
enum { IMAGE_LEAST = 10 }; /* pixels a side: the network halves them twice */

/* Reads a pair of IDX files. Returns 0, or -1 with an error message that names the file. */
int images_load(images_t *images, const char *images_path, const char *labels_path,
                char error[IMAGE_ERROR]);

/* Draws digits, which are the same ones every time. */
int images_draw(images_t *images, size_t count, size_t side, char error[IMAGE_ERROR]);

/* Shuffles the images, always in the same way, and holds the last `held_out` images out. */
void images_split(images_t *images, size_t held_out);

void images_free(images_t *images);

/* Stores a random order of the numbers below `count`. random: the state of a generator. */
void shuffle(uint32_t *order, size_t count, uint64_t *random);

/* Files in MNIST's IDX format, uncompressed, hold an array of unsigned bytes with some dimensions.
 * They begin with two zero bytes, the type (8), the number of dimensions, and the size of each as
 * 32 bits with the highest byte first. The elements follow; those of the last dimension are next to
 * each other. */

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
