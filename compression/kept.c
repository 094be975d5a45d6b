/* The kept values: two copies, the lazy error, and the error in the open. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "compression/blocks.h"

onebit_status_t ob_kept_create(struct ob_kept *kept, const struct ob_layout *layout, size_t first,
                               size_t end, bool one_scale, bool moments,
                               const struct ob_memory *memory) {
  size_t word = ob_layout_word(layout, first);
  *kept = (struct ob_kept){.first = first,
                           .first_word = word,
                           .blocks = end - first,
                           .words = ob_layout_word(layout, end) - word,
                           .one_scale = one_scale,
                           .memory = memory};
  for (int copy = 0; copy < 2; copy++) {
    kept->values[copy] = memory->allocate(kept->words, OB_LANES * sizeof(float));
    if (kept->values[copy])
      kept->scales[copy] = memory->allocate(one_scale ? 1 : kept->blocks, sizeof(float));
    if (kept->scales[copy] && moments)
      kept->moments[copy] = memory->allocate(kept->words, OB_LANES * sizeof(uint16_t));
    if (!kept->scales[copy] || (moments && !kept->moments[copy]))
      return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a residual of %zu elements",
                      kept->words * OB_LANES);
  }
  return ONEBIT_OK;
}

void ob_kept_destroy(struct ob_kept *kept) {
  for (int copy = 0; copy < 2; copy++) {
    if (!kept->memory)
      break;
    kept->memory->release(kept->values[copy]);
    kept->memory->release(kept->scales[copy]);
    kept->memory->release(kept->moments[copy]);
  }
  *kept = (struct ob_kept){0};
}

static size_t value_bytes(const struct ob_kept *kept) {
  return kept->words * OB_LANES * sizeof(float);
}

static size_t scale_bytes(const struct ob_kept *kept) {
  return (kept->one_scale ? 1 : kept->blocks) * sizeof(float);
}

onebit_status_t ob_kept_reset(struct ob_kept *kept) {
  OB_TRY(kept->memory->clear(kept->values[kept->now], value_bytes(kept)));
  return kept->memory->clear(kept->scales[kept->now], scale_bytes(kept));
}

onebit_status_t ob_kept_forget(struct ob_kept *kept) {
  return kept->serving.rule == OB_SERVE_MEAN ? ob_kept_reset(kept) : ONEBIT_OK;
}

size_t ob_kept_bytes(const struct ob_kept *kept) {
  size_t moments = kept->moments[0] ? value_bytes(kept) / 2 : 0;
  return 2 * (value_bytes(kept) + scale_bytes(kept) + moments);
}

size_t ob_kept_elements(const struct ob_kept *kept, const struct ob_layout *layout) {
  size_t elements = 0, piece = 0;
  for (size_t b = kept->first; b < kept->first + kept->blocks; b++)
    elements += ob_layout_block(layout, b, &piece).count;
  return elements;
}

onebit_status_t ob_kept_view(const struct ob_kept *kept, float **values, float **scales) {
  *values = kept->values[kept->now];
  *scales = kept->scales[kept->now];
  if (kept->memory == &ob_memory_host)
    return ONEBIT_OK;
  *values = ob_allocate(1, value_bytes(kept));
  *scales = ob_allocate(1, scale_bytes(kept));
  if (!*values || !*scales)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a residual of %zu elements",
                    kept->words * OB_LANES);
  OB_TRY(kept->memory->copy(*values, kept->values[kept->now], value_bytes(kept)));
  return kept->memory->copy(*scales, kept->scales[kept->now], scale_bytes(kept));
}

void ob_kept_end_view(const struct ob_kept *kept, float *values, float *scales) {
  if (kept->memory == &ob_memory_host)
    return;
  ob_release(values);
  ob_release(scales);
}

static float *values_of(const struct ob_kept *kept, float *values, const struct ob_block *block) {
  return values + (block->word - kept->first_word) * OB_LANES;
}

onebit_status_t ob_kept_export(const struct ob_kept *kept, const struct ob_layout *layout,
                               float *error) {
  float *values, *scales;
  onebit_status_t status = ob_kept_view(kept, &values, &scales);
  size_t piece = 0;
  for (size_t b = 0; status == ONEBIT_OK && b < kept->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, kept->first + b, &piece);
    const float *value = values_of(kept, values, &block);
    for (size_t i = 0; i < block.count; i++)
      *error++ = ob_kept_content(kept->serving.rule, value[i], scales[kept->one_scale ? 0 : b]);
  }
  ob_kept_end_view(kept, values, scales);
  return status;
}

/* Scales become zero: the kept value is the error itself. */
onebit_status_t ob_kept_import(struct ob_kept *kept, const struct ob_layout *layout,
                               const float *error) {
  OB_TRY(ob_kept_reset(kept));
  float *values, *scales;
  onebit_status_t status = ob_kept_view(kept, &values, &scales);
  size_t piece = 0;
  for (size_t b = 0; status == ONEBIT_OK && b < kept->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, kept->first + b, &piece);
    memcpy(values_of(kept, values, &block), error, block.count * sizeof *error);
    error += block.count;
  }
  if (status == ONEBIT_OK && kept->memory != &ob_memory_host)
    status = kept->memory->copy(kept->values[kept->now], values, value_bytes(kept));
  ob_kept_end_view(kept, values, scales);
  return status;
}
