/*
 * Checkpoints in files. The manifest names the files of a checkpoint. The directory is changed in
 * the order that docs/checkpoints.md describes ("Files"), so that the manifest always names a
 * complete checkpoint.
 */
#define _DEFAULT_SOURCE /* flock */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/communicator.h"
#include "optimizers/checkpoint/checkpoint.h"

/* --- The directory -----------------------------------------------------------------------------*/

/* Creates and opens the directory, and writes its name in its parent to the disk. */
static onebit_status_t make_directory(struct ob_directory *directory, const char *path) {
  OB_TRY(ob_directory_create(path));
  OB_TRY(ob_directory_open(directory, path));
  return ob_directory_sync_parent(directory);
}

/* Opens the directory to list its names. Returns NULL if it cannot be read. */
static DIR *list_directory(const struct ob_directory *directory) {
  int number = openat(directory->number, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *list = number < 0 ? NULL : fdopendir(number);
  if (!list && number >= 0)
    close(number);
  return list;
}

/* Finds the largest generation of a part in the directory, and removes parts of generations before
 * `keep`. */
static onebit_status_t scan_generations(const struct ob_directory *directory, uint64_t keep,
                                        uint64_t *largest) {
  DIR *list = list_directory(directory);
  uint64_t generation;
  *largest = 0;
  if (!list)
    return ob_error(ONEBIT_ERROR_FILE, "%s: the directory cannot be read", directory->path);
  for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
    if (!ob_part_read_name(entry->d_name, &generation))
      continue;
    if (generation > *largest)
      *largest = generation;
    if (generation < keep)
      ob_file_remove(directory, entry->d_name);
  }
  closedir(list);
  return ONEBIT_OK;
}

/* --- Saving ------------------------------------------------------------------------------------*/

struct files {
  const struct ob_state *state;
  const char *path;
  struct ob_directory directory;
  int lock; /* rank 0's file descriptor of the lock; -1: none */
  uint64_t generation;
  char name[OB_FILE_NAME]; /* the name of this rank's part */
  struct ob_manifest manifest;
  bool published;
};

static onebit_status_t files_check(const char *directory) {
  if (!directory || !*directory)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "directory is %s", directory ? "empty" : "NULL");
  if (strlen(directory) >= PATH_MAX)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "directory is a path of %zu bytes, but a path must have fewer than %d",
                    strlen(directory), PATH_MAX);
  return ONEBIT_OK;
}

/* Locks the directory: the second of two processes that save here gets an error. Some file systems
 * cannot lock directories: there, the error arises because both processes write parts of the same
 * name. */
