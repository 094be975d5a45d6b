/* Computes the checksums of a part, and checks its front before any content of the part is used. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "optimizers/checkpoint/checkpoint.h"

/* The bytes of a part are those of the structs in memory; compression/message.h checks the byte
 * order. */
_Static_assert(sizeof(struct ob_part_header) == 232, "the header is what the format says");
_Static_assert(sizeof(struct ob_part_section) == 40, "so is a row of a section");
_Static_assert(sizeof(struct ob_part_tensor) == 16, "and that of a tensor");

/* --- Checksums ---------------------------------------------------------------------------------*/

/* An odd factor, so that a multiplication can be undone. */
#define FACTOR 0x9e3779b97f4a7c15u

static uint64_t mix_word(uint64_t x) {
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
    *lane = mix_word(*lane ^ word);
  }
}

uint64_t ob_checksum_end(const struct ob_checksum *sum) {
  uint64_t all = sum->words;
  for (int k = 0; k < 4; k++)
    all = mix_word(all ^ sum->lanes[k]);
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

uint64_t ob_section_limit(const struct ob_part_header *header, uint32_t what, uint32_t space) {
  if (space == OB_PADDING)
    return ob_saved_is_numbers(what) ? 0 : header->padding;
  return what == OB_SAVED_NORMS     ? header->window
         : what == OB_SAVED_NUMBERS ? header->numbers
         : what == OB_SAVED_LADDERS ? header->tensors * OB_LADDER_NUMBERS
                                    : header->elements;
}

/* Returns true if the section is of an earlier kind or space, or ends before the element. */
static bool ends_before(const struct ob_part_section *section, uint32_t what, uint32_t space,
                        uint64_t element) {
  if (section->what != what)
    return section->what < what;
  if (section->space != space)
    return section->space < space;
  return section->first + section->count <= element;
}

/* Fails unless the section follows the one before it, without gap and without overlap. */
static onebit_status_t check_section(const struct ob_part *part, uint64_t i, uint64_t offset) {
  const struct ob_part_section *section = &part->sections[i];
  if (section->what < OB_SAVED_NORMS || section->what >= OB_SAVED_END ||
      section->space >= OB_SPACES)
    return ob_part_error(part, "section %" PRIu64 " has a kind that this library does not know", i);
  const uint64_t limit = ob_section_limit(&part->header, section->what, section->space);
  const uint64_t bytes = part->header.bytes;
  const char *name = ob_saved_rows[section->what].name;
  if (section->first > limit || section->count > limit - section->first)
    return ob_part_error(part,
                         "section '%s' has %" PRIu64 " elements from element %" PRIu64
                         " on, but the checkpoint has only %" PRIu64 "",
                         name, section->count, section->first, limit);
  if (section->offset != offset ||
      (i && !ends_before(section - 1, section->what, section->space, section->first)))
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
  return ob_part_error(part, "its sections end at byte %" PRIu64 ", not at its end, byte %" PRIu64,
                       offset, part->header.bytes);
}

/* Reads bytes, which must lie within the part. */
static onebit_status_t read_part_bytes(const struct ob_part *part, uint64_t offset, void *to,
                                       size_t bytes) {
  if (!part->source.memory)
    return ob_stored_read(part->source.file, offset, to, bytes);
  memcpy(to, part->source.memory + offset, bytes);
  return ONEBIT_OK;
}

/* --- Opening a part ----------------------------------------------------------------------------*/

static onebit_status_t check_identity(const struct ob_part *part) {
  const struct ob_part_header *header = &part->header;
  const uint64_t bytes = part->source.bytes;
  if (bytes < 16)
    return ob_part_error(part, "it is truncated: %" PRIu64 " bytes are too few for a header",
                         bytes);
  if (memcmp(header->magic, OB_PART_MAGIC, sizeof header->magic) != 0)
    return ob_part_error(part, "its first bytes are not those of a checkpoint");
  if (header->order != OB_PART_ORDER)
    return ob_part_error(part, "its numbers are not little-endian");
  if (header->version == 0 || header->version > OB_PART_VERSION)
    return ob_part_error(
        part, "it has format version %" PRIu32 ", but this library reads versions up to %d",
        header->version, OB_PART_VERSION);
  if (bytes < sizeof *header)
    return ob_part_error(part, "it is truncated: it has %" PRIu64 " bytes, but its header %zu",
                         bytes, sizeof *header);
  if (bytes < header->bytes)
    return ob_part_error(part, "it is truncated: it has %" PRIu64 " of %" PRIu64 " bytes", bytes,
                         header->bytes);
  if (bytes > header->bytes)
    return ob_part_error(part, "it has %" PRIu64 " bytes, but its header says %" PRIu64, bytes,
                         header->bytes);
  return ONEBIT_OK;
}

static onebit_status_t check_counts(const struct ob_part *part) {
  const struct ob_part_header *header = &part->header;
  uint64_t max = header->bytes / 16;
  if (header->tensors <= max && header->sections <= max &&
      header->front == sizeof *header + header->tensors * sizeof(struct ob_part_tensor) +
                           header->sections * sizeof(struct ob_part_section) &&
      header->front <= header->bytes && header->front <= OB_MAX_FRONT)
    return ONEBIT_OK;
  return ob_part_error(part, "it is damaged: the counts in its header do not fit its length");
}

/* Reads the front once, so that the copy that is checked is the one that is used. */
static onebit_status_t part_read_front(struct ob_part *part) {
  struct ob_part_header *header = &part->header, zeroed;
  part->front = ob_allocate(1, (size_t)header->front);
  part->sound = ob_allocate((size_t)header->sections, sizeof *part->sound);
  if (!part->front || !part->sound)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %" PRIu64 " sections",
                    header->sections);
  OB_TRY(read_part_bytes(part, 0, part->front, (size_t)header->front));
  if (memcmp(part->front, header, sizeof *header) != 0)
    return ob_part_error(part, "its header was changed while it was read");
  zeroed = *header;
  zeroed.checksum = 0;
  memcpy(part->front, &zeroed, sizeof zeroed);
  struct ob_checksum sum = ob_checksum_begin();
  ob_checksum_add(&sum, part->front, (size_t)header->front);
  if (ob_checksum_end(&sum) != header->checksum)
    return ob_part_error(part,
                         "its header has the checksum %016" PRIx64
                         ", but the checksum of the header's bytes is %016" PRIx64,
                         header->checksum, ob_checksum_end(&sum));
  part->tensors = (const void *)(part->front + sizeof *header);
  part->sections = (const void *)(part->tensors + header->tensors);
  return ONEBIT_OK;
}

