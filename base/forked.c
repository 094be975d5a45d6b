/* Files that a forked child closes. */
#define _POSIX_C_SOURCE 200809L
#include "base/forked.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/lock.h"

/* The number of files that a process may have open, by Linux's default of fs.nr_open. Each has a
 * bit, of memory that takes no page until it is written to. */
#define FILES (1 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char registered[FILES / CHAR_BIT];
static int top; /* all numbers of registered files are below */
static atomic_uint forks;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void in_child(void) {
  for (int file = 0; file < top; file++)
    if (registered[file / CHAR_BIT] & 1U << file % CHAR_BIT)
      close(file);
  memset(registered, 0, (size_t)(top + CHAR_BIT - 1) / CHAR_BIT);
  top = 0;
  atomic_fetch_add(&forks, 1);
  pthread_mutex_unlock(&lock);
}

/* Without memory for the handlers a child keeps the files. */
static void forked_begin(void) { pthread_atfork(before_fork, after_fork, in_child); }

int ob_own_file(int file) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, forked_begin);
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
