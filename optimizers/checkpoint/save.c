/* An optimizer to a part. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

onebit_status_t ob_checkpoint_idle(onebit_optimizer_t optimizer) {
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  return ob_optimizer_catch_up(optimizer);
}

/* --- Which sections there are ------------------------------------------------------------------*/

/* The list as it grows; the first time only its length. */
struct listing {
  const struct ob_saving *saving;
  struct ob_part_section *sections;
  uint64_t count;
};

static void add(struct listing *listing, enum ob_saved what, enum ob_space space, uint64_t first,
                uint64_t count) {
  if (!count)
    return;
  if (listing->sections)
    listing->sections[listing->count] = (struct ob_part_section){
        .what = (uint32_t)what, .space = (uint32_t)space, .first = first, .count = count};
  listing->count++;
}

/* total * part / parts, without overflow. */
static uint64_t fraction(uint64_t total, uint64_t part, uint64_t parts) {
  return total / parts * part + total % parts * part / parts;
}

/* All of what is this rank's own; this rank's part of what all have alike. */
static void add_array(struct listing *listing, enum ob_saved what, enum ob_space space) {
  const struct ob_saving *saving = listing->saving;
  bool own = ob_saved_is_own(what, saving->header.apart);
  uint64_t rank = own ? 0 : saving->header.rank, ranks = own ? 1 : saving->header.ranks;
  uint64_t total = saving->map.total[space], first = fraction(total, rank, ranks);
  add(listing, what, space, first, fraction(total, rank + 1, ranks) - first);
}

/* The elements of a stretch that this rank has that of: from *first on. */
static size_t share_of(const struct ob_unit *unit, enum ob_saved what,
                       const struct ob_stretch *stretch, uint64_t *first) {
  const struct ob_layout *layout = &unit->bits->geometry.layout;
  size_t begin, end, last = stretch->offset + stretch->count;
  ob_saved_blocks(unit, what, &begin, &end);
  size_t low = ob_offset_in(layout, stretch->piece, begin),
         high = ob_offset_in(layout, stretch->piece, end);
  low = low > stretch->offset ? low : stretch->offset;
  high = high < last ? high : last;
  *first = stretch->first + (low - stretch->offset);
  return low >= high ? 0 : high - low;
}

/* What a rank has of some blocks only: as many sections as there are stretches of elements. */
static void add_shares(struct listing *listing, enum ob_saved what, enum ob_space space) {
  const struct ob_saving *saving = listing->saving;
  uint64_t first = 0, end = 0, from;
  for (size_t k = 0; k < saving->map.count[space]; k++) {
    const struct ob_stretch *stretch = &saving->map.stretches[space][k];
    size_t count = share_of(&saving->optimizer->units[stretch->unit], what, stretch, &from);
    if (count && from != end) {
      add(listing, what, space, first, end - first);
      first = from;
    }
    end = count ? from + count : end;
  }
  add(listing, what, space, first, end - first);
}

static void add_elements(struct listing *listing, enum ob_saved what) {
  const struct ob_method *method = listing->saving->optimizer->method;
  bool served = what == OB_SAVED_MOMENTUM && method->serve_rule != OB_SERVE_MEAN;
  bool shares = what >= OB_SAVED_WORKER || method->sharded || served;
  for (int space = 0; space < OB_SPACES; space++)
    if (space == OB_PADDING && what == OB_SAVED_PARAMETERS)
      continue;
    else if (shares)
      add_shares(listing, what, (enum ob_space)space);
    else
      add_array(listing, what, (enum ob_space)space);
}

static void list_sections(struct listing *listing) {
  const struct ob_saving *saving = listing->saving;
  const struct ob_part_header *header = &saving->header;
  listing->count = 0;
  for (int k = OB_SAVED_NORMS; k < OB_SAVED_END; k++) {
    enum ob_saved what = (enum ob_saved)k;
    if (!ob_checkpoint_has(saving->optimizer, (enum ob_stage)header->stage, what))
      continue;
    if (what == OB_SAVED_NORMS)
      add(listing, what, OB_ELEMENTS, 0, header->window);
    else if (what == OB_SAVED_NUMBERS)
      add(listing, what, OB_ELEMENTS, 0, header->numbers);
    else
      add_elements(listing, what);
  }
}

/* --- The front ---------------------------------------------------------------------------------*/

