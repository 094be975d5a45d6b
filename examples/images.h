/*
 * Images to learn from: gray, all of one size, each with a label. They come from files in MNIST's
 * format, or are drawn (digits.h).
 */
#ifndef EXAMPLES_IMAGES_H
#define EXAMPLES_IMAGES_H

#include <stddef.h>
#include <stdint.h>

typedef struct images {
  size_t count, rows, columns;
  size_t training;      /* the first ones are to learn from, the others are held out */
  size_t classes;       /* labels are below */
  unsigned char *pixel; /* [count][rows][columns], 0 is the background */
  unsigned char *label; /* [count] */
} images_t;

enum { IMAGE_WORDS = 1100 };
enum { IMAGE_LEAST = 10 }; /* pixels a side: the network halves them twice */

/* Reads a pair of IDX files. Returns 0, or -1 with words that say which file is at fault and why.
 */
int images_load(images_t *images, const char *images_path, const char *labels_path,
                char words[IMAGE_WORDS]);

/* Draws digits, the same ones every time. */
int images_draw(images_t *images, size_t count, size_t side, char words[IMAGE_WORDS]);

/* Shuffles the images, always in the same way, and holds so many out. */
void images_split(images_t *images, size_t held_out);

void images_free(images_t *images);

/* Makes a random order of the numbers below count, by the state of random.h. */
void shuffle(uint32_t *order, size_t count, uint64_t *random);

#endif
