/* Defines the rows of the state, finds the memory of a bucket's part of a row, and reads and writes
 * the elements of the part. */
#include "optimizers/state.h"

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/outer/outer.h"

enum {
  WARMUP = 1 << OB_STAGE_WARMUP,
  FROZEN = 1 << OB_STAGE_FROZEN | 1 << OB_STAGE_SENT,
  ALWAYS = WARMUP | FROZEN
};

/* clang-format off */
const struct ob_saved_row ob_saved_rows[OB_SAVED_END] = {
  [OB_SAVED_NORMS] =      {"norms",            8, false, false, false, false, WARMUP, 0},
  [OB_SAVED_NUMBERS] =    {"numbers",          8, false, false, false, false, ALWAYS, 0},
  [OB_SAVED_PARAMETERS] = {"parameters",       4, false, true,  false, false, ALWAYS, 0},
  [OB_SAVED_MOMENTUM] =   {"momentum",         4, false, true,  false, true,  ALWAYS, OB_MOMENTUM},
  [OB_SAVED_VARIANCE] =   {"variance",         4, false, false, false, false, ALWAYS, OB_VARIANCE},
  [OB_SAVED_FRESH] =      {"fresh",            4, false, false, false, false, FROZEN, OB_FRESH},
  [OB_SAVED_ANCHOR] =     {"anchor",           4, false, false, false, false, FROZEN, OB_ANCHOR},
  [OB_SAVED_MOVED] =      {"moved",            4, false, true,  false, false, FROZEN, OB_MOVED},
  [OB_SAVED_WORKER] =     {"worker residuals", 4, true,  false, true,  true,  ALWAYS, 0},
  [OB_SAVED_SERVER] =     {"server residuals", 4, false, false, true,  true,  ALWAYS, 0},
  [OB_SAVED_MOMENTS] =    {"own moments",      4, true,  false, false, true,  ALWAYS, 0},
  [OB_SAVED_CONSENSUS] =  {"consensus", 4, false, false, false, true, 0, OB_OUTER_CONSENSUS},
  [OB_SAVED_OUTER_MOMENTUM] = {"outer momentum", 4, false, false, false, true, 0,
                               OB_OUTER_MOMENTUM},
  [OB_SAVED_DRIFT] =      {"drift", 4, false, false, false, true, 0, OB_OUTER_DRIFT},
  [OB_SAVED_LADDERS] =    {"ladders",          8, false, false, false, false, ALWAYS, 0},
};
/* clang-format on */

enum ob_stage ob_stage_of(const struct onebit_optimizer *optimizer) {
  if (!ob_optimizer_is_frozen(optimizer))
    return OB_STAGE_WARMUP;
  bool sent = optimizer->method->momentum && optimizer->steps != optimizer->frozen_at &&
              ob_optimizer_compresses(optimizer);
  return sent ? OB_STAGE_SENT : OB_STAGE_FROZEN;
}

/* Returns true if the optimizer has residuals in that stage. A method that sends momentum, or whose
 * state is sharded, has them only from the freeze on; a compressed warm-up has residuals of its
 * own. */
static bool has_residual(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                         enum ob_saved what) {
  const struct ob_method *method = optimizer->method;
  if (optimizer->options.no_error_feedback ||
      (what == OB_SAVED_SERVER && method->serve_rule != OB_SERVE_MEAN))
    return false;
  return stage == OB_STAGE_SENT || !(method->momentum || method->sharded) ||
         (method->sharded && stage == OB_STAGE_FROZEN) ||
         (stage == OB_STAGE_WARMUP && optimizer->options.warmup_bits);
}

bool ob_has_section(const struct onebit_optimizer *optimizer, enum ob_stage stage,
                    enum ob_saved what) {
  const struct ob_saved_row *row = &ob_saved_rows[what];
  const struct ob_method *method = optimizer->method;
  if (!(row->stages >> stage & 1) || (row->slot && !(method->arrays & OB_MASK(row->slot))))
    return false;
  switch (what) {
  case OB_SAVED_NORMS:
    return optimizer->window;
  case OB_SAVED_VARIANCE:
    return !(method->divides && stage != OB_STAGE_WARMUP);
  case OB_SAVED_WORKER:
  case OB_SAVED_SERVER:
    return has_residual(optimizer, stage, what);
  case OB_SAVED_MOMENTS:
    return method->moments;
  case OB_SAVED_LADDERS:
    return optimizer->ladders;
  default:
    return true;
  }
}

