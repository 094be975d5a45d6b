/* Numbers the hosts and their ranks, and allocates the memory that the ranks of a host share. */
#define _DEFAULT_SOURCE /* flock */
#include "collectives/hosts.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"

/* Returns the lowest rank on the host of a rank. */
static int first_rank_on_host(const int *host_of, int rank) {
  int first = 0;
  while (host_of && host_of[first] != host_of[rank])
    first++;
  return first;
}

/* The state of a host while the hosts are being numbered; the array is indexed by the host's lowest
 * rank. */
struct tally {
  int number, ranks;
};

static void set_host_limits(struct ob_hosts *hosts, const struct tally *tallies, int size) {
  hosts->fewest = hosts->max = tallies[0].ranks;
  for (int r = 0; r < size; r++) {
    int ranks = tallies[r].ranks;
    if (ranks == 0)
      continue;
    hosts->fewest = ranks < hosts->fewest ? ranks : hosts->fewest;
    hosts->max = ranks > hosts->max ? ranks : hosts->max;
  }
  hosts->each = hosts->fewest == hosts->max ? hosts->max : 0;
}

/* Fills in hosts->ranks if every host has the same number of ranks. */
static void order_ranks(struct ob_hosts *hosts, const int *host_of, struct tally *tallies,
                        int size) {
  for (int r = 0; r < size; r++)
    tallies[r].ranks = 0;
  for (int r = 0; r < size; r++) {
    struct tally *tally = &tallies[first_rank_on_host(host_of, r)];
    hosts->ranks[tally->number * hosts->each + tally->ranks++] = r;
  }
}

onebit_status_t ob_hosts_create(struct ob_hosts *hosts, const int *host_of, int rank, int size) {
  *hosts = (struct ob_hosts){0};
  struct tally *tallies = ob_allocate((size_t)size, sizeof *tallies);
  hosts->ranks = ob_allocate((size_t)size, sizeof *hosts->ranks);
  if (!tallies || !hosts->ranks) {
    ob_release(tallies);
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the host names of %d ranks", size);
  }
  for (int r = 0; r < size; r++) {
    struct tally *tally = &tallies[first_rank_on_host(host_of, r)];
    if (tally->ranks == 0)
      tally->number = hosts->count++;
    if (r == rank) {
      hosts->host = tally->number;
      hosts->local_rank = tally->ranks;
    }
    tally->ranks++;
  }
  hosts->here = tallies[first_rank_on_host(host_of, rank)].ranks;
  set_host_limits(hosts, tallies, size);
  if (hosts->each)
    order_ranks(hosts, host_of, tallies, size);
  ob_release(tallies);
  return ONEBIT_OK;
}

void ob_hosts_destroy(struct ob_hosts *hosts) {
  ob_release(hosts->ranks);
  hosts->ranks = NULL;
}

/* --- Blocks of POSIX shared memory -------------------------------------------------------------*/

/* The name of a block, as shm_open expects it. */
struct path {
  char text[40];
};

static struct path shared_path_of(uint64_t name) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/onebit-%016" PRIx64, name);
  return path;
}

/* Makes a block's name from the process number, the block's number and the clock, so that it
 * differs from the name that a crashed process with the same number has left. Never 0. */
static uint64_t make_block_name(void) {
  static atomic_uint blocks;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  uint64_t number = atomic_fetch_add(&blocks, 1) & 0xffff;
  return (uint64_t)getpid() << 40 | number << 24 | ((uint64_t)now.tv_nsec >> 6 & 0xfffffe) | 1;
}

static onebit_status_t report_shared_error(const char *call, const struct ob_shared *shared,
                                           int code) {
  return ob_error(ONEBIT_ERROR_MEMORY, "%s: %s: out of shared memory for %zu bytes (/dev/shm)",
                  call, strerror(code), shared->bytes);
}

static int open_block(uint64_t name, int flags) {
  return ob_memory_must_fail() ? -1 : shm_open(shared_path_of(name).text, O_RDWR | flags, 0600);
}

/* --- Blocks of killed processes: if a process is killed while its block has a name, the name
 * remains. A process locks its block as long as the block has a name; the lock ends with the
 * process. */

/* Linux lists the blocks in this directory; other systems have no such list. */
#define BLOCKS "/dev/shm"

static bool is_block_name(const char *name) {
  static const char digits[] = "0123456789abcdef", begins[] = "onebit-";
  size_t length = sizeof begins - 1;
  return strncmp(name, begins, length) == 0 && strspn(name + length, digits) == 16 &&
         strlen(name) == length + 16;
}

