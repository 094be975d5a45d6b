/*
 * A sparse message has the 64 elements of largest magnitude of every chunk of 4096 elements: two
 * bits for each value, and the positions. SparseLoCo (arXiv 2508.15706) sends such messages. Ranks
 * use an allgather for them, since a sum of sparse messages is not sparse. docs/wire-format.md has
 * the format: each chunk takes 21 words, whatever its values. Sums are computed in double, in
 * ascending order of position, so that every build computes the same bits.
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

/* Compresses `values`, which are the input plus the residual, and subtracts from them the values
 * that are sent: the difference is the next residual. Returns false if a value is not finite, or so
 * large that a level would not be finite (from 2^128 - 2^119 on). The message is then not valid,
 * and the values of that chunk and of later ones are unchanged. */
bool ob_sparse_compress(float *values, size_t elements, uint32_t *message);

/* Fails unless the message is valid: its size fits this number of elements, it has the right number
 * of positions, they ascend and lie within their chunk, and the levels are finite and not negative.
 * The error message names the chunk. */
onebit_status_t ob_sparse_check(const uint32_t *message, size_t bytes, size_t elements);

/* sums[i] += weight * the decoded value, for the elements that are sent. The message must have
 * passed ob_sparse_check. */
void ob_sparse_add(const uint32_t *message, size_t elements, float weight, float *sums);

#endif
