/* Seals messages, checks those that arrive, and computes layouts. */
#include "compression/message.h"

#include <inttypes.h>

#include "base/error.h"
#include "base/memory.h"
#include "compression/codec.h"

_Static_assert(sizeof(struct ob_header) == 40, "the header is 40 bytes on the wire");

static uint32_t message_checksum(const struct ob_header *header,
                                 const struct ob_message_shape *shape,
                                 const struct ob_codec *codec) {
  return ob_header_sum(header) + codec->checksum(header + 1, ob_message_payload_count(shape));
}

void ob_message_seal(void *memory, const struct ob_message_shape *shape,
                     const struct ob_codec *codec) {
  struct ob_header *header = memory;
  header->checksum = message_checksum(header, shape, codec);
}

/* Checks the checksum of a message. A message of another format or version is not checked, since it
 * may have another checksum or none: check_header refuses it. */
static onebit_status_t check_checksum(const struct ob_header *header,
                                      const struct ob_message_shape *shape,
                                      const struct ob_codec *codec) {
  if (header->magic != OB_MESSAGE_MAGIC || header->version != OB_MESSAGE_VERSION)
    return ONEBIT_OK;
  uint32_t computed = message_checksum(header, shape, codec);
  if (header->checksum == computed)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MESSAGE,
                  "message was damaged on its way: its checksum is %08" PRIx32
                  ", but the checksum of its bytes is %08" PRIx32,
                  header->checksum, computed);
}

static onebit_status_t check_header(const struct ob_header *header,
                                    const struct ob_message_shape *shape,
                                    const struct ob_message_call *call) {
  switch (ob_header_check(header, shape, call)) {
  case OB_HEADER_SOUND:
    break;
  case OB_HEADER_MAGIC:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message is not a onebit message: its magic number is %08" PRIx32 "",
                    header->magic);
  case OB_HEADER_VERSION:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message has wire format version %d, but this library has version %d: install "
                    "one version on all hosts",
                    header->version, OB_MESSAGE_VERSION);
  case OB_HEADER_KIND:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message has kind %d and flags %d, expected kind %d, %s%u bit", header->kind,
                    header->flags, (int)call->kind, shape->dense ? "dense, of " : "",
                    shape->half    ? 16
                    : shape->dense ? 32
                                   : shape->width);
  case OB_HEADER_SEQUENCE:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message belongs to call %" PRIu32 ", expected call %" PRIu32, header->sequence,
                    call->sequence);
  case OB_HEADER_BLOCK:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message begins with block %" PRIu64 " of %" PRIu64
                    " elements, expected block %zu of %" PRIu64,
                    header->block, header->elements, shape->first, call->elements);
  case OB_HEADER_SCALE:
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message has the scale %g: it must be finite and at least 0",
                    (double)header->scale);
  }
  return ONEBIT_OK;
}

onebit_status_t ob_message_check(const void *memory, size_t bytes,
                                 const struct ob_message_shape *shape,
                                 const struct ob_message_call *call, const struct ob_codec *codec) {
  if (bytes != ob_message_bytes(shape))
    return ob_error(ONEBIT_ERROR_MESSAGE, "message has %zu bytes, expected %zu", bytes,
                    ob_message_bytes(shape));
  const struct ob_header *header = memory;
  OB_TRY(check_checksum(header, shape, codec));
  OB_TRY(check_header(header, shape, call));
  const float *scales = (const float *)(header + 1);
  for (size_t i = 0; i < ob_message_scales(shape); i++)
    if (!ob_scale_is_sound(scales[i]))
      return ob_error(ONEBIT_ERROR_MESSAGE,
                      "message has the scale %g for block %zu: it must be finite and at least 0",
                      (double)scales[i], shape->first + i);
  return ONEBIT_OK;
}

/* --- Layouts: index arithmetic only ------------------------------------------------------------*/

static size_t divide_up(size_t a, size_t b) { return a / b + (a % b != 0); }

onebit_status_t ob_layout_create(struct ob_layout *layout, size_t block, size_t pieces,
                                 const size_t *counts, const size_t *valid) {
  *layout = (struct ob_layout){.block = block, .pieces = pieces};
  layout->piece = ob_allocate(pieces + 1, sizeof *layout->piece);
  if (!layout->piece)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a layout of %zu pieces", pieces);
  for (size_t k = 0; k < pieces; k++) {
    layout->piece[k] = (struct ob_piece){.count = counts[k],
                                         .valid = valid ? valid[k] : counts[k],
                                         .first_block = layout->blocks,
                                         .first_word = layout->words};
    layout->blocks += divide_up(counts[k], block);
    layout->words += divide_up(counts[k], OB_LANES);
    layout->elements += counts[k];
  }
  layout->piece[pieces] =
      (struct ob_piece){.first_block = layout->blocks, .first_word = layout->words};
  return ONEBIT_OK;
}

void ob_layout_destroy(struct ob_layout *layout) {
  ob_release(layout->piece);
  layout->piece = NULL;
}

size_t ob_layout_elements_before(const struct ob_layout *layout, size_t block) {
  if (block >= layout->blocks)
    return layout->elements;
  size_t piece = 0, before = 0;
  size_t offset = ob_layout_block(layout, block, &piece).offset;
  for (size_t k = 0; k < piece; k++)
    before += layout->piece[k].count;
  return before + offset;
}

size_t ob_layout_first_block_from(const struct ob_layout *layout, size_t word) {
  size_t low = 0, high = layout->blocks; /* the result is in low .. high */
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (ob_layout_word(layout, middle) < word)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
