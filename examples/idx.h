/*
 * Files in MNIST's IDX format, not compressed: an array of unsigned bytes of some dimensions. Two
 * zero bytes, the type (8), the number of dimensions, the size of each as 32 bits with the highest
 * byte first, and the elements, the last dimension's next to each other.
 */
#ifndef EXAMPLES_IDX_H
#define EXAMPLES_IDX_H

#include <stddef.h>

enum { IDX_DIMENSIONS = 3, IDX_WORDS = 512 };

typedef struct idx {
  size_t size[IDX_DIMENSIONS];
  unsigned char *data; /* NULL where a size is 0 */
} idx_t;

/* Reads an array of 1 to 3 dimensions. Returns 0, or -1 with words that say what is wrong with the
 * file. */
int idx_read(idx_t *idx, const char *path, size_t dimensions, char words[IDX_WORDS]);
void idx_free(idx_t *idx);

#endif
