/* A transport of threads for tests/behaviour_digest.c, which adds up digests of all messages. */
#ifndef ONEBIT_TESTS_BEHAVIOUR_WIRE_H
#define ONEBIT_TESTS_BEHAVIOUR_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/communicator.h"

/* 64-bit FNV-1a, from DIGEST or from the digest of what came before. */
#define DIGEST 0xcbf29ce484222325u
uint64_t digest(uint64_t hash, const void *data, size_t bytes);

/* A communicator of rank `rank`, whose thread calls; ends the process where there is none. */
onebit_comm_t wire_connect(int rank, int size, int hosts);

/* The sum of the digests of all messages since the last call, whose order does not matter: each
 * says which call it is of. */
uint64_t wire_digest(void);

#endif