onebit_status_t ob_part_open(struct ob_part *part, int number,
                             const struct ob_part_source *source) {
  *part = (struct ob_part){.number = number, .source = *source};
  size_t bytes = sizeof part->header;
  bytes = source->bytes < bytes ? (size_t)source->bytes : bytes;
  if (!source->memory && !source->file)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "parts[%d] is NULL", number);
  OB_TRY(read_part_bytes(part, 0, &part->header, bytes));
  OB_TRY(check_identity(part));
  OB_TRY(check_counts(part));
  OB_TRY(part_read_front(part));
  return check_sections(part);
}

void ob_part_close(struct ob_part *part) {
  ob_release(part->front);
  ob_release(part->sound);
}

void ob_part_release(struct ob_part *part) {
  if (!part)
    return;
  ob_release((void *)part->source.memory);
  ob_part_close(part);
  ob_release(part);
}

/* --- Access to a part's content ----------------------------------------------------------------*/

const struct ob_part_section *ob_part_find_section(const struct ob_part *part, enum ob_saved what,
                                                   enum ob_space space, uint64_t element) {
  size_t low = 0, high = (size_t)part->header.sections;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (ends_before(&part->sections[middle], what, space, element))
      low = middle + 1;
    else
      high = middle;
  }
  const struct ob_part_section *found = &part->sections[low];
  bool fits = low < part->header.sections && found->what == (uint32_t)what &&
              found->space == (uint32_t)space;
  return fits ? found : NULL;
}

onebit_status_t ob_part_copy(const struct ob_part *part, const struct ob_part_section *section,
                             uint64_t first, size_t count, void *values) {
  size_t size = ob_saved_rows[section->what].size;
  return read_part_bytes(part, section->offset + (first - section->first) * size, values,
                         count * size);
}

/* Returns the index of the first of `count` floats that is not finite, or `count`. */
static uint64_t first_infinite(const unsigned char *bytes, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    float value;
    memcpy(&value, bytes + sizeof value * i, sizeof value);
    if (!ob_is_finite(value))
      return i;
  }
  return count;
}

/* Computes the checksum of a section, piece by piece, and finds its first float that is not
 * finite. */
static onebit_status_t checksum_section(const struct ob_part *part,
                                        const struct ob_part_section *section,
                                        struct ob_checksum *sum, uint64_t *infinite) {
  uint64_t whole = ob_section_bytes(section->what, section->count), some;
  unsigned char buffer[OB_READ_AT_ONCE * sizeof(float)];
  *infinite = section->count;
  for (uint64_t at = 0; at < whole; at += some) {
    const unsigned char *bytes = buffer;
    some = whole - at < sizeof buffer ? whole - at : sizeof buffer;
    if (part->source.memory)
      bytes = part->source.memory + section->offset + at;
    else
      OB_TRY(read_part_bytes(part, section->offset + at, buffer, (size_t)some));
    ob_checksum_add(sum, bytes, (size_t)some);
    if (ob_saved_rows[section->what].finite && *infinite == section->count) {
      uint64_t first = at / sizeof(float), left = section->count - first;
      uint64_t here = left < some / sizeof(float) ? left : some / sizeof(float);
      uint64_t found = first_infinite(bytes, here);
      *infinite = found < here ? first + found : section->count;
    }
  }
  return ONEBIT_OK;
}

onebit_status_t ob_part_verify(struct ob_part *part, const struct ob_part_section *section) {
  const char *name = ob_saved_rows[section->what].name;
  bool *sound = &part->sound[section - part->sections];
  uint64_t infinite;
  if (*sound)
    return ONEBIT_OK;
  struct ob_checksum sum = ob_checksum_begin();
  OB_TRY(checksum_section(part, section, &sum, &infinite));
  if (ob_checksum_end(&sum) != section->checksum)
    return ob_part_error(part,
                         "section '%s' has the checksum %016" PRIx64
                         ", but the checksum of its bytes is %016" PRIx64,
                         name, section->checksum, ob_checksum_end(&sum));
  if (infinite < section->count) {
    float value;
    OB_TRY(ob_part_copy(part, section, section->first + infinite, 1, &value));
    return ob_part_error(part, "section '%s': element %" PRIu64 " is %g, not finite", name,
                         section->first + infinite, (double)value);
  }
  *sound = true;
  return ONEBIT_OK;
}

onebit_status_t ob_part_find_numbers(struct ob_part *part, enum ob_saved what, uint64_t count,
                                     const struct ob_part_section **section) {
  *section = ob_part_find_section(part, what, OB_ELEMENTS, 0);
  if (!*section || (*section)->first || (*section)->count != count)
    return ob_part_error(part, "section '%s' is missing or has another size",
                         ob_saved_rows[what].name);
  return ob_part_verify(part, *section);
}
