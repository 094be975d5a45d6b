/* The layout of messages, and the check of one that arrived. */
#include "compression/message.h"

#include <inttypes.h>

#include "base/error.h"

_Static_assert(sizeof(struct ob_header) == 40, "the header is 40 bytes on the wire");

static bool is_scale(float scale) { return ob_is_finite(scale) && scale >= 0; }

/* What the payload is, as flags. */
static unsigned payload(const struct ob_message_shape *shape) {
  return (shape->dense ? OB_FLAG_DENSE : 0u) | (shape->half ? OB_FLAG_HALF : 0u);
}

static onebit_status_t check_header(const struct ob_header *header,
                                    const struct ob_message_shape *shape,
                                    const struct ob_message_expected *expected) {
  if (header->magic != OB_MESSAGE_MAGIC)
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: magic %08" PRIx32 ", not a onebit message",
                    header->magic);
  if (header->version != OB_MESSAGE_VERSION)
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: version %d, this library speaks %d",
                    header->version, OB_MESSAGE_VERSION);
  if (header->kind != expected->kind ||
      (header->flags & (OB_FLAG_DENSE | OB_FLAG_HALF)) != payload(shape))
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: kind %d flags %d, expected kind %d %s",
                    header->kind, header->flags, (int)expected->kind,
                    shape->half    ? "dense, of 16 bit"
                    : shape->dense ? "dense"
                                   : "of bits");
  if (header->sequence != expected->sequence)
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: of call %" PRIu32 ", expected %" PRIu32,
                    header->sequence, expected->sequence);
  if (header->elements != expected->elements || header->block != shape->first)
    return ob_error(ONEBIT_ERROR_MESSAGE,
                    "message: block %" PRIu64 " of %" PRIu64 " elements, expected %zu of %" PRIu64,
                    header->block, header->elements, shape->first, expected->elements);
  return ONEBIT_OK;
}

onebit_status_t ob_message_check(const void *memory, size_t bytes,
                                 const struct ob_message_shape *shape,
                                 const struct ob_message_expected *expected) {
  if (bytes != ob_message_bytes(shape))
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: %zu bytes, expected %zu", bytes,
                    ob_message_bytes(shape));
  const struct ob_header *header = memory;
  OB_TRY(check_header(header, shape, expected));
  if (!is_scale(header->scale))
    return ob_error(ONEBIT_ERROR_MESSAGE, "message: scale %g", (double)header->scale);
  const float *scales = (const float *)(header + 1);
  for (size_t i = 0; i < ob_message_scales(shape); i++)
    if (!is_scale(scales[i]))
      return ob_error(ONEBIT_ERROR_MESSAGE, "message: scale %g of block %zu", (double)scales[i],
                      shape->first + i);
  return ONEBIT_OK;
}
