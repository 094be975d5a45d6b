/*
 * Parts of checkpoints, of one rank or of two, into an optimizer of one rank. What is refused
 * changes nothing, and with what is accepted steps can be made.
 */
#include "base/error.h"
#include "optimizers/checkpoint/checkpoint.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/optimizers.h"

/* What an input begins with: which optimizer, what is mended, and the bytes of the first of two
 * parts; 0: there is one. */
enum { CHOICES = 4 };
enum { MEND_IDENTITY = 1, MEND_LENGTHS = 2, MEND_SECTIONS = 4, MEND_FRONT = 8 };

struct rows {
  struct ob_part_header header;
  struct ob_part_section *section; /* a copy */
  size_t at;                       /* where they are */
};

/* False: the rows do not fit. */
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

static void mend_sections(struct rows *rows, const unsigned char *part, size_t bytes, int what) {
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

/* The checksum of the front comes last: it is of all that was mended before. */
static void mend(unsigned char *part, size_t bytes, int what) {
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
  mend_sections(&rows, part, bytes, what);
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

static unsigned char *saved(onebit_optimizer_t optimizer, size_t *bytes) {
  FUZZ_CHECK(onebit_optimizer_save(optimizer, NULL, 0, bytes) == ONEBIT_OK);
  unsigned char *memory = calloc(1, *bytes);
  FUZZ_CHECK(memory && onebit_optimizer_save(optimizer, memory, *bytes, bytes) == ONEBIT_OK);
  return memory;
}

static void load(int kind, const void *const *parts, const size_t *bytes, int count) {
  struct fuzz_optimizer made;
  onebit_comm_t comm;
  size_t before_bytes, after_bytes;
  FUZZ_CHECK(onebit_comm_create_self(&comm) == ONEBIT_OK);
  FUZZ_CHECK(fuzz_optimizer_create(&made, kind, comm) == ONEBIT_OK);
  unsigned char *before = saved(made.optimizer, &before_bytes);
  if (onebit_optimizer_load(made.optimizer, parts, bytes, count) == ONEBIT_OK) {
    onebit_status_t status = fuzz_optimizer_train(&made, 2);
    FUZZ_CHECK(status == ONEBIT_OK || status == ONEBIT_SKIPPED);
  } else {
    unsigned char *after = saved(made.optimizer, &after_bytes);
    FUZZ_CHECK(before_bytes == after_bytes && memcmp(before, after, before_bytes) == 0);
    free(after);
  }
  free(before);
  onebit_optimizer_destroy(made.optimizer);
  onebit_comm_destroy(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < CHOICES)
    return 0;
  size_t all = size - CHOICES, first = data[2] | (size_t)data[3] << 8;
  int count = first > 0 && first < all ? 2 : 1;
  size_t bytes[2] = {count == 2 ? first : all, all - first};
  void *parts[2] = {fuzz_copy(data + CHOICES, bytes[0], 0), NULL};
  if (count == 2)
    parts[1] = fuzz_copy(data + CHOICES + first, bytes[1], 0);
  for (int k = 0; k < count; k++)
    mend(parts[k], bytes[k], data[1]);
  load(data[0] % FUZZ_OPTIMIZERS, (const void *const *)parts, bytes, count);
  free(parts[0]);
  free(parts[1]);
  return 0;
}
