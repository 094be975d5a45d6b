/*
 * A fuzzer for sparse messages (libFuzzer). The first two bytes choose the number of elements that
 * the receiver expects; the rest is the message. Decoding an accepted message must stay within
 * these elements. The address and undefined-behaviour sanitizers report violations.
 */
#include "compression/sparse.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 3)
    return 0;
  const size_t elements = (size_t)data[0] * 37 + data[1], wanted = ob_sparse_bytes(elements);
  const size_t bytes = data[2] & 1 ? wanted : size - 3; /* half of the inputs get the expected
                                                         * length */
  const size_t given = size - 3 < bytes ? size - 3 : bytes;
  uint32_t *message = fuzz_copy(data + 3, given, bytes - given);
  float *sums = calloc(elements ? elements : 1, sizeof *sums);
  if (ob_sparse_check(message, bytes, elements) == ONEBIT_OK)
    ob_sparse_add(message, elements, 0.5f, sums);
  free(sums);
  free(message);
  return 0;
}
