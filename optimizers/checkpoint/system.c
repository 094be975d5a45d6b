/* Files: what the system may do half, done whole. */
#define _POSIX_C_SOURCE   200809L
#define _FILE_OFFSET_BITS 64
#include "optimizers/checkpoint/system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static int open_file(const char *path, int flags, mode_t mode) { return open(path, flags, mode); }

struct ob_system ob_system = {.open = open_file,
                              .pwrite = pwrite,
                              .fsync = fsync,
                              .close = close,
                              .rename = rename,
                              .unlink = unlink,
                              .mkdir = mkdir};

/* errno as text; what the system calls it must be asked at once. */
static onebit_status_t file_error(const char *what, const char *path) {
  char text[96];
  int number = errno;
  if (strerror_r(number, text, sizeof text) != 0)
    snprintf(text, sizeof text, "error %d", number);
  return ob_error(ONEBIT_ERROR_FILE, "%s %s: %s", what, path, text);
}

onebit_status_t ob_path(char path[OB_PATH], const char *directory, const char *name) {
  if (snprintf(path, OB_PATH, "%s/%s", directory, name) < OB_PATH)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_FILE, "the path of %s in the directory is too long", name);
}

static int open_again(const char *path, int flags) {
  int file;
  do
    file = ob_system.open(path, flags | O_CLOEXEC, 0666);
  while (file < 0 && errno == EINTR);
  return file;
}

onebit_status_t ob_file_create(struct ob_file *file, const char *directory, const char *name) {
  file->number = -1;
  OB_TRY(ob_path(file->path, directory, name));
  file->number = open_again(file->path, O_WRONLY | O_CREAT | O_TRUNC);
  return file->number < 0 ? file_error("open", file->path) : ONEBIT_OK;
}

onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes) {
  const char *from = data;
  while (bytes) {
    ssize_t written = ob_system.pwrite(file->number, from, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR)
      continue;
    if (written == 0)
      errno = ENOSPC; /* some file systems have no better word for it */
    if (written <= 0)
      return file_error("write", file->path);
    from += written;
    offset += (uint64_t)written;
    bytes -= (size_t)written;
  }
  return ONEBIT_OK;
}

static int sync_again(int file) {
  int result;
  do
    result = ob_system.fsync(file);
  while (result != 0 && errno == EINTR);
  return result;
}

/* A close that is interrupted has closed, and the bytes are on the disk. */
onebit_status_t ob_file_finish(struct ob_file *file) {
  onebit_status_t status =
      sync_again(file->number) == 0 ? ONEBIT_OK : file_error("fsync", file->path);
  int closed = ob_system.close(file->number);
  file->number = -1;
  if (status == ONEBIT_OK && closed != 0 && errno != EINTR)
    status = file_error("close", file->path);
  return status;
}

void ob_file_abandon(struct ob_file *file) {
  if (file->number >= 0)
    ob_system.close(file->number);
  ob_system.unlink(file->path);
  file->number = -1;
}

/* Some file systems cannot sync a directory, and have no need to. */
onebit_status_t ob_directory_sync(const char *directory) {
  int file = open_again(directory, O_RDONLY | O_DIRECTORY);
  if (file < 0)
    return file_error("open", directory);
  onebit_status_t status = ONEBIT_OK;
  if (sync_again(file) != 0 && errno != EINVAL && errno != ENOTSUP)
    status = file_error("fsync", directory);
  ob_system.close(file);
  return status;
}

onebit_status_t ob_directory_create(const char *directory) {
  if (ob_system.mkdir(directory, 0777) == 0 || errno == EEXIST)
    return ONEBIT_OK;
  return file_error("mkdir", directory);
}

onebit_status_t ob_file_rename(const char *directory, const char *from, const char *to) {
  char before[OB_PATH], after[OB_PATH];
  OB_TRY(ob_path(before, directory, from));
  OB_TRY(ob_path(after, directory, to));
  return ob_system.rename(before, after) == 0 ? ONEBIT_OK : file_error("rename", before);
}

void ob_file_remove(const char *directory, const char *name) {
  char path[OB_PATH];
  if (snprintf(path, sizeof path, "%s/%s", directory, name) < OB_PATH)
    ob_system.unlink(path);
}

static onebit_status_t map(struct ob_mapping *mapping, int file, const char *path) {
  struct stat about;
  if (fstat(file, &about) != 0)
    return file_error("stat", path);
  mapping->bytes = (size_t)about.st_size;
  if (!S_ISREG(about.st_mode))
    return ob_error(ONEBIT_ERROR_FILE, "%s is no file", path);
  if (mapping->bytes == 0)
    return ob_error(ONEBIT_ERROR_CHECKPOINT, "%s is empty", path);
  void *memory = mmap(NULL, mapping->bytes, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED)
    return file_error("mmap", path);
  mapping->memory = memory;
  return ONEBIT_OK;
}

onebit_status_t ob_file_map(struct ob_mapping *mapping, const char *directory, const char *name) {
  char path[OB_PATH];
  *mapping = (struct ob_mapping){0};
  OB_TRY(ob_path(path, directory, name));
  int file = open_again(path, O_RDONLY);
  if (file < 0)
    return file_error("open", path);
  onebit_status_t status = map(mapping, file, path);
  ob_system.close(file);
  return status;
}

void ob_file_unmap(struct ob_mapping *mapping) {
  if (mapping->memory)
    munmap((void *)mapping->memory, mapping->bytes);
}
