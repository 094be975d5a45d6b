/* Files: completes calls that the system may do in part. */
#define _POSIX_C_SOURCE   200809L
#define _FILE_OFFSET_BITS 64
#include "optimizers/checkpoint/system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

static int system_open_file(int directory, const char *name, int flags, mode_t mode) {
  return openat(directory, name, flags, mode);
}

static int rename_file(int directory, const char *from, const char *to) {
  return renameat(directory, from, directory, to);
}

static int unlink_file(int directory, const char *name) { return unlinkat(directory, name, 0); }

struct ob_system ob_system = {.open = system_open_file,
                              .pwrite = pwrite,
                              .fsync = fsync,
                              .close = close,
                              .rename = rename_file,
                              .unlink = unlink_file,
                              .mkdir = mkdir};

/* Reports a failed action on a file (or on the directory: NULL), and the reason. */
static onebit_status_t system_failed(const char *what, const char *directory, const char *name,
                                     int code) {
  char reason[OB_INPUT_REASON];
  return ob_error(ONEBIT_ERROR_FILE, "%s %s%s%s: %s", what, directory, name ? "/" : "",
                  name ? name : "", ob_input_reason(code, reason));
}

static int open_again(int directory, const char *name, int flags) {
  int file;
  do
    file = ob_system.open(directory, name, flags | O_CLOEXEC, 0666);
  while (file < 0 && errno == EINTR);
  return file;
}

/* --- Directories -------------------------------------------------------------------------------*/

onebit_status_t ob_directory_create(const char *path) {
  if (ob_system.mkdir(path, 0777) == 0 || errno == EEXIST)
    return ONEBIT_OK;
  return system_failed("mkdir", path, NULL, errno);
}

onebit_status_t ob_directory_open(struct ob_directory *directory, const char *path) {
  directory->path = path;
  directory->number = open_again(AT_FDCWD, path, O_RDONLY | O_DIRECTORY);
  return directory->number < 0 ? system_failed("open", path, NULL, errno) : ONEBIT_OK;
}

void ob_directory_close(struct ob_directory *directory) {
  if (directory->number >= 0)
    ob_system.close(directory->number);
  directory->number = -1;
}

static int sync_again(int file) {
  int result;
  do
    result = ob_system.fsync(file);
  while (result != 0 && errno == EINTR);
  return result;
}

/* Some file systems cannot sync a directory, and have no need to. */
static onebit_status_t sync_names(int number, const char *path) {
  if (sync_again(number) == 0 || errno == EINVAL || errno == ENOTSUP)
    return ONEBIT_OK;
  return system_failed("fsync", path, NULL, errno);
}

onebit_status_t ob_directory_sync(const struct ob_directory *directory) {
  return sync_names(directory->number, directory->path);
}

onebit_status_t ob_directory_sync_parent(const struct ob_directory *directory) {
  int parent = open_again(directory->number, "..", O_RDONLY | O_DIRECTORY);
  if (parent < 0)
    return system_failed("open", directory->path, "..", errno);
  onebit_status_t status = sync_names(parent, directory->path);
  ob_system.close(parent);
  return status;
}

onebit_status_t ob_file_rename(const struct ob_directory *directory, const char *from,
                               const char *to) {
  if (ob_system.rename(directory->number, from, to) == 0)
    return ONEBIT_OK;
  return system_failed("rename", directory->path, from, errno);
}

void ob_file_remove(const struct ob_directory *directory, const char *name) {
  ob_system.unlink(directory->number, name);
}

/* --- Writing -----------------------------------------------------------------------------------*/

static onebit_status_t file_failed(const char *what, const struct ob_file *file) {
  return system_failed(what, file->directory->path, file->name, errno);
}

onebit_status_t ob_file_create(struct ob_file *file, const struct ob_directory *directory,
                               const char *name) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
  file->directory = directory;
  snprintf(file->name, sizeof file->name, "%s", name);
  file->number = open_again(directory->number, name, flags);
  if (file->number < 0 && errno == EEXIST)
    return ob_error(file_failed("open", file), "%s: another process is saving a checkpoint here",
                    onebit_last_error());
  return file->number < 0 ? file_failed("open", file) : ONEBIT_OK;
}

onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes) {
  const char *from = data;
  while (bytes) {
    ssize_t written = ob_system.pwrite(file->number, from, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR)
      continue;
    if (written == 0)
      errno = ENOSPC; /* some file systems return this code for it */
    if (written <= 0)
      return file_failed("write", file);
    from += written;
    offset += (uint64_t)written;
    bytes -= (size_t)written;
  }
  return ONEBIT_OK;
}

/* A close that is interrupted has closed, and the bytes are on the disk. */
onebit_status_t ob_file_finish(struct ob_file *file) {
  onebit_status_t status = sync_again(file->number) == 0 ? ONEBIT_OK : file_failed("fsync", file);
  int closed = ob_system.close(file->number);
  file->number = -1;
  if (status == ONEBIT_OK && closed != 0 && errno != EINTR)
    status = file_failed("close", file);
  return status;
}

void ob_file_abandon(struct ob_file *file) {
  if (file->number >= 0)
    ob_system.close(file->number);
  ob_file_remove(file->directory, file->name);
  file->number = -1;
}

/* --- Reading -----------------------------------------------------------------------------------*/

onebit_status_t ob_stored_open(struct ob_stored *stored, const struct ob_directory *directory,
                               const char *name) {
  stored->directory = directory;
  snprintf(stored->name, sizeof stored->name, "%s", name);
  int code = ob_input_open(&stored->input, directory->number, name);
  return code == 0 ? ONEBIT_OK : system_failed("open", directory->path, name, code);
}

void ob_stored_suspend(struct ob_stored *stored) { ob_input_close(&stored->input); }

onebit_status_t ob_stored_read(const struct ob_stored *stored, uint64_t offset, void *to,
                               size_t bytes) {
  struct ob_input input = stored->input;
  int code = 0;
  if (input.number < 0)
    code = ob_input_open(&input, stored->directory->number, stored->name);
  if (code == 0 && input.bytes != stored->input.bytes)
    code = OB_INPUT_CHANGED;
  if (code == 0)
    code = ob_input_read(&input, offset, to, bytes);
  if (stored->input.number < 0)
    ob_input_close(&input);
  return code == 0 ? ONEBIT_OK : system_failed("read", stored->directory->path, stored->name, code);
}

void ob_stored_close(struct ob_stored *stored) { ob_input_close(&stored->input); }
