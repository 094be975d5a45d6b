/* Wrong arguments and disagreement over MPI: the scenarios of test_disagreement.c, and what only
 * MPI has. */
#include "base/memory.h"
#include "onebit/mpi.h"
#include "tests/support_errors.h"
#include "tests/support_mpi.h"

/* Not followed; must not survive a failing creation. */
static char stale;
static onebit_comm_t stale_comm(void) { return (onebit_comm_t)(void *)&stale; }

static void check_wrong(onebit_status_t status, onebit_comm_t comm, const char *word) {
  CHECK_STATUS(status, ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS(word);
  CHECK(comm == NULL, "a failed creation left a communicator");
}

static void check_not_initialised(void) {
  onebit_comm_t comm = stale_comm();
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  check_wrong(status, comm, "MPI");
}

/* Two halves that know each other make an inter-communicator. */
static void check_inter_communicator(int rank, int size) {
  MPI_Comm half, between;
  onebit_comm_t comm = stale_comm();
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  if (size > 1) {
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between);
    onebit_status_t status = onebit_comm_create_mpi(between, &comm);
    check_wrong(status, comm, "inter");
    MPI_Comm_free(&between);
  }
  MPI_Comm_free(&half);
}

/* The first, the second, ... allocation of a rank fails while a communicator is made: the others
 * learn of it. */
static void check_memory(int rank, int size) {
  for (int culprit = 0; culprit < size; culprit++)
    for (long n = 1, done = 0; !done; n++) {
      onebit_comm_t comm = stale_comm();
      check_case("allocation %ld of rank %d fails", n, culprit);
      ob_memory_fail_at(rank == culprit ? n : 0);
      onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
      ob_memory_fail_at(0);
      done = status == ONEBIT_OK;
      if (!done)
        CHECK_STATUS(status, ONEBIT_ERROR_MEMORY);
      CHECK((comm == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
      onebit_comm_destroy(comm);
    }
}

Test(mpi_errors, reach_all_ranks) {
  static rank_body *const scenarios[] = {
      wrong_learning_rate_on_one_rank, mistakes_in_an_open_step,    destroyed_in_an_open_step,
      wrong_buffers_on_one_rank,       wrong_operation_on_one_rank, wrong_plan_on_one_rank,
      wrong_tensors_on_one_rank,       other_plan_on_one_rank,      other_adam_on_one_rank,
      plan_here_and_optimizer_there,   other_threads_on_one_rank};
  check_not_initialised();
  int rank = mpi_begin(), size;
  onebit_comm_t comm = stale_comm();
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_NULL, &comm);
  check_wrong(status, comm, "MPI_COMM_NULL");
  check_wrong(onebit_comm_create_mpi(MPI_COMM_WORLD, NULL), NULL, "comm");
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  check_inter_communicator(rank, size);
  check_memory(rank, size);
  for (size_t k = 0; size > 1 && k < sizeof scenarios / sizeof scenarios[0]; k++)
    for (int guilty = 0; guilty < size; guilty++) {
      struct culprit culprit = {.rank = guilty};
      on_mpi_ranks(MPI_COMM_WORLD, scenarios[k], &culprit);
      culprit.clip_norm = 1.5; /* there is one exchange more */
      if (k < 3)
        on_mpi_ranks(MPI_COMM_WORLD, scenarios[k], &culprit);
    }
  mpi_end();
}

/* --- ONEBIT_CONFIG */

/* Makes a file that says when 1-bit Adam freezes, which only this process has. */
static void write_config(char *path, int freeze_step) {
  char text[128];
  int file = mkstemp(path);
  int length = snprintf(text, sizeof text,
                        "{\"optimizer\": {\"type\": \"adam\", \"params\": {\"freeze_step\": %d}}}",
                        freeze_step);
  cr_assert(file >= 0 && write(file, text, (size_t)length) == length);
  close(file);
  setenv("ONEBIT_CONFIG", path, 1);
}

RankedTest(mpi_errors, a_file_that_one_rank_cannot_read) {
  onebit_comm_t comm = stale_comm();
  if (rank == size - 1)
    setenv("ONEBIT_CONFIG", "/nowhere/at.all", 1);
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comm), ONEBIT_ERROR_FILE);
  CHECK_WORDS(rank == size - 1 ? "ONEBIT_CONFIG=/nowhere/at.all: No such file" : "another rank");
  CHECK(comm == NULL, "a communicator");
}

RankedTest(mpi_errors, files_that_differ_between_ranks) {
  char path[] = "/tmp/onebit-config-XXXXXX";
  float parameter = 1, gradient = 1;
  onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_optimizer_t optimizer = NULL;
  onebit_comm_t comm = NULL;
  write_config(path, 3 + (rank == size - 1));
  CHECK_STATUS(onebit_comm_create_mpi(MPI_COMM_WORLD, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer),
               size > 1 ? ONEBIT_ERROR_MISMATCH : ONEBIT_OK);
  if (size > 1)
    CHECK_WORDS("freeze_step");
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  unlink(path);
}
