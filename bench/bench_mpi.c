/* Ranks that are MPI processes, and MPI's own dense collectives to compare with. */
#ifdef ONEBIT_HAVE_MPI
#include "bench/bench_mpi.h"

#include <limits.h>
#include <string.h>

#include "collectives/progress.h"
#include "onebit/mpi.h"

static void mpi_barrier(struct bench_team *team) {
  (void)team;
  MPI_Barrier(MPI_COMM_WORLD);
}

/* Counts are an int each. */
static void mpi_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  (void)team;
  while (count) {
    int part = count < INT_MAX ? (int)count : INT_MAX;
    MPI_Allreduce(MPI_IN_PLACE, values, part, MPI_DOUBLE, sum ? MPI_SUM : MPI_MAX, MPI_COMM_WORLD);
    values += part;
    count -= (size_t)part;
  }
}

/* The sum, where onebit gives the mean: what an MPI program would call. */
int bench_mpi_dense(MPI_Comm comm, onebit_operation_t operation, const float *send, float *receive,
                    int count) {
  switch (operation) {
  case ONEBIT_ALLREDUCE:
    return MPI_Allreduce(send, receive, count, MPI_FLOAT, MPI_SUM, comm);
  case ONEBIT_ALLGATHER:
    return MPI_Allgather(send, count, MPI_FLOAT, receive, count, MPI_FLOAT, comm);
  case ONEBIT_REDUCE_SCATTER:
    return MPI_Reduce_scatter_block(send, receive, count, MPI_FLOAT, MPI_SUM, comm);
  }
  return MPI_ERR_OP;
}

/* count fits an int, the caller sees to it. */
static void mpi_dense(struct bench_team *team, size_t algorithm, onebit_operation_t operation,
                      const float *send, float *receive, size_t count) {
  const struct bench_mpi_state *state = team->state;
  bench_mpi_dense(state->comms[algorithm], operation, send, receive, (int)count);
}

static void mpi_start_dense(struct bench_team *team, onebit_operation_t operation,
                            const float *send, float *receive, size_t count) {
  MPI_Request *request = &((struct bench_mpi_state *)team->state)->request;
  int n = (int)count;
  switch (operation) {
  case ONEBIT_ALLREDUCE:
    MPI_Iallreduce(send, receive, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
    break;
  case ONEBIT_ALLGATHER:
    MPI_Iallgather(send, n, MPI_FLOAT, receive, n, MPI_FLOAT, MPI_COMM_WORLD, request);
    break;
  case ONEBIT_REDUCE_SCATTER:
    MPI_Ireduce_scatter_block(send, receive, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
    break;
  }
}

static bool mpi_finish_dense(struct bench_team *team, bool wait) {
  MPI_Request *request = &((struct bench_mpi_state *)team->state)->request;
  int finished = 1;
  if (wait)
    MPI_Wait(request, MPI_STATUS_IGNORE);
  else
    MPI_Test(request, &finished, MPI_STATUS_IGNORE);
  return finished;
}

static const struct bench_team_kind mpi_kind = {
    mpi_barrier, mpi_combine, bench_mpi_choose, mpi_dense, mpi_start_dense, mpi_finish_dense,
};

void bench_mpi_begin(int *argc, char ***argv, int *rank, int *size) {
  int provided;
  bool thread;
  /* Locks cost a little: only for those who ask. A wrong value is the library's to complain of. */
  (void)ob_progress_wanted(&thread);
  MPI_Init_thread(argc, argv, thread ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, size);
}

int bench_mpi_run(bench_body *body, const void *context) {
  struct bench_mpi_state state = {.request = MPI_REQUEST_NULL};
  struct bench_team team = {.kind = &mpi_kind, .state = &state};
  onebit_status_t made = onebit_comm_create_mpi(MPI_COMM_WORLD, &team.comm);
  if (made != ONEBIT_OK)
    return bench_status(made, "onebit_comm_create_mpi");
  team.rank = onebit_comm_rank(team.comm);
  team.size = onebit_comm_size(team.comm);
  int status = body(&team, context);
  bench_mpi_forget(&team);
  onebit_comm_destroy(team.comm);
  return status;
}

void bench_mpi_end(void) { MPI_Finalize(); }

/* Its first line: some libraries tell all about how they were built. */
const char *bench_mpi_library(void) {
  static char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  name[strcspn(name, ",\n")] = '\0';
  return name;
}

#else
typedef int bench_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