static onebit_status_t lock_directory(struct files *files) {
  int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  files->lock = ob_own_file(openat(files->directory.number, ".", flags));
  if (files->lock < 0 || flock(files->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_FILE, "%s: another process is saving a checkpoint here",
                  files->path);
}

/* Begins to save: rank 0 locks the directory and chooses the number of the new generation. */
static onebit_status_t files_begin(struct files *files, onebit_status_t status) {
  onebit_comm_t comm = files->state->comm;
  uint64_t largest = 0;
  if (status == ONEBIT_OK)
    status = files_check(files->path);
  if (comm->rank == 0 && status == ONEBIT_OK)
    status = make_directory(&files->directory, files->path);
  if (comm->rank == 0 && status == ONEBIT_OK)
    status = lock_directory(files);
  if (comm->rank == 0 && status == ONEBIT_OK)
    status = scan_generations(&files->directory, 0, &largest);
  OB_TRY(ob_agree_noting(comm, status, NULL, 0, largest + 1));
  files->generation = ob_agree_note(comm, 0);
  ob_part_name(files->name, files->generation, comm->rank);
  return ONEBIT_OK;
}

static onebit_status_t write_to_file(void *file, uint64_t offset, const void *data, size_t bytes) {
  return ob_file_write(file, offset, data, bytes);
}

static onebit_status_t write_state(const struct ob_state *state, const struct ob_sink *sink,
                                   uint64_t *checksum) {
  struct ob_saving saving;
  onebit_status_t status = ob_saving_create(&saving, state, false);
  if (status == ONEBIT_OK)
    status = ob_saving_write(&saving, sink);
  *checksum = saving.header.checksum;
  ob_saving_destroy(&saving);
  return status;
}

/* Writes a file with the text or, if that is NULL, this rank's part. A failure removes the file. */
static onebit_status_t files_write_file(const struct files *files, const char *name,
                                        uint64_t *checksum, const char *text) {
  struct ob_file file;
  const struct ob_sink sink = {write_to_file, &file};
  OB_TRY(ob_file_create(&file, &files->directory, name));
  onebit_status_t status = text ? ob_file_write(&file, 0, text, strlen(text))
                                : write_state(files->state, &sink, checksum);
  if (status == ONEBIT_OK)
    status = ob_file_finish(&file);
  if (status != ONEBIT_OK)
    ob_file_abandon(&file);
  return status;
}

/* Writes this rank's part, and returns its checksum for rank 0, which has opened the directory
 * already. */
static onebit_status_t write_part(struct files *files, uint64_t *checksum) {
  *checksum = 0;
  if (files->directory.number < 0)
    OB_TRY(ob_directory_open(&files->directory, files->path));
  return files_write_file(files, files->name, checksum, NULL);
}

/* Writes the manifest. It replaces the file that a killed save has left. */
static onebit_status_t write_manifest(const struct files *files) {
  char *text = ob_manifest_text(&files->manifest);
  ob_file_remove(&files->directory, OB_MANIFEST_NEW);
  onebit_status_t status = text ? files_write_file(files, OB_MANIFEST_NEW, NULL, text)
                                : ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a manifest");
  ob_release(text);
  return status;
}

/* Opens a part and reads its header, which is zeros if the part is too short for one. */
static onebit_status_t open_stored_part(const struct ob_directory *directory, const char *name,
                                        struct ob_stored *stored, struct ob_part_header *header) {
  *header = (struct ob_part_header){0};
  OB_TRY(ob_stored_open(stored, directory, name));
  if (stored->input.bytes == 0)
    return ob_error(ONEBIT_ERROR_CHECKPOINT, "%s/%s is empty", directory->path, name);
  if (stored->input.bytes < sizeof *header)
    return ONEBIT_OK;
  return ob_stored_read(stored, 0, header, sizeof *header);
}

/* Checks that rank 0 finds the rank's part: on another machine the same path may be another
 * directory. */
static onebit_status_t check_written_part(struct files *files, int rank) {
  struct ob_manifest_part *part = &files->manifest.parts[rank];
  struct ob_part_header header;
  struct ob_stored stored = {.input.number = -1};
  char name[OB_FILE_NAME];
  ob_part_name(name, files->generation, rank);
  onebit_status_t status = open_stored_part(&files->directory, name, &stored, &header);
  ob_stored_close(&stored);
  OB_TRY(status);
  *part = (struct ob_manifest_part){stored.input.bytes, ob_agree_note(files->state->comm, rank)};
  if (header.checksum == part->checksum && header.bytes == part->bytes)
    return ONEBIT_OK;
  return ob_error(
      ONEBIT_ERROR_FILE,
      "%s/%s, as rank 0 reads it, is not what rank %d wrote: all ranks must share the directory",
      files->path, name, rank);
}

static onebit_status_t files_publish(struct files *files) {
  const struct ob_state *state = files->state;
  struct ob_manifest *manifest = &files->manifest;
  *manifest = (struct ob_manifest){
      .steps = state->steps, .generation = files->generation, .ranks = state->comm->size};
  snprintf(manifest->kind, sizeof manifest->kind, "%s", state->kind);
  manifest->parts = ob_allocate((size_t)manifest->ranks, sizeof *manifest->parts);
  if (!manifest->parts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a manifest");
  for (int rank = 0; rank < manifest->ranks; rank++)
    OB_TRY(check_written_part(files, rank));
  OB_TRY(write_manifest(files));
  OB_TRY(ob_directory_sync(&files->directory));
  OB_TRY(ob_file_rename(&files->directory, OB_MANIFEST_NEW, OB_MANIFEST));
  files->published = true;
  return ob_directory_sync(&files->directory);
}

/* Removes the parts of a new generation that has failed. */
static void remove_parts(const struct files *files) {
  char name[OB_FILE_NAME];
  ob_file_remove(&files->directory, OB_MANIFEST_NEW);
  for (int rank = 0; rank < files->state->comm->size; rank++) {
    ob_part_name(name, files->generation, rank);
    ob_file_remove(&files->directory, name);
  }
}

/* Returns true if rank 0 knows of the failure, and so writes no manifest. Returns false if the
 * ranks' agreement itself has failed. */
static bool is_failure_agreed(onebit_status_t status) {
  return status != ONEBIT_ERROR_TRANSPORT && status != ONEBIT_ERROR_MESSAGE;
}

static onebit_status_t files_save(struct files *files, onebit_status_t status) {
  onebit_comm_t comm = files->state->comm;
  uint64_t checksum, largest;
  OB_TRY(files_begin(files, status));
  onebit_status_t written = write_part(files, &checksum);
  status = ob_agree_noting(comm, written, NULL, 0, checksum);
  if (status != ONEBIT_OK && written == ONEBIT_OK && is_failure_agreed(status))
    ob_file_remove(&files->directory, files->name);
  OB_TRY(status);
  if (comm->rank == 0) {
    status = files_publish(files);
    if (status != ONEBIT_OK && !files->published)
      remove_parts(files);
  }
  OB_TRY(ob_agree(comm, status, NULL, 0));
  if (comm->rank == 0) /* a file that cannot be removed does no harm */
    (void)scan_generations(&files->directory, files->generation, &largest);
  return ONEBIT_OK;
}

onebit_status_t ob_state_save_files(const struct ob_state *state, onebit_status_t status,
                                    const char *directory) {
  struct files files = {.state = state, .path = directory, .directory.number = -1, .lock = -1};
  status = files_save(&files, status);
  ob_own_close(files.lock);
  ob_directory_close(&files.directory);
  ob_release(files.manifest.parts);
  return status;
}

/* --- Loading -----------------------------------------------------------------------------------*/

/* The largest number of parts whose files stay open; a process may usually have 1024 open files. */
enum { OPEN_PARTS = 256 };

/* The largest number of attempts to open a checkpoint while other checkpoints are saved. */
enum { TURNS = 5 };

/* The parts that a manifest names. */
struct opened {
  struct ob_manifest manifest;
  struct ob_directory directory;
  struct ob_stored *parts;
};

static onebit_status_t files_read_text(struct opened *opened, const struct ob_stored *stored) {
  uint64_t bytes = stored->input.bytes;
  if (bytes > OB_MANIFEST_BYTES)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "the file has %" PRIu64 " bytes, too many for a manifest", bytes);
  char *text = ob_allocate(1, (size_t)bytes);
  if (!text)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a manifest of %" PRIu64 " bytes",
                    bytes);
  onebit_status_t status = ob_stored_read(stored, 0, text, (size_t)bytes);
  if (status == ONEBIT_OK)
    status = ob_manifest_parse(&opened->manifest, text, (size_t)bytes);
  ob_release(text);
  return status;
}

