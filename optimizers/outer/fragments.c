/*
 * Fragments: the elements of all tensors, one after the other, cut into parts whose sizes differ by
 * at most about a block. A fragment may begin and end within a tensor, so there may be more
 * fragments than tensors, and no fragment is larger than necessary.
 */
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/element.h"
#include "optimizers/outer/outer.h"

void *ob_outer_allocate(struct onebit_outer *outer, size_t count, size_t size) {
  outer->own_bytes += count * size;
  return ob_allocate(count, size);
}

onebit_status_t ob_outer_no_memory(const struct onebit_outer *outer) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for an outer step of %zu parameters",
                  outer->count);
}

/* Returns the unit in which a tensor may be cut: the number of elements in a block. */
static size_t cut_unit(const struct onebit_outer *outer) {
  struct ob_plan_shape shape;
  const bool dense = outer->options.bits == ONEBIT_OUTER_DENSE;
  return ob_outer_shape(outer, dense, &shape) == ONEBIT_OK ? shape.block : 1;
}

/* Returns how many elements of a tensor lie before a cut; `before` elements lie before the
 * tensor. */
static size_t count_before_cut(size_t before, size_t count, size_t end, size_t block) {
  if (before + count <= end)
    return count;
  size_t left = end > before ? end - before : 0;
  left = (left + block / 2) / block * block;
  return left < count ? left : count;
}

/* Fills in outer->pieces, in the order of fragments. */
static void cut_fragments(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments, block = cut_unit(outer);
  size_t tensor = 0, first = 0, before = 0; /* elements of the tensors before this one */
  for (size_t f = 0; f < parts; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    const size_t end = outer->count / parts * (f + 1) + outer->count % parts * (f + 1) / parts;
    fragment->piece = outer->pieces + outer->piece_count;
    fragment->first = f ? fragment[-1].first + fragment[-1].count : 0;
    while (tensor < outer->tensor_count) {
      const struct ob_outer_tensor *of = &outer->tensors[tensor];
      const size_t upto =
          f + 1 == parts ? of->count : count_before_cut(before, of->count, end, block);
      if (upto > first) {
        fragment->piece[fragment->pieces++] = (struct ob_outer_piece){
            tensor, first, upto - first, fragment->count, of->uncompressed, 0};
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

/* --- The memory of fragments -------------------------------------------------------------------*/

static onebit_status_t fragments_allocate_arrays(struct onebit_outer *outer) {
  for (int k = 0; k < OB_OUTER_HOME_ARRAYS; k++) {
    if (k == OB_OUTER_MOMENTUM && outer->options.rule == ONEBIT_OUTER_MEAN)
      continue;
    outer->array[k] = outer->executor->memory->allocate(outer->count, sizeof(float));
    if (!outer->array[k])
      return ob_outer_no_memory(outer);
    outer->own_bytes += outer->count * sizeof(float);
  }
  return ONEBIT_OK;
}

void ob_fragments_set_arrays(struct onebit_outer *outer) {
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    for (int k = 0; k < OB_OUTER_ARRAYS; k++) {
      float *array = outer->array[k];
      fragment->array[k] = array ? array + fragment->first : NULL;
    }
  }
}

/* Creates the lists of each fragment, but not its arrays. */
static onebit_status_t create_lists(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments;
  const uint64_t before = outer->own_bytes;
  outer->piece_count = outer->longest = 0;
  outer->sums = NULL;
  outer->fragments = ob_outer_allocate(outer, parts, sizeof *outer->fragments);
  outer->pieces = ob_outer_allocate(outer, parts + outer->tensor_count, sizeof *outer->pieces);
  if (!outer->fragments || !outer->pieces)
    return ob_outer_no_memory(outer);
  cut_fragments(outer);
  for (size_t f = 0; f < parts; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    fragment->outer = outer;
    fragment->number = f;
    fragment->begin_step = ob_outer_begin_step(outer, f / (parts / outer->groups));
    outer->longest = fragment->count > outer->longest ? fragment->count : outer->longest;
  }
  outer->sums = ob_outer_allocate(outer, outer->longest / OB_OUTER_RUN + 1, sizeof *outer->sums);
  outer->fragment_bytes = outer->own_bytes - before;
  return outer->sums ? ONEBIT_OK : ob_outer_no_memory(outer);
}

static void destroy_lists(struct onebit_outer *outer) {
  const struct ob_memory *memory = outer->executor ? outer->executor->memory : &ob_memory_host;
  for (size_t f = 0; outer->fragments && f < outer->options.fragments; f++) {
    memory->release(outer->fragments[f].weights_there[0]);
    memory->release(outer->fragments[f].weights_there[1]);
  }
  ob_release(outer->fragments);
  ob_release(outer->pieces);
  ob_release(outer->sums);
}

onebit_status_t ob_fragments_create(struct onebit_outer *outer) {
  OB_TRY(create_lists(outer));
  OB_TRY(fragments_allocate_arrays(outer));
  ob_fragments_set_arrays(outer);
  return ONEBIT_OK;
}

void ob_fragments_destroy(struct onebit_outer *outer) {
  for (int k = 0; k < OB_OUTER_ARRAYS; k++)
    if (k < OB_OUTER_HOME_ARRAYS && outer->executor)
      outer->executor->memory->release(outer->array[k]);
    else
      ob_release(outer->array[k]);
  destroy_lists(outer);
}

/* --- Changing the number of fragments ----------------------------------------------------------*/

/* Copies the state of the former fragment that has the first element of the new one. */
static void copy_fragment_state(struct ob_fragment *next, const struct onebit_outer *before) {
  const struct ob_fragment *of = before->fragments;
  for (size_t f = 1; f < before->options.fragments && before->fragments[f].first <= next->first;
       f++)
    of = &before->fragments[f];
  next->keeps = of->keeps;
  next->weight = of->weight + (of->stage == OB_FRAGMENT_SENDING ? of->sent_weight : 0);
}

onebit_status_t ob_outer_recut(struct onebit_outer *outer, size_t parts) {
  struct onebit_outer before = *outer;
  if (parts == before.options.fragments)
    return ONEBIT_OK;
  outer->own_bytes -= before.fragment_bytes;
  outer->options.fragments = parts;
  const onebit_status_t status = create_lists(outer);
  if (status != ONEBIT_OK) {
    destroy_lists(outer);
    *outer = before;
    return status;
  }
  for (size_t f = 0; f < parts; f++)
    copy_fragment_state(&outer->fragments[f], &before);
  ob_fragments_set_arrays(outer);
  destroy_lists(&before);
  return ONEBIT_OK;
}

/* --- Copies ------------------------------------------------------------------------------------*/

onebit_status_t ob_outer_copy(const struct onebit_outer *outer, void *to, const void *from,
                              size_t bytes) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = executor->memory->copy(to, from, bytes);
  if (executor->leave)
    executor->leave(before);
  return status;
}

onebit_status_t ob_outer_clear(const struct onebit_outer *outer, void *memory, size_t bytes) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = executor->memory->clear(memory, bytes);
  if (executor->leave)
    executor->leave(before);
  return status;
}

/* --- The host's copies -------------------------------------------------------------------------*/

/* Replaces an array by a copy on the host; *home is set to the array's own address. */
static onebit_status_t copy_array_to_host(const struct onebit_outer *outer, void **array,
                                          void **home, size_t bytes) {
  if (!*array)
    return ONEBIT_OK;
  void *copy = ob_allocate(1, bytes);
  if (!copy)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of host memory for an outer step of %zu parameters",
                    outer->count);
  const onebit_status_t status = ob_outer_copy(outer, copy, *array, bytes);
  *home = *array;
  *array = copy;
  return status;
}

