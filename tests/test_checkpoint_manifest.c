/*
 * Tests directories with wrong contents. The error message must name the file, and nothing may have
 * changed. Also tests loading checkpoint files on other numbers of ranks.
 */
#include <sys/stat.h>

#include "tests/support_files.h"

/* Checks that loading fails on both ranks, with a message. */
static void check_failed_load(onebit_status_t status, const char *words) {
  check_case("%s", words);
  struct files_run run = load_files(&two_ranks);
  expect_all(&run, status, words);
}

Test(checkpoint_manifest, other_numbers_of_ranks) {
  struct saved_parts wanted;
  files_begin();
  save_checkpoint(&two_ranks, 6);
  save_after(&two_ranks, 6, &wanted);
  for (int size = 1; size <= 7; size += 2) {
    struct checkpoint_case other = two_ranks;
    other.size = size;
    struct saved_parts parts = {0};
    struct files_run run = {.what = &other, .parts = &parts};
    run_files(&run);
    expect_all(&run, ONEBIT_OK, "");
    for (uint32_t what = SECTION_PARAMETERS; what <= SECTION_VARIANCE; what++)
      check_same_values("loaded from files", what, &wanted, &parts);
    free_parts(&parts);
    save_checkpoint(&other, 7); /* replaces files of another number of ranks */
    CHECK(list_names(directories.saved).count == size + 1, "%d files",
          list_names(directories.saved).count);
    directory_empty(directories.saved);
    save_checkpoint(&two_ranks, 6);
  }
  free_parts(&wanted);
  files_end();
}

Test(checkpoint_manifest, files_that_are_not_there) {
  char path[256], other[300];
  files_begin();
  check_failed_load(ONEBIT_ERROR_FILE, "/saved: No such file or directory");
  save_checkpoint(&two_ranks, 5);
  file_path(path, "part-1-1");
  snprintf(other, sizeof other, "%s/kept", directories.shadow);
  rename(path, other);
  check_failed_load(ONEBIT_ERROR_FILE, "/saved/part-1-1: No such file or directory");
  rename(other, path);
  file_path(path, "manifest");
  unlink(path);
  check_failed_load(ONEBIT_ERROR_FILE, "/saved/manifest: No such file or directory");
  files_end();
}

Test(checkpoint_manifest, parts_that_are_others) {
  char path[256], other[256];
  files_begin();
  save_checkpoint(&two_ranks, 5);
  file_path(path, "part-1-1");
  cr_assert(truncate(path, 1234) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT, "/saved/part-1-1 is truncated: it has 1234 of ");
  cr_assert(truncate(path, 0) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT, "/saved/part-1-1 is empty");
  directory_empty(directories.saved);
  save_checkpoint(&two_ranks, 5);
  file_path(path, "part-1-0");
  file_path(other, "part-1-1");
  unlink(other);
  cr_assert(link(path, other) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT,
                    "/saved/part-1-1 is not the part that the manifest names");
  directory_empty(directories.saved);
  save_checkpoint(&two_ranks, 6); /* the file of this other step has the same length */
  snprintf(path, sizeof path, "%s/kept", directories.shadow);
  cr_assert(rename(other, path) == 0);
  directory_empty(directories.saved);
  save_checkpoint(&two_ranks, 7);
  cr_assert(rename(path, other) == 0);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT,
                    "/saved/part-1-1 is not the part that the manifest names");
  files_end();
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
  struct checkpoint_case one = two_ranks;
  one.size = 1;
  one.freeze_step = ONEBIT_FREEZE_NEVER;
  files_begin();
  save_checkpoint(&one, 1);
  file_path(path, "manifest");
  FILE *file = fopen(path, "rb");
  size_t bytes = fread(text, 1, sizeof text, file);
  fclose(file);
  for (size_t k = 0, bit; (bit = sample_entry(k)) < 8 * bytes; k++) {
    check_case("bit %zu of %zu bytes", bit, bytes);
    text[bit / 8] ^= (unsigned char)(1 << bit % 8);
    write_manifest(text, bytes);
    text[bit / 8] ^= (unsigned char)(1 << bit % 8);
    struct files_run run = load_files(&one);
    expect_all(&run, ONEBIT_ERROR_CHECKPOINT, "");
  }
  for (size_t k = 0, length; (length = sample_entry(k)) < bytes; k++) {
    check_case("%zu of %zu bytes", length, bytes);
    write_manifest(text, length);
    struct files_run run = load_files(&one);
    expect_all(&run, ONEBIT_ERROR_CHECKPOINT, "");
  }
  write_manifest(text, bytes);
  struct files_run run = load_files(&one);
  expect_all(&run, ONEBIT_OK, "");
  files_end();
}

Test(checkpoint_manifest, newer_manifest) {
  char path[256];
  files_begin();
  save_checkpoint(&two_ranks, 5);
  file_path(path, "manifest");
  FILE *file = fopen(path, "w");
  fputs("onebit checkpoint 2\nwhatever\n", file);
  fclose(file);
  check_failed_load(ONEBIT_ERROR_CHECKPOINT,
                    "manifest: the manifest has version 2, but this library reads version 1");
  files_end();
}

/* Each rank passes a directory of its own. The mistake is noticed only when the directory is
 * read. */
Test(checkpoint_manifest, directories_of_their_own) {
  char elsewhere[128];
  files_begin();
  save_checkpoint(&two_ranks, 4);
  struct names before = list_names(directories.saved);
  snprintf(elsewhere, sizeof elsewhere, "%s", directories.shadow);
  struct files_run run = {.what = &two_ranks, .steps = 5, .path = {NULL, elsewhere}};
  run_files(&run);
  expect_rank(&run, 0, ONEBIT_ERROR_FILE, "part-2-1: No such file or directory");
  expect_rank(&run, 1, ONEBIT_ERROR_PEER, "rank 0 failed with ONEBIT_ERROR_FILE");
  struct names after = list_names(directories.saved);
  CHECK(memcmp(&before, &after, sizeof before) == 0, "%d files", after.count);
  run = load_files(&two_ranks);
  expect_all(&run, ONEBIT_OK, "");
  files_end();
}

Test(checkpoint_manifest, wrong_directories) {
  char file[256], under[300];
  files_begin();
  save_checkpoint(&two_ranks, 4);
  file_path(file, "manifest");
  snprintf(under, sizeof under, "%s/saved", file);
  struct files_run run = {.what = &two_ranks, .steps = 5, .path = {under, under}};
  run_files(&run);
  expect_rank(&run, 0, ONEBIT_ERROR_FILE, "mkdir ");
  expect_rank(&run, 1, ONEBIT_ERROR_PEER, "rank 0 failed with ONEBIT_ERROR_FILE");
  run.steps = 0;
  run_files(&run);
  expect_all(&run, ONEBIT_ERROR_FILE, "Not a directory");
  run.path[0] = run.path[1] = "";
  for (run.steps = 5; run.steps >= 0; run.steps -= 5) {
    run_files(&run);
    expect_all(&run, ONEBIT_ERROR_ARGUMENT, "directory is empty");
  }
  files_end();
}
