/* Where elements are: by their number among all tensors' elements, in buckets and pieces. */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* Pieces of a tensor follow each other; one of no tensor is padding. */
static void add_bucket(struct ob_map *map, const struct onebit_optimizer *optimizer, size_t u) {
  const struct ob_bucket *bucket = &optimizer->buckets[u];
  size_t before = optimizer->tensor_count;
  uint64_t element = 0;
  map->of_bucket[u] = map->count;
  for (size_t k = 0; k < bucket->bits->geometry.layout.pieces; k++) {
    const struct ob_piece *piece = &bucket->bits->geometry.layout.piece[k];
    size_t tensor = bucket->tensor_of[k];
    size_t real = tensor < optimizer->tensor_count ? piece->valid : 0;
    if (tensor < optimizer->tensor_count && tensor != before)
      element = optimizer->tensors[tensor].first;
    before = tensor;
    map->all[map->count++] = (struct ob_stretch){.first = {element, map->total[OB_PADDING]},
                                                 .count = {real, piece->count - real},
                                                 .bucket = u,
                                                 .piece = k};
    element += real;
    map->total[OB_ELEMENTS] += real;
    map->total[OB_PADDING] += piece->count - real;
  }
}

/* Of pieces that begin with the same number all but the last have no element. */
static int by_element(const void *a, const void *b) {
  const struct ob_stretch *x = a, *y = b;
  const int e = OB_ELEMENTS;
  int order = (x->first[e] > y->first[e]) - (x->first[e] < y->first[e]);
  return order ? order : (x->count[e] > 0) - (y->count[e] > 0);
}

onebit_status_t ob_map_create(struct ob_map *map, const struct onebit_optimizer *optimizer) {
  size_t pieces = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    pieces += optimizer->buckets[u].bits->geometry.layout.pieces;
  *map = (struct ob_map){.all = ob_allocate(pieces, sizeof *map->all),
                         .sorted = ob_allocate(pieces, sizeof *map->sorted),
                         .of_bucket = ob_allocate(optimizer->bucket_count, sizeof *map->of_bucket)};
  if (!map->all || !map->sorted || !map->of_bucket)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu pieces", pieces);
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    add_bucket(map, optimizer, u);
  for (size_t k = 0; k < pieces; k++)
    map->sorted[k] = map->all[k];
  qsort(map->sorted, pieces, sizeof *map->sorted, by_element);
  return ONEBIT_OK;
}

void ob_map_destroy(struct ob_map *map) {
  ob_release(map->all);
  ob_release(map->sorted);
  ob_release(map->of_bucket);
}

const struct ob_stretch *ob_map_list(const struct ob_map *map, enum ob_space space) {
  return space == OB_ELEMENTS ? map->sorted : map->all;
}

const struct ob_stretch *ob_map_find(const struct ob_map *map, enum ob_space space,
                                     uint64_t element) {
  const struct ob_stretch *list = ob_map_list(map, space);
  size_t low = 0, high = map->count;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (list[middle].first[space] <= element)
      low = middle;
    else
      high = middle;
  }
  return &list[low];
}
