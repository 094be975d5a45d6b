/* Saves checkpoints to a directory and loads them, on all ranks of a group. */
#include "tests/support_files.h"

struct directories directories;

void files_begin(void) { directories = directories_create(); }

void files_end(void) {
  directories_remove(&directories);
  checks_must_hold();
}

static void run_on_rank(onebit_comm_t comm, void *context) {
  struct files_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, run->steps ? 0 : 1);
  const int rank = trainee.rank;
  const char *path = run->path[rank] ? run->path[rank] : directories.saved;
  size_t bytes, again;
  for (int step = 0; step < run->steps; step++)
    trainee_step(&trainee, step);
  void *before = optimizer_part(trainee.optimizer, &bytes);
  run->status[rank] = run->steps ? onebit_optimizer_save_files(trainee.optimizer, path)
                                 : onebit_optimizer_load_files(trainee.optimizer, path);
  snprintf(run->words[rank], sizeof run->words[0], "%s",
           run->status[rank] ? onebit_last_error() : "");
  void *after = optimizer_part(trainee.optimizer, &again);
  run->unchanged[rank] = again == bytes && memcmp(before, after, bytes) == 0;
  if (run->parts)
    trainee_save(&trainee, comm, run->parts);
  trainee_destroy(&trainee);
  free(before);
  free(after);
}

void run_files(struct files_run *run) { on_ranks(run->what->size, run_on_rank, run); }

struct files_run save_files(const struct checkpoint_case *what, int steps) {
  struct files_run run = {.what = what, .steps = steps};
  run_files(&run);
  return run;
}

struct files_run load_files(const struct checkpoint_case *what) {
  return save_files(what, 0);
}

void expect_rank(const struct files_run *run, int rank, onebit_status_t status, const char *words) {
  CHECK(run->status[rank] == status && strstr(run->words[rank], words), "rank %d: %d: %s, not %s",
        rank, (int)run->status[rank], run->words[rank], words);
  CHECK(status == ONEBIT_OK || run->unchanged[rank], "rank %d has changed", rank);
}

void expect_all(const struct files_run *run, onebit_status_t status, const char *words) {
  for (int rank = 0; rank < run->what->size; rank++)
    expect_rank(run, rank, status, words);
}

void save_checkpoint(const struct checkpoint_case *what, int steps) {
  const struct files_run run = save_files(what, steps);
  expect_all(&run, ONEBIT_OK, "");
}

void file_path(char path[256], const char *name) {
  snprintf(path, 256, "%s/%s", directories.saved, name);
}
