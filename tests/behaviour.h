/* The parts of tests/behaviour_digest.c. */
#ifndef ONEBIT_TESTS_BEHAVIOUR_H
#define ONEBIT_TESTS_BEHAVIOUR_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/communicator.h"
#include "onebit/plan.h"

/* The inputs, memory and files of tests/behaviour_digest.c, which needs only the public headers. */

/* The input does not repeat at any size that the library knows; some elements and blocks are
 * zero. */
float input_value(size_t i, int rank, int step);

/* Stores a float32 as dtype. The 16-bit types get truncated bits, without rounding. */
void store_value(void *buffer, size_t i, onebit_dtype_t dtype, float value);
size_t bytes_of(onebit_dtype_t dtype);

/* Returns memory of zeros; ends the process where there is none. */
void *allocate_zeros(size_t bytes);

/* Digests the files of a directory, whatever their order, and removes them and the directory. */
uint64_t digest_files(const char *directory);

/* A transport of threads for tests/behaviour_digest.c, which adds up digests of all messages. */

/* Continues a digest (64-bit FNV-1a) with more data; the first is DIGEST. */
#define DIGEST 0xcbf29ce484222325u
uint64_t digest_bytes(uint64_t hash, const void *data, size_t bytes);

/* Makes the communicator of rank `rank` for the calling thread; ends the process if it cannot. */
onebit_comm_t wire_connect(int rank, int size, int hosts);

/* Returns the sum of the digests of all messages since the last call. Their order does not matter:
 * each digest covers the number of its call. */
uint64_t wire_digest(void);

#endif
