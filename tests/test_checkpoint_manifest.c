/*
 * Directories with wrong contents: the message names the file, and nothing has changed. Checkpoints
 * in files also load on other numbers of ranks.
 */
#include <sys/stat.h>

#include "tests/support_checkpoint.h"
#include "tests/support_disk.h"

static struct directories directories;

static const struct checkpoint_case two = {
    .name = "two ranks", .method = &ob_method_adam, .size = 2, .steps = 8, .freeze_step = 3};

struct files_run {
  const struct checkpoint_case *what;
  int steps;           /* the step at which it is saved; 0: it is loaded */
  const char *path[8]; /* of each rank; NULL: the usual one */
  onebit_status_t wanted[8];
  const char *words[8]; /* where an error is wanted */
  struct saved_parts parts;
};

static void run_on_rank(onebit_comm_t comm, void *context) {
  struct files_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, run->steps ? 0 : 1);
  int rank = trainee.rank;
  const char *path = run->path[rank] ? run->path[rank] : directories.saved;
  for (int step = 0; step < run->steps; step++)
    trainee_step(&trainee, step);
  if (run->steps)
    CHECK_STATUS(onebit_optimizer_save_files(trainee.optimizer, path), run->wanted[rank]);
  else
    CHECK_STATUS(onebit_optimizer_load_files(trainee.optimizer, path), run->wanted[rank]);
  if (run->wanted[rank] != ONEBIT_OK)
    CHECK_WORDS(run->words[rank]);
  trainee_save(&trainee, comm, &run->parts);
  trainee_destroy(&trainee);
}

static void run_files(struct files_run *run) {
  on_ranks(run->what->size, run_on_rank, run);
  free_parts(&run->parts);
}

static void save_checkpoint(int steps) {
  struct files_run run = {.what = &two, .steps = steps};
  run_files(&run);
}

/* Checks that loading fails on both ranks, with a message. */
static void check_failed_load(onebit_status_t status, const char *words) {
  struct files_run run = {.what = &two, .wanted = {status, status}, .words = {words, words}};
  check_case("%s", words);
  run_files(&run);
}

static void file_path(char path[256], const char *name) {
  snprintf(path, 256, "%s/%s", directories.saved, name);
}

static void remove_directories(void) {
  directories_remove(&directories);
  checks_must_hold();
}

