/* The map of elements: from their number among all tensors' elements to buckets and pieces. */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* Orders pieces by their first element. Of several that begin with the same number all but the last
 * are empty. */
static int by_element(const void *a, const void *b) {
  const struct ob_stretch *x = a, *y = b;
  const int e = OB_ELEMENTS;
  int order = (x->first[e] > y->first[e]) - (x->first[e] < y->first[e]);
  return order ? order : (x->count[e] > 0) - (y->count[e] > 0);
}

onebit_status_t ob_map_create(struct ob_map *map, const struct ob_state *state) {
  const size_t count = state->list_stretches(state->object, NULL);
  *map = (struct ob_map){.all = ob_allocate(count, sizeof *map->all),
                         .sorted = ob_allocate(count, sizeof *map->sorted),
                         .count = count};
  if (!map->all || !map->sorted)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu pieces", count);
  state->list_stretches(state->object, map->all);
  for (size_t k = 0; k < count; k++) {
    map->all[k].first[OB_PADDING] = map->total[OB_PADDING];
    for (int space = 0; space < OB_SPACES; space++)
      map->total[space] += map->all[k].count[space];
    map->sorted[k] = map->all[k];
  }
  qsort(map->sorted, count, sizeof *map->sorted, by_element);
  return ONEBIT_OK;
}

void ob_map_destroy(struct ob_map *map) {
  ob_release(map->all);
  ob_release(map->sorted);
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
