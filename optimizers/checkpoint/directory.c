/* Writes and reads the files of a checkpoint's directory, and repeats partial reads and writes
 * until they are complete; formats and parses the text of the manifest. */
#define _POSIX_C_SOURCE   200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "optimizers/checkpoint/directory.h"

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

/* Reports an action that failed on a file, or on the directory if `name` is NULL, and the
 * reason. */
static onebit_status_t report_system_error(const char *what, const char *directory,
                                           const char *name, int code) {
  char reason[OB_INPUT_REASON];
  return ob_error(ONEBIT_ERROR_FILE, "%s %s%s%s: %s", what, directory, name ? "/" : "",
                  name ? name : "", ob_input_reason(code, reason));
}

static int open_uninterrupted(int directory, const char *name, int flags) {
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
  return report_system_error("mkdir", path, NULL, errno);
}

onebit_status_t ob_directory_open(struct ob_directory *directory, const char *path) {
  directory->path = path;
  directory->number = open_uninterrupted(AT_FDCWD, path, O_RDONLY | O_DIRECTORY);
  return directory->number < 0 ? report_system_error("open", path, NULL, errno) : ONEBIT_OK;
}

void ob_directory_close(struct ob_directory *directory) {
  if (directory->number >= 0)
    ob_system.close(directory->number);
  directory->number = -1;
}

static int sync_uninterrupted(int file) {
  int result;
  do
    result = ob_system.fsync(file);
  while (result != 0 && errno == EINTR);
  return result;
}

/* Writes names in a directory to the disk. Some file systems cannot sync a directory, and do not
 * need to. */
static onebit_status_t sync_directory_names(int number, const char *path) {
  if (sync_uninterrupted(number) == 0 || errno == EINVAL || errno == ENOTSUP)
    return ONEBIT_OK;
  return report_system_error("fsync", path, NULL, errno);
}

onebit_status_t ob_directory_sync(const struct ob_directory *directory) {
  return sync_directory_names(directory->number, directory->path);
}

onebit_status_t ob_directory_sync_parent(const struct ob_directory *directory) {
  int parent = open_uninterrupted(directory->number, "..", O_RDONLY | O_DIRECTORY);
  if (parent < 0)
    return report_system_error("open", directory->path, "..", errno);
  onebit_status_t status = sync_directory_names(parent, directory->path);
  ob_system.close(parent);
  return status;
}

onebit_status_t ob_file_rename(const struct ob_directory *directory, const char *from,
                               const char *to) {
  if (ob_system.rename(directory->number, from, to) == 0)
    return ONEBIT_OK;
  return report_system_error("rename", directory->path, from, errno);
}

void ob_file_remove(const struct ob_directory *directory, const char *name) {
  ob_system.unlink(directory->number, name);
}

/* --- Writing -----------------------------------------------------------------------------------*/

static onebit_status_t report_file_error(const char *what, const struct ob_file *file) {
  return report_system_error(what, file->directory->path, file->name, errno);
}

onebit_status_t ob_file_create(struct ob_file *file, const struct ob_directory *directory,
                               const char *name) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
  file->directory = directory;
  snprintf(file->name, sizeof file->name, "%s", name);
  file->number = open_uninterrupted(directory->number, name, flags);
  if (file->number < 0 && errno == EEXIST)
    return ob_error(report_file_error("open", file),
                    "%s: another process is saving a checkpoint here", onebit_last_error());
  return file->number < 0 ? report_file_error("open", file) : ONEBIT_OK;
}

onebit_status_t ob_file_write(struct ob_file *file, uint64_t offset, const void *data,
                              size_t bytes) {
  const char *from = data;
  while (bytes) {
    ssize_t written = ob_system.pwrite(file->number, from, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR)
      continue;
    if (written == 0)
      errno = ENOSPC; /* some file systems return 0 when the disk is full */
    if (written <= 0)
      return report_file_error("write", file);
    from += written;
    offset += (uint64_t)written;
    bytes -= (size_t)written;
  }
  return ONEBIT_OK;
}

/* A close that a signal interrupts has still closed the file, and its bytes are on the disk
 * already. */
onebit_status_t ob_file_finish(struct ob_file *file) {
  onebit_status_t status =
      sync_uninterrupted(file->number) == 0 ? ONEBIT_OK : report_file_error("fsync", file);
  int closed = ob_system.close(file->number);
  file->number = -1;
  if (status == ONEBIT_OK && closed != 0 && errno != EINTR)
    status = report_file_error("close", file);
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
  return code == 0 ? ONEBIT_OK : report_system_error("open", directory->path, name, code);
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
  return code == 0 ? ONEBIT_OK
                   : report_system_error("read", stored->directory->path, stored->name, code);
}

void ob_stored_close(struct ob_stored *stored) { ob_input_close(&stored->input); }

/* --- The manifest ------------------------------------------------------------------------------*/