/* --- The memory of each array in a bucket -----------------------------------------------------*/

static void set_residual_section(struct ob_section *section, const struct ob_residual *residual,
                                 enum ob_content content) {
  section->content = content;
  section->residual = residual;
  section->values = residual->values[residual->now];
  section->first = residual->first;
  section->end = residual->first + residual->blocks;
  section->first_word = residual->first_word;
}

/* Completes a section of a compressed bucket. If steps are sent back compressed, the residual
 * belongs to the server that sends them; servers without a residual have the momentum in the
 * residual's memory. */
static void set_compressed_section(struct ob_section *section, enum ob_stage stage) {
  const struct ob_bucket *bucket = section->bucket;
  const struct ob_residual *worker = ob_plan_residual(section->plan, false),
                           *server = ob_plan_residual(section->plan, true);
  bool from_servers = server->serving.rule != OB_SERVE_MEAN;
  if (section->what == OB_SAVED_WORKER) {
    set_residual_section(section, worker, OB_CONTENT_RESIDUAL);
    ob_plan_find_compressed(section->plan, &section->first, &section->end);
  } else if (section->what == OB_SAVED_MOMENTS) {
    set_residual_section(section, worker, OB_CONTENT_BFLOATS);
    section->values = worker->moments[worker->now];
    ob_plan_find_compressed(bucket->bits, &section->first, &section->end);
  } else if (section->what == OB_SAVED_SERVER) {
    server = bucket->steps_back ? ob_plan_residual(bucket->steps_back, false) : server;
    set_residual_section(section, server, OB_CONTENT_RESIDUAL);
    if (ob_plan_geometry(section->plan)->replicated)
      ob_plan_segment(section->plan, &section->first, &section->end);
    if (server->serving.rule != OB_SERVE_MEAN)
      section->end = section->first;
  } else if (section->what == OB_SAVED_MOMENTUM && from_servers) {
    set_residual_section(section, server, OB_CONTENT_FLOATS);
  } else if (section->what == OB_SAVED_MOMENTUM && stage == OB_STAGE_SENT) {
    section->content = OB_CONTENT_MESSAGES;
  }
}

struct ob_section ob_section_of(const struct ob_bucket *bucket, enum ob_stage stage,
                                enum ob_saved what) {
  struct ob_section section = {.what = what,
                               .bucket = bucket,
                               .plan = bucket->bits,
                               .first = bucket->first_block,
                               .end = bucket->first_block + bucket->blocks,
                               .first_word = bucket->first_word};
  bool parameters = what == OB_SAVED_PARAMETERS;
  const int slot = what == OB_SAVED_MOMENTS ? OB_VARIANCE : ob_saved_rows[what].slot;
  section.values = parameters ? bucket->masters : bucket->arrays[slot];
  if (parameters &&
      !bucket->masters) { /* the caller's parameters, which are complete on every rank */
    section.content = OB_CONTENT_PIECES;
    section.first = 0;
    section.end = ob_plan_layout(bucket->bits)->blocks;
  }
  if (stage == OB_STAGE_WARMUP && (what == OB_SAVED_WORKER || what == OB_SAVED_SERVER) &&
      ob_plan_is_compressed(bucket->dense))
    section.plan = bucket->dense;
  if (!bucket->uncompressed)
    set_compressed_section(&section, stage);
  else if (what == OB_SAVED_WORKER || what == OB_SAVED_SERVER || !(parameters || section.values))
    section.end = section.first;
  return section;
}

/* --- Runs of elements --------------------------------------------------------------------------*/

size_t ob_block_offset_in_piece(const struct ob_layout *layout, size_t piece, size_t block) {
  const struct ob_piece *at = &layout->piece[piece];
  if (block <= at->first_block)
    return 0;
  if (block - at->first_block > at->count / layout->block)
    return at->count;
  return (block - at->first_block) * layout->block;
}

