/* The clock, the machine, and the files that a forked child closes. */
#define _DEFAULT_SOURCE
#include "base/process.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/lock.h"

double ob_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

uint64_t ob_machine_number(void) {
  char boot[64] = "";
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
  bool known = file && fgets(boot, sizeof boot, file);
  if (file)
    fclose(file);
  return known ? ob_hash(OB_HASH_START, boot, strlen(boot)) : 0;
}

int ob_machine_processors(void) {
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return processors > 0 ? (int)processors : 1;
}

/* --- Files that a forked child closes ----------------------------------------------------------*/

/* The largest number of open files of a process, by Linux's default of fs.nr_open. Each file has a
 * bit in `registered`, whose pages take no memory until they are written. */
#define FILES (1 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char registered[FILES / CHAR_BIT];
static int top; /* larger than the number of every registered file */
static atomic_uint forks;

static void lock_before_fork(void) { pthread_mutex_lock(&lock); }

static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }

static void close_files_in_child(void) {
  for (int file = 0; file < top; file++)
    if (registered[file / CHAR_BIT] & 1U << file % CHAR_BIT)
      close(file);
  memset(registered, 0, (size_t)(top + CHAR_BIT - 1) / CHAR_BIT);
  top = 0;
  atomic_fetch_add(&forks, 1);
  pthread_mutex_unlock(&lock);
}

/* Registers the fork handlers. If that fails, a child keeps the files open. */
static void register_fork_handlers(void) {
  pthread_atfork(lock_before_fork, unlock_after_fork, close_files_in_child);
}

int ob_own_file(int file) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, register_fork_handlers);
  if (file < 0 || file >= FILES)
    return file;
  OB_LOCKED(&lock);
  registered[file / CHAR_BIT] |= (unsigned char)(1U << file % CHAR_BIT);
  top = file >= top ? file + 1 : top;
  return file;
}

void ob_own_close(int file) {
  if (file < 0)
    return;
  OB_LOCKED(&lock);
  if (file < FILES)
    registered[file / CHAR_BIT] &= (unsigned char)~(1U << file % CHAR_BIT);
  close(file);
}

unsigned ob_forks(void) { return atomic_load_explicit(&forks, memory_order_relaxed); }
