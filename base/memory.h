/*
 * Memory. All of the library's allocations pass here, so that a test can make any of them fail.
 */
#ifndef OB_BASE_MEMORY_H
#define OB_BASE_MEMORY_H

#include <stddef.h>

/* Vector loads, non-temporal stores and cache lines all want this much. */
#define OB_ALIGNMENT 64

/* count * size bytes set to zero, aligned to OB_ALIGNMENT; NULL when there is no such memory or the
 * product overflows. Asking for nothing gives a pointer too. Large arrays are placed on huge pages
 * where the system has them. */
void *ob_allocate(size_t count, size_t size);

/* Gives it back. NULL is fine. */
void ob_release(void *memory);

/* For tests: from now on the n-th allocation of the process fails, once; n <= 0 switches it off. */
void ob_memory_fail_at(long n);

#endif