bool ob_find_next_run(const struct ob_layout *layout, size_t first, size_t end,
                      struct ob_run *run) {
  if (!run->count)
    run->piece = first < end ? ob_layout_piece(layout, first) : layout->pieces;
  size_t k = run->piece, at = run->offset + run->count;
  for (; k < layout->pieces && layout->piece[k].first_block < end; k++, at = 0) {
    const size_t begin = ob_block_offset_in_piece(layout, k, first),
                 stop = ob_block_offset_in_piece(layout, k, end);
    at = at > begin ? at : begin;
    if (at < stop) {
      *run = (struct ob_run){k, at, stop - at < OB_CHUNK ? stop - at : OB_CHUNK};
      return true;
    }
  }
  return false;
}

size_t ob_find_interval(const size_t *bounds, size_t stride, size_t count, size_t block) {
  size_t low = 0, high = count;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (bounds[middle * stride] <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* --- Reading and writing -----------------------------------------------------------------------*/

onebit_status_t ob_reader_create(struct ob_reader *reader,
                                 const struct onebit_optimizer *optimizer) {
  size_t stride = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    if (ob_plan_geometry(optimizer->buckets[u].bits)->stride > stride)
      stride = ob_plan_geometry(optimizer->buckets[u].bits)->stride;
  *reader = (struct ob_reader){.scales = ob_allocate(OB_CHUNK / OB_LANES + 2, sizeof(float)),
                               .message = ob_allocate(1, stride)};
  if (!reader->scales || !reader->message)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for reading an optimizer's state");
  return ONEBIT_OK;
}

void ob_reader_destroy(struct ob_reader *reader) {
  ob_release(reader->scales);
  ob_release(reader->message);
}

/* Returns the address of the run's first element. */
static void *section_address(const struct ob_section *section, const struct ob_run *run) {
  const struct ob_bucket *bucket = section->bucket;
  if (section->content == OB_CONTENT_PIECES)
    return bucket->parameters[run->piece] + run->offset;
  size_t word = ob_plan_layout(section->plan)->piece[run->piece].first_word - section->first_word;
  size_t size = section->content == OB_CONTENT_BFLOATS ? sizeof(uint16_t) : sizeof(float);
  return (char *)section->values + (word * OB_LANES + run->offset) * size;
}

/* Reads 16-bit values into the upper half of `values`, and expands them from there. */
static onebit_status_t read_bfloats(const struct ob_memory *memory, const void *from, size_t count,
                                    float *values) {
  uint16_t *buffer = (uint16_t *)(void *)values + count;
  OB_TRY(memory->copy(buffer, from, count * sizeof *buffer));
  for (size_t i = 0; i < count; i++)
    values[i] = ob_from_bfloat16(buffer[i]);
  return ONEBIT_OK;
}

/* Reads compensated values and their scales, and computes from them the residual or the decoded
 * signs. */
static onebit_status_t read_residual(struct ob_reader *reader, const struct ob_section *section,
                                     const struct ob_run *run, float *values) {
  const struct ob_residual *residual = section->residual;
  const struct ob_layout *layout = ob_plan_layout(section->plan);
  size_t first = run->offset / layout->block;
  size_t count =
      residual->one_scale ? 1 : (run->offset + run->count - 1) / layout->block + 1 - first;
  const float *scales = residual->scales[residual->now];
  if (!residual->one_scale)
    scales += layout->piece[run->piece].first_block + first - residual->first;
  OB_TRY(
      residual->memory->copy(values, section_address(section, run), run->count * sizeof *values));
  OB_TRY(residual->memory->copy(reader->scales, scales, count * sizeof *scales));
  for (size_t i = 0; i < run->count; i++) {
    float scale =
        reader->scales[residual->one_scale ? 0 : (run->offset + i) / layout->block - first];
    values[i] = section->content == OB_CONTENT_RESIDUAL
                    ? ob_residual_of(values[i], residual->eager[residual->now] ? 0 : scale)
                    : ob_decode(ob_bits_of(values[i]) >> 31, scale);
  }
  return ONEBIT_OK;
}

/* Sets a view of message number `number` that the host can read. Chunks of segments are numbered
 * consecutively. */
static onebit_status_t section_view_message(struct ob_reader *reader,
                                            const struct onebit_plan *plan, size_t number,
                                            const struct ob_message_shape *shape,
                                            unsigned char *message, struct ob_view *view) {
  if (ob_plan_message_memory(plan) != &ob_memory_host) {
    if (reader->plan != plan || reader->copied != number)
      OB_TRY(ob_plan_message_memory(plan)->copy(reader->message, message, ob_message_bytes(shape)));
    reader->plan = plan;
    reader->copied = number;
    message = reader->message;
  }
  *view = ob_message_view(message, shape);
  return ONEBIT_OK;
}

/* Decodes `count` elements of a block, from an offset on, from the received message, or from the
 * message that this rank has sent, which is in host memory and has its width in its header. */
static onebit_status_t section_decode_block(struct ob_reader *reader,
                                            const struct onebit_plan *plan, bool sent, size_t block,
                                            size_t offset, size_t count, float *values) {
  const struct ob_geometry *geometry = ob_plan_geometry(plan);
  size_t number =
      ob_find_interval(geometry->bounds, 1, geometry->segments * geometry->chunks, block);
  size_t segment = number / geometry->chunks, chunk = number % geometry->chunks;
  struct ob_message_shape shape = ob_plan_last_message(plan, segment, chunk);
  unsigned char *message = ob_plan_result(plan, false, segment, chunk);
  struct ob_view view;
  if (sent) {
    message = ob_message_at(geometry, geometry->outgoing, segment - geometry->first_segment, chunk);
    shape.width = ob_flags_width(((const struct ob_header *)(const void *)message)->flags);
  }
  OB_TRY(section_view_message(reader, plan, number, &shape, message, &view));
  float scale = shape.one_scale ? view.header->scale : view.scales[block - shape.first];
  const uint32_t *words =
      view.words + shape.width * (ob_layout_word(&geometry->layout, block) -
                                  ob_layout_word(&geometry->layout, shape.first));
  for (size_t i = offset; i < offset + count; i++) {
    const uint32_t *fields = words + i / OB_LANES * shape.width;
    const unsigned lane = (unsigned)(i % OB_LANES);
    *values++ = shape.width == 1
                    ? ob_decode(*fields >> lane & 1, scale)
                    : ob_decode_level(ob_read_code(fields, lane, shape.width), shape.width) * scale;
  }
  return ONEBIT_OK;
}

static onebit_status_t read_messages(struct ob_reader *reader, const struct onebit_plan *plan,
                                     bool sent, const struct ob_run *run, float *values) {
  size_t block = ob_plan_layout(plan)->block,
         first = ob_plan_layout(plan)->piece[run->piece].first_block;
  for (size_t done = 0, some; done < run->count; done += some) {
    size_t offset = run->offset + done, left = run->count - done, within = offset % block;
    some = block - within < left ? block - within : left;
    OB_TRY(section_decode_block(reader, plan, sent, first + offset / block, within, some,
                                values + done));
  }
  return ONEBIT_OK;
}

onebit_status_t ob_section_read(struct ob_reader *reader, const struct ob_section *section,
                                const struct ob_run *run, float *values) {
  const struct onebit_plan *plan = section->plan;
  const struct ob_memory *memory = ob_plan_memory(plan);
  switch (section->content) {
  case OB_CONTENT_BFLOATS:
    return read_bfloats(memory, section_address(section, run), run->count, values);
  case OB_CONTENT_SENT:
    if (section->residual->eager[section->residual->now])
      return read_messages(reader, plan, true, run, values);
    return read_residual(reader, section, run, values);
  case OB_CONTENT_RESIDUAL:
    return read_residual(reader, section, run, values);
  case OB_CONTENT_MESSAGES:
    return read_messages(reader, plan, false, run, values);
  default:
    return memory->copy(values, section_address(section, run), run->count * sizeof *values);
  }
}

/* Writes the values of a run. Moments are rounded to bfloat16, the type in which they are
 * stored. */
onebit_status_t ob_section_write(const struct ob_section *section, const struct ob_run *run,
                                 const float *values, float *scratch) {
  const struct ob_memory *memory = ob_plan_memory(section->plan);
  if (section->content != OB_CONTENT_BFLOATS)
    return memory->copy(section_address(section, run), values, run->count * sizeof *values);
  for (size_t i = 0; i < run->count; i++)
    ob_store(scratch, i, ONEBIT_BFLOAT16, values[i]);
  return memory->copy(section_address(section, run), scratch, run->count * sizeof(uint16_t));
}
