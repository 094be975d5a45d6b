/*
 * Fragments: the elements of all tensors, one after the other, cut into parts of the same size but
 * for a block. A fragment may begin and end within a tensor, so there may be more fragments than
 * tensors, and none is larger than it must be.
 */
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/element.h"
#include "optimizers/outer/outer.h"

void *ob_outer_allocate(struct onebit_outer *outer, size_t count, size_t size) {
  outer->own_bytes += count * size;
  return ob_allocate(count, size);
}

static onebit_status_t no_memory(const struct onebit_outer *outer) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an outer step of %zu parameters",
                  outer->count);
}

static float *allocate_array(struct onebit_outer *outer, size_t count) {
  outer->own_bytes += count * sizeof(float);
  return outer->executor->memory->allocate(count, sizeof(float));
}

/* Where a tensor may be cut: between blocks. */
static size_t quantum(const struct onebit_outer *outer) {
  struct ob_plan_shape shape;
  const bool dense = outer->options.bits == ONEBIT_OUTER_DENSE;
  return ob_outer_shape(outer, dense, &shape) == ONEBIT_OK ? shape.block : 1;
}

/* The elements of a tensor up to a cut, after `before` of all tensors. */
static size_t cut_at(size_t before, size_t count, size_t end, size_t block) {
  if (before + count <= end)
    return count;
  size_t left = end > before ? end - before : 0;
  left = (left + block / 2) / block * block;
  return left < count ? left : count;
}

/* Fills in outer->pieces, in the order of fragments. */
static void cut(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments, block = quantum(outer);
  size_t tensor = 0, first = 0, before = 0; /* elements of the tensors before this one */
  for (size_t f = 0; f < parts; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    const size_t end = outer->count / parts * (f + 1) + outer->count % parts * (f + 1) / parts;
    fragment->piece = outer->pieces + outer->piece_count;
    fragment->first = f ? fragment[-1].first + fragment[-1].count : 0;
    while (tensor < outer->tensor_count) {
      const struct ob_outer_tensor *of = &outer->tensors[tensor];
      const size_t upto = f + 1 == parts ? of->count : cut_at(before, of->count, end, block);
      if (upto > first) {
        fragment->piece[fragment->pieces++] =
            (struct ob_outer_piece){tensor, first, upto - first, fragment->count, of->uncompressed};
        fragment->count += upto - first;
        first = upto;
      }
      if (first < of->count)
        break;
      before += of->count;
      tensor++;
      first = 0;
    }
    outer->piece_count += fragment->pieces;
  }
}

static onebit_status_t allocate_fragment(struct onebit_outer *outer, struct ob_fragment *fragment) {
  fragment->consensus = allocate_array(outer, fragment->count);
  fragment->drift = allocate_array(outer, fragment->count);
  if (outer->options.rule != ONEBIT_OUTER_MEAN)
    fragment->momentum = allocate_array(outer, fragment->count);
  if (!fragment->consensus || !fragment->drift ||
      (outer->options.rule != ONEBIT_OUTER_MEAN && !fragment->momentum))
    return no_memory(outer);
  return ONEBIT_OK;
}

onebit_status_t ob_fragments_create(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments;
  const uint64_t before = outer->own_bytes;
  outer->longest = 0;
  outer->sums = NULL;
  outer->fragments = ob_outer_allocate(outer, parts, sizeof *outer->fragments);
  outer->pieces = ob_outer_allocate(outer, parts + outer->tensor_count, sizeof *outer->pieces);
  outer->runs = ob_outer_allocate(outer, parts + outer->tensor_count, sizeof *outer->runs);
  if (!outer->fragments || !outer->pieces || !outer->runs)
    return no_memory(outer);
  cut(outer);
  for (size_t f = 0; f < parts; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    fragment->outer = outer;
    fragment->number = f;
    fragment->begin_step = ob_outer_begin_step(outer, f / (parts / outer->groups));
    OB_TRY(allocate_fragment(outer, fragment));
    outer->longest = fragment->count > outer->longest ? fragment->count : outer->longest;
  }
  outer->sums = ob_outer_allocate(outer, outer->longest / OB_OUTER_RUN + 1, sizeof *outer->sums);
  outer->fragment_bytes = outer->own_bytes - before;
  return outer->sums ? ONEBIT_OK : no_memory(outer);
}

void ob_fragments_destroy(struct onebit_outer *outer) {
  const struct ob_memory *memory = outer->executor ? outer->executor->memory : &ob_memory_host;
  for (size_t f = 0; outer->fragments && f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    memory->release(fragment->consensus);
    memory->release(fragment->momentum);
    memory->release(fragment->drift);
    memory->release(fragment->weights_there[0]);
    memory->release(fragment->weights_there[1]);
    ob_release(fragment->held[0]);
    ob_release(fragment->held[1]);
  }
  ob_release(outer->fragments);
  ob_release(outer->pieces);
  ob_release(outer->runs);
  ob_release(outer->sums);
}
