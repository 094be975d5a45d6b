/* Inputs that are parts of checkpoints, of one rank or of two, which are read by one rank. */
#ifndef ONEBIT_TESTS_FUZZ_PARTS_INPUT_H
#define ONEBIT_TESTS_FUZZ_PARTS_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fuzz_parts {
  int kind, count;
  void *part[2];
  size_t bytes[2];
};

/* False: it is too short. What it asks for is mended: identity, lengths, checksums. */
bool fuzz_parts_read(struct fuzz_parts *parts, const uint8_t *data, size_t size);
void fuzz_parts_free(struct fuzz_parts *parts);

#endif