static onebit_status_t read_manifest(struct opened *opened) {
  struct ob_stored stored;
  OB_TRY(ob_stored_open(&stored, &opened->directory, OB_MANIFEST));
  onebit_status_t status = files_read_text(opened, &stored);
  ob_stored_close(&stored);
  if (status == ONEBIT_ERROR_CHECKPOINT)
    status =
        ob_error(status, "%s/" OB_MANIFEST ": %s", opened->directory.path, onebit_last_error());
  return status;
}

static onebit_status_t open_part(struct opened *opened, int rank) {
  const struct ob_manifest_part *part = &opened->manifest.parts[rank];
  const char *directory = opened->directory.path;
  struct ob_stored *stored = &opened->parts[rank];
  struct ob_part_header header;
  char name[OB_FILE_NAME];
  ob_part_name(name, opened->manifest.generation, rank);
  OB_TRY(open_stored_part(&opened->directory, name, stored, &header));
  if (rank >= OPEN_PARTS)
    ob_stored_suspend(stored);
  if (stored->input.bytes < part->bytes)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "%s/%s is truncated: it has %" PRIu64 " of %" PRIu64 " bytes", directory, name,
                    stored->input.bytes, part->bytes);
  if (stored->input.bytes == part->bytes && part->bytes >= sizeof header &&
      header.checksum == part->checksum)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "%s/%s is not the part that the manifest names",
                  directory, name);
}