static onebit_status_t copy_back(const struct onebit_outer *outer, void **array, void **home,
                                 size_t bytes, bool changed) {
  if (!*home)
    return ONEBIT_OK;
  const onebit_status_t status = changed ? ob_outer_copy(outer, *home, *array, bytes) : ONEBIT_OK;
  ob_release(*array);
  *array = *home;
  *home = NULL;
  return status;
}

static size_t parameter_bytes(const struct onebit_outer *outer, size_t tensor) {
  return outer->tensors[tensor].count * ob_dtype_size(outer->options.parameter_dtype);
}

static onebit_status_t copy_arrays_to_host(struct onebit_outer *outer) {
  for (int k = 0; k < OB_OUTER_HOME_ARRAYS; k++)
    OB_TRY(
        copy_array_to_host(outer, &outer->array[k], &outer->home[k], outer->count * sizeof(float)));
  for (size_t t = 0; t < outer->tensor_count; t++) {
    struct ob_outer_tensor *tensor = &outer->tensors[t];
    OB_TRY(copy_array_to_host(outer, &tensor->parameter, &tensor->home, parameter_bytes(outer, t)));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_outer_to_host(struct onebit_outer *outer) {
  if (outer->executor->memory == &ob_memory_host || outer->on_host)
    return ONEBIT_OK;
  outer->on_host = true;
  const onebit_status_t status = copy_arrays_to_host(outer);
  ob_fragments_set_arrays(outer);
  if (status != ONEBIT_OK)
    (void)ob_outer_from_host(outer, false); /* only pointers change */
  return status;
}

/* Copies all arrays back, even if one copy fails. */
onebit_status_t ob_outer_from_host(struct onebit_outer *outer, bool changed) {
  onebit_status_t status = ONEBIT_OK;
  if (!outer->on_host)
    return ONEBIT_OK;
  outer->on_host = false;
  for (int k = 0; k < OB_OUTER_HOME_ARRAYS; k++) {
    const onebit_status_t sent =
        copy_back(outer, &outer->array[k], &outer->home[k], outer->count * sizeof(float), changed);
    status = status == ONEBIT_OK ? sent : status;
  }
  ob_fragments_set_arrays(outer);
  for (size_t t = 0; t < outer->tensor_count; t++) {
    struct ob_outer_tensor *tensor = &outer->tensors[t];
    const onebit_status_t sent =
        copy_back(outer, &tensor->parameter, &tensor->home, parameter_bytes(outer, t), changed);
    status = status == ONEBIT_OK ? sent : status;
  }
  return status;
}