static void unlink_if_abandoned(const char *name) {
  struct stat is;
  char path[NAME_MAX + 2];
  snprintf(path, sizeof path, "/%s", name);
  int file = shm_open(path, O_RDWR | O_NONBLOCK, 0);
  if (file < 0)
    return;
  if (fstat(file, &is) == 0 && S_ISREG(is.st_mode) && is.st_uid == geteuid() &&
      flock(file, LOCK_EX | LOCK_NB) == 0)
    shm_unlink(path);
  close(file);
}

static void unlink_abandoned(void) {
  DIR *directory = opendir(BLOCKS);
  for (const struct dirent *entry; directory && (entry = readdir(directory)) != NULL;)
    if (is_block_name(entry->d_name))
      unlink_if_abandoned(entry->d_name);
  if (directory)
    closedir(directory);
}

/* --- Memory -----------------------------------------------------------------------------------*/

static onebit_status_t map_block(struct ob_shared *shared, int block, int file) {
  void *base = MAP_FAILED;
  if (!ob_memory_must_fail())
    base = mmap(NULL, shared->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED)
    return report_shared_error("mmap", shared, errno);
  shared->base[block] = base;
  return ONEBIT_OK;
}

/* Allocates and maps the memory of this rank's block. On a full file system the allocation fails
 * here; otherwise a later access would end the process with a signal. */
static onebit_status_t allocate_own_block(struct ob_shared *shared, int file) {
  int code = ob_memory_must_fail() ? ENOSPC : posix_fallocate(file, 0, (off_t)shared->bytes);
  if (code)
    return report_shared_error("posix_fallocate", shared, code);
  return map_block(shared, shared->own, file);
}

/* Makes a block with a name, and locks it. Another process may remove the block before it is
 * locked, taking it for one of a killed process; this function then makes another block. */
static onebit_status_t open_own_block(struct ob_shared *shared) {
  struct stat is = {0};
  while (is.st_nlink == 0) {
    if (shared->name)
      ob_own_close(shared->file);
    uint64_t name = make_block_name();
    shared->name = 0;
    shared->file = ob_own_file(open_block(name, O_CREAT | O_EXCL));
    if (shared->file < 0)
      return report_shared_error("shm_open", shared, errno);
    shared->name = name;
    while (flock(shared->file, LOCK_EX) != 0)
      if (errno != EINTR)
        return report_shared_error("flock", shared, errno);
    if (fstat(shared->file, &is) != 0)
      return report_shared_error("fstat", shared, errno);
  }
  return ONEBIT_OK;
}

onebit_status_t ob_shared_create(struct ob_shared *shared, size_t bytes, int blocks, int own) {
  *shared = (struct ob_shared){.bytes = bytes, .blocks = blocks, .own = own};
  shared->base = ob_allocate((size_t)blocks, sizeof *shared->base);
  if (!shared->base)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for %d shared blocks", blocks);
  unlink_abandoned();
  OB_TRY(open_own_block(shared));
  return allocate_own_block(shared, shared->file);
}

/* Fails unless another process of this user made the block for this job. Other files of that name
 * are not changed. A block that is too small would end this process with a signal. */
static onebit_status_t check_block(const struct ob_shared *shared, int file, uint64_t name) {
  struct stat is;
  if (fstat(file, &is) != 0)
    return report_shared_error("fstat", shared, errno);
  if (!S_ISREG(is.st_mode) || is.st_uid != geteuid())
    return ob_error(ONEBIT_ERROR_MEMORY, BLOCKS "%s is not shared memory of user %lu",
                    shared_path_of(name).text, (unsigned long)geteuid());
  if ((uintmax_t)is.st_size != shared->bytes)
    return ob_error(ONEBIT_ERROR_MEMORY, BLOCKS "%s has %ju bytes, not %zu",
                    shared_path_of(name).text, (uintmax_t)is.st_size, shared->bytes);
  return ONEBIT_OK;
}

onebit_status_t ob_shared_attach(struct ob_shared *shared, int block, uint64_t name) {
  if (block == shared->own)
    return ONEBIT_OK;
  int file = open_block(name, 0);
  if (file < 0)
    return report_shared_error("shm_open of another rank's block", shared, errno);
  onebit_status_t status = check_block(shared, file, name);
  if (status == ONEBIT_OK)
    status = map_block(shared, block, file);
  close(file);
  return status;
}

void ob_shared_unlink(struct ob_shared *shared) {
  if (!shared->name)
    return;
  shm_unlink(shared_path_of(shared->name).text);
  ob_own_close(shared->file);
  shared->name = 0;
}

void ob_shared_destroy(struct ob_shared *shared) {
  ob_shared_unlink(shared);
  for (int k = 0; shared->base && k < shared->blocks; k++)
    if (shared->base[k])
      munmap(shared->base[k], shared->bytes);
  ob_release(shared->base);
  *shared = (struct ob_shared){0};
}
