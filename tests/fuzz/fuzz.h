/*
 * The common part of the fuzzers. Each is a file here with libFuzzer's one function; its first
 * inputs are in seeds/NAME, written by the library itself (seeds.c). A format with a checksum is
 * mended before it is read, where the input asks for that: so the fuzzer gets behind it.
 */
#ifndef ONEBIT_TESTS_FUZZ_FUZZ_H
#define ONEBIT_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the run with a report: what must hold does not. */
#define FUZZ_CHECK(condition) ((condition) ? (void)0 : abort())

/* A copy that is exactly as long, so that the address sanitizer sees what is read behind it; with
 * `more` zeros behind. The caller frees. */
static inline void *fuzz_copy(const uint8_t *data, size_t size, size_t more) {
  unsigned char *copy = calloc(size + more ? size + more : 1, 1);
  FUZZ_CHECK(copy);
  if (size)
    memcpy(copy, data, size);
  return copy;
}

#endif
