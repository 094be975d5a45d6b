/*
 * A fuzzer for sparse messages (libFuzzer). The first two bytes choose how many elements the
 * receiver expects; the rest is what arrived. What the check lets pass must decode within these
 * elements: address and undefined-behaviour sanitizers watch.
 */
#include "compression/sparse.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 3)
    return 0;
  const size_t elements = (size_t)data[0] * 37 + data[1], wanted = ob_sparse_bytes(elements);
  const size_t bytes = data[2] & 1 ? wanted : size - 3; /* often as long as it should be */
  const size_t given = size - 3 < bytes ? size - 3 : bytes;
  uint32_t *message = fuzz_copy(data + 3, given, bytes - given);
  float *sums = calloc(elements ? elements : 1, sizeof *sums);
  if (ob_sparse_check(message, bytes, elements) == ONEBIT_OK)
    ob_sparse_add(message, elements, 0.5f, sums);
  free(sums);
  free(message);
  return 0;
}
