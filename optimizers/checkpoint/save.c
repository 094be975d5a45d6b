/* Writes the state of an object to a part: first its sections, and then its front, which has their
 * checksums. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* --- Positions of elements ---------------------------------------------------------------------*/

/* Orders pieces by their first element. If several pieces begin with the same element, all but the
 * last are empty. */
static int compare_stretches(const void *a, const void *b) {
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
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %zu pieces", count);
  state->list_stretches(state->object, map->all);
  for (size_t k = 0; k < count; k++) {
    map->all[k].first[OB_PADDING] = map->total[OB_PADDING];
    for (int space = 0; space < OB_SPACES; space++)
      map->total[space] += map->all[k].count[space];
    map->sorted[k] = map->all[k];
  }
  qsort(map->sorted, count, sizeof *map->sorted, compare_stretches);
  return ONEBIT_OK;
}

void ob_map_destroy(struct ob_map *map) {
  ob_release(map->all);
  ob_release(map->sorted);
}

/* Returns all stretches in the order of a space's elements. */
static const struct ob_stretch *list_in_order(const struct ob_map *map, enum ob_space space) {
  return space == OB_ELEMENTS ? map->sorted : map->all;
}

/* Returns the stretch that has this element. */
static const struct ob_stretch *find_stretch(const struct ob_map *map, enum ob_space space,
                                             uint64_t element) {
  const struct ob_stretch *list = list_in_order(map, space);
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

/* --- The sections of a part --------------------------------------------------------------------*/

/* Adds a section, or extends the last one if these elements follow it. */
static void add_section(struct ob_saving *saving, enum ob_saved what, enum ob_space space,
                        uint64_t first, uint64_t end) {
  struct ob_part_section *next = saving->sections + saving->header.sections;
  struct ob_part_section *last = next - (saving->header.sections > 0);
  if (first >= end)
    return;
  if (last < next && last->what == (uint32_t)what && last->space == (uint32_t)space &&
      last->first + last->count == first) {
    last->count += end - first;
    return;
  }
  *next = (struct ob_part_section){
      .what = (uint32_t)what, .space = (uint32_t)space, .first = first, .count = end - first};
  saving->header.sections++;
}

/* Returns total * part / parts, without overflow. */
static uint64_t compute_fraction(uint64_t total, uint64_t part, uint64_t parts) {
  return total / parts * part + total % parts * part / parts;
}

static uint64_t clip_number(uint64_t value, uint64_t low, uint64_t high) {
  return value < low ? low : value > high ? high : value;
}

/* Adds those elements of a stretch (a contiguous range) to the saved part that are within
 * low .. high - 1. */
static void add_stretch(struct ob_saving *saving, enum ob_saved what, enum ob_space space,
                        const struct ob_stretch *stretch, uint64_t low, uint64_t high) {
  const struct ob_run has = saving->state->extent(saving, what, stretch);
  const uint64_t before = space == OB_PADDING ? stretch->count[OB_ELEMENTS] : 0;
  const uint64_t after = before + stretch->count[space], number = stretch->first[space];
  const uint64_t first = clip_number(has.offset, before, after);
  const uint64_t end = clip_number(has.offset + has.count, before, after);
  add_section(saving, what, space, clip_number(number + first - before, low, high),
              clip_number(number + end - before, low, high));
}

/* Adds the elements that this rank saves: all that it has or, if the row is equal on all ranks,
 * only its fraction of the row. */
static void add_elements(struct ob_saving *saving, enum ob_saved what, enum ob_space space) {
  const bool own = ob_saved_is_own(what, saving->header.apart) || ob_saved_rows[what].may_lack;
  const uint64_t total = saving->map.total[space];
  uint64_t low = 0, high = total;
  const bool in_shards = saving->state->in_shards && saving->state->in_shards(saving, what);
  if (!own && !saving->whole && !in_shards) {
    low = compute_fraction(total, saving->header.rank, saving->header.ranks);
    high = compute_fraction(total, saving->header.rank + 1, saving->header.ranks);
  }
  for (size_t k = 0; total && k < saving->map.count; k++)
    add_stretch(saving, what, space, &list_in_order(&saving->map, space)[k], low, high);
}

static onebit_status_t list_sections(struct ob_saving *saving) {
  const size_t max = (size_t)OB_SAVED_END * OB_SPACES * (saving->map.count + 1);
  saving->sections = ob_allocate(max, sizeof *saving->sections);
  if (!saving->sections)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %zu sections", max);
  for (int k = OB_SAVED_NORMS; k < OB_SAVED_END; k++) {
    const enum ob_saved what = (enum ob_saved)k;
    if (!saving->state->has(saving, what))
      continue;
    if (ob_saved_is_numbers(what))
      add_section(saving, what, OB_ELEMENTS, 0,
                  ob_section_limit(&saving->header, what, OB_ELEMENTS));
    else
      add_elements(saving, what, OB_ELEMENTS);
    if (!ob_saved_is_numbers(what) && what != OB_SAVED_PARAMETERS)
      add_elements(saving, what, OB_PADDING);
  }
  return ONEBIT_OK;
}

/* --- The front ---------------------------------------------------------------------------------*/

static onebit_status_t checkpoint_save_describe(struct ob_saving *saving) {
  const struct ob_state *state = saving->state;
  struct ob_part_header *header = &saving->header;
  *header = (struct ob_part_header){
      .version = OB_PART_VERSION_PLAIN,
      .order = OB_PART_ORDER,
      .library = ONEBIT_VERSION_MAJOR << 16 | ONEBIT_VERSION_MINOR << 8 | ONEBIT_VERSION_PATCH,
      .ranks = (uint32_t)state->comm->size,
      .tensors = state->tensors,
      .elements = saving->map.total[OB_ELEMENTS],
      .padding = saving->map.total[OB_PADDING],
      .rank = (uint32_t)state->comm->rank,
  };
  memcpy(header->magic, OB_PART_MAGIC, sizeof header->magic);
  memcpy(header->kind, state->kind, strlen(state->kind));
  OB_TRY(state->describe(saving));
  saving->tensors = ob_allocate(header->tensors, sizeof *saving->tensors);
  if (!saving->tensors)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %zu tensors",
                    (size_t)header->tensors);
  state->list_tensors(state->object, saving->tensors);
  return ONEBIT_OK;
}

