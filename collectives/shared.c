/* Blocks of POSIX shared memory. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/shared.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"

/* A name in the system's one list of them. */
struct path {
  char text[40];
};

static struct path path_of(uint64_t name) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/onebit-%016" PRIx64, name);
  return path;
}

/* The process, and which of its blocks; what is left over of a crashed process with the same number
 * is told apart by the clock. Never 0. */
static uint64_t new_name(void) {
  static atomic_uint blocks;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  uint64_t number = atomic_fetch_add(&blocks, 1) & 0xffff;
  return (uint64_t)getpid() << 40 | number << 24 | ((uint64_t)now.tv_nsec >> 6 & 0xfffffe) | 1;
}

static onebit_status_t failed(const char *call, const struct ob_shared *shared, int code) {
  return ob_error(ONEBIT_ERROR_MEMORY, "%s: %s: no %zu bytes of shared memory (/dev/shm)", call,
                  strerror(code), shared->bytes);
}

static int open_block(uint64_t name, int flags) {
  return ob_memory_must_fail() ? -1 : shm_open(path_of(name).text, O_RDWR | flags, 0600);
}

static onebit_status_t map(struct ob_shared *shared, int block, int file) {
  void *base = MAP_FAILED;
  if (!ob_memory_must_fail())
    base = mmap(NULL, shared->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED)
    return failed("mmap", shared, errno);
  shared->base[block] = base;
  return ONEBIT_OK;
}

/* The memory is taken now: a full file system is an error here, and a signal later. */
static onebit_status_t fill(struct ob_shared *shared, int file) {
  int code = ob_memory_must_fail() ? ENOSPC : posix_fallocate(file, 0, (off_t)shared->bytes);
  if (code)
    return failed("posix_fallocate", shared, code);
  return map(shared, shared->own, file);
}

onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own) {
  *shared = (struct ob_shared){.bytes = bytes, .blocks = blocks, .own = own};
  shared->base = ob_allocate((size_t)blocks, sizeof *shared->base);
  if (!shared->base)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for %d shared blocks", blocks);
  shared->name = new_name();
  int file = open_block(shared->name, O_CREAT | O_EXCL);
  if (file < 0) {
    shared->name = 0;
    return failed("shm_open", shared, errno);
  }
  onebit_status_t status = fill(shared, file);
  close(file);
  return status;
}

onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name) {
  if (block == shared->own)
    return ONEBIT_OK;
  int file = open_block(name, 0);
  if (file < 0)
    return failed("shm_open of another rank's", shared, errno);
  onebit_status_t status = map(shared, block, file);
  close(file);
  return status;
}

void ob_shared_hide(struct ob_shared *shared) {
  if (shared->name)
    shm_unlink(path_of(shared->name).text);
  shared->name = 0;
}

void ob_shared_destroy(struct ob_shared *shared) {
  ob_shared_hide(shared);
  for (int k = 0; shared->base && k < shared->blocks; k++)
    if (shared->base[k])
      munmap(shared->base[k], shared->bytes);
  ob_release(shared->base);
  *shared = (struct ob_shared){0};
}