static void describe(struct ob_saving *saving) {
  struct onebit_optimizer *optimizer = saving->optimizer;
  const struct ob_hosts *hosts = &optimizer->comm->hosts;
  bool across = ob_checkpoint_hosts(optimizer) > 0;
  enum ob_stage stage = ob_checkpoint_stage(optimizer);
  bool norms = ob_checkpoint_has(optimizer, stage, OB_SAVED_NORMS);
  saving->header = (struct ob_part_header){
      .version = OB_PART_VERSION,
      .order = OB_PART_ORDER,
      .library = ONEBIT_VERSION_MAJOR << 16 | ONEBIT_VERSION_MINOR << 8 | ONEBIT_VERSION_PATCH,
      .profile = (uint32_t)optimizer->options.profile,
      .ranks = (uint32_t)optimizer->comm->size,
      .hosts = (uint32_t)ob_checkpoint_hosts(optimizer),
      .stage = (uint32_t)stage,
      .form = (uint32_t)ob_checkpoint_form(optimizer),
      .shards = (uint32_t)optimizer->moments.shards,
      .apart = ob_checkpoint_apart(optimizer),
      .tensors = optimizer->tensor_count,
      .elements = saving->map.total[OB_ELEMENTS],
      .padding = saving->map.total[OB_PADDING],
      .steps = optimizer->steps,
      .frozen_at = optimizer->frozen_at,
      .variance_ratio = optimizer->variance_ratio,
      .window = norms ? optimizer->window : 0,
      .numbers = ob_checkpoint_count_numbers(optimizer),
      .rank = (uint32_t)optimizer->comm->rank,
      .host = across ? (uint32_t)hosts->host : 0,
      .place = across ? (uint32_t)hosts->place : 0,
      .skipped = optimizer->skipped,
      .good_steps = optimizer->good_steps,
      .loss_scale = optimizer->options.initial_loss_scale != 0 ? optimizer->loss_scale : 0,
      .gradient_norm = optimizer->gradient_norm,
  };
  memcpy(saving->header.magic, OB_PART_MAGIC, sizeof saving->header.magic);
  memcpy(saving->header.kind, optimizer->method->name, strlen(optimizer->method->name));
  memcpy(saving->header.exchanges, optimizer->exchanges, sizeof optimizer->exchanges);
}

static void lay_out(struct ob_saving *saving) {
  struct ob_part_header *header = &saving->header;
  header->front = sizeof *header + header->tensors * sizeof(struct ob_part_tensor) +
                  header->sections * sizeof(struct ob_part_section);
  uint64_t offset = header->front;
  for (uint64_t i = 0; i < header->sections; i++) {
    struct ob_part_section *section = &saving->sections[i];
    section->offset = offset;
    offset += ob_section_bytes((enum ob_saved)section->what, section->count);
  }
  header->bytes = offset;
}

onebit_status_t ob_saving_create(struct ob_saving *saving, onebit_optimizer_t optimizer) {
  *saving = (struct ob_saving){.optimizer = optimizer};
  OB_TRY(ob_map_create(&saving->map, optimizer));
  describe(saving);
  struct listing listing = {.saving = saving};
  list_sections(&listing);
  saving->header.sections = listing.count;
  saving->sections = ob_allocate((size_t)listing.count, sizeof *saving->sections);
  if (!saving->sections)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %" PRIu64 " sections",
                    listing.count);
  listing.sections = saving->sections;
  list_sections(&listing);
  lay_out(saving);
  return ONEBIT_OK;
}

void ob_saving_destroy(struct ob_saving *saving) {
  ob_map_destroy(&saving->map);
  ob_release(saving->sections);
}

/* --- Writing it --------------------------------------------------------------------------------*/

/* What goes with it while sections are written. */
struct writing {
  struct ob_saving *saving;
  const struct ob_sink *sink;
  struct ob_reader reader;
  uint64_t *room; /* OB_CHUNK: floats, doubles or whole numbers */
};

static void read_numbers(struct onebit_optimizer *optimizer, uint64_t first, size_t count,
                         uint64_t *room) {
  struct ob_numbers list[OB_NUMBERS_AT_MOST];
  size_t lists = ob_checkpoint_numbers(optimizer, list);
  uint64_t number = 0;
  for (size_t k = 0; k < lists; k++)
    for (size_t i = 0; i < list[k].count; i++, number++)
      if (number >= first && number - first < count)
        memcpy(&room[number - first], ob_number_at(&list[k], i), sizeof *room);
}

