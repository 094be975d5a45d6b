/*
 * Sparse messages: of every chunk of 4096 elements the 64 of the largest magnitude, two bits each,
 * and where they are. What SparseLoCo (arXiv 2508.15706) sends; between ranks they are gathered,
 * since a sum of them is not sparse.
 *
 * A chunk takes 84 bytes, 21 little-endian words, whatever its values; 1/195 of float32:
 *   word 0         two levels, bfloat16, not negative: the lower in bits 0 to 15, and the upper
 *   words 1 to 4   for sent element i, in ascending order of position p, bit i + (p >> 6)
 *   words 5 to 16  p & 63, six bits each, element i from bit 6 i on
 *   words 17 to 20 two bits each: bit 2 i is the sign (1: negative), bit 2 i + 1: the upper level
 * Positions in 8 bits each are Elias and Fano's code of an ascending list; 12 bits each, as the
 * paper's authors write them, would make it 116 bytes. Its last chunk may be short: of c elements
 * min(64, c) are sent, all other bits are 0.
 *
 * Which elements: by magnitude, of equal ones those before. The magnitudes of a chunk above their
 * mean have the upper level, the mean of those, the others the lower. Sums are in double, in
 * ascending order of position: the same bits on every build.
 */
#ifndef OB_COMPRESSION_SPARSE_H
#define OB_COMPRESSION_SPARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"

#define OB_SPARSE_CHUNK  4096
#define OB_SPARSE_SENT   64
#define OB_SPARSE_STRIDE 21 /* words that a chunk takes */

static inline size_t ob_sparse_chunks(size_t elements) {
  return elements / OB_SPARSE_CHUNK + (elements % OB_SPARSE_CHUNK != 0);
}

static inline size_t ob_sparse_bytes(size_t elements) {
  return ob_sparse_chunks(elements) * OB_SPARSE_STRIDE * sizeof(uint32_t);
}

/* Compresses `values`, the input plus the residual, and leaves in them what was not sent: the next
 * residual. False: a value is not finite, or so near to that that no level is near it (from 2^128 -
 * 2^119 on); the message means nothing, and values are as they were in the chunks that were not
 * reached. `message` has ob_sparse_bytes(elements). */
bool ob_sparse_compress(float *values, size_t elements, uint32_t *message);

/* Fails unless `bytes` bytes are a message of so many elements: with the right number of positions,
 * ascending and within their chunk, and levels that are finite and not negative. The error message
 * names the chunk. */
onebit_status_t ob_sparse_check(const uint32_t *message, size_t bytes, size_t elements);

/* sums[i] += weight * the decoded value, for the elements that a sound message has. */
void ob_sparse_add(const uint32_t *message, size_t elements, float weight, float *sums);

#endif
