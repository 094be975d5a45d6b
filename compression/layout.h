/*
 * The layout of elements in blocks and words.
 *
 * A layout is a list of pieces (tensors, or a server's share of a padded buffer), each cut into
 * blocks from its start; a block never spans two pieces. In the residuals and in messages each
 * block occupies whole words of 32 elements, so element i of a block lies at 32 * word + i. Only
 * the last block of a piece can be short.
 */
#ifndef OB_COMPRESSION_LAYOUT_H
#define OB_COMPRESSION_LAYOUT_H

#include <stddef.h>

#include "compression/numerics.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ob_piece {
  size_t count; /* elements */
  /* of them in the caller's buffer; the rest is padding, which is compressed as zeros */
  size_t valid;
  size_t first_block, first_word;
};

struct ob_layout {
  size_t block; /* elements of a full block, a multiple of 32 */
  size_t pieces;
  struct ob_piece *piece; /* pieces + 1 of them; the last one only ends the one before */
  size_t blocks, words, elements;
};

/* A block that was looked up. */
struct ob_block {
  size_t piece, offset; /* its first element, counted in its piece */
  size_t count, valid;
  size_t word;
};

/* Cuts pieces of counts[k] elements (valid[k] of them real; valid NULL: all). ONEBIT_ERROR_MEMORY;
 * the layout is then safe to destroy. */
onebit_status_t ob_layout_create(struct ob_layout *layout, size_t block, size_t pieces,
                                 const size_t *counts, const size_t *valid);
void ob_layout_destroy(struct ob_layout *layout);

/* The last piece that begins at this block or before it and is not empty. */
OB_INLINE size_t ob_layout_piece(const struct ob_layout *layout, size_t block) {
  size_t low = 0, high = layout->pieces;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (layout->piece[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Looks up block number `block`. *piece is where to start searching, and is moved there: start at
 * 0, keep it between neighbours. Here, since device code looks blocks up too. */
OB_INLINE struct ob_block ob_layout_block(const struct ob_layout *layout, size_t block,
                                          size_t *piece) {
  const struct ob_piece *at = &layout->piece[*piece];
  if (block < at[0].first_block || block >= at[1].first_block) {
    *piece = ob_layout_piece(layout, block);
    at = &layout->piece[*piece];
  }
  struct ob_block found;
  found.piece = *piece;
  found.offset = (block - at->first_block) * layout->block;
  size_t left = at->count - found.offset;
  size_t real = at->valid > found.offset ? at->valid - found.offset : 0;
  found.count = left < layout->block ? left : layout->block;
  found.valid = real < found.count ? real : found.count;
  found.word = at->first_word + found.offset / OB_LANES;
  return found;
}

struct ob_interval {
  size_t first, end;
};

/* The words of a piece that are among others. */
OB_INLINE struct ob_interval ob_piece_interval(const struct ob_piece *piece,
                                               const struct ob_interval *among) {
  struct ob_interval found;
  found.first = piece[0].first_word > among->first ? piece[0].first_word : among->first;
  found.end = piece[1].first_word < among->end ? piece[1].first_word : among->end;
  return found;
}

/* The first word of a block; block == blocks gives the number of words. */
OB_INLINE size_t ob_layout_word(const struct ob_layout *layout, size_t block) {
  if (block >= layout->blocks)
    return layout->words;
  size_t piece = 0;
  return ob_layout_block(layout, block, &piece).word;
}

/* The number of elements before a block. */
size_t ob_layout_element(const struct ob_layout *layout, size_t block);

/* The first block that begins at this word or after it. */
size_t ob_layout_block_from(const struct ob_layout *layout, size_t word);

#ifdef __cplusplus
}
#endif
#endif
