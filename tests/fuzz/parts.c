/*
 * Loads the checkpoint parts of one or two ranks into an optimizer or outer step of one rank. A
 * refused part must change nothing. After an accepted part, further steps must succeed.
 */
#include <stdbool.h>

#include "optimizers/checkpoint/checkpoint.h"
#include "tests/fuzz/fuzz.h"

/* The first bytes of an input: the object's kind, the fields to correct, and the length of the
 * first of two parts. A length of 0 means that the input has only one part. */
enum { CHOICES = 4 };
enum { MEND_IDENTITY = 1, MEND_LENGTHS = 2, MEND_SECTIONS = 4, MEND_FRONT = 8 };

struct rows {
  struct ob_part_header header;
  struct ob_part_section *section; /* a copy */
  size_t at;                       /* offset of the sections in the part */
};

/* Reads the header and the section table. Returns false if the part is too short for them. */
static int read_rows(struct rows *rows, const unsigned char *part, size_t bytes) {
  rows->section = NULL;
  if (bytes < sizeof rows->header)
    return 0;
  memcpy(&rows->header, part, sizeof rows->header);
  uint64_t left = bytes - sizeof rows->header, tensors = rows->header.tensors;
  if (tensors > left / sizeof(struct ob_part_tensor))
    return 0;
  rows->at = sizeof rows->header + (size_t)tensors * sizeof(struct ob_part_tensor);
  if (rows->header.sections > (bytes - rows->at) / sizeof *rows->section)
    return 0;
  rows->section =
      fuzz_copy(part + rows->at, (size_t)rows->header.sections * sizeof *rows->section, 0);
  return 1;
}

static void correct_sections(struct rows *rows, const unsigned char *part, size_t bytes, int what) {
  uint64_t offset = rows->header.front;
  for (uint64_t i = 0; i < rows->header.sections; i++) {
    struct ob_part_section *section = &rows->section[i];
    if (section->what >= OB_SAVED_END || section->count > bytes)
      continue;
    if (what & MEND_LENGTHS)
      section->offset = offset;
    uint64_t length = ob_section_bytes(section->what, section->count);
    offset = section->offset + length;
    if (!(what & MEND_SECTIONS) || section->offset > bytes || length > bytes - section->offset)
      continue;
    struct ob_checksum sum = ob_checksum_begin();
    ob_checksum_add(&sum, part + section->offset, (size_t)length);
    section->checksum = ob_checksum_end(&sum);
  }
}

/* Corrects the fields that `what` names. The checksum of the part's front (header and tables) is
 * corrected last, because it covers the other fields. */
static void correct_part(unsigned char *part, size_t bytes, int what) {
  struct rows rows;
  if (!read_rows(&rows, part, bytes))
    return;
  struct ob_part_header *header = &rows.header;
  if (what & MEND_IDENTITY) {
    memcpy(header->magic, OB_PART_MAGIC, sizeof header->magic);
    header->order = OB_PART_ORDER;
    header->version = OB_PART_VERSION;
  }
  if (what & MEND_LENGTHS) {
    header->bytes = bytes;
    header->front = rows.at + header->sections * sizeof *rows.section;
  }
  correct_sections(&rows, part, bytes, what);
  if (what & MEND_FRONT)
    header->checksum = 0;
  memcpy(part, header, sizeof *header);
  memcpy(part + rows.at, rows.section, (size_t)header->sections * sizeof *rows.section);
  if ((what & MEND_FRONT) && header->front <= bytes) {
    struct ob_checksum sum = ob_checksum_begin();
    ob_checksum_add(&sum, part, (size_t)header->front);
    header->checksum = ob_checksum_end(&sum);
    memcpy(part, header, sizeof *header);
  }
  free(rows.section);
}

struct parts {
  int kind, count;
  void *part[2];
  size_t bytes[2];
};

/* Reads the parts of an input, and computes those checksums and sizes anew that the input selects.
 * Returns false if the
 * input is too short. */
static bool read_parts(struct parts *parts, const uint8_t *data, size_t size) {
  if (size < CHOICES)
    return false;
  size_t all = size - CHOICES, first = data[2] | (size_t)data[3] << 8;
  parts->kind = data[0];
  parts->count = first > 0 && first < all ? 2 : 1;
  parts->bytes[0] = parts->count == 2 ? first : all;
  parts->bytes[1] = all - first;
  parts->part[0] = fuzz_copy(data + CHOICES, parts->bytes[0], 0);
  parts->part[1] = parts->count == 2 ? fuzz_copy(data + CHOICES + first, parts->bytes[1], 0) : NULL;
  for (int k = 0; k < parts->count; k++)
    correct_part(parts->part[k], parts->bytes[k], data[1]);
  return true;
}

static void load_parts(const struct parts *parts) {
  struct fuzz_object made;
  onebit_comm_t comm;
  size_t before_bytes, after_bytes;
  FUZZ_CHECK(onebit_comm_create_self(&comm) == ONEBIT_OK);
  fuzz_object_create(&made, parts->kind % FUZZ_KINDS, comm);
  unsigned char *before = fuzz_object_save(&made, &before_bytes);
  if (fuzz_object_load(&made, (const void *const *)parts->part, parts->bytes, parts->count) ==
      ONEBIT_OK) {
    const onebit_status_t status = fuzz_object_train(&made, 5);
    FUZZ_CHECK(status == ONEBIT_OK || status == ONEBIT_SKIPPED);
  } else {
    unsigned char *after = fuzz_object_save(&made, &after_bytes);
    FUZZ_CHECK(before_bytes == after_bytes && memcmp(before, after, before_bytes) == 0);
    free(after);
  }
  free(before);
  fuzz_object_destroy(&made);
  onebit_comm_destroy(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct parts parts;
  if (!read_parts(&parts, data, size))
    return 0;
  load_parts(&parts);
  free(parts.part[0]);
  free(parts.part[1]);
  return 0;
}