enum { LINE = 80 }; /* the length of the longest line, with its newline */

void ob_part_name(char name[OB_FILE_NAME], uint64_t generation, int rank) {
  snprintf(name, OB_FILE_NAME, "part-%" PRIu64 "-%d", generation, rank);
}

int ob_part_read_name(const char *name, uint64_t *generation) {
  char again[OB_FILE_NAME];
  int rank;
  if (sscanf(name, "part-%20" SCNu64 "-%9d", generation, &rank) != 2)
    return 0;
  ob_part_name(again, *generation, rank);
  return strcmp(name, again) == 0;
}

char *ob_manifest_text(const struct ob_manifest *manifest) {
  size_t capacity = ((size_t)manifest->ranks + 6) * LINE, used;
  char *text = ob_allocate(1, capacity);
  if (!text)
    return NULL;
  used = (size_t)snprintf(text, capacity,
                          "onebit checkpoint 1\nkind %.15s\nsteps %" PRIu64 "\ngeneration %" PRIu64
                          "\nranks %d\n",
                          manifest->kind, manifest->steps, manifest->generation, manifest->ranks);
  for (int k = 0; k < manifest->ranks; k++)
    used += (size_t)snprintf(text + used, capacity - used, "part %d %" PRIu64 " %016" PRIx64 "\n",
                             k, manifest->parts[k].bytes, manifest->parts[k].checksum);
  snprintf(text + used, capacity - used, "checksum %016" PRIx64 "\n",
           ob_hash(OB_HASH_START, text, used));
  return text;
}

/* Returns the number that follows the expected text, and moves *text behind the number. Returns 0
 * if the expected text or the number is missing. */
static uint64_t read_number_after(const char **text, const char *expected, int base) {
  size_t length = strlen(expected);
  if (strncmp(*text, expected, length) != 0)
    return 0;
  char *end;
  uint64_t number = strtoull(*text + length, &end, base);
  *text = end;
  return number;
}

/* Reads the fields of the text. The caller formats them again and compares the two texts, to find
 * anything else in the text. */
static onebit_status_t manifest_read_text(struct ob_manifest *manifest, const char *text,
                                          size_t bytes) {
  uint64_t version = read_number_after(&text, "onebit checkpoint ", 10);
  if (version > 1)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "the manifest has version %" PRIu64 ", but this library reads version 1",
                    version);
  int end = 0;
  if (sscanf(text, "\nkind %15s%n", manifest->kind, &end) == 1)
    text += end;
  manifest->steps = read_number_after(&text, "\nsteps ", 10);
  manifest->generation = read_number_after(&text, "\ngeneration ", 10);
  uint64_t ranks = read_number_after(&text, "\nranks ", 10);
  if (ranks > INT_MAX || ranks > bytes / 8) /* each rank has a line */
    return ob_error(ONEBIT_ERROR_CHECKPOINT, "line 5: the manifest has fewer lines than ranks");
  manifest->ranks = (int)ranks;
  manifest->parts = ob_allocate((size_t)ranks, sizeof *manifest->parts);
  if (!manifest->parts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of parts");
  for (uint64_t k = 0; k < ranks; k++) {
    read_number_after(&text, "\npart ", 10);
    manifest->parts[k].bytes = read_number_after(&text, " ", 10);
    manifest->parts[k].checksum = read_number_after(&text, " ", 16);
  }
  return ONEBIT_OK;
}

/* Fails unless the text equals the one that would be written; the message names the first line that
 * differs. */
static onebit_status_t manifest_compare(const char *text, size_t bytes, const char *wanted) {
  size_t at = 0;
  int line = 1;
  while (at < bytes && text[at] == wanted[at] && wanted[at])
    line += text[at++] == '\n';
  if (at == bytes && !wanted[at])
    return ONEBIT_OK;
  const char *why = at == bytes                 ? "the manifest is truncated"
                    : !wanted[at]               ? "text follows the end of the manifest"
                    : strlen(wanted + at) <= 17 ? "the manifest's checksum is wrong"
                                                : "the line is not that of a manifest";
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "line %d: %s", line, why);
}

onebit_status_t ob_manifest_parse(struct ob_manifest *manifest, const char *text, size_t bytes) {
  *manifest = (struct ob_manifest){0};
  char *copy = ob_allocate(1, bytes + 1), *again = NULL;
  onebit_status_t status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a manifest");
  if (copy) {
    memcpy(copy, text, bytes);
    status = manifest_read_text(manifest, copy, bytes);
  }
  if (status == ONEBIT_OK) {
    again = ob_manifest_text(manifest);
    status = again ? manifest_compare(text, bytes, again)
                   : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a manifest");
  }
  if (status == ONEBIT_OK && manifest->ranks < 1)
    status = ob_error(ONEBIT_ERROR_CHECKPOINT, "line 5: no rank has saved");
  ob_release(copy);
  ob_release(again);
  return status;
}
