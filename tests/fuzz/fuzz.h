/*
 * The common part of the fuzzers. Each file here has libFuzzer's one function; its first inputs are
 * in seeds/NAME, which the library writes (seeds.c). A checksum is corrected before it is read if
 * the input asks for that, so that the fuzzer reaches the code after the check.
 */
#ifndef ONEBIT_TESTS_FUZZ_FUZZ_H
#define ONEBIT_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the run with a report if the condition does not hold. */
#define FUZZ_CHECK(condition) ((condition) ? (void)0 : abort())

/* Copies the data, plus `more` zeros, to memory of exactly that size, so that the address sanitizer
 * sees reads behind it. The caller frees it. */
static inline void *fuzz_copy(const uint8_t *data, size_t size, size_t more) {
  unsigned char *copy = calloc(size + more ? size + more : 1, 1);
  FUZZ_CHECK(copy);
  if (size)
    memcpy(copy, data, size);
  return copy;
}

#endif
