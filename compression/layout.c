/* Pieces, blocks, words: index arithmetic and nothing else. */
#include "compression/layout.h"

#include "base/error.h"
#include "base/memory.h"

static size_t layout_divided_up(size_t a, size_t b) { return a / b + (a % b != 0); }

onebit_status_t ob_layout_create(struct ob_layout *layout, size_t block, size_t pieces,
                                 const size_t *counts, const size_t *valid) {
  *layout = (struct ob_layout){.block = block, .pieces = pieces};
  layout->piece = ob_allocate(pieces + 1, sizeof *layout->piece);
  if (!layout->piece)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a layout of %zu pieces", pieces);
  for (size_t k = 0; k < pieces; k++) {
    layout->piece[k] = (struct ob_piece){.count = counts[k],
                                         .valid = valid ? valid[k] : counts[k],
                                         .first_block = layout->blocks,
                                         .first_word = layout->words};
    layout->blocks += layout_divided_up(counts[k], block);
    layout->words += layout_divided_up(counts[k], OB_LANES);
    layout->elements += counts[k];
  }
  layout->piece[pieces] =
      (struct ob_piece){.first_block = layout->blocks, .first_word = layout->words};
  return ONEBIT_OK;
}

void ob_layout_destroy(struct ob_layout *layout) {
  ob_release(layout->piece);
  layout->piece = NULL;
}

size_t ob_layout_element(const struct ob_layout *layout, size_t block) {
  if (block >= layout->blocks)
    return layout->elements;
  size_t piece = 0, before = 0;
  size_t offset = ob_layout_block(layout, block, &piece).offset;
  for (size_t k = 0; k < piece; k++)
    before += layout->piece[k].count;
  return before + offset;
}

size_t ob_layout_block_from(const struct ob_layout *layout, size_t word) {
  size_t low = 0, high = layout->blocks; /* the answer is in low .. high */
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (ob_layout_word(layout, middle) < word)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
