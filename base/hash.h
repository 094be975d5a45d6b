/* Hashes bytes with 64-bit FNV-1a (Fowler, Noll, Vo), for files and messages. */
#ifndef OB_BASE_HASH_H
#define OB_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

/* The hash of zero bytes. To hash several pieces, pass the hash of one piece as the start of the
 * next. */
#define OB_HASH_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t ob_hash(uint64_t start, const void *bytes, size_t count) {
  const unsigned char *byte = bytes;
  for (size_t i = 0; i < count; i++)
    start = (start ^ byte[i]) * UINT64_C(0x100000001b3);
  return start;
}

#endif
