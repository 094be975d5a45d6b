/* A part is written: its sections, and then its front, which has their checksums. */
#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

void ob_part_lay_out(struct ob_part_header *header, struct ob_part_section *sections) {
  header->front = sizeof *header + header->tensors * sizeof(struct ob_part_tensor) +
                  header->sections * sizeof(struct ob_part_section);
  uint64_t offset = header->front;
  for (uint64_t i = 0; i < header->sections; i++) {
    sections[i].offset = offset;
    offset += ob_section_bytes(sections[i].what, sections[i].count);
  }
  header->bytes = offset;
}

/* `buffer`: OB_CHUNK floats, doubles or whole numbers. */
static onebit_status_t write_section(const struct ob_part_writer *writer,
                                     const struct ob_sink *sink, struct ob_part_section *section,
                                     uint64_t *buffer) {
  struct ob_checksum sum = ob_checksum_begin();
  uint64_t offset = section->offset;
  for (uint64_t at = 0; at < section->count; at += OB_CHUNK) {
    size_t left = (size_t)(section->count - at), count = left < OB_CHUNK ? left : OB_CHUNK;
    size_t bytes = (size_t)ob_section_bytes(section->what, count);
    buffer[bytes / 8 - 1] = 0; /* what fills up */
    OB_TRY(writer->read(writer->context, section, section->first + at, count, buffer));
    ob_checksum_add(&sum, buffer, bytes);
    OB_TRY(sink->put(sink->context, offset, buffer, bytes));
    offset += bytes;
  }
  section->checksum = ob_checksum_end(&sum);
  return ONEBIT_OK;
}

static onebit_status_t write_front(const struct ob_part_writer *writer,
                                   const struct ob_sink *sink) {
  struct ob_part_header *header = writer->header;
  unsigned char *front = ob_allocate(1, (size_t)header->front);
  if (!front)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of sections");
  unsigned char *at = front + sizeof *header;
  if (header->tensors)
    memcpy(at, writer->tensors, (size_t)header->tensors * sizeof *writer->tensors);
  at += header->tensors * sizeof *writer->tensors;
  memcpy(at, writer->sections, (size_t)header->sections * sizeof *writer->sections);
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

onebit_status_t ob_part_write(const struct ob_part_writer *writer, const struct ob_sink *sink) {
  onebit_status_t status = ONEBIT_OK;
  uint64_t *buffer = ob_allocate(OB_CHUNK, sizeof *buffer);
  if (!buffer)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to write a checkpoint");
  for (uint64_t i = 0; status == ONEBIT_OK && i < writer->header->sections; i++)
    status = write_section(writer, sink, &writer->sections[i], buffer);
  if (status == ONEBIT_OK)
    status = write_front(writer, sink);
  ob_release(buffer);
  return status;
}

static onebit_status_t put_in_memory(void *memory, uint64_t offset, const void *data,
                                     size_t bytes) {
  memcpy((unsigned char *)memory + offset, data, bytes);
  return ONEBIT_OK;
}

onebit_status_t ob_part_to_memory(const struct ob_part_header *header, ob_write_body *write,
                                  void *context, void *memory, size_t capacity, size_t *bytes) {
  const struct ob_sink sink = {put_in_memory, memory};
  *bytes = (size_t)header->bytes;
  if (!memory)
    return ONEBIT_OK;
  if (capacity < *bytes)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "capacity is %zu, and the part takes %zu bytes",
                    capacity, *bytes);
  return write(context, &sink);
}
