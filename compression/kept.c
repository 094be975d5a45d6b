/* The kept values: two copies, the lazy error, and the error in the open. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "compression/blocks.h"

onebit_status_t ob_kept_create(struct ob_kept *kept, const struct ob_layout *layout, size_t first,
                               size_t end, bool one_scale) {
  size_t word = ob_layout_word(layout, first);
  *kept = (struct ob_kept){.first = first,
                           .first_word = word,
                           .blocks = end - first,
                           .words = ob_layout_word(layout, end) - word,
                           .one_scale = one_scale};
  for (int copy = 0; copy < 2; copy++) {
    kept->values[copy] = ob_allocate(kept->words, OB_LANES * sizeof(float));
    if (kept->values[copy])
      kept->scales[copy] = ob_allocate(one_scale ? 1 : kept->blocks, sizeof(float));
    if (!kept->scales[copy])
      return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %zu kept values", kept->words * OB_LANES);
  }
  return ONEBIT_OK;
}

void ob_kept_destroy(struct ob_kept *kept) {
  for (int copy = 0; copy < 2; copy++) {
    ob_release(kept->values[copy]);
    ob_release(kept->scales[copy]);
  }
  *kept = (struct ob_kept){0};
}

void ob_kept_commit(struct ob_kept *kept) { kept->now = !kept->now; }

void ob_kept_reset(struct ob_kept *kept) {
  memset(kept->values[kept->now], 0, kept->words * OB_LANES * sizeof(float));
  memset(kept->scales[kept->now], 0, (kept->one_scale ? 1 : kept->blocks) * sizeof(float));
}

bool ob_kept_large(const struct ob_kept *kept) {
  size_t scales = kept->one_scale ? 1 : kept->blocks;
  for (size_t b = 0; b < scales; b++)
    if (kept->scales[kept->now][b] >= OB_LARGE_SCALE)
      return true;
  return false;
}

size_t ob_kept_bytes(const struct ob_kept *kept) {
  size_t scales = kept->one_scale ? 1 : kept->blocks;
  return 2 * (kept->words * OB_LANES + scales) * sizeof(float);
}

size_t ob_kept_elements(const struct ob_kept *kept, const struct ob_layout *layout) {
  size_t elements = 0, piece = 0;
  for (size_t b = kept->first; b < kept->first + kept->blocks; b++)
    elements += ob_layout_block(layout, b, &piece).count;
  return elements;
}

void ob_kept_export(const struct ob_kept *kept, const struct ob_layout *layout, float *error) {
  size_t piece = 0;
  for (size_t b = 0; b < kept->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, kept->first + b, &piece);
    const float *values = kept->values[kept->now] + (block.word - kept->first_word) * OB_LANES;
    float scale = kept->scales[kept->now][kept->one_scale ? 0 : b];
    for (size_t i = 0; i < block.count; i++)
      *error++ = ob_kept_error(values[i], scale);
  }
}

void ob_kept_import(struct ob_kept *kept, const struct ob_layout *layout, const float *error) {
  ob_kept_reset(kept); /* scales are zero: the kept value is the error itself */
  size_t piece = 0;
  for (size_t b = 0; b < kept->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, kept->first + b, &piece);
    float *values = kept->values[kept->now] + (block.word - kept->first_word) * OB_LANES;
    memcpy(values, error, block.count * sizeof *error);
    error += block.count;
  }
}
