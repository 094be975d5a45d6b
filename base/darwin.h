/*
 * Supplies POSIX functions that macOS lacks. The Makefile includes it before the files that use it
 * in a build for Darwin. This code is only cross-compiled; it has not run on macOS yet.
 */
#ifndef OB_BASE_DARWIN_H
#define OB_BASE_DARWIN_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Waits until a time of CLOCK_MONOTONIC. It is needed because on macOS a condition variable can
 * wait only until a time of the calendar clock, or for a duration. */
static inline int ob_darwin_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock,
                                      const struct timespec *until) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  struct timespec left = {.tv_sec = until->tv_sec - now.tv_sec,
                          .tv_nsec = until->tv_nsec - now.tv_nsec};
  if (left.tv_nsec < 0) {
    left.tv_sec--;
    left.tv_nsec += 1000000000;
  }
  return left.tv_sec < 0 ? ETIMEDOUT : pthread_cond_timedwait_relative_np(condition, lock, &left);
}
#define pthread_cond_timedwait                 ob_darwin_timedwait
#define pthread_condattr_setclock(attr, clock) ((void)(attr), 0)

static inline int ob_darwin_fallocate(int file, off_t offset, off_t bytes) {
  return ftruncate(file, offset + bytes) == 0 ? 0 : errno;
}
#define posix_fallocate ob_darwin_fallocate

/* Opens a file in place of shared memory, which on macOS is no regular file and cannot be
 * locked. */
static inline int ob_darwin_shm_open(const char *name, int flags, mode_t mode) {
  char path[64];
  snprintf(path, sizeof path, "/tmp%s", name);
  return open(path, flags | O_CLOEXEC, mode);
}
static inline int ob_darwin_shm_unlink(const char *name) {
  char path[64];
  snprintf(path, sizeof path, "/tmp%s", name);
  return unlink(path);
}
#define shm_open   ob_darwin_shm_open
#define shm_unlink ob_darwin_shm_unlink

#endif
