/*
 * Checkpoints over MPI: in memory and in files, a run goes on exactly; and ranks that fail to save
 * or to load do so together.
 */
#include "tests/support_disk.h"
#include "tests/support_mpi.h"
#include "tests/support_parts.h"

enum { SAVED_AT = 5, STEPS = 9 };

/* Every rank has the parts of all of them. */
static void share_parts(struct saved_parts *parts) {
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int k = 0; k < size; k++) {
    unsigned long long bytes = parts->bytes[k];
    MPI_Bcast(&bytes, 1, MPI_UNSIGNED_LONG_LONG, k, MPI_COMM_WORLD);
    if (!parts->memory[k])
      parts->memory[k] = allocate(1, (size_t)bytes);
    parts->bytes[k] = (size_t)bytes;
    MPI_Bcast(parts->memory[k], (int)bytes, MPI_BYTE, k, MPI_COMM_WORLD);
  }
  parts->count = size;
}

struct mpi_run {
  const struct checkpoint_case *what;
  struct directories directories;
};

static void finish(struct trainee *trainee, const float *wanted) {
  for (int step = SAVED_AT; step < STEPS; step++)
    trainee_step(trainee, step);
  CHECK_BITS("parameters", trainee->parameters, wanted, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
  trainee_destroy(trainee);
}

static void go_on(onebit_comm_t comm, void *context) {
  struct mpi_run *run = context;
  const char *path = run->directories.saved;
  struct saved_parts parts = {0};
  float wanted[TRAINEE_ELEMENTS];
  check_case("%s", run->what->name);
  struct trainee trainee = trainee_create(comm, run->what, 0);
  for (int step = 0; step < SAVED_AT; step++)
    trainee_step(&trainee, step);
  trainee_save(&trainee, comm, &parts);
  CHECK_STATUS(onebit_optimizer_save_files(trainee.optimizer, path), ONEBIT_OK);
  for (int step = SAVED_AT; step < STEPS; step++)
    trainee_step(&trainee, step);
  memcpy(wanted, trainee.parameters, sizeof wanted);
  trainee_destroy(&trainee);
  share_parts(&parts);
  trainee = trainee_create(comm, run->what, 1);
  CHECK_STATUS(trainee_load(&trainee, &parts), ONEBIT_OK);
  finish(&trainee, wanted);
  trainee = trainee_create(comm, run->what, 2);
  CHECK_STATUS(onebit_optimizer_load_files(trainee.optimizer, path), ONEBIT_OK);
  finish(&trainee, wanted);
  free_parts(&parts);
}

/* The same directory for all ranks. */
static struct mpi_run begin(int rank) {
  struct mpi_run run = {0};
  if (rank == 0)
    run.directories = directories_create();
  MPI_Bcast(&run.directories, sizeof run.directories, MPI_BYTE, 0, MPI_COMM_WORLD);
  return run;
}

static void end(const struct mpi_run *run, int rank) {
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    directories_remove(&run->directories);
  mpi_end();
}

Test(mpi_checkpoint, goes_on_exactly) {
  int rank = mpi_begin();
  struct mpi_run run = begin(rank);
  for (const struct ob_method *const *method = ob_methods; *method; method++) {
    struct checkpoint_case what = {
        .name = (*method)->name, .method = *method, .steps = STEPS, .freeze_step = 3};
    MPI_Comm_size(MPI_COMM_WORLD, &what.size);
    run.what = &what;
    on_mpi_ranks(MPI_COMM_WORLD, go_on, &run);
  }
  end(&run, rank);
}

/* One rank's disk is full; then one rank's part is damaged. */
static void fail_on_one(onebit_comm_t comm, void *context) {
  struct mpi_run *run = context;
  const char *path = run->directories.saved;
  struct trainee trainee = trainee_create(comm, run->what, 0);
  int last = onebit_comm_size(comm) - 1;
  bool mine = trainee.rank == last;
  trainee_step(&trainee, 0);
  CHECK_STATUS(onebit_optimizer_save_files(trainee.optimizer, path), ONEBIT_OK);
  trainee_step(&trainee, 1);
  if (mine)
    disk_begin(DISK_FULL, last ? 3 : 7, run->directories.shadow);
  CHECK_STATUS(onebit_optimizer_save_files(trainee.optimizer, path),
               mine ? ONEBIT_ERROR_FILE : ONEBIT_ERROR_PEER);
  CHECK_WORDS(mine ? "No space left on device" : "reports ONEBIT_ERROR_FILE");
  if (mine)
    disk_end();
  CHECK_STATUS(onebit_optimizer_load_files(trainee.optimizer, path), ONEBIT_OK);
  const onebit_optimizer_info_t info = optimizer_info(trainee.optimizer);
  CHECK(info.steps == 1, "%llu steps", (unsigned long long)info.steps);
  MPI_Barrier(MPI_COMM_WORLD);
  if (mine) {
    struct names names = list_names(path);
    char name[400];
    CHECK(names.count == last + 2, "%d files", names.count);
    snprintf(name, sizeof name, "%s/%s", path, names.name[1]);
    CHECK(truncate(name, 777) == 0, "%s cannot be cut off", name);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  CHECK_STATUS(onebit_optimizer_load_files(trainee.optimizer, path), ONEBIT_ERROR_CHECKPOINT);
  CHECK_WORDS("part-1-0: truncated: 777 of ");
  trainee_step(&trainee, 1);
  trainee_destroy(&trainee);
}

Test(mpi_checkpoint, fails_together) {
  int rank = mpi_begin();
  struct mpi_run run = begin(rank);
  struct checkpoint_case what = {
      .name = "over MPI", .method = &ob_method_adam, .steps = STEPS, .freeze_step = 3};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  run.what = &what;
  on_mpi_ranks(MPI_COMM_WORLD, fail_on_one, &run);
  end(&run, rank);
}