static onebit_status_t read_section(struct writing *writing, const struct ob_part_section *section,
                                    uint64_t first, size_t count) {
  struct onebit_optimizer *optimizer = writing->saving->optimizer;
  enum ob_saved what = (enum ob_saved)section->what;
  float *values = (float *)(void *)writing->room;
  if (count % 2)
    values[count] = 0; /* what fills up */
  switch (what) {
  case OB_SAVED_NORMS:
    memcpy(writing->room, optimizer->norms + first, count * sizeof(double));
    return ONEBIT_OK;
  case OB_SAVED_NUMBERS:
    read_numbers(optimizer, first, count, writing->room);
    return ONEBIT_OK;
  default:
    return ob_read(&writing->reader, what, (enum ob_space)section->space, first, count, values);
  }
}

static onebit_status_t write_section(struct writing *writing, struct ob_part_section *section) {
  enum ob_saved what = (enum ob_saved)section->what;
  struct ob_checksum sum = ob_checksum_begin();
  uint64_t offset = section->offset;
  for (uint64_t at = 0; at < section->count; at += OB_CHUNK) {
    size_t left = (size_t)(section->count - at), count = left < OB_CHUNK ? left : OB_CHUNK;
    size_t bytes = (size_t)ob_section_bytes(what, count);
    OB_TRY(read_section(writing, section, section->first + at, count));
    ob_checksum_add(&sum, writing->room, bytes);
    OB_TRY(writing->sink->put(writing->sink->context, offset, writing->room, bytes));
    offset += bytes;
  }
  section->checksum = ob_checksum_end(&sum);
  return ONEBIT_OK;
}

/* The front comes last, since it has the checksums. */
static onebit_status_t write_front(struct ob_saving *saving, const struct ob_sink *sink) {
  struct ob_part_header *header = &saving->header;
  const struct onebit_optimizer *optimizer = saving->optimizer;
  unsigned char *front = ob_allocate(1, (size_t)header->front), *at = front + sizeof *header;
  if (!front)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of sections");
  for (size_t t = 0; t < optimizer->tensor_count; t++, at += sizeof(struct ob_part_tensor)) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    struct ob_part_tensor row = {tensor->count, optimizer->units[tensor->unit].uncompressed};
    memcpy(at, &row, sizeof row);
  }
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

static onebit_status_t write_sections(struct writing *writing) {
  struct ob_saving *saving = writing->saving;
  writing->room = ob_allocate(OB_CHUNK, sizeof *writing->room);
  if (!writing->room)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to save an optimizer");
  for (uint64_t i = 0; i < saving->header.sections; i++)
    OB_TRY(write_section(writing, &saving->sections[i]));
  return write_front(saving, writing->sink);
}

onebit_status_t ob_saving_write(struct ob_saving *saving, const struct ob_sink *sink) {
  struct writing writing = {.saving = saving, .sink = sink};
  onebit_status_t status = ob_reader_create(&writing.reader, saving->optimizer, &saving->map);
  if (status == ONEBIT_OK)
    status = write_sections(&writing);
  ob_reader_destroy(&writing.reader);
  ob_release(writing.room);
  return status;
}

/* --- To memory ---------------------------------------------------------------------------------*/

static onebit_status_t put_in_memory(void *memory, uint64_t offset, const void *data,
                                     size_t bytes) {
  memcpy((unsigned char *)memory + offset, data, bytes);
  return ONEBIT_OK;
}

static onebit_status_t save_to(struct ob_saving *saving, void *memory, size_t capacity,
                               size_t *bytes) {
  const struct ob_sink sink = {put_in_memory, memory};
  *bytes = (size_t)saving->header.bytes;
  if (!memory)
    return ONEBIT_OK;
  if (capacity < *bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "capacity is %zu, and the part takes %zu bytes",
                    capacity, *bytes);
  return ob_saving_write(saving, &sink);
}

onebit_status_t onebit_optimizer_save(onebit_optimizer_t optimizer, void *memory, size_t capacity,
                                      size_t *bytes) {
  if (!optimizer || !bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", optimizer ? "bytes" : "optimizer");
  *bytes = 0;
  OB_TRY(ob_checkpoint_idle(optimizer));
  struct ob_saving saving;
  onebit_status_t status = ob_saving_create(&saving, optimizer);
  if (status == ONEBIT_OK)
    status = save_to(&saving, memory, capacity, bytes);
  ob_saving_destroy(&saving);
  return status;
}
