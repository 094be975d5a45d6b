/* Where elements lie: by their number among all tensors' elements, in units and pieces. */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

static size_t count_pieces(const struct onebit_optimizer *optimizer) {
  size_t pieces = 0;
  for (size_t u = 0; u < optimizer->unit_count; u++)
    pieces += optimizer->units[u].bits->geometry.layout.pieces;
  return pieces;
}

static onebit_status_t allocate(struct ob_map *map, const struct onebit_optimizer *optimizer) {
  size_t pieces = count_pieces(optimizer);
  map->pieces = ob_allocate(pieces, sizeof *map->pieces);
  map->of_unit = ob_allocate(optimizer->unit_count, sizeof *map->of_unit);
  for (int space = 0; space < OB_SPACES; space++) {
    map->stretches[space] = ob_allocate(pieces, sizeof *map->stretches[space]);
    if (!map->stretches[space])
      return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu pieces", pieces);
  }
  if (!map->pieces || !map->of_unit)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu pieces", pieces);
  return ONEBIT_OK;
}

static void add_stretch(struct ob_map *map, enum ob_space space, struct ob_stretch stretch) {
  if (!stretch.count)
    return;
  map->stretches[space][map->count[space]++] = stretch;
  map->total[space] += stretch.count;
}

/* Pieces of a tensor follow each other; one of no tensor is padding. */
static void add_unit(struct ob_map *map, const struct onebit_optimizer *optimizer, size_t u,
                     const uint64_t *firsts) {
  const struct ob_unit *unit = &optimizer->units[u];
  size_t before = optimizer->tensor_count;
  uint64_t element = 0;
  for (size_t k = 0; k < unit->bits->geometry.layout.pieces; k++) {
    const struct ob_piece *piece = &unit->bits->geometry.layout.piece[k];
    size_t tensor = unit->tensor_of[k];
    size_t real = tensor < optimizer->tensor_count ? piece->valid : 0;
    if (tensor < optimizer->tensor_count && tensor != before)
      element = firsts[tensor];
    before = tensor;
    map->of_unit[u][k] = (struct ob_piece_map){element, map->total[OB_PADDING], real};
    add_stretch(map, OB_ELEMENTS, (struct ob_stretch){element, real, u, k, 0});
    add_stretch(map, OB_PADDING,
                (struct ob_stretch){map->total[OB_PADDING], piece->count - real, u, k, real});
    element += real;
  }
}

static int by_element(const void *a, const void *b) {
  uint64_t x = ((const struct ob_stretch *)a)->first, y = ((const struct ob_stretch *)b)->first;
  return (x > y) - (x < y);
}

onebit_status_t ob_map_create(struct ob_map *map, const struct onebit_optimizer *optimizer) {
  *map = (struct ob_map){0};
  uint64_t *firsts = ob_allocate(optimizer->tensor_count + 1, sizeof *firsts);
  onebit_status_t status = firsts
                               ? allocate(map, optimizer)
                               : ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of tensors");
  for (size_t t = 0; status == ONEBIT_OK && t < optimizer->tensor_count; t++)
    firsts[t + 1] = firsts[t] + optimizer->tensors[t].count;
  struct ob_piece_map *next = map->pieces;
  for (size_t u = 0; status == ONEBIT_OK && u < optimizer->unit_count; u++) {
    map->of_unit[u] = next;
    add_unit(map, optimizer, u, firsts);
    next += optimizer->units[u].bits->geometry.layout.pieces;
  }
  if (status == ONEBIT_OK)
    qsort(map->stretches[OB_ELEMENTS], map->count[OB_ELEMENTS], sizeof(struct ob_stretch),
          by_element);
  ob_release(firsts);
  return status;
}

void ob_map_destroy(struct ob_map *map) {
  for (int space = 0; space < OB_SPACES; space++)
    ob_release(map->stretches[space]);
  ob_release(map->pieces);
  ob_release(map->of_unit);
}

const struct ob_stretch *ob_map_find(const struct ob_map *map, enum ob_space space,
                                     uint64_t element) {
  const struct ob_stretch *stretches = map->stretches[space];
  size_t low = 0, high = map->count[space];
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (stretches[middle].first <= element)
      low = middle;
    else
      high = middle;
  }
  return &stretches[low];
}