/* Sets the offset of each section, and the number of bytes of the part. */
static void checkpoint_save_lay_out(struct ob_part_header *header,
                                    struct ob_part_section *sections) {
  header->front = sizeof *header + header->tensors * sizeof(struct ob_part_tensor) +
                  header->sections * sizeof(struct ob_part_section);
  header->bytes = header->front;
  for (uint64_t i = 0; i < header->sections; i++) {
    sections[i].offset = header->bytes;
    header->bytes += ob_section_bytes(sections[i].what, sections[i].count);
  }
}

onebit_status_t ob_saving_create(struct ob_saving *saving, const struct ob_state *state,
                                 bool whole) {
  *saving = (struct ob_saving){.state = state, .whole = whole};
  OB_TRY(ob_map_create(&saving->map, state));
  OB_TRY(checkpoint_save_describe(saving));
  OB_TRY(list_sections(saving));
  checkpoint_save_lay_out(&saving->header, saving->sections);
  return ONEBIT_OK;
}

void ob_saving_destroy(struct ob_saving *saving) {
  ob_map_destroy(&saving->map);
  ob_reader_destroy(&saving->reader);
  ob_release(saving->tensors);
  ob_release(saving->sections);
}

/* --- The values of a part ----------------------------------------------------------------------*/

static onebit_status_t checkpoint_save_read_elements(struct ob_saving *saving,
                                                     const struct ob_part_section *section,
                                                     uint64_t first, size_t count, float *values) {
  const enum ob_space space = (enum ob_space)section->space;
  for (size_t some; count; count -= some, first += some, values += some) {
    const struct ob_stretch *stretch = find_stretch(&saving->map, space, first);
    const size_t before = (size_t)(first - stretch->first[space]);
    some = stretch->count[space] - before < count ? stretch->count[space] - before : count;
    struct ob_run run = {stretch->piece, before, some};
    run.offset += space == OB_PADDING ? stretch->count[OB_ELEMENTS] : 0;
    OB_TRY(
        saving->state->read(saving, (enum ob_saved)section->what, stretch->bucket, &run, values));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_saving_read(struct ob_saving *saving, const struct ob_part_section *section,
                               uint64_t first, size_t count, void *values) {
  const struct ob_state *state = saving->state;
  if (!ob_saved_is_numbers(section->what))
    return checkpoint_save_read_elements(saving, section, first, count, values);
  for (size_t i = 0; i < count; i++)
    memcpy((uint64_t *)values + i,
           state->number(state->object, (enum ob_saved)section->what, first + i), sizeof(uint64_t));
  return ONEBIT_OK;
}

/* --- Writing -----------------------------------------------------------------------------------*/

/* Writes a section. `buffer` has space for OB_CHUNK floats, doubles or whole numbers. */
static onebit_status_t write_section(struct ob_saving *saving, const struct ob_sink *sink,
                                     struct ob_part_section *section, uint64_t *buffer) {
  struct ob_checksum sum = ob_checksum_begin();
  uint64_t offset = section->offset;
  for (uint64_t at = 0; at < section->count; at += OB_CHUNK) {
    size_t left = (size_t)(section->count - at), count = left < OB_CHUNK ? left : OB_CHUNK;
    size_t bytes = (size_t)ob_section_bytes(section->what, count);
    buffer[bytes / 8 - 1] = 0; /* the padding */
    OB_TRY(ob_saving_read(saving, section, section->first + at, count, buffer));
    ob_checksum_add(&sum, buffer, bytes);
    OB_TRY(sink->put(sink->context, offset, buffer, bytes));
    offset += bytes;
  }
  section->checksum = ob_checksum_end(&sum);
  return ONEBIT_OK;
}

static onebit_status_t write_front(struct ob_saving *saving, const struct ob_sink *sink) {
  struct ob_part_header *header = &saving->header;
  unsigned char *front = ob_allocate(1, (size_t)header->front);
  if (!front)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of sections");
  unsigned char *at = front + sizeof *header;
  if (header->tensors)
    memcpy(at, saving->tensors, (size_t)header->tensors * sizeof *saving->tensors);
  at += header->tensors * sizeof *saving->tensors;
  memcpy(at, saving->sections, (size_t)header->sections * sizeof *saving->sections);
  header->checksum = 0;
  memcpy(front, header, sizeof *header);
  struct ob_checksum sum = ob_checksum_begin();
  ob_checksum_add(&sum, front, (size_t)header->front);
  header->checksum = ob_checksum_end(&sum);
  memcpy(front, header, sizeof *header);
  onebit_status_t status = sink->put(sink->context, 0, front, (size_t)header->front);
  ob_release(front);
  return status;
}

onebit_status_t ob_saving_write(struct ob_saving *saving, const struct ob_sink *sink) {
  onebit_status_t status = ONEBIT_OK;
  uint64_t *buffer = ob_allocate(OB_CHUNK, sizeof *buffer);
  if (!buffer)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for writing a checkpoint");
  for (uint64_t i = 0; status == ONEBIT_OK && i < saving->header.sections; i++)
    status = write_section(saving, sink, &saving->sections[i], buffer);
  if (status == ONEBIT_OK)
    status = write_front(saving, sink);
  ob_release(buffer);
  return status;
}

/* --- To memory ---------------------------------------------------------------------------------*/

static onebit_status_t write_to_memory(void *memory, uint64_t offset, const void *data,
                                       size_t bytes) {
  memcpy((unsigned char *)memory + offset, data, bytes);
  return ONEBIT_OK;
}

static onebit_status_t write_part_to_memory(struct ob_saving *saving, void *memory,
                                            size_t capacity) {
  const struct ob_sink sink = {write_to_memory, memory};
  const size_t bytes = (size_t)saving->header.bytes;
  if (!memory)
    return ONEBIT_OK;
  if (capacity < bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "capacity is %zu, and the part takes %zu bytes",
                    capacity, bytes);
  return ob_saving_write(saving, &sink);
}

onebit_status_t ob_state_save(const struct ob_state *state, bool whole, void *memory,
                              size_t capacity, size_t *bytes) {
  struct ob_saving saving;
  onebit_status_t status = ob_saving_create(&saving, state, whole);
  *bytes = (size_t)saving.header.bytes;
  if (status == ONEBIT_OK)
    status = write_part_to_memory(&saving, memory, capacity);
  ob_saving_destroy(&saving);
  return status;
}
