/* A part: its checksums, and what must hold of its front before anything in it is believed. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* It is read as it lies in memory; compression/message.h sees to the order of bytes. */
_Static_assert(sizeof(struct ob_part_header) == 232, "the header is what the format says");
_Static_assert(sizeof(struct ob_part_section) == 40, "so is a row of a section");
_Static_assert(sizeof(struct ob_part_tensor) == 16, "and that of a tensor");

/* --- Checksums ---------------------------------------------------------------------------------*/

/* Odd, so that multiplying can be undone. */
#define FACTOR 0x9e3779b97f4a7c15u

static uint64_t mixed(uint64_t x) {
  x *= FACTOR;
  return x ^ x >> 32;
}

struct ob_checksum ob_checksum_begin(void) {
  return (struct ob_checksum){{0x6f6e6562, 0x69742063, 0x6865636b, 0x73756d73}, 0};
}

void ob_checksum_add(struct ob_checksum *sum, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes / 8; i++, sum->words++) {
    uint64_t word, *lane = &sum->lanes[sum->words % 4];
    memcpy(&word, at + 8 * i, sizeof word);
    *lane = mixed(*lane ^ word);
  }
}

uint64_t ob_checksum_end(const struct ob_checksum *sum) {
  uint64_t all = sum->words;
  for (int k = 0; k < 4; k++)
    all = mixed(all ^ sum->lanes[k]);
  return all;
}

/* --- Sections ----------------------------------------------------------------------------------*/

uint64_t ob_section_bytes(uint32_t what, uint64_t count) {
  return (count * ob_saved_rows[what].size + 7) / 8 * 8;
}

onebit_status_t ob_part_error(const struct ob_part *part, const char *format, ...) {
  char text[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "part %d: %s", part->number, text);
}

/* How many there can be of what the section has. */
static uint64_t limit_of(const struct ob_part_header *header,
                         const struct ob_part_section *section) {
  if (section->space == OB_PADDING)
    return section->what > OB_SAVED_NUMBERS ? header->padding : 0;
  return section->what == OB_SAVED_NORMS     ? header->window
         : section->what == OB_SAVED_NUMBERS ? header->numbers
                                             : header->elements;
}

/* Whether all of the section is before an element of some kind. */
static bool is_before(const struct ob_part_section *section, uint32_t what, uint32_t space,
                      uint64_t element) {
  if (section->what != what)
    return section->what < what;
  if (section->space != space)
    return section->space < space;
  return section->first + section->count <= element;
}

/* Sections stand in order, without gaps and without overlap. */
static onebit_status_t check_section(const struct ob_part *part, uint64_t i, uint64_t offset) {
  const struct ob_part_section *section = &part->sections[i];
  if (section->what < OB_SAVED_NORMS || section->what >= OB_SAVED_END ||
      section->space >= OB_SPACES)
    return ob_part_error(part, "section %" PRIu64 " is of no kind that this library knows", i);
  uint64_t limit = limit_of(&part->header, section), bytes = part->header.bytes;
  const char *name = ob_saved_rows[section->what].name;
  if (section->first > limit || section->count > limit - section->first)
    return ob_part_error(part,
                         "section '%s' has %" PRIu64 " from number %" PRIu64 " on, of %" PRIu64,
                         name, section->count, section->first, limit);
  if (section->offset != offset ||
      (i && !is_before(section - 1, section->what, section->space, section->first)))
    return ob_part_error(part, "section '%s' is out of order", name);
  if (section->count > bytes / 4)
    return ob_part_error(part, "section '%s' is longer than the part", name);
  if (offset + ob_section_bytes(section->what, section->count) > bytes)
    return ob_part_error(part, "section '%s' ends beyond the part", name);
  return ONEBIT_OK;
}

static onebit_status_t check_sections(const struct ob_part *part) {
  uint64_t offset = part->header.front;
  for (uint64_t i = 0; i < part->header.sections; i++) {
    OB_TRY(check_section(part, i, offset));
    offset += ob_section_bytes(part->sections[i].what, part->sections[i].count);
  }
  if (offset == part->header.bytes)
    return ONEBIT_OK;
  return ob_part_error(part, "its sections end at byte %" PRIu64 " of %" PRIu64, offset,
                       part->header.bytes);
}

/* --- Opening one -------------------------------------------------------------------------------*/

