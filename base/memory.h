/*
 * Memory. All of the library's allocations pass here, so that a test can make any of them fail.
 */
#ifndef OB_BASE_MEMORY_H
#define OB_BASE_MEMORY_H

#include <stddef.h>

#include "onebit/status.h"

/* The alignment of vector loads, non-temporal stores and cache lines. */
#define OB_ALIGNMENT 64

/* Allocates count * size bytes, set to zero and aligned to OB_ALIGNMENT. Returns NULL if memory is
 * exhausted or the product overflows. A size of 0 gives a pointer, too. Large arrays are placed on
 * huge pages where the system supports them. */
void *ob_allocate(size_t count, size_t size);

/* Frees memory. NULL is fine. */
void ob_release(void *memory);

/* Returns to the system those huge pages that lie completely in this range; they read as zeros
 * afterwards. */
void ob_memory_return(void *memory, size_t bytes);

/* Keeps the memory until the process ends, since something outside the library may still access it.
 * NULL is fine. */
void ob_memory_keep(void *memory);

/* A kind of memory. `allocate` returns zeroed arrays, or NULL; `release` accepts NULL; `copy`
 * copies from the host or to it. */
struct ob_memory {
  void *(*allocate)(size_t count, size_t size);
  void (*release)(void *memory);
  onebit_status_t (*copy)(void *to, const void *from, size_t bytes);
  onebit_status_t (*clear)(void *memory, size_t bytes);
};

extern const struct ob_memory ob_memory_host;

/* Returns nonzero if this allocation must fail, for a test; errno is then ENOMEM. The library also
 * calls it before it requests other resources from the system: shared memory, a mapping, a
 * thread. */
int ob_memory_must_fail(void);

/* Makes the n-th allocation from now on fail, once, for tests; n <= 0: no allocation fails. */
void ob_memory_fail_at(long n);

#endif
