/*
 * Wrong arguments of the calls in onebit/mpi_calls.h: MPI's error class, the communicator's handler
 * called once, a message that names the fault, and no rank left waiting. mpi_wrong_calls.c has
 * more.
 */
#include "tests/support_calls.h"

enum { COUNT = 5000 };

static int handled;

static void note_error(MPI_Comm *comm, int *code, ...) {
  (void)comm, (void)code;
  handled++;
}

static void check_refused(int code, int wanted, const char *word) {
  int class = MPI_SUCCESS;
  MPI_Error_class(code, &class);
  CHECK(class == wanted, "class %d, not %d", class, wanted);
  CHECK_WORDS(word);
  CHECK(handled == 1, "the handler was called %d times", handled);
  handled = 0;
}

static void own_sum(void *from, void *to, int *count, MPI_Datatype *type) {
  (void)from, (void)to, (void)count, (void)type;
}

static void refuse_arguments(MPI_Comm comm) {
  float a[8] = {0}, b[64];
  MPI_Op own;
  MPI_Op_create(own_sum, 1, &own);
  check_refused(ONEBIT_Allreduce(a, b, -1, MPI_FLOAT, MPI_SUM, comm), MPI_ERR_COUNT, "-1");
  check_refused(ONEBIT_Allreduce(a, MPI_IN_PLACE, 8, MPI_FLOAT, MPI_SUM, comm), MPI_ERR_BUFFER,
                "recvbuf");
  check_refused(ONEBIT_Allreduce(a, b, 8, MPI_DATATYPE_NULL, MPI_SUM, comm), MPI_ERR_TYPE,
                "datatype");
  check_refused(ONEBIT_Allreduce(a, b, 8, MPI_FLOAT, MPI_OP_NULL, comm), MPI_ERR_OP, "op");
  check_refused(ONEBIT_Reduce_scatter_block(a, b, 1, MPI_FLOAT, own, comm), MPI_ERR_OP, "op");
  check_refused(ONEBIT_Forget(NULL, comm), MPI_ERR_BUFFER, "buffer");
  CHECK(ONEBIT_Allreduce(NULL, NULL, 0, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS, "count 0");
  MPI_Op_free(&own);
}

static void refuse_between_groups(int rank, MPI_Errhandler handler) {
  MPI_Comm half, between;
  float a[8] = {0}, b[8];
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  if (size_of(MPI_COMM_WORLD) > 1) {
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between);
    MPI_Comm_set_errhandler(between, handler);
    check_refused(ONEBIT_Allreduce(a, b, 8, MPI_FLOAT, MPI_SUM, between), MPI_ERR_COMM, "inter");
    MPI_Comm_free(&between);
  }
  MPI_Comm_free(&half);
}

/* A refusal that some rank notices leaves no rank waiting for another. */
static void refuse_other_counts(MPI_Comm comm, int rank) {
  float a[8] = {0}, b[8];
  if (size_of(comm) > 1)
    check_refused(ONEBIT_Allreduce(a, b, rank ? 8 : 7, MPI_FLOAT, MPI_SUM, comm), MPI_ERR_COUNT,
                  "differs between ranks");
}

/* A rank's environment is wrong: every rank has an error, and the next call is well. */
static void refuse_environments(int rank, MPI_Errhandler handler) {
  static const char *const wrong[][2] = {{"ONEBIT_CODEC", "abacus"}, {"ONEBIT_PROGRESS", "none"}};
  static float a[COUNT], b[COUNT];
  for (size_t k = 0; size_of(MPI_COMM_WORLD) > 1 && k < 2; k++) {
    MPI_Comm comm = duplicate();
    MPI_Comm_set_errhandler(comm, handler);
    check_case("%s=%s", wrong[k][0], wrong[k][1]);
    if (rank == 0)
      setenv(wrong[k][0], wrong[k][1], 1);
    int code = ONEBIT_Allreduce(a, b, COUNT, MPI_FLOAT, MPI_SUM, comm);
    check_refused(code, MPI_ERR_OTHER, rank == 0 ? wrong[k][1] : "rank");
    unsetenv(wrong[k][0]);
    MPI_Comm_free(&comm);
    comm = duplicate();
    CHECK(ONEBIT_Allreduce(a, b, COUNT, MPI_FLOAT, MPI_SUM, comm) == MPI_SUCCESS, "it is well");
    MPI_Comm_free(&comm);
  }
}

/* MPI's own reductions know nothing of a mean. */
static void averages_are_not_mpis(void) {
  float mine = 1, result = 1;
  MPI_Allreduce(&mine, &result, 1, MPI_FLOAT, ONEBIT_AVG, MPI_COMM_WORLD);
  CHECK(size_of(MPI_COMM_WORLD) == 1 || isnan(result), "a mean of %g", (double)result);
}

Test(mpi_calls_arguments, are_refused_where_they_are_wrong) {
  float a = 0, b;
  MPI_Errhandler handler;
  CHECK(ONEBIT_Allreduce(&a, &b, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_ERR_OTHER,
        "without MPI");
  CHECK_WORDS("not initialised");
  CHECK(ONEBIT_AVG == MPI_OP_NULL && ONEBIT_FLOAT16_TYPE == MPI_DATATYPE_NULL, "without MPI");
  int rank = mpi_begin();
  MPI_Comm comm = duplicate();
  MPI_Comm_create_errhandler(note_error, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
  refuse_arguments(comm);
  check_refused(ONEBIT_Allreduce(&a, &b, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_NULL), MPI_ERR_COMM,
                "MPI_COMM_NULL");
  refuse_between_groups(rank, handler);
  refuse_other_counts(comm, rank);
  refuse_environments(rank, handler);
  averages_are_not_mpis();
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
  mpi_end();
}
