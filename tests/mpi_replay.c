/* Recorded cases on ranks that are processes: for this number of ranks, for another one, and when
 * one rank does not find what the others find. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support_mpi.h"
#include "tests/support_replay.h"
#include "tools/replay/replay.h"

TestSuite(mpi_replay, .timeout = 120);

/* Rank 0 makes what all ranks are told of. */
static void shared_scratch(int rank, char path[PATH_ROOM]) {
  memset(path, 0, PATH_ROOM);
  if (rank == 0)
    scratch_create(path);
  MPI_Bcast(path, PATH_ROOM, MPI_CHAR, 0, MPI_COMM_WORLD);
}

static void shared_scratch_remove(int rank, const char *path) {
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    scratch_remove(path);
}

static void record(int rank, int world, const char *scratch, const char *name,
                   char path[PATH_ROOM]) {
  path_join(path, scratch, name);
  if (rank == 0 && name[0] == 'a')
    record_adam(scratch, name, world, 8, path);
  else if (rank == 0 && name[0] == 'z')
    record_zero_one(scratch, name, world, 14, path);
  else if (rank == 0)
    record_allreduce(scratch, name, world, 1003, 4, path);
  MPI_Barrier(MPI_COMM_WORLD);
}

static void replayed(const char *path, enum replay_verdict verdict, const char *part) {
  struct replay_result result;
  replay_with_mpi(path, ONEBIT_DEVICE_HOST, &result);
  CHECK(result.verdict == verdict, "%s: verdict %d, not %d: %s", path, (int)result.verdict,
        (int)verdict, result.error);
  CHECK(strstr(result.error, part), "the words \"%s\" do not say \"%s\"", result.error, part);
  CHECK((result.tally.values > 0) == (verdict == REPLAY_OK) && result.tally.exceptions == 0,
        "%s: %llu values, %llu exceptions", path, (unsigned long long)result.tally.values,
        (unsigned long long)result.tally.exceptions);
}

Test(mpi_replay, cases_of_this_and_of_other_worlds) {
  int rank = mpi_begin(), world;
  char scratch[PATH_ROOM], path[PATH_ROOM];
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  shared_scratch(rank, scratch);
  record(rank, world, scratch, "reduce", path);
  replayed(path, REPLAY_OK, "");
  record(rank, world, scratch, "adam", path);
  replayed(path, REPLAY_OK, "");
  record(rank, world, scratch, "zero-one", path);
  replayed(path, REPLAY_OK, "");
  record(rank, world + 1, scratch, "reduce-more", path);
  replayed(path, REPLAY_FAILED, "reduce-more/case.txt: world is ");
  record(rank, world + 1, scratch, "adam-more", path);
  replayed(path, REPLAY_FAILED, "adam-more/case.txt: world is ");
  shared_scratch_remove(rank, scratch);
  mpi_end();
}

/* The last rank is told of another directory. All ranks fail, with the same words. */
Test(mpi_replay, ranks_that_find_other_cases) {
  int rank = mpi_begin(), world;
  char scratch[PATH_ROOM], path[PATH_ROOM], odd[PATH_ROOM];
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  shared_scratch(rank, scratch);
  record(rank, world, scratch, "reduce", path);
  path_join(odd, scratch, "nowhere");
  replayed(rank == world - 1 ? odd : path, REPLAY_FAILED, "nowhere/case.txt: No such file");
  record(rank, world, scratch, "adam", odd);
  replayed(rank == world - 1 ? odd : path, world > 1 ? REPLAY_FAILED : REPLAY_OK,
           world > 1 ? "its case.txt is another one than rank 0's" : "");
  shared_scratch_remove(rank, scratch);
  mpi_end();
}
