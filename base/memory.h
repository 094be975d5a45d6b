/*
 * Memory. All of the library's allocations pass here, so that a test can make any of them fail.
 */
#ifndef OB_BASE_MEMORY_H
#define OB_BASE_MEMORY_H

#include <stddef.h>

#include "onebit/status.h"

/* The alignment of vector loads, non-temporal stores and cache lines. */
#define OB_ALIGNMENT 64

/* Allocates count * size bytes set to zero, aligned to OB_ALIGNMENT; NULL when there is no such
 * memory or the product overflows. A size of 0 gives a pointer, too. Large arrays are placed on
 * huge pages where the system has them. */
void *ob_allocate(size_t count, size_t size);

/* Frees memory. NULL is fine. */
void ob_release(void *memory);

/* Returns the complete huge pages of this range to the system; they read as zeros afterwards. */
void ob_memory_return(void *memory, size_t bytes);

/* Keeps memory until the process ends, since something outside the library may still access it.
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

/* Nonzero if this allocation must fail, for a test; errno is then ENOMEM. It is also called before
 * other resources are requested of the system: shared memory, its mapping, a thread. */
int ob_memory_must_fail(void);

/* Makes the n-th allocation from now on fail, once, for tests; n <= 0 switches it off. */
void ob_memory_fail_at(long n);

#endif
