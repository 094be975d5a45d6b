/*
 * Files, as checkpoints want them: written whole and on the disk, or not there; what goes wrong is
 * ONEBIT_ERROR_FILE with the file's name and the system's words.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_SYSTEM_H
#define OB_OPTIMIZERS_CHECKPOINT_SYSTEM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/file.h"
#include "onebit/status.h"

/* The calls that change what is on the disk, as the system has them, in one place: a test stops at
 * any of them, and looks at what a crash there would leave. Names are of a directory that is open:
 * its path may come to mean another one meanwhile. */
struct ob_system {
  int (*open)(int directory, const char *name, int flags, mode_t mode);
  ssize_t (*pwrite)(int file, const void *data, size_t bytes, off_t offset);
  int (*fsync)(int file);
  int (*close)(int file);
  int (*rename)(int directory, const char *from, const char *to);
  int (*unlink)(int directory, const char *name);
  int (*mkdir)(const char *path, mode_t mode);
};

extern struct ob_system ob_system;

/* --- Directories. The path is the caller's, and is for messages once the directory is open. */

struct ob_directory {
  int number; /* -1: not open */
  const char *path;
};

/* Makes it, unless it is there. */
onebit_status_t ob_directory_create(const char *path);
onebit_status_t ob_directory_open(struct ob_directory *directory, const char *path);
void ob_directory_close(struct ob_directory *directory);
/* Names that were made, changed or removed in it, or in the one that it is in, are on the disk. */
onebit_status_t ob_directory_sync(const struct ob_directory *directory);
onebit_status_t ob_directory_sync_parent(const struct ob_directory *directory);
onebit_status_t ob_file_rename(const struct ob_directory *directory, const char *from,
                               const char *to);
/* Nobody asks whether that went well: what stays is in nobody's way. */
void ob_file_remove(const struct ob_directory *directory, const char *name);

/* --- Files */

enum { OB_FILE_NAME = 48 };

struct ob_file {
  int number;
  const struct ob_directory *directory;
  char name[OB_FILE_NAME];
};

/* A new file to write. What is left of a crash, or was put in its place, is removed first; a link
 * is never followed. */
onebit_status_t ob_file_create(struct ob_file *file, const struct ob_directory *directory,
                               const char *name);
onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes);
/* Its bytes are on the disk when this returns. It is closed also on failure. */
onebit_status_t ob_file_finish(struct ob_file *file);
/* Closes and removes it. */
void ob_file_abandon(struct ob_file *file);

/* A file to read: a regular one. It stays open, or where there are many is opened for each read. */
struct ob_stored {
  struct ob_input input;
  const struct ob_directory *directory;
  char name[OB_FILE_NAME];
};

onebit_status_t ob_stored_open(struct ob_stored *stored, const struct ob_directory *directory,
                               const char *name);
/* From now on it is opened for each read. */
void ob_stored_suspend(struct ob_stored *stored);
onebit_status_t ob_stored_read(const struct ob_stored *stored, uint64_t offset, void *to,
                               size_t bytes);
void ob_stored_close(struct ob_stored *stored);

#endif