static onebit_status_t check_identity(const struct ob_part *part, size_t bytes) {
  const struct ob_part_header *header = &part->header;
  if (bytes < 16)
    return ob_part_error(part, "truncated: %zu bytes, which is no header", bytes);
  if (memcmp(header->magic, OB_PART_MAGIC, sizeof header->magic) != 0)
    return ob_part_error(part, "its first bytes are not those of a checkpoint");
  if (header->order != OB_PART_ORDER)
    return ob_part_error(part, "its numbers are not little-endian");
  if (header->version == 0 || header->version > OB_PART_VERSION)
    return ob_part_error(part, "written by format version %" PRIu32 ", this library reads up to %d",
                         header->version, OB_PART_VERSION);
  if (bytes < sizeof *header)
    return ob_part_error(part, "truncated: %zu bytes of a header of %zu", bytes, sizeof *header);
  if (bytes < header->bytes)
    return ob_part_error(part, "truncated: %zu of %" PRIu64 " bytes", bytes, header->bytes);
  if (bytes > header->bytes)
    return ob_part_error(part, "%zu bytes, but it ends after %" PRIu64, bytes, header->bytes);
  return ONEBIT_OK;
}

static onebit_status_t check_front(const struct ob_part *part) {
  const struct ob_part_header *header = &part->header;
  uint64_t max = header->bytes / 16;
  if (header->tensors > max || header->sections > max ||
      header->front != sizeof *header + header->tensors * sizeof(struct ob_part_tensor) +
                           header->sections * sizeof(struct ob_part_section) ||
      header->front > header->bytes)
    return ob_part_error(part, "its header does not fit its length");
  struct ob_part_header zeroed = *header;
  zeroed.checksum = 0;
  struct ob_checksum sum = ob_checksum_begin();
  ob_checksum_add(&sum, &zeroed, sizeof zeroed);
  ob_checksum_add(&sum, part->tensors, header->front - sizeof zeroed);
  if (ob_checksum_end(&sum) != header->checksum)
    return ob_part_error(part, "header: checksum %016" PRIx64 ", its bytes have %016" PRIx64,
                         header->checksum, ob_checksum_end(&sum));
  return ONEBIT_OK;
}

static onebit_status_t read_sections(struct ob_part *part) {
  size_t count = (size_t)part->header.sections;
  part->sections = ob_allocate(count, sizeof *part->sections);
  part->sound = ob_allocate(count, sizeof *part->sound);
  if (!part->sections || !part->sound)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of %zu sections", count);
  memcpy(part->sections, part->tensors + part->header.tensors * sizeof(struct ob_part_tensor),
         count * sizeof *part->sections);
  return check_sections(part);
}

onebit_status_t ob_part_open(struct ob_part *part, int number, const void *memory, size_t bytes) {
  *part = (struct ob_part){.number = number, .memory = memory};
  if (!memory)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "parts[%d] is NULL", number);
  memcpy(&part->header, memory, bytes < sizeof part->header ? bytes : sizeof part->header);
  OB_TRY(check_identity(part, bytes));
  part->tensors = part->memory + sizeof part->header;
  OB_TRY(check_front(part));
  return read_sections(part);
}

void ob_part_close(struct ob_part *part) {
  ob_release(part->sections);
  ob_release(part->sound);
}

/* --- Looking into it ---------------------------------------------------------------------------*/

const struct ob_part_section *ob_part_from(const struct ob_part *part, enum ob_saved what,
                                           enum ob_space space, uint64_t element) {
  size_t low = 0, high = (size_t)part->header.sections;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (is_before(&part->sections[middle], what, space, element))
      low = middle + 1;
    else
      high = middle;
  }
  const struct ob_part_section *found = &part->sections[low];
  bool fits = low < part->header.sections && found->what == (uint32_t)what &&
              found->space == (uint32_t)space;
  return fits ? found : NULL;
}

void ob_part_copy(const struct ob_part *part, const struct ob_part_section *section, uint64_t first,
                  size_t count, void *values) {
  size_t size = ob_saved_rows[section->what].size;
  memcpy(values, part->memory + section->offset + (first - section->first) * size, count * size);
}

onebit_status_t ob_part_verify(struct ob_part *part, const struct ob_part_section *section) {
  const struct ob_saved_row *row = &ob_saved_rows[section->what];
  bool *sound = &part->sound[section - part->sections];
  if (*sound)
    return ONEBIT_OK;
  struct ob_checksum sum = ob_checksum_begin();
  ob_checksum_add(&sum, part->memory + section->offset,
                  ob_section_bytes(section->what, section->count));
  if (ob_checksum_end(&sum) != section->checksum)
    return ob_part_error(part, "section '%s': checksum %016" PRIx64 ", its bytes have %016" PRIx64,
                         row->name, section->checksum, ob_checksum_end(&sum));
  for (uint64_t i = 0; row->finite && i < section->count; i++) {
    float value;
    ob_part_copy(part, section, section->first + i, 1, &value);
    if (!ob_is_finite(value))
      return ob_part_error(part, "section '%s': element %" PRIu64 " is %g, not finite", row->name,
                           section->first + i, (double)value);
  }
  *sound = true;
  return ONEBIT_OK;
}
