/*
 * Files, as checkpoints want them: written whole and on the disk, or not there; what goes wrong is
 * ONEBIT_ERROR_FILE with the file's name and the system's words.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_SYSTEM_H
#define OB_OPTIMIZERS_CHECKPOINT_SYSTEM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "onebit/status.h"

/* The calls that change what is on the disk, as the system has them, in one place: a test stops at
 * any of them, and looks at what a crash there would leave. */
struct ob_system {
  int (*open)(const char *path, int flags, mode_t mode);
  ssize_t (*pwrite)(int file, const void *data, size_t bytes, off_t offset);
  int (*fsync)(int file);
  int (*close)(int file);
  int (*rename)(const char *from, const char *to);
  int (*unlink)(const char *path);
  int (*mkdir)(const char *path, mode_t mode);
};

extern struct ob_system ob_system;

/* Of a path in a directory. */
enum { OB_PATH = 4096 };
onebit_status_t ob_path(char path[OB_PATH], const char *directory, const char *name);

struct ob_file {
  int number;
  char path[OB_PATH];
};

/* A file to write, emptied if it is there. */
onebit_status_t ob_file_create(struct ob_file *file, const char *directory, const char *name);
onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes);
/* Its bytes are on the disk when this returns. It is closed also on failure. */
onebit_status_t ob_file_finish(struct ob_file *file);
/* Closes and removes it. */
void ob_file_abandon(struct ob_file *file);

/* Names that were made, changed or removed in a directory are on the disk. */
onebit_status_t ob_directory_sync(const char *directory);
/* Makes it, unless it is there. */
onebit_status_t ob_directory_create(const char *directory);
onebit_status_t ob_file_rename(const char *directory, const char *from, const char *to);
/* Nobody asks whether that went well: what stays is in nobody's way. */
void ob_file_remove(const char *directory, const char *name);

/* A file that is read as memory. */
struct ob_mapping {
  const void *memory;
  size_t bytes;
};

onebit_status_t ob_file_map(struct ob_mapping *mapping, const char *directory, const char *name);
void ob_file_unmap(struct ob_mapping *mapping);

#endif
