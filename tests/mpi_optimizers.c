/* Tests optimizers and outer steps over MPI. */
#include "onebit/mpi.h"
#include "tests/support_checkpoint.h"
#include "tests/support_disk.h"
#include "tests/support_mpi.h"
#include "tests/support_zero_one.h"

static struct adam_case make_case(const struct optimizer_kind *kind, size_t freeze_step) {
  struct adam_case what = {.kind = kind,
                           .steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .still = true};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  what.options.freeze_step = freeze_step;
  return what;
}

static void check_adam(const struct adam_case *what) {
  struct adam_run run = adam_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, adam_on_rank, &run);
  adam_release(&run);
}

/* Runs a case with one bucket and one scale. Then runs it with several buckets, steps that all
 * ranks must skip, other dtypes, clipping, and missing gradients. */
static void check_buckets(struct adam_case what) {
  what.options.common.schedule = ONEBIT_SCHEDULE_EXCHANGE;
  check_adam(&what);
  what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
  check_adam(&what);
  what.options.common.block_size = what.options.shards ? 64 : 0;
  if (!what.options.shards && what.kind != &kind_lion)
    what.options.common.schedule = ONEBIT_SCHEDULE_ALLGATHER;
  what.options.common.chunk_size = what.options.shards ? 256 : 0;
  what.options.common.bucket_size = 1000;
  what.poisoned_rank = what.size - 1;
  for (int form = BACKWARD; form < ADAM_FORMS; form++) {
    what.form = (enum adam_form)form;
    what.options.common.gradient_dtype = form % 2 ? ONEBIT_BFLOAT16 : ONEBIT_FLOAT32;
    what.options.common.parameter_dtype = (onebit_dtype_t)(what.options.shards ? 0 : form % 3);
    what.options.common.clip_norm = form < SHUFFLED ? 195 : 0;
    what.options.common.initial_loss_scale = form < SHUFFLED ? 8 : 0;
    what.options.common.loss_scale_interval = 2;
    what.uncompressed = form % 2 ? 0x2b : 0;
    what.absent = form % 2 ? 5 : 0;
    what.poison = form % 2 ? 0.0f : INFINITY;
    check_adam(&what);
  }
}

/* Runs a case with the schedule that the library chooses, and with DeepSpeed's formulas. */
static void check_profiles(struct adam_case what) {
  check_adam(&what);
  what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  check_adam(&what);
  what.poison = INFINITY;
  what.poisoned_rank = what.size - 1;
  what.options.common.gradient_dtype = ONEBIT_FLOAT16;
  what.options.common.parameter_dtype = ONEBIT_BFLOAT16;
  what.options.common.clip_norm = 195;
  what.options.common.initial_loss_scale = 8;
  check_adam(&what);
}

RankedTest(mpi_optimizers, equal_the_oracle) {
  check_profiles(make_case(&kind_adam, 5));
  check_buckets(make_case(&kind_adam, 5));
  check_profiles(make_case(&kind_lamb, 5));
  check_buckets(make_case(&kind_lamb, 5));
  check_buckets(make_case(&kind_momentum, 0));
  check_buckets(make_case(&kind_momentum, 3));
  check_buckets(make_case(&kind_efficient_adam, 0));
  check_buckets(make_case(&kind_lion, 0));
}

RankedTest(mpi_optimizers, shards_equal_the_oracle) {
  struct adam_case what = make_case(&kind_adam, 5);
  for (int mode = ONEBIT_SHARDS_STEP; mode <= ONEBIT_SHARDS_PARAMETERS; mode++) {
    what.options.shards = (onebit_shards_t)mode;
    check_buckets(what);
  }
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  check_adam(&what);
}

static void check_zero_one(const struct zero_one_case *what) {
  struct zero_one_run run = zero_one_prepare(what);
  on_mpi_ranks(MPI_COMM_WORLD, zero_one_on_rank, &run);
  zero_one_release(&run);
}

/* Tests 0/1 Adam. The library may choose only a schedule that an optimizer can use: an allgather
 * has no servers. */
RankedTest(mpi_optimizers, zero_one_adam) {
  struct zero_one_case what = {.adam = make_case(NULL, 0), .options = zero_one_options(10)};
  onebit_optimizer_options_t *common = &what.adam.options.common;
  what.adam.steps = 30;
  check_zero_one(&what);
  what.adam.tensors = &adam_tensors_tiny;
  check_zero_one(&what);
  what.adam.tensors = &adam_tensors_odd;
  common->block_size = ONEBIT_BLOCK_BUFFER;
  check_zero_one(&what);
  common->block_size = 0;
  common->profile = ONEBIT_PROFILE_DEEPSPEED;
  common->gradient_dtype = ONEBIT_BFLOAT16;
  check_zero_one(&what);
  what.poison = NAN; /* in every other call; all ranks skip such a call, but if it is a local step,
                      * only this rank does */
  what.poisoned_rank = what.adam.size - 1;
  check_zero_one(&what);
  common->profile = ONEBIT_PROFILE_DEFAULT;
  common->bucket_size = 1000;
  what.adam.form = BACKWARD;
  check_zero_one(&what);
}

/*
 * Tests checkpoints over MPI. After saving and loading, in memory or in files, a run must continue
 * exactly. If saving or loading fails on one rank, it must fail on all ranks.
 */

