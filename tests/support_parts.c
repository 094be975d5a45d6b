/* Parts of a checkpoint, as docs/checkpoints.md describes them. */
#include "tests/support_parts.h"

uint64_t part_number(const void *part, size_t offset) {
  uint64_t number;
  memcpy(&number, (const char *)part + offset, sizeof number);
  return number;
}

void part_set(void *part, size_t offset, uint64_t number) {
  memcpy((char *)part + offset, &number, sizeof number);
}

static size_t row_of(const void *part, size_t number) {
  return PART_ROWS + part_number(part, PART_TENSORS) * 16 + number * 40;
}

struct section part_section(const void *part, size_t number) {
  struct section section;
  memcpy(&section, (const char *)part + row_of(part, number), 40);
  return section;
}

void part_set_section(void *part, size_t number, const struct section *section) {
  memcpy((char *)part + row_of(part, number), section, 40);
}

static void add_values(const struct saved_parts *parts, int k, uint32_t what, float *values) {
  const char *part = parts->memory[k];
  for (size_t i = 0; i < part_number(part, PART_SECTIONS); i++) {
    struct section section = part_section(part, i);
    if (section.what == what && section.space == 0)
      memcpy(values + section.first, part + section.offset, section.count * sizeof *values);
  }
}

static float *no_values(const struct saved_parts *parts) {
  size_t count = part_number(parts->memory[0], PART_ELEMENTS);
  float *values = allocate(count, sizeof *values);
  for (size_t i = 0; i < count; i++)
    values[i] = NAN;
  return values;
}

float *part_values(const struct saved_parts *parts, int part, uint32_t what) {
  float *values = no_values(parts);
  add_values(parts, part, what, values);
  return values;
}

float *parts_values(const struct saved_parts *parts, uint32_t what) {
  float *values = no_values(parts);
  for (int k = 0; k < parts->count; k++)
    add_values(parts, k, what, values);
  return values;
}

double *parts_mean(const struct saved_parts *parts, uint32_t what) {
  size_t count = part_number(parts->memory[0], PART_ELEMENTS);
  double *sums = allocate(count, sizeof *sums);
  int *having = allocate(count, sizeof *having);
  for (size_t i = 0; i < count; i++)
    sums[i] = -0.0;
  for (int k = 0; k < parts->count; k++) {
    float *values = part_values(parts, k, what);
    for (size_t i = 0; i < count; i++)
      if (!isnan(values[i])) {
        sums[i] += (double)values[i];
        having[i]++;
      }
    free(values);
  }
  for (size_t i = 0; i < count; i++)
    sums[i] = having[i] ? sums[i] / having[i] : NAN;
  free(having);
  return sums;
}

/* --- Checksums */

static uint64_t mixed(uint64_t x) {
  x *= 0x9e3779b97f4a7c15u;
  return x ^ x >> 32;
}

static uint64_t checksum_of(const char *data, size_t bytes) {
  uint64_t lanes[4] = {0x6f6e6562, 0x69742063, 0x6865636b, 0x73756d73};
  for (size_t i = 0; i < bytes / 8; i++)
    lanes[i % 4] = mixed(lanes[i % 4] ^ part_number(data, 8 * i));
  uint64_t all = bytes / 8;
  for (int k = 0; k < 4; k++)
    all = mixed(all ^ lanes[k]);
  return all;
}

void part_sign_section(void *part, size_t number) {
  struct section section = part_section(part, number);
  size_t size = section.what <= SECTION_NUMBERS ? 8 : 4;
  section.checksum = checksum_of((char *)part + section.offset, (section.count * size + 7) / 8 * 8);
  part_set_section(part, number, &section);
}

void part_sign(void *part) {
  part_set(part, PART_CHECKSUM, 0);
  part_set(part, PART_CHECKSUM, checksum_of(part, part_number(part, PART_FRONT)));
}