static onebit_status_t files_open_all(struct opened *opened, const char *directory) {
  *opened = (struct opened){.directory.number = -1};
  OB_TRY(ob_directory_open(&opened->directory, directory));
  OB_TRY(read_manifest(opened));
  size_t ranks = (size_t)opened->manifest.ranks;
  opened->parts = ob_allocate(ranks, sizeof *opened->parts);
  if (!opened->parts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a list of %zu parts", ranks);
  for (size_t rank = 0; rank < ranks; rank++)
    opened->parts[rank].input.number = -1;
  for (int rank = 0; rank < opened->manifest.ranks; rank++)
    OB_TRY(open_part(opened, rank));
  return ONEBIT_OK;
}

/* Returns true if the manifest names another checkpoint by now. Keeps the failure's error
 * message. */
static bool is_checkpoint_replaced(const struct opened *opened) {
  struct opened now = {.directory = opened->directory};
  char message[512];
  snprintf(message, sizeof message, "%s", onebit_last_error());
  bool replaced = opened->directory.number >= 0 && read_manifest(&now) == ONEBIT_OK &&
                  now.manifest.generation != opened->manifest.generation;
  ob_release(now.manifest.parts);
  ob_error(ONEBIT_ERROR_FILE, "%s", message);
  return replaced;
}

static void close_files(struct opened *opened) {
  for (int rank = 0; opened->parts && rank < opened->manifest.ranks; rank++)
    ob_stored_close(&opened->parts[rank]);
  ob_directory_close(&opened->directory);
  ob_release(opened->parts);
  ob_release(opened->manifest.parts);
}

/* Opens a checkpoint's parts, which the caller closes also after a failure. If another checkpoint
 * is saved meanwhile, the new checkpoint is opened. */
static onebit_status_t open_files(struct opened *opened, onebit_status_t status,
                                  const char *directory) {
  *opened = (struct opened){.directory.number = -1};
  OB_TRY(status);
  OB_TRY(files_check(directory));
  for (int turn = 1;; turn++) {
    status = files_open_all(opened, directory);
    const bool gone = status == ONEBIT_ERROR_FILE || status == ONEBIT_ERROR_CHECKPOINT;
    if (!gone || turn == TURNS || !is_checkpoint_replaced(opened))
      return status;
    close_files(opened);
  }
}

static onebit_status_t load_files(const struct ob_load *load, onebit_status_t status,
                                  const char *directory) {
  struct opened opened;
  status = open_files(&opened, status, directory);
  const bool ready = status == ONEBIT_OK;
  const struct ob_sources sources = {.files = opened.parts, .count = opened.manifest.ranks};
  status = ob_load_parts(load, status, &sources);
  if (ready && status == ONEBIT_ERROR_CHECKPOINT)
    status = ob_error(status, "%s: %s", directory, onebit_last_error());
  close_files(&opened);
  return status;
}

/* Loads again if ranks have opened different checkpoints because one was saved meanwhile. Then all
 * ranks find that they differ only in term 1 of their agreement, the checkpoint's fingerprint. */
onebit_status_t ob_state_load(const struct ob_load *load, onebit_status_t status,
                              const struct ob_sources *sources, const char *directory) {
  const onebit_status_t ready = status;
  if (sources)
    return ob_load_parts(load, status, sources);
  for (int turn = 1;; turn++) {
    status = load_files(load, ready, directory);
    const bool differ =
        status == ONEBIT_ERROR_MISMATCH && ob_agree_differed_only(load->state->comm, 1);
    if (!differ || load->agreed || turn == TURNS)
      return status;
  }
}
