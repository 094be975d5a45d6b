/* What an optimizer has of some elements, as floats, wherever and in whatever form it has it. */
#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

onebit_status_t ob_reader_create(struct ob_reader *reader, const struct onebit_optimizer *optimizer,
                                 const struct ob_map *map) {
  size_t stride = 0;
  *reader = (struct ob_reader){.optimizer = optimizer, .map = map};
  for (size_t u = 0; u < optimizer->unit_count; u++)
    if (optimizer->units[u].bits->geometry.stride > stride)
      stride = optimizer->units[u].bits->geometry.stride;
  reader->scales = ob_allocate(OB_CHUNK / OB_LANES + 2, sizeof(float));
  reader->message = ob_allocate(1, stride);
  if (!reader->scales || !reader->message)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to read an optimizer's state");
  return ONEBIT_OK;
}

void ob_reader_destroy(struct ob_reader *reader) {
  ob_release(reader->scales);
  ob_release(reader->message);
}

/* Errors of the elements offset .. offset + count - 1 of a piece. */
static onebit_status_t read_error(struct ob_reader *reader, const struct onebit_plan *plan,
                                  const struct ob_kept *kept, size_t piece, size_t offset,
                                  size_t count, float *values) {
  const struct ob_layout *layout = &plan->geometry.layout;
  const struct ob_piece *at = &layout->piece[piece];
  size_t first = offset / layout->block, end = (offset + count - 1) / layout->block + 1;
  size_t word = at->first_word - kept->first_word;
  const float *scales = kept->scales[kept->now];
  if (!kept->one_scale)
    scales += (at->first_block + first) - kept->first;
  OB_TRY(kept->memory->copy(values, kept->values[kept->now] + (word * OB_LANES + offset),
                            count * sizeof *values));
  OB_TRY(kept->memory->copy(reader->scales, scales,
                            (kept->one_scale ? 1 : end - first) * sizeof *scales));
  for (size_t i = 0; i < count; i++) {
    size_t block = kept->one_scale ? 0 : (offset + i) / layout->block - first;
    values[i] = ob_kept_error(values[i], reader->scales[block]);
  }
  return ONEBIT_OK;
}

/* Which message has this block: messages number their shares' chunks. */
static size_t message_of(const struct onebit_plan *plan, size_t block) {
  size_t low = 0, high = plan->geometry.segments * plan->geometry.chunks;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (plan->geometry.bounds[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* The message, where the host can read it. */
static onebit_status_t look_at(struct ob_reader *reader, const struct onebit_plan *plan,
                               size_t number, const struct ob_message_shape *shape,
                               unsigned char **message) {
  *message =
      ob_plan_result(plan, false, number / plan->geometry.chunks, number % plan->geometry.chunks);
  if (plan->executor->messages == &ob_memory_host)
    return ONEBIT_OK;
  if (reader->plan != plan || reader->copied != number)
    OB_TRY(plan->executor->messages->copy(reader->message, *message, ob_message_bytes(shape)));
  reader->plan = plan;
  reader->copied = number;
  *message = reader->message;
  return ONEBIT_OK;
}

/* What the latest messages say of elements of one block. */
static onebit_status_t decode(struct ob_reader *reader, const struct onebit_plan *plan,
                              size_t number, size_t block, size_t offset, size_t count,
                              float *values) {
  size_t share = number / plan->geometry.chunks, chunk = number % plan->geometry.chunks;
  struct ob_message_shape shape = ob_plan_message(plan, share, chunk);
  unsigned char *message;
  OB_TRY(look_at(reader, plan, number, &shape, &message));
  struct ob_view view = ob_message_view(message, &shape);
  float scale = shape.one_scale ? view.header->scale : view.scales[block - shape.first];
  const uint32_t *words = view.words + ob_layout_word(&plan->geometry.layout, block) -
                          ob_layout_word(&plan->geometry.layout, shape.first);
  for (size_t i = 0; i < count; i++) {
    size_t at = offset + i;
    values[i] = ob_decode(words[at / OB_LANES] >> at % OB_LANES & 1, scale);
  }
  return ONEBIT_OK;
}

static onebit_status_t read_messages(struct ob_reader *reader, const struct onebit_plan *plan,
                                     size_t piece, size_t offset, size_t count, float *values) {
  size_t block = plan->geometry.layout.block,
         first = plan->geometry.layout.piece[piece].first_block;
  while (count) {
    size_t number = first + offset / block, within = offset % block;
    size_t some = block - within < count ? block - within : count;
    OB_TRY(decode(reader, plan, message_of(plan, number), number, within, some, values));
    offset += some;
    values += some;
    count -= some;
  }
  return ONEBIT_OK;
}

/* In the upper half of the room first: from there they spread to where they belong. */
static onebit_status_t read_moments(const struct ob_memory *memory, const uint16_t *moments,
                                    size_t count, float *values) {
  uint16_t *room = (uint16_t *)(void *)values + count;
  OB_TRY(memory->copy(room, moments, count * sizeof *moments));
  for (size_t i = 0; i < count; i++)
    values[i] = ob_from_bfloat16(room[i]);
  return ONEBIT_OK;
}

static onebit_status_t read_piece(struct ob_reader *reader, enum ob_saved what,
                                  const struct ob_stretch *stretch, size_t offset, size_t count,
                                  float *values) {
  const struct ob_unit *unit = &reader->optimizer->units[stretch->unit];
  const struct onebit_plan *plan = unit->bits;
  const struct ob_memory *memory = plan->executor->residuals;
  bool sent = ob_checkpoint_stage(reader->optimizer) == OB_STAGE_SENT && !unit->uncompressed;
  if (what == OB_SAVED_WORKER)
    return read_error(reader, plan, &plan->worker, stretch->piece, offset, count, values);
  if (what == OB_SAVED_SERVER)
    return read_error(reader, plan, ob_saved_server(unit), stretch->piece, offset, count, values);
  if (what == OB_SAVED_MOMENTUM && sent)
    return read_messages(reader, plan, stretch->piece, offset, count, values);
  const uint16_t *moments = ob_saved_moments(unit, what, stretch->piece, offset);
  if (moments)
    return read_moments(memory, moments, count, values);
  return memory->copy(values, ob_saved_at(unit, what, stretch->piece, offset),
                      count * sizeof *values);
}

onebit_status_t ob_read(struct ob_reader *reader, enum ob_saved what, enum ob_space space,
                        uint64_t first, size_t count, float *values) {
  while (count) {
    const struct ob_stretch *stretch = ob_map_find(reader->map, space, first);
    size_t before = (size_t)(first - stretch->first);
    size_t some = stretch->count - before < count ? stretch->count - before : count;
    OB_TRY(read_piece(reader, what, stretch, stretch->offset + before, some, values));
    first += some;
    values += some;
    count -= some;
  }
  return ONEBIT_OK;
}
