/* Residuals in one or two copies, stored as lazy errors or as the errors themselves; and the norms
 * of blocks. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "compression/blocks.h"
#include "compression/levels.h"

/* The offset of the second copy, in words of 32 elements. Large arrays begin at the start of a
 * page. If a loop reads one copy and writes the other at the same offset within a page, the cache
 * lines of both are in the same set of the first-level cache, and reduce takes a fifth longer
 * (docs/measured/processor.md). */
#define STAGGER 9

static float *allocate_values(const struct ob_residual *residual, int copy) {
  float *base = residual->memory->allocate(residual->words + STAGGER, OB_LANES * sizeof *base);
  return base ? base + copy * STAGGER * OB_LANES : NULL;
}

static void release_values(const struct ob_residual *residual, int copy) {
  float *values = residual->values[copy];
  residual->memory->release(values ? values - copy * STAGGER * OB_LANES : NULL);
}

static void residual_describe(struct ob_residual *residual, const struct ob_layout *layout,
                              size_t first, size_t end, bool one_scale,
                              const struct ob_memory *memory) {
  size_t word = ob_layout_word(layout, first);
  *residual = (struct ob_residual){.first = first,
                                   .first_word = word,
                                   .blocks = end - first,
                                   .words = ob_layout_word(layout, end) - word,
                                   .one_scale = one_scale,
                                   .memory = memory};
}

static onebit_status_t residual_memory_error(const struct ob_residual *residual) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a residual of %zu elements",
                  residual->words * OB_LANES);
}

static size_t scale_count(const struct ob_residual *residual) {
  return residual->one_scale ? 1 : residual->blocks;
}

onebit_status_t ob_residual_create(struct ob_residual *residual, const struct ob_layout *layout,
                                   size_t first, size_t end, bool one_scale, bool moments,
                                   int copies, const struct ob_memory *memory) {
  residual_describe(residual, layout, first, end, one_scale, memory);
  for (int copy = 0; copy < 2; copy++) {
    residual->values[copy] = copy < copies ? allocate_values(residual, copy) : residual->values[0];
    residual->scales[copy] = memory->allocate(scale_count(residual), sizeof(float));
    if (moments)
      residual->moments[copy] = memory->allocate(residual->words, OB_LANES * sizeof(uint16_t));
    if (!residual->values[copy] || !residual->scales[copy] || (moments && !residual->moments[copy]))
      return residual_memory_error(residual);
  }
  if (copies == 1)
    residual->changed = ob_allocate(residual->blocks, sizeof *residual->changed);
  return copies > 1 || residual->changed ? ONEBIT_OK : residual_memory_error(residual);
}

void ob_residual_destroy(struct ob_residual *residual) {
  for (int copy = 0; copy < 2; copy++) {
    if (!residual->memory)
      break;
    if (copy == 0 || residual->values[1] != residual->values[0])
      release_values(residual, copy);
    residual->memory->release(residual->scales[copy]);
    residual->memory->release(residual->moments[copy]);
  }
  ob_release(residual->changed);
  *residual = (struct ob_residual){0};
}

static size_t value_bytes(const struct ob_residual *residual) {
  return residual->words * OB_LANES * sizeof(float);
}

static size_t scale_bytes(const struct ob_residual *residual) {
  return scale_count(residual) * sizeof(float);
}

onebit_status_t ob_residual_reset(struct ob_residual *residual) {
  OB_TRY(residual->memory->clear(residual->values[residual->now], value_bytes(residual)));
  return residual->memory->clear(residual->scales[residual->now], scale_bytes(residual));
}

void ob_residual_return_memory(struct ob_residual *residual) {
  for (int copy = 0; copy < 2 && residual->memory == &ob_memory_host; copy++)
    ob_memory_return(residual->values[copy], value_bytes(residual));
}

onebit_status_t ob_residual_forget(struct ob_residual *residual) {
  return residual->serving.rule == OB_SERVE_MEAN ? ob_residual_reset(residual) : ONEBIT_OK;
}

