/*
 * Files of checkpoints, each of which is complete and on the disk or does not exist, and the
 * manifest that names them. A failure is ONEBIT_ERROR_FILE, with the file's name and the system's
 * message.
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_DIRECTORY_H
#define OB_OPTIMIZERS_CHECKPOINT_DIRECTORY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/file.h"
#include "onebit/status.h"

/* The system calls that change the disk. A test replaces them, to stop at any of these calls and
 * check which files a crash at that point would leave. File names are relative to an open
 * directory, since its path may name another directory by then. */
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

/* --- Directories. The path is the caller's; once the directory is open, only error messages use
 * it. */

struct ob_directory {
  int number; /* -1: not open */
  const char *path;
};

/* Creates the directory, unless it exists. */
onebit_status_t ob_directory_create(const char *path);
onebit_status_t ob_directory_open(struct ob_directory *directory, const char *path);
void ob_directory_close(struct ob_directory *directory);
/* Writes names that were created, changed or removed in the directory, or in its parent, to the
 * disk. */
onebit_status_t ob_directory_sync(const struct ob_directory *directory);
onebit_status_t ob_directory_sync_parent(const struct ob_directory *directory);
onebit_status_t ob_file_rename(const struct ob_directory *directory, const char *from,
                               const char *to);
/* Ignores failures: a file that stays does no harm. */
void ob_file_remove(const struct ob_directory *directory, const char *name);

/* --- Files */

enum { OB_FILE_NAME = 48 };

struct ob_file {
  int number;
  const struct ob_directory *directory;
  char name[OB_FILE_NAME];
};

/* Creates a file to write. A file of that name, which a crash may have left, is removed first; a
 * link is never followed. */
onebit_status_t ob_file_create(struct ob_file *file, const struct ob_directory *directory,
                               const char *name);
onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes);
/* Writes the bytes to the disk and closes the file, also on failure. */
onebit_status_t ob_file_finish(struct ob_file *file);
/* Closes and removes the file. */
void ob_file_abandon(struct ob_file *file);

/* A file to read: a regular one. It stays open or, if there are many files, is opened for each
 * read. */
struct ob_stored {
  struct ob_input input;
  const struct ob_directory *directory;
  char name[OB_FILE_NAME];
};

onebit_status_t ob_stored_open(struct ob_stored *stored, const struct ob_directory *directory,
                               const char *name);
/* Closes the file, which is opened for each read from now on. */
void ob_stored_suspend(struct ob_stored *stored);
onebit_status_t ob_stored_read(const struct ob_stored *stored, uint64_t offset, void *to,
                               size_t bytes);
void ob_stored_close(struct ob_stored *stored);

/* --- The manifest of a checkpoint in files: a text that says which files are its parts.
 *
 *   onebit checkpoint 1
 *   kind adam
 *   steps 1200
 *   generation 17
 *   ranks 2
 *   part 0 81736 9f07c2e85a1b3d64        bytes, and the checksum of its front
 *   part 1 81720 0c3d5e6f708192a3
 *   checksum 5566778899aabbcc            of all lines before
 *
 * Part k of generation g is the file "part-g-k". */

#define OB_MANIFEST     "manifest"
#define OB_MANIFEST_NEW "manifest.new"

/* The size of the longest manifest that is read: a manifest has at most 80 bytes per rank. */
#define OB_MANIFEST_BYTES ((uint64_t)64 << 20)

struct ob_manifest_part {
  uint64_t bytes, checksum;
};

struct ob_manifest {
  char kind[16];
  uint64_t steps, generation;
  int ranks;
  struct ob_manifest_part *parts; /* freed with ob_release */
};

void ob_part_name(char name[OB_FILE_NAME], uint64_t generation, int rank);
/* Returns true if this is the name of a part, and sets its generation. */
int ob_part_read_name(const char *name, uint64_t *generation);

/* Returns the manifest as a string, which the caller releases, or NULL when out of memory. */
char *ob_manifest_text(const struct ob_manifest *manifest);

/* Parses the text. Errors: ONEBIT_ERROR_CHECKPOINT, ONEBIT_ERROR_MEMORY; the caller must release
 * `parts` after an error, too. */
onebit_status_t ob_manifest_parse(struct ob_manifest *manifest, const char *text, size_t bytes);

#endif
