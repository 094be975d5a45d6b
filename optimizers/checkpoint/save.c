/* An optimizer to a part. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "base/memory.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

onebit_status_t ob_checkpoint_idle(onebit_optimizer_t optimizer) {
  if (optimizer->step.open)
    return ob_error(ONEBIT_ERROR_BUSY, "a step is open: onebit_optimizer_step ends it");
  return ob_optimizer_catch_up(optimizer);
}

/* --- What is no array --------------------------------------------------------------------------*/

enum ob_form ob_checkpoint_form(const struct onebit_optimizer *optimizer) {
  bool step = optimizer->moments.exchange == ONEBIT_ADAM_EXCHANGE_STEP;
  return step && ob_optimizer_compresses(optimizer) ? OB_FORM_STEP : OB_FORM_MOMENTUM;
}

size_t ob_checkpoint_hosts(const struct onebit_optimizer *optimizer) {
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (optimizer->buckets[u].bits->host.ranks)
      return (size_t)optimizer->comm->hosts.count;
  return 0;
}

/* Of struct ob_ladder_state. `at` and `count` are of the whole scratch: the caller's. */
static void *ladder_number(struct onebit_optimizer *optimizer, uint64_t i, struct ob_numbers *is) {
  static const struct {
    enum ob_numbers_kind kind;
    double min, max;
    size_t count;
  } rows[] = {{OB_NUMBERS_WHOLE, 1, OB_MAX_WIDTH, 2}, /* widths */
              {OB_NUMBERS_WHOLE, 0, 0x1p63, 6},
              {OB_NUMBERS_WHOLE, 0, OB_LADDER_FLAGS, 2},
              {OB_NUMBERS_REAL, 0, INFINITY, OB_LADDER_NUMBERS - 10}};
  uint64_t count = optimizer->ladders ? optimizer->list_count * OB_LADDER_NUMBERS : 0;
  size_t number = (size_t)(i % OB_LADDER_NUMBERS), k = 0;
  for (; number >= rows[k].count; k++)
    number -= rows[k].count;
  *is = (struct ob_numbers){rows[k].kind, optimizer->ladders, count, rows[k].min, rows[k].max};
  return i < count ? (uint64_t *)(void *)optimizer->ladders + i : NULL;
}

void *ob_checkpoint_number(struct onebit_optimizer *optimizer, enum ob_saved what, uint64_t i,
                           struct ob_numbers *is) {
  if (what == OB_SAVED_LADDERS)
    return ladder_number(optimizer, i, is);
  struct ob_numbers list[OB_MAX_NUMBERS] = {{.at = optimizer->norms, .count = optimizer->window}};
  size_t lists = 1;
  if (what == OB_SAVED_NUMBERS)
    lists = optimizer->method->numbers ? optimizer->method->numbers(optimizer, list) : 0;
  for (size_t k = 0; k < lists; i -= list[k++].count)
    if (i < list[k].count) {
      *is = list[k];
      return (char *)list[k].at + sizeof(uint64_t) * i;
    }
  return NULL;
}

uint64_t ob_checkpoint_numbers(struct onebit_optimizer *optimizer, enum ob_saved what) {
  struct ob_numbers is;
  uint64_t count = 0;
  while (ob_checkpoint_number(optimizer, what, count, &is))
    count += is.count;
  return count;
}

/* --- Which sections there are ------------------------------------------------------------------*/

