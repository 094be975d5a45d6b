/* A transport of threads for tests/behaviour_digest.c, which adds up digests of all messages. */
#ifndef ONEBIT_TESTS_BEHAVIOUR_WIRE_H
#define ONEBIT_TESTS_BEHAVIOUR_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/communicator.h"

/* Continues a digest (64-bit FNV-1a) with more data; the first is DIGEST. */
#define DIGEST 0xcbf29ce484222325u
uint64_t digest(uint64_t hash, const void *data, size_t bytes);

/* Makes the communicator of rank `rank` for the calling thread; ends the process if it cannot. */
onebit_comm_t wire_connect(int rank, int size, int hosts);

/* Returns the sum of the digests of all messages since the last call. Their order does not matter:
 * each digest covers the number of its call. */
uint64_t wire_digest(void);

#endif