Test(checkpoint_manifest, other_numbers_of_ranks) {
  struct saved_parts wanted;
  directories = directories_create();
  save_checkpoint(6);
  save_after(&two, 6, &wanted);
  for (int size = 1; size <= 7; size += 2) {
    struct checkpoint_case other = two;
    other.size = size;
    struct files_run run = {.what = &other};
    on_ranks(size, run_on_rank, &run);
    for (uint32_t what = SECTION_PARAMETERS; what <= SECTION_VARIANCE; what++) {
      float *a = parts_values(&wanted, what), *b = parts_values(&run.parts, what);
      CHECK_BITS("loaded from files", b, a, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
      free(a);
      free(b);
    }
    run.steps = 7; /* and they save again, over files of another number of ranks */
    free_parts(&run.parts);
    run_files(&run);
    CHECK(list_names(directories.saved).count == size + 1, "%d files",
          list_names(directories.saved).count);
    directory_empty(directories.saved);
    save_checkpoint(6);
  }
  free_parts(&wanted);
  remove_directories();
}

Test(checkpoint_manifest, files_that_are_not_there) {
  char path[256], other[300];
  directories = directories_create();
  check_failed_load(ONEBIT_ERROR_FILE, "/saved: No such file or directory");
  save_checkpoint(5);
  file_path(path, "part-1-1");
  snprintf(other, sizeof other, "%s/kept", directories.shadow);
  rename(path, other);
  check_failed_load(ONEBIT_ERROR_FILE, "/saved/part-1-1: No such file or directory");
  rename(other, path);
  file_path(path, "manifest");
  unlink(path);
  check_failed_load(ONEBIT_ERROR_FILE, "/saved/manifest: No such file or directory");
  remove_directories();
}

Test(checkpoint_manifest, parts_that_are_others) {
  char path[256], other[256];
  directories = directories_create();
  save_checkpoint(5);
  file_path(path, "part-1-1");
  cr_assert(truncate(path, 1234) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT, "/saved/part-1-1: truncated: 1234 of ");
  cr_assert(truncate(path, 0) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT, "/saved/part-1-1 is empty");
  directory_empty(directories.saved);
  save_checkpoint(5);
  file_path(path, "part-1-0");
  file_path(other, "part-1-1");
  unlink(other);
  cr_assert(link(path, other) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT, "/saved/part-1-1: ");
  directory_empty(directories.saved);
  save_checkpoint(6); /* the file of another step has the same length */
  snprintf(path, sizeof path, "%s/kept", directories.shadow);
  cr_assert(rename(other, path) == 0);
  directory_empty(directories.saved);
  save_checkpoint(7);
  cr_assert(rename(path, other) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT,
                    "/saved/part-1-1: not the part that the manifest names");
  remove_directories();
}

static void write_manifest(const unsigned char *text, size_t bytes) {
  char path[256];
  file_path(path, "manifest");
  FILE *file = fopen(path, "wb");
  fwrite(text, 1, bytes, file);
  fclose(file);
}

Test(checkpoint_manifest, every_bit_that_flips_is_found) {
  char path[256];
  unsigned char text[1000];
  struct checkpoint_case one = two;
  one.size = 1;
  one.freeze_step = ONEBIT_FREEZE_NEVER;
  directories = directories_create();
  struct files_run run = {.what = &one, .steps = 1, .words = {""}};
  run_files(&run);
  file_path(path, "manifest");
  FILE *file = fopen(path, "rb");
  size_t bytes = fread(text, 1, sizeof text, file);
  fclose(file);
  run.steps = 0;
  run.wanted[0] = ONEBIT_ERROR_CHECKPOINT;
  for (size_t k = 0, bit; (bit = sample_entry(k)) < 8 * bytes; k++) {
    check_case("bit %zu of %zu bytes", bit, bytes);
    text[bit / 8] ^= (unsigned char)(1 << bit % 8);
    write_manifest(text, bytes);
    text[bit / 8] ^= (unsigned char)(1 << bit % 8);
    run_files(&run);
  }
  for (size_t k = 0, length; (length = sample_entry(k)) < bytes; k++) {
    check_case("%zu of %zu bytes", length, bytes);
    write_manifest(text, length);
    run_files(&run);
  }
  write_manifest(text, bytes);
  run.wanted[0] = ONEBIT_OK;
  run_files(&run);
  remove_directories();
}

Test(checkpoint_manifest, newer_manifest) {
  char path[256];
  directories = directories_create();
  save_checkpoint(5);
  file_path(path, "manifest");
  FILE *file = fopen(path, "w");
  fputs("onebit checkpoint 2\nwhatever\n", file);
  fclose(file);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT,
                    "manifest: written by manifest version 2, this library reads 1");
  remove_directories();
}

/* Each rank has a directory of its own; only reading the directory shows it. */
Test(checkpoint_manifest, directories_of_their_own) {
  char elsewhere[128];
  directories = directories_create();
  save_checkpoint(4);
  struct names before = list_names(directories.saved);
  snprintf(elsewhere, sizeof elsewhere, "%s", directories.shadow);
  struct files_run run = {
      .what = &two,
      .steps = 5,
      .path = {NULL, elsewhere},
      .wanted = {ONEBIT_ERROR_FILE, ONEBIT_ERROR_PEER},
      .words = {"part-2-1: No such file or directory", "rank 0 reports ONEBIT_ERROR_FILE"}};
  run_files(&run);
  struct names after = list_names(directories.saved);
  CHECK(memcmp(&before, &after, sizeof before) == 0, "%d files", after.count);
  struct files_run again = {.what = &two};
  run_files(&again);
  remove_directories();
}

Test(checkpoint_manifest, wrong_directories) {
  char file[256], under[300];
  directories = directories_create();
  save_checkpoint(4);
  file_path(file, "manifest");
  snprintf(under, sizeof under, "%s/saved", file);
  struct files_run run = {.what = &two,
                          .steps = 5,
                          .path = {under, under},
                          .wanted = {ONEBIT_ERROR_FILE, ONEBIT_ERROR_PEER},
                          .words = {"mkdir ", "rank 0 reports ONEBIT_ERROR_FILE"}};
  run_files(&run);
  struct files_run loading = run;
  loading.steps = 0;
  loading.wanted[1] = ONEBIT_ERROR_FILE;
  loading.words[0] = loading.words[1] = "Not a directory";
  run_files(&loading);
  run.path[0] = run.path[1] = "";
  run.wanted[0] = run.wanted[1] = ONEBIT_ERROR_ARGUMENT;
  run.words[0] = run.words[1] = "directory is empty";
  run_files(&run);
  run.steps = 0;
  run_files(&run);
  remove_directories();
}
