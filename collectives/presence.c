/* Files that say what ranks are waiting for. */
#define _DEFAULT_SOURCE /* flock */
#include "collectives/presence.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/process.h"

#define SHORTEST 1.0 /* seconds of a wait that is written, and between two */

struct path {
  char text[64];
};

static struct path directory_of_user(void) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/tmp/onebit-%lu", (unsigned long)geteuid());
  return path;
}

static struct path presence_path_of(const struct ob_presence *presence) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/tmp/onebit-%lu/%ld-%u", (unsigned long)geteuid(),
           (long)getpid(), presence->number);
  return path;
}

/* Accepts only files of this user, since all users write to /tmp. */
static int is_own_directory(const char *path) {
  struct stat is;
  return (mkdir(path, 0700), lstat(path, &is) == 0) && S_ISDIR(is.st_mode) &&
         is.st_uid == geteuid() && (is.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

void ob_presence_begin(struct ob_presence *presence, int rank, int size, const char *over) {
  static atomic_uint numbers;
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  *presence = (struct ob_presence){.rank = rank, .size = size, .over = over};
  if (!is_own_directory(directory_of_user().text))
    return;
  int file = -1;
  for (struct stat is = {0};
       is.st_nlink == 0;) { /* before it is locked it looks like one that was left */
    ob_own_close(file);
    presence->number = ++numbers;
    file = ob_own_file(open(presence_path_of(presence).text, flags, 0600));
    if (file <= 0 || flock(file, LOCK_EX | LOCK_NB) != 0 || fstat(file, &is) != 0) {
      ob_own_close(file);
      return;
    }
  }
  presence->file = file;
  ob_presence_write(presence, 0, "");
}

void ob_presence_end(struct ob_presence *presence) {
  if (!presence->file)
    return;
  unlink(presence_path_of(presence).text);
  ob_own_close(presence->file);
  presence->file = 0;
}

int ob_presence_is_due(const struct ob_presence *presence, double waited, double now) {
  return presence->file && waited >= SHORTEST && now - presence->written >= SHORTEST;
}

void ob_presence_write(struct ob_presence *presence, double now, const char *text) {
  char line[512];
  presence->written = now;
  int length = snprintf(line, sizeof line, "rank %d of %d over %s\n%s\n", presence->rank,
                        presence->size, presence->over, text);
  if (length >= (int)sizeof line)
    length = sizeof line - 1;
  if (pwrite(presence->file, line, (size_t)length, 0) == length)
    (void)!ftruncate(presence->file, length);
}
