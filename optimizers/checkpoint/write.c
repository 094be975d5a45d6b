/* A part is written: its sections, and then its front, which has their checksums. */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* `buffer`: OB_CHUNK floats, doubles or whole numbers. */
static onebit_status_t write_section(struct ob_saving *saving, const struct ob_sink *sink,
                                     struct ob_part_section *section, uint64_t *buffer) {
  struct ob_checksum sum = ob_checksum_begin();
  uint64_t offset = section->offset;
  for (uint64_t at = 0; at < section->count; at += OB_CHUNK) {
    size_t left = (size_t)(section->count - at), count = left < OB_CHUNK ? left : OB_CHUNK;
    size_t bytes = (size_t)ob_section_bytes(section->what, count);
    buffer[bytes / 8 - 1] = 0; /* what fills up */
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
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of sections");
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
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to write a checkpoint");
  for (uint64_t i = 0; status == ONEBIT_OK && i < saving->header.sections; i++)
    status = write_section(saving, sink, &saving->sections[i], buffer);
  if (status == ONEBIT_OK)
    status = write_front(saving, sink);
  ob_release(buffer);
  return status;
}
