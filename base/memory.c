/* Allocates memory that is aligned and zeroed; a test can make an allocation fail. */
#define _DEFAULT_SOURCE
#include "base/memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The size of a huge page on x86-64, and on arm64 with the usual kernels. */
#define HUGE_PAGE ((size_t)2 << 20)

static atomic_long countdown;

void ob_memory_fail_at(long n) { atomic_store(&countdown, n > 0 ? n : 0); }

int ob_memory_must_fail(void) {
  if (atomic_load_explicit(&countdown, memory_order_relaxed) <= 0)
    return 0;
  bool fails = atomic_fetch_sub(&countdown, 1) == 1;
  if (fails)
    errno = ENOMEM;
  return fails;
}

static size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

void *ob_allocate(size_t count, size_t size) {
  if (ob_memory_must_fail() || (size != 0 && count > (SIZE_MAX - HUGE_PAGE) / size))
    return NULL;
  size_t bytes = count * size;
  int large = bytes >= 2 * HUGE_PAGE;
  size_t alignment = large ? HUGE_PAGE : OB_ALIGNMENT;
  size_t whole = round_up(bytes ? bytes : 1, alignment);
  void *memory = aligned_alloc(alignment, whole);
  if (!memory)
    return NULL;
#ifdef MADV_HUGEPAGE
  if (large)
    (void)madvise(memory, whole,
                  MADV_HUGEPAGE); /* a hint: without huge pages the memory is only slower */
#endif
  return memset(memory, 0, bytes); /* every page is touched here, rather than in the first call */
}

void ob_release(void *memory) { free(memory); }

void ob_memory_return(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_DONTNEED)
  const uintptr_t begin = (uintptr_t)memory, first = round_up(begin, HUGE_PAGE),
                  end = (begin + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end > first)
    (void)madvise((void *)first, end - first, MADV_DONTNEED);
#else
  (void)memory, (void)bytes;
#endif
}

/* Lists memory that is kept on purpose, so that a leak checker finds it. */
struct retained {
  struct retained *next;
  void *memory;
};

void ob_memory_keep(void *memory) {
  static _Atomic(struct retained *) first;
  struct retained *entry = memory ? malloc(sizeof *entry) : NULL;
  if (!entry)
    return;
  *entry = (struct retained){atomic_load(&first), memory};
  while (!atomic_compare_exchange_weak(&first, &entry->next, entry))
    ;
}

static onebit_status_t memory_copy(void *to, const void *from, size_t bytes) {
  if (bytes)
    memcpy(to, from, bytes);
  return ONEBIT_OK;
}

static onebit_status_t memory_clear(void *memory, size_t bytes) {
  if (bytes)
    memset(memory, 0, bytes);
  return ONEBIT_OK;
}

const struct ob_memory ob_memory_host = {ob_allocate, ob_release, memory_copy, memory_clear};
