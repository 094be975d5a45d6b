/* Heads of segments, and where messages are cut. */
#include <stddef.h>

#include "base/hash.h"
#include "collectives/transports/sockets_state.h"

#define SEGMENT_MAGIC 0x5342314fu /* the bytes "O1BS" */
#define SEGMENT_STEP  ((uint64_t)4096)

static uint32_t sockets_segment_check_of(const struct ob_segment *segment) {
  size_t from = offsetof(struct ob_segment, number);
  return (uint32_t)ob_hash(OB_HASH_START, &segment->number, sizeof *segment - from);
}

void ob_segment_seal(struct ob_segment *segment) {
  segment->magic = SEGMENT_MAGIC;
  segment->check = sockets_segment_check_of(segment);
}

bool ob_segment_is_valid(const struct ob_segment *segment) {
  return segment->magic == SEGMENT_MAGIC && segment->check == sockets_segment_check_of(segment) &&
         segment->tag >= 0 && segment->total <= PTRDIFF_MAX && segment->bytes <= OB_SEGMENT_MAX &&
         segment->offset <= segment->total && segment->bytes <= segment->total - segment->offset &&
         (segment->bytes > 0 || segment->total == 0);
}

size_t ob_segment_bytes(uint64_t total, uint64_t given, int streams) {
  uint64_t part = OB_SEGMENT_MAX, left = total - given;
  if (streams > 1)
    part = total / (2 * (uint64_t)streams) / SEGMENT_STEP * SEGMENT_STEP + SEGMENT_STEP;
  part = part < OB_SEGMENT_MIN ? OB_SEGMENT_MIN : part;
  part = part > OB_SEGMENT_MAX ? OB_SEGMENT_MAX : part;
  return (size_t)(left < part ? left : part);
}