/* Elements that follow those before are in one section with them. */
static void add(struct ob_saving *saving, int what, int space, uint64_t first, uint64_t end) {
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

/* total * part / parts, without overflow. */
static uint64_t fraction(uint64_t total, uint64_t part, uint64_t parts) {
  return total / parts * part + total % parts * part / parts;
}

static uint64_t clip(uint64_t value, uint64_t low, uint64_t high) {
  return value < low ? low : value > high ? high : value;
}

/* With the blocks whose elements this rank saves: what it has, but of parameters its shard, and of
 * momentum that servers keep what it serves, also where it has all of it, unless all is wanted. */
static struct ob_section saved_section(const struct ob_saving *saving,
                                       const struct ob_bucket *bucket, enum ob_saved what) {
  struct ob_section section = ob_section_of(bucket, (enum ob_stage)saving->header.stage, what);
  if (what == OB_SAVED_PARAMETERS) {
    section.first = bucket->first_block;
    section.end = section.first + bucket->blocks;
  }
  if (what == OB_SAVED_MOMENTUM && saving->optimizer->method->serve_rule != OB_SERVE_MEAN &&
      !saving->whole) {
    section.first = bucket->bits->server.first;
    section.end = section.first + bucket->bits->server.blocks;
  }
  return section;
}

/* Of a stretch the elements low .. high - 1 at most. */
static void add_stretch(struct ob_saving *saving, enum ob_saved what, enum ob_space space,
                        const struct ob_stretch *stretch, uint64_t low, uint64_t high) {
  const struct ob_bucket *bucket = &saving->optimizer->buckets[stretch->bucket];
  struct ob_section section = saved_section(saving, bucket, what);
  const struct ob_layout *layout = &section.plan->geometry.layout;
  uint64_t before = space == OB_PADDING ? stretch->count[OB_ELEMENTS] : 0;
  uint64_t after = before + stretch->count[space], number = stretch->first[space];
  uint64_t first = clip(ob_offset_in(layout, stretch->piece, section.first), before, after);
  uint64_t end = clip(ob_offset_in(layout, stretch->piece, section.end), before, after);
  add(saving, (int)what, (int)space, clip(number + first - before, low, high),
      clip(number + end - before, low, high));
}

/* All that this rank has; but of what all ranks have alike its part. */
static void add_elements(struct ob_saving *saving, enum ob_saved what, enum ob_space space) {
  const struct ob_method *method = saving->optimizer->method;
  const struct ob_saved_row *row = &ob_saved_rows[what];
  bool from_servers = what == OB_SAVED_MOMENTUM && method->serve_rule != OB_SERVE_MEAN;
  bool own = row->own || row->may_lack || (row->own_apart && saving->header.apart);
  uint64_t total = saving->map.total[space], low = 0, high = total;
  if (!own && !from_servers && !method->sharded && !saving->whole) {
    low = fraction(total, saving->header.rank, saving->header.ranks);
    high = fraction(total, saving->header.rank + 1, saving->header.ranks);
  }
  for (size_t k = 0; k < saving->map.count; k++)
    add_stretch(saving, what, space, &ob_map_list(&saving->map, space)[k], low, high);
}

static onebit_status_t list_sections(struct ob_saving *saving) {
  const struct ob_part_header *header = &saving->header;
  size_t max = (size_t)OB_SAVED_END * OB_SPACES * (saving->map.count + 1);
  saving->sections = ob_allocate(max, sizeof *saving->sections);
  if (!saving->sections)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu sections", max);
  add(saving, OB_SAVED_NORMS, OB_ELEMENTS, 0, header->window);
  add(saving, OB_SAVED_NUMBERS, OB_ELEMENTS, 0, header->numbers);
  for (int k = OB_SAVED_PARAMETERS; k < OB_SAVED_END; k++) {
    enum ob_saved what = (enum ob_saved)k;
    if (!ob_has_section(saving->optimizer, (enum ob_stage)header->stage, what))
      continue;
    add_elements(saving, what, OB_ELEMENTS);
    if (what != OB_SAVED_PARAMETERS)
      add_elements(saving, what, OB_PADDING);
  }
  add(saving, OB_SAVED_LADDERS, OB_ELEMENTS, 0,
      ob_checkpoint_numbers(saving->optimizer, OB_SAVED_LADDERS));
  return ONEBIT_OK;
}

/* --- The front ---------------------------------------------------------------------------------*/

static void describe(struct ob_saving *saving) {
  struct onebit_optimizer *optimizer = saving->optimizer;
  const struct ob_hosts *hosts = &optimizer->comm->hosts;
  bool across = ob_checkpoint_hosts(optimizer) > 0;
  enum ob_stage stage = ob_stage_of(optimizer);
  bool norms = ob_has_section(optimizer, stage, OB_SAVED_NORMS);
  saving->header = (struct ob_part_header){
      .version = optimizer->ladders ? OB_PART_VERSION : OB_PART_VERSION_PLAIN,
      .order = OB_PART_ORDER,
      .library = ONEBIT_VERSION_MAJOR << 16 | ONEBIT_VERSION_MINOR << 8 | ONEBIT_VERSION_PATCH,
      .profile = (uint32_t)optimizer->options.profile,
      .ranks = (uint32_t)optimizer->comm->size,
      .hosts = (uint32_t)ob_checkpoint_hosts(optimizer),
      .stage = (uint32_t)stage,
      .form = (uint32_t)ob_checkpoint_form(optimizer),
      .shards = (uint32_t)optimizer->moments.shards,
      .apart = optimizer->method->apart && optimizer->method->apart(optimizer),
      .tensors = optimizer->tensor_count,
      .elements = saving->map.total[OB_ELEMENTS],
      .padding = saving->map.total[OB_PADDING],
      .steps = optimizer->steps,
      .frozen_at = optimizer->frozen_at,
      .variance_ratio = optimizer->variance_ratio,
      .window = norms ? optimizer->window : 0,
      .numbers = ob_checkpoint_numbers(optimizer, OB_SAVED_NUMBERS),
      .rank = (uint32_t)optimizer->comm->rank,
      .host = across ? (uint32_t)hosts->host : 0,
      .local_rank = across ? (uint32_t)hosts->local_rank : 0,
      .skipped = optimizer->skipped,
      .good_steps = optimizer->good_steps,
      .loss_scale = optimizer->options.initial_loss_scale != 0 ? optimizer->loss_scale : 0,
      .gradient_norm = optimizer->gradient_norm,
  };
  for (size_t t = 0; optimizer->ladders && t < optimizer->tensor_count; t++)
    optimizer->ladders[t] = ob_ladder_keep(optimizer->buckets[optimizer->tensors[t].bucket].bits);
  memcpy(saving->header.magic, OB_PART_MAGIC, sizeof saving->header.magic);
  memcpy(saving->header.kind, optimizer->method->name, strlen(optimizer->method->name));
  memcpy(saving->header.exchanges, optimizer->exchanges, sizeof optimizer->exchanges);
}

onebit_status_t ob_saving_create(struct ob_saving *saving, onebit_optimizer_t optimizer,
                                 bool whole) {
  *saving = (struct ob_saving){.optimizer = optimizer, .whole = whole};
  OB_TRY(ob_map_create(&saving->map, optimizer));
  describe(saving);
  OB_TRY(list_sections(saving));
  ob_part_lay_out(&saving->header, saving->sections);
  return ONEBIT_OK;
}

void ob_saving_destroy(struct ob_saving *saving) {
  ob_map_destroy(&saving->map);
  ob_release(saving->sections);
}

/* --- Writing it --------------------------------------------------------------------------------*/

static onebit_status_t read_elements(const struct ob_saving *saving, struct ob_reader *reader,
                                     const struct ob_part_section *section, uint64_t first,
                                     size_t count, float *values) {
  const uint32_t space = section->space;
  for (size_t some; count; count -= some, first += some, values += some) {
    const struct ob_stretch *stretch = ob_map_find(&saving->map, (enum ob_space)space, first);
    size_t before = (size_t)(first - stretch->first[space]);
    some = stretch->count[space] - before < count ? stretch->count[space] - before : count;
    struct ob_run run = {stretch->piece, before, some};
    run.offset += space == OB_PADDING ? stretch->count[OB_ELEMENTS] : 0;
    struct ob_section from =
        ob_section_of(&saving->optimizer->buckets[stretch->bucket],
                      (enum ob_stage)saving->header.stage, (enum ob_saved)section->what);
    OB_TRY(ob_section_read(reader, &from, &run, values));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_saving_read(const struct ob_saving *saving, struct ob_reader *reader,
                               const struct ob_part_section *section, uint64_t first, size_t count,
                               void *values) {
  struct ob_numbers is;
  if (!ob_saved_numbers(section->what))
    return read_elements(saving, reader, section, first, count, values);
  for (size_t i = 0; i < count; i++)
    memcpy((uint64_t *)values + i,
           ob_checkpoint_number(saving->optimizer, (enum ob_saved)section->what, first + i, &is),
           sizeof(uint64_t));
  return ONEBIT_OK;
}

struct reading {
  const struct ob_saving *saving;
  struct ob_reader reader;
};

static onebit_status_t read_section(void *context, const struct ob_part_section *section,
                                    uint64_t first, size_t count, void *values) {
  struct reading *reading = context;
  return ob_saving_read(reading->saving, &reading->reader, section, first, count, values);
}

static onebit_status_t list_tensors(const struct onebit_optimizer *optimizer,
                                    struct ob_part_tensor **rows) {
  *rows = ob_allocate(optimizer->tensor_count, sizeof **rows);
  if (!*rows)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu tensors",
                    optimizer->tensor_count);
  for (size_t t = 0; t < optimizer->tensor_count; t++) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    (*rows)[t] =
        (struct ob_part_tensor){tensor->count, optimizer->buckets[tensor->bucket].uncompressed};
  }
  return ONEBIT_OK;
}

onebit_status_t ob_saving_write(struct ob_saving *saving, const struct ob_sink *sink) {
  struct reading reading = {.saving = saving};
  struct ob_part_tensor *tensors = NULL;
  onebit_status_t status = ob_reader_create(&reading.reader, saving->optimizer);
  if (status == ONEBIT_OK)
    status = list_tensors(saving->optimizer, &tensors);
  const struct ob_part_writer writer = {&saving->header, tensors, saving->sections, read_section,
                                        &reading};
  if (status == ONEBIT_OK)
    status = ob_part_write(&writer, sink);
  ob_reader_destroy(&reading.reader);
  ob_release(tensors);
  return status;
}

/* --- To memory ---------------------------------------------------------------------------------*/

static onebit_status_t write(void *saving, const struct ob_sink *sink) {
  return ob_saving_write(saving, sink);
}

static onebit_status_t save(onebit_optimizer_t optimizer, bool whole, void *memory, size_t capacity,
                            size_t *bytes) {
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  if (!bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "bytes is NULL");
  *bytes = 0;
  OB_TRY(ob_checkpoint_idle(optimizer));
  struct ob_saving saving;
  onebit_status_t status = ob_saving_create(&saving, optimizer, whole);
  if (status == ONEBIT_OK)
    status = ob_part_to_memory(&saving.header, write, &saving, memory, capacity, bytes);
  ob_saving_destroy(&saving);
  return status;
}

onebit_status_t onebit_optimizer_save(onebit_optimizer_t optimizer, void *memory, size_t capacity,
                                      size_t *bytes) {
  OB_CALL_SCOPE;
  return save(optimizer, false, memory, capacity, bytes);
}

onebit_status_t onebit_optimizer_save_whole(onebit_optimizer_t optimizer, void *memory,
                                            size_t capacity, size_t *bytes) {
  OB_CALL_SCOPE;
  return save(optimizer, true, memory, capacity, bytes);
}