size_t ob_residual_bytes(const struct ob_residual *residual) {
  size_t moments = residual->moments[0] ? value_bytes(residual) / 2 : 0;
  size_t copies = residual->changed ? 1 : 2, stagger = STAGGER * OB_LANES * sizeof(float);
  return copies * (value_bytes(residual) + stagger) + 2 * (scale_bytes(residual) + moments) +
         (residual->changed ? residual->blocks : 0);
}

size_t ob_residual_elements(const struct ob_residual *residual, const struct ob_layout *layout) {
  size_t elements = 0, piece = 0;
  for (size_t b = residual->first; b < residual->first + residual->blocks; b++)
    elements += ob_layout_block(layout, b, &piece).count;
  return elements;
}

/* Makes the current copy readable on the host. In host memory the results are the arrays
 * themselves. Otherwise they are copies, which residual_close_view frees, also after a failure.
 * Errors: ONEBIT_ERROR_MEMORY and those of copying. */
static onebit_status_t residual_open_view(const struct ob_residual *residual, float **values,
                                          float **scales) {
  *values = residual->values[residual->now];
  *scales = residual->scales[residual->now];
  if (residual->memory == &ob_memory_host)
    return ONEBIT_OK;
  *values = ob_allocate(1, value_bytes(residual));
  *scales = ob_allocate(1, scale_bytes(residual));
  if (!*values || !*scales)
    return residual_memory_error(residual);
  OB_TRY(residual->memory->copy(*values, residual->values[residual->now], value_bytes(residual)));
  return residual->memory->copy(*scales, residual->scales[residual->now], scale_bytes(residual));
}

static void residual_close_view(const struct ob_residual *residual, float *values, float *scales) {
  if (residual->memory == &ob_memory_host)
    return;
  ob_release(values);
  ob_release(scales);
}

static float *residual_block_values(const struct ob_residual *residual, float *values,
                                    const struct ob_block *block) {
  return values + (block->word - residual->first_word) * OB_LANES;
}

onebit_status_t ob_residual_export(const struct ob_residual *residual,
                                   const struct ob_layout *layout, float *error) {
  float *values, *scales;
  onebit_status_t status = residual_open_view(residual, &values, &scales);
  size_t piece = 0;
  for (size_t b = 0; status == ONEBIT_OK && b < residual->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, residual->first + b, &piece);
    const float *value = residual_block_values(residual, values, &block);
    const float scale = residual->eager[residual->now] ? 0 : scales[residual->one_scale ? 0 : b];
    for (size_t i = 0; i < block.count; i++)
      *error++ = ob_serve_state(residual->serving.rule, value[i], scale);
  }
  residual_close_view(residual, values, scales);
  return status;
}

/* Imports errors, and sets all scales to zero: the residual is then the error itself. */
onebit_status_t ob_residual_import(struct ob_residual *residual, const struct ob_layout *layout,
                                   const float *error) {
  OB_TRY(ob_residual_reset(residual));
  float *values, *scales;
  onebit_status_t status = residual_open_view(residual, &values, &scales);
  size_t piece = 0;
  for (size_t b = 0; status == ONEBIT_OK && b < residual->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, residual->first + b, &piece);
    memcpy(residual_block_values(residual, values, &block), error, block.count * sizeof *error);
    error += block.count;
  }
  if (status == ONEBIT_OK && residual->memory != &ob_memory_host)
    status = residual->memory->copy(residual->values[residual->now], values, value_bytes(residual));
  residual_close_view(residual, values, scales);
  return status;
}

/* --- After a call */

void ob_residual_commit(struct ob_residual *residual) {
  residual->now = !residual->now;
  if (residual->changed)
    memset(residual->changed, 0, residual->blocks);
}

bool ob_residual_has_changed(const struct ob_residual *residual) {
  return residual->changed && memchr(residual->changed, true, residual->blocks);
}

/* Sets the scales to 0, since the values are now the errors themselves. Undoing a single block
 * cannot do this, because blocks may share one scale. */
void ob_residual_end_undo(struct ob_residual *residual) {
  memset(residual->scales[residual->now], 0, scale_bytes(residual));
  memset(residual->changed, 0, residual->blocks);
}

