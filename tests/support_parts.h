/*
 * The parts of a checkpoint, read by docs/checkpoints.md alone, without the library's code; and
 * signed anew after a test has changed them.
 */
#ifndef ONEBIT_TESTS_SUPPORT_PARTS_H
#define ONEBIT_TESTS_SUPPORT_PARTS_H

#include "tests/support_checkpoint.h"

/* Offsets of fields of the header. */
enum {
  PART_VERSION = 8,
  PART_BYTES = 16,
  PART_FRONT = 24,
  PART_CHECKSUM = 32,
  PART_KIND = 40,
  PART_RANKS = 64,
  PART_STAGE = 72,
  PART_APART = 84, /* 4 bytes */
  PART_TENSORS = 88,
  PART_ELEMENTS = 96,
  PART_PADDING = 104,
  PART_STEPS = 112,
  PART_FROZEN_AT = 120,
  PART_RANK = 176,
  PART_SECTIONS = 224,
  PART_ROWS = 232
};

/* The contents of a section. */
enum {
  SECTION_NORMS = 1,
  SECTION_NUMBERS,
  SECTION_PARAMETERS,
  SECTION_MOMENTUM,
  SECTION_VARIANCE,
  SECTION_FRESH,
  SECTION_ANCHOR,
  SECTION_MOVED,
  SECTION_WORKER,
  SECTION_SERVER,
  SECTION_MOMENTS,
  SECTION_CONSENSUS,
  SECTION_OUTER_MOMENTUM,
  SECTION_DRIFT
};

struct section {
  uint32_t what, space;
  uint64_t first, count, offset, checksum;
};

uint64_t part_number(const void *part, size_t offset);
void part_set(void *part, size_t offset, uint64_t number);
struct section part_section(const void *part, size_t number);
void part_set_section(void *part, size_t number, const struct section *section);

/* Returns all elements of one kind; NaN stands for those that the part does not have. The caller
 * frees them. */
float *part_values(const struct saved_parts *parts, int part, uint32_t what);
/* Returns the same of all parts together; an element of several parts is the last one's. */
float *parts_values(const struct saved_parts *parts, uint32_t what);
/* The mean over the parts that have an element. */
double *parts_mean(const struct saved_parts *parts, uint32_t what);

/* Set the checksum of a section, and of the front. */
void part_sign_section(void *part, size_t number);
void part_sign(void *part);

#endif
