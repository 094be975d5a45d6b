/*
 * Tests links, FIFOs, devices and other objects at the paths of a checkpoint's files, files that
 * change while they are read, and reads that fail. No write may follow a link, no call may block,
 * and all ranks must get an error.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "optimizers/checkpoint/checkpoint.h"
#include "optimizers/checkpoint/directory.h"
#include "tests/support_files.h"

enum { RANKS = 2, STEPS = 5 };

/* --- Links at the paths of files that are written */

static void write_file(const char *path, const char *text) {
  FILE *file = fopen(path, "w");
  cr_assert(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void check_file(const char *path, const char *text) {
  char read[64] = "";
  FILE *file = fopen(path, "r");
  CHECK(file && fgets(read, sizeof read, file) && strcmp(read, text) == 0, "%s has: %s", path,
        read);
  if (file)
    fclose(file);
}

static void check_link_as(const char *name) {
  char path[256], victim[300], missing[300];
  file_path(path, name);
  snprintf(victim, sizeof victim, "%s/victim", directories.shadow);
  snprintf(missing, sizeof missing, "%s/missing", directories.shadow);
  write_file(victim, "precious");
  for (int k = 0; k < 3; k++) {
    check_case("%s, link %d", name, k);
    /* A symbolic link to a file, one to a missing file, and a hard link, which is an ordinary
     * file. */
    CHECK((k < 2 ? symlink(k ? missing : victim, path) : link(victim, path)) == 0,
          "the link is not made");
    save_checkpoint(&two_ranks, STEPS);
    check_file(victim, "precious");
    CHECK(access(missing, F_OK) != 0, "a link was followed");
    struct files_run run = load_files(&two_ranks);
    expect_all(&run, ONEBIT_OK, "");
    directory_empty(directories.saved);
  }
}

/* The generation number of new parts is in no file name, so only a race could put a link at their
 * paths. In this test, every call that creates a part finds such a link. */
static struct ob_system real;
static char planted[256];

static int plant_link_and_open(int directory, const char *name, int flags, mode_t mode) {
  if (flags & O_CREAT && strncmp(name, "part-", 5) == 0)
    (void)!symlinkat(planted, directory, name);
  return real.open(directory, name, flags, mode);
}

Test(checkpoint_places, links_are_not_followed) {
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  directory_empty(directories.saved);
  check_link_as("manifest.new");
  check_link_as("manifest");
  check_link_as("part-1-0");
  files_end();
}

Test(checkpoint_places, links_that_come_between_are_not_followed) {
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  snprintf(planted, sizeof planted, "%s/victim", directories.shadow);
  write_file(planted, "precious");
  real = ob_system;
  ob_system.open = plant_link_and_open;
  struct files_run run = save_files(&two_ranks, STEPS);
  ob_system = real;
  expect_all(&run, ONEBIT_ERROR_FILE, "File exists");
  check_file(planted, "precious");
  run = load_files(&two_ranks);
  expect_all(&run, ONEBIT_OK, "");
  save_checkpoint(&two_ranks, STEPS); /* removes the links */
  CHECK(list_names(directories.saved).count == RANKS + 1, "something is left");
  files_end();
}

/* --- Other objects at the paths of files that are read */

static void check_irregular_as(const char *name) {
  char path[256], aside[300];
  file_path(path, name);
  snprintf(aside, sizeof aside, "%s/aside", directories.shadow);
  rename(path, aside);
  for (enum irregular kind = A_FIFO; kind < IRREGULARS; kind++) {
    check_case("a %s is %s", irregular_names[kind], name);
    irregular_make(kind, path);
    struct files_run run = load_files(&two_ranks);
    expect_all(&run, ONEBIT_ERROR_FILE, "not a regular file");
    expect_all(&run, ONEBIT_ERROR_FILE, path);
    irregular_remove(kind, path);
  }
  rename(aside, path);
}

Test(checkpoint_places, nothing_but_files_is_read) {
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  check_irregular_as("manifest");
  check_irregular_as("part-1-1");
  struct files_run run = load_files(&two_ranks);
  expect_all(&run, ONEBIT_OK, "");
  files_end();
}

/* Puts an object that is not a file at the path of a new file. The save fails or replaces the
 * object. */
Test(checkpoint_places, nothing_else_is_written_to) {
  char path[256];
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  file_path(path, "manifest.new");
  for (enum irregular kind = A_FIFO; kind < IRREGULARS; kind++) {
    check_case("a %s is manifest.new", irregular_names[kind]);
    irregular_make(kind, path);
    struct files_run run = save_files(&two_ranks, STEPS);
    if (kind == A_DIRECTORY) {
      expect_rank(&run, 0, ONEBIT_ERROR_FILE, "manifest.new: ");
      irregular_remove(kind, path);
    } else {
      expect_all(&run, ONEBIT_OK, "");
    }
    run = load_files(&two_ranks);
    expect_all(&run, ONEBIT_OK, "");
  }
  file_path(path, "manifest.new.target");
  unlink(path);
  files_end();
}

Test(checkpoint_places, large_files_are_not_read_whole) {
  char path[256];
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  file_path(path, "manifest");
  cr_assert(truncate(path, (off_t)1 << 40) == 0); /* sparse: it takes no disk space */
  struct files_run run = load_files(&two_ranks);
  expect_all(&run, ONEBIT_ERROR_CHECKPOINT,
             "the file has 1099511627776 bytes, too many for a manifest");
  files_end();
}

/* --- Files that change while they are read */

static struct ob_input_calls real_input;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long reads, at;
static char shortened[256];

/* Truncates the file just before read number `at`. */
static ssize_t shorten_and_read(int file, void *to, size_t bytes, off_t offset) {
  pthread_mutex_lock(&lock);
  if (++reads == at)
    (void)!truncate(shortened, 1000);
  pthread_mutex_unlock(&lock);
  return real_input.read(file, to, bytes, offset);
}

Test(checkpoint_places, parts_that_become_shorter_are_errors) {
  int checked = 0, taken = 0;
  files_begin();
  file_path(shortened, "part-1-1");
  bool reached = true;
  for (at = 1; reached; at++) {
    save_checkpoint(&two_ranks, STEPS);
    check_case("shorter at read %ld", at);
    real_input = ob_input_calls;
    reads = 0;
    ob_input_calls.read = shorten_and_read;
    struct files_run run = load_files(&two_ranks);
    ob_input_calls = real_input;
    reached = reads >= at;
    for (int k = 0; k < RANKS; k++) {
      bool told = strstr(run.words[k], "part of the state has already been loaded");
      if (run.status[k] == ONEBIT_ERROR_FILE)
        (told ? (taken++) : (checked++));
      if (run.status[k] == ONEBIT_ERROR_FILE && !told)
        CHECK(run.unchanged[k], "rank %d has changed", k);
    }
    CHECK((run.status[0] == ONEBIT_OK) == (run.status[1] == ONEBIT_OK), "%d and %d: %s",
          (int)run.status[0], (int)run.status[1], run.words[1]);
    directory_empty(directories.saved);
    checks_must_hold();
  }
  CHECK(checked > 0 && taken > 0, "%d and %d errors", checked, taken);
  files_end();
}

/* Changes the checksum in the header, as if the rank had read another machine's directory, whose
 * parts have the same lengths. */
static ssize_t read_changed_header(int file, void *to, size_t bytes, off_t offset) {
  ssize_t got = real_input.read(file, to, bytes, offset);
  if (offset == 0 && got == (ssize_t)sizeof(struct ob_part_header))
    ((struct ob_part_header *)to)->checksum ^= 1;
  return got;
}

Test(checkpoint_places, parts_that_no_rank_wrote_are_not_published) {
  files_begin();
  real_input = ob_input_calls;
  ob_input_calls.read = read_changed_header;
  struct files_run run = save_files(&two_ranks, STEPS);
  ob_input_calls = real_input;
  expect_rank(&run, 0, ONEBIT_ERROR_FILE,
              "/saved/part-1-0, as rank 0 reads it, is not what rank 0 wrote");
  expect_rank(&run, 1, ONEBIT_ERROR_PEER, "");
  files_end();
}

/* Makes every system call of a load fail once. */
Test(checkpoint_places, calls_of_loading_that_fail) {
  int failures = 0;
  bool passed = false;
  files_begin();
  save_checkpoint(&two_ranks, STEPS);
  for (size_t k = 0; !passed; k++) {
    const long call = 1 + (long)sample_entry(k);
    disk_begin(DISK_FULL, call, directories.shadow);
    struct files_run run = load_files(&two_ranks);
    passed = disk_calls() < call;
    disk_end();
    check_case("call %ld fails", call);
    bool failed = run.status[0] != ONEBIT_OK;
    failures += failed;
    CHECK(failed == (run.status[1] != ONEBIT_OK), "only one rank failed");
    CHECK(!failed || strstr(run.words[0], "No space left") || strstr(run.words[1], "No space left"),
          "%s, %s", run.words[0], run.words[1]);
    checks_must_hold();
  }
  CHECK(failures * (int)test_share() > 20, "only %d calls have failed", failures);
  struct files_run run = load_files(&two_ranks);
  expect_all(&run, ONEBIT_OK, "");
  files_end();
}

/* A part that was closed because too many files are open is opened again for reading. */
Test(checkpoint_places, files_are_opened_again) {
  struct ob_directory directory;
  struct ob_stored stored;
  char path[256], text[9] = "";
  files_begin();
  mkdir(directories.saved, 0700);
  file_path(path, "part-1-0");
  write_file(path, "abcdefgh");
  CHECK_STATUS(ob_directory_open(&directory, directories.saved), ONEBIT_OK);
  CHECK_STATUS(ob_stored_open(&stored, &directory, "part-1-0"), ONEBIT_OK);
  ob_stored_suspend(&stored);
  CHECK_STATUS(ob_stored_read(&stored, 2, text, 6), ONEBIT_OK);
  CHECK(strcmp(text, "cdefgh") == 0 && stored.input.number < 0, "%s", text);
  write_file(path, "abc");
  CHECK_STATUS(ob_stored_read(&stored, 0, text, 2), ONEBIT_ERROR_FILE);
  CHECK_WORDS("part-1-0: it was changed while it was read");
  ob_stored_close(&stored);
  ob_directory_close(&directory);
  files_end();
}