bool ob_residual_has_large_scale(const struct ob_residual *residual) {
  for (size_t b = 0; b < scale_count(residual); b++)
    if (residual->scales[residual->now][b] >= OB_LARGE_SCALE)
      return true;
  return false;
}

/* --- Measuring ---------------------------------------------------------------------------------*/

/* Sums of squares are added in lanes, as the sums for scales are, so that vectors of any width give
 * the same bits. */

struct lanes {
  float input[OB_LANES], residual[OB_LANES], value[OB_LANES], magnitude[OB_LANES];
};

static inline void measure_add_element(const struct ob_measure_run *run, size_t at, size_t lane,
                                       struct lanes *lanes) {
  const float value = run->values[at];
  const float input = value - ob_residual_of(run->before[at], run->before_scale);
  const float left = run->error ? run->error[at] : ob_residual_of(value, run->scale);
  lanes->input[lane] += input * input;
  lanes->residual[lane] += left * left;
  lanes->value[lane] += value * value;
  lanes->magnitude[lane] += ob_magnitude(value, ONEBIT_SCALE_MEAN_ABSOLUTE);
}

static void measure_add_block(const struct ob_measure_run *run, struct lanes *lanes) {
  const size_t whole = run->count / OB_LANES * OB_LANES;
  for (size_t at = 0; at < whole; at += OB_LANES)
    for (size_t i = 0; i < OB_LANES; i++)
      measure_add_element(run, at + i, i, lanes);
  for (size_t i = 0; whole + i < run->count; i++)
    measure_add_element(run, whole + i, i, lanes);
}

static double measure_sum_lanes(const float *lanes) {
  double sum = 0;
  for (size_t i = 0; i < OB_LANES; i++)
    sum += (double)lanes[i];
  return sum;
}

/* Returns the sum of squares of whole groups of values. */
static float sum_squares(const float *values, size_t count) {
  float squares[OB_LANES] = {0};
  for (size_t at = 0; at < count; at += OB_LANES)
    for (size_t i = 0; i < OB_LANES; i++)
      squares[i] += values[at + i] * values[at + i];
  return (float)measure_sum_lanes(squares);
}

/* Returns the number of floats of scratch. The scratch receives the error and the fields that
 * quantising writes; nothing reads these fields. */
size_t ob_measure_scratch(size_t block) { return block + block / OB_LANES * OB_MAX_WIDTH; }

/* Returns the sum of squares of the error that levels of `width` bits would leave. `value` is the
 * sum of squares of the values. */
static double compute_level_error(const struct ob_measure_run *run, unsigned width, double value,
                                  const struct ob_codec *codec) {
  const float largest = codec->largest(run->values, run->count);
  const struct ob_quantise_run lower = {
      .count = run->count,
      .width = width,
      .values = run->values,
      .scale = ob_level_scale((float)value, run->count, largest, run->rule, width),
      .residual_out = run->scratch,
      .fields =
          (uint32_t *)(void *)(run->scratch + (run->count + OB_LANES - 1) / OB_LANES * OB_LANES),
  };
  codec->quantise(&lower);
  return (double)sum_squares(run->scratch, run->count);
}

/* Returns the sum of squares of the error that signs would leave: the sum of (|c| - s)^2, where s
 * is the root mean square of all c. */
static double compute_sign_error(size_t count, double value, double magnitude) {
  return 2 * (value - sqrt(value / (double)count) * magnitude);
}

struct ob_norms ob_measure_block(const struct ob_measure_run *run, const struct ob_codec *codec) {
  struct lanes lanes = {{0}, {0}, {0}, {0}};
  measure_add_block(run, &lanes);
  struct ob_norms norms = {measure_sum_lanes(lanes.input), measure_sum_lanes(lanes.residual),
                           measure_sum_lanes(lanes.value), 0};
  if (run->width > 2)
    norms.lower = compute_level_error(run, run->width / 2, norms.value, codec);
  else if (run->width == 2)
    norms.lower = compute_sign_error(run->count, norms.value, measure_sum_lanes(lanes.magnitude));
  return norms;
}