enum { SAVED_AT = 5, STEPS = 9 };

/* Gives every rank the parts of all ranks. */
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

static void finish_training(struct trainee *trainee, const float *wanted) {
  for (int step = SAVED_AT; step < STEPS; step++)
    trainee_step(trainee, step);
  CHECK_BITS("parameters", trainee->parameters, wanted, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
  trainee_destroy(trainee);
}

static void check_resumed_training(onebit_comm_t comm, void *context) {
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
  finish_training(&trainee, wanted);
  trainee = trainee_create(comm, run->what, 2);
  CHECK_STATUS(onebit_optimizer_load_files(trainee.optimizer, path), ONEBIT_OK);
  finish_training(&trainee, wanted);
  free_parts(&parts);
}

/* Creates one directory for all ranks. */
static struct mpi_run create_directories(int rank) {
  struct mpi_run run = {0};
  if (rank == 0)
    run.directories = directories_create();
  MPI_Bcast(&run.directories, sizeof run.directories, MPI_BYTE, 0, MPI_COMM_WORLD);
  return run;
}

static void remove_directories(const struct mpi_run *run, int rank) {
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    directories_remove(&run->directories);
  mpi_end();
}

Test(mpi_checkpoint, goes_on_exactly) {
  int rank = mpi_begin();
  struct mpi_run run = create_directories(rank);
  for (const struct ob_method *const *method = ob_methods; *method; method++) {
    struct checkpoint_case what = {
        .name = (*method)->name, .method = *method, .steps = STEPS, .freeze_step = 3};
    MPI_Comm_size(MPI_COMM_WORLD, &what.size);
    run.what = &what;
    on_mpi_ranks(MPI_COMM_WORLD, check_resumed_training, &run);
  }
  remove_directories(&run, rank);
}

/* Makes saving fail on one rank, as if its disk were full. Then damages the checkpoint part of one
 * rank. */
static void check_failure_on_one_rank(onebit_comm_t comm, void *context) {
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
  CHECK_WORDS(mine ? "No space left on device" : "failed with ONEBIT_ERROR_FILE");
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
  CHECK_WORDS("part-1-0 is truncated: it has 777 of ");
  trainee_step(&trainee, 1);
  trainee_destroy(&trainee);
}

Test(mpi_checkpoint, fails_together) {
  int rank = mpi_begin();
  struct mpi_run run = create_directories(rank);
  struct checkpoint_case what = {
      .name = "over MPI", .method = &ob_method_adam, .steps = STEPS, .freeze_step = 3};
  MPI_Comm_size(MPI_COMM_WORLD, &what.size);
  run.what = &what;
  on_mpi_ranks(MPI_COMM_WORLD, check_failure_on_one_rank, &run);
  remove_directories(&run, rank);
}

/* Tests the outer step between sites over MPI. A site that is late is left out of a round, but none
 * of its changes may be lost. */

enum { COUNT = 1000, H = 3, DRIFTS = 8 * H };

/* Each rank is a site that adds a constant of its own to the parameters in each step (its drift).
 * With a quorum of all sites no site is left out, although all may be late. All sites must end at
 * the sum of the mean drifts. */
static void check_drifting_sites(onebit_comm_t between, void *context) {
  const int site = onebit_comm_rank(between), sites = onebit_comm_size(between);
  const int *quorum = context;
  float p[COUNT] = {0};
  onebit_tensor_t tensor = {.parameter = p, .count = COUNT};
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_sites_options_t how = ONEBIT_SITES_OPTIONS_INIT;
  onebit_outer_t outer;
  options.local_steps = H;
  options.fragments = *quorum ? H : 1;
  options.delay = *quorum ? 0 : H - 1;
  options.mixing = 1;
  options.bits = *quorum ? ONEBIT_OUTER_DENSE : 1;
  how.quorum = *quorum ? sites : 0;
  how.patience = *quorum ? 0.01 : 1000;
  onebit_comm_t alone = self_comm();
  CHECK_STATUS(onebit_outer_create_sites(alone, between, &tensor, 1, &options, &how, &outer),
               ONEBIT_OK);
  for (int step = 1; step <= DRIFTS; step++) {
    if (*quorum && step == 2 * H && site == sites - 1)
      for (double until = MPI_Wtime() + 0.2; MPI_Wtime() < until;)
        ;
    for (size_t i = 0; i < COUNT; i++)
      p[i] -= (float)(2 * site);
    CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_outer_synchronize(outer), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(outer);
  const float wanted = -(float)(DRIFTS * (sites - 1));
  for (size_t i = 0; i < COUNT; i++)
    if (!CHECK(p[i] >= wanted * 1.0001f && p[i] <= wanted * 0.9999f, "p[%zu] is %g, not %g", i,
               (double)p[i], (double)wanted))
      break;
  float sums[2] = {(float)(info.checksum & 0xffff), 0};
  MPI_Allreduce(&sums[0], &sums[1], 1, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  CHECK(sums[0] == sums[1], "checksum %08x", (unsigned)info.checksum);
  onebit_outer_destroy(outer);
  onebit_comm_destroy(alone);
}

RankedTest(mpi_outer_sites, a_late_site_loses_nothing) {
  for (int quorum = 0; quorum < 2; quorum++)
    on_mpi_ranks(MPI_COMM_WORLD, check_drifting_sites, &quorum);
}
