/*
 * Ranks that are MPI processes, and MPI's own dense collectives to compare with, by each of the
 * algorithms that the library has, side by side in one launch.
 *
 * Open MPI's coll/tuned looks at its variable coll_tuned_allreduce_algorithm (and its like) when a
 * communicator is made, if coll_tuned_use_dynamic_rules was set before MPI_Init. So: write the
 * variable through MPI's tool interface, duplicate MPI_COMM_WORLD, write the next. Each duplicate
 * keeps its algorithm. Other libraries do not have the variable, and only their own choice is
 * measured.
 */
#define _DEFAULT_SOURCE
#ifdef ONEBIT_HAVE_MPI
#include "onebit/mpi.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "collectives/steps.h"

struct state {
  MPI_Comm comms[BENCH_ALGORITHMS + 1];
  struct bench_algorithm algorithms[BENCH_ALGORITHMS + 1];
  MPI_Request request; /* of a nonblocking dense collective */
};

static void bench_mpi_barrier(struct bench_team *team) {
  (void)team;
  MPI_Barrier(MPI_COMM_WORLD);
}

/* Combines numbers over the ranks. Counts are an int each. */
static void bench_mpi_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  (void)team;
  for (size_t first = 0; first < count; first += INT_MAX) {
    int part = count - first < INT_MAX ? (int)(count - first) : INT_MAX;
    MPI_Allreduce(MPI_IN_PLACE, values + first, part, MPI_DOUBLE, sum ? MPI_SUM : MPI_MAX,
                  MPI_COMM_WORLD);
  }
}

/* Makes MPI's call: the sum, where onebit gives the mean, as an MPI program would. request: NULL,
 * or it does not block. Returns MPI's status. */
static int bench_mpi_call(MPI_Comm comm, onebit_operation_t operation, const float *send,
                          float *receive, int n, MPI_Request *request) {
  const MPI_Datatype type = MPI_FLOAT;
  switch (operation) {
  case ONEBIT_ALLREDUCE:
    return request ? MPI_Iallreduce(send, receive, n, type, MPI_SUM, comm, request)
                   : MPI_Allreduce(send, receive, n, type, MPI_SUM, comm);
  case ONEBIT_ALLGATHER:
    return request ? MPI_Iallgather(send, n, type, receive, n, type, comm, request)
                   : MPI_Allgather(send, n, type, receive, n, type, comm);
  case ONEBIT_REDUCE_SCATTER:
    return request ? MPI_Ireduce_scatter_block(send, receive, n, type, MPI_SUM, comm, request)
                   : MPI_Reduce_scatter_block(send, receive, n, type, MPI_SUM, comm);
  }
  return MPI_ERR_OP;
}

/* Makes the dense call; the caller ensures that count fits an int. */
static void bench_mpi_dense(struct bench_team *team, size_t algorithm, onebit_operation_t operation,
                            const float *send, float *receive, size_t count) {
  bench_mpi_call(((struct state *)team->state)->comms[algorithm], operation, send, receive,
                 (int)count, NULL);
}

static void bench_mpi_start_dense(struct bench_team *team, onebit_operation_t operation,
                                  const float *send, float *receive, size_t count) {
  MPI_Request *request = &((struct state *)team->state)->request;
  bench_mpi_call(MPI_COMM_WORLD, operation, send, receive, (int)count, request);
}

static void bench_mpi_finish_dense(struct bench_team *team, bool wait) {
  MPI_Request *request = &((struct state *)team->state)->request;
  int finished;
  if (wait)
    MPI_Wait(request, MPI_STATUS_IGNORE);
  else
    MPI_Test(request, &finished, MPI_STATUS_IGNORE);
}

/* --- Algorithms */

/* The variable that chooses the algorithm; its values are an enumeration of the library's, with
 * names. */
struct control {
  MPI_T_cvar_handle handle;
  MPI_T_enum names;
  int values;
};

static bool open_control(struct control *control, onebit_operation_t operation) {
  static const char *const names[] = {
      [ONEBIT_ALLREDUCE] = "coll_tuned_allreduce_algorithm",
      [ONEBIT_ALLGATHER] = "coll_tuned_allgather_algorithm",
      [ONEBIT_REDUCE_SCATTER] = "coll_tuned_reduce_scatter_block_algorithm",
  };
  int index, verbosity, bind, scope, count, length = 0, description_length = 0;
  char name[2], description[2];
  MPI_Datatype type = MPI_DATATYPE_NULL;
  control->names = MPI_T_ENUM_NULL;
  if (MPI_T_cvar_get_index(names[operation], &index) != MPI_SUCCESS ||
      MPI_T_cvar_get_info(index, name, &length, &verbosity, &type, &control->names, description,
                          &description_length, &bind, &scope) != MPI_SUCCESS ||
      type != MPI_INT || control->names == MPI_T_ENUM_NULL)
    return false;
  length = 0;
  return MPI_T_enum_get_info(control->names, &control->values, name, &length) == MPI_SUCCESS &&
         MPI_T_cvar_handle_alloc(index, NULL, &control->handle, &count) == MPI_SUCCESS;
}

static bool name_of(const struct control *control, int number, struct bench_algorithm *algorithm) {
  for (int k = 0; k < control->values; k++) {
    char name[64];
    int value, length = sizeof name;
    if (MPI_T_enum_get_item(control->names, k, &value, name, &length) != MPI_SUCCESS ||
        value != number)
      continue;
    algorithm->number = number;
    snprintf(algorithm->name, sizeof algorithm->name, "%.31s", name);
    return true;
  }
  return false;
}

/* Tries a call on a few numbers: some algorithms refuse numbers of ranks that they are not made
 * for. */
static bool algorithm_works(MPI_Comm comm, onebit_operation_t operation, int ranks) {
  float *numbers = calloc((size_t)ranks * 2, sizeof *numbers);
  int well =
      numbers && bench_mpi_call(comm, operation, numbers, numbers + ranks, 1, NULL) == MPI_SUCCESS;
  MPI_Allreduce(MPI_IN_PLACE, &well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  free(numbers);
  return well;
}

/* Adds a communicator with the algorithm of that number to the team. */
static bool add_algorithm(struct bench_team *team, const struct control *control,
                          onebit_operation_t operation, int number) {
  struct state *state = team->state;
  MPI_Comm *comm = &state->comms[team->algorithm_count];
  if (!name_of(control, number, &state->algorithms[team->algorithm_count])) {
    if (team->rank == 0)
      bench_complain("--mpi-algorithms %d: there is no such algorithm", number);
    return false;
  }
  if (MPI_T_cvar_write(control->handle, &number) != MPI_SUCCESS ||
      MPI_Comm_dup(MPI_COMM_WORLD, comm) != MPI_SUCCESS)
    return false;
  MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
  if (algorithm_works(*comm, operation, team->size))
    team->algorithm_count++;
  else
    MPI_Comm_free(comm);
  return true;
}

static bool bench_mpi_add_all(struct bench_team *team, const struct control *control,
                              const struct bench_options *options, onebit_operation_t operation) {
  bool all = options->all_algorithms;
  size_t count = all ? (size_t)control->values - 1 : options->algorithm_count;
  int before;
  bool well = MPI_T_cvar_read(control->handle, &before) == MPI_SUCCESS;
  for (size_t k = 0; well && k < count && team->algorithm_count <= BENCH_ALGORITHMS; k++)
    well = add_algorithm(team, control, operation, all ? (int)k + 1 : (int)options->algorithms[k]);
  MPI_T_cvar_write(control->handle, &before);
  return well;
}

static int bench_mpi_choose(struct bench_team *team, const struct bench_options *options,
                            onebit_operation_t operation) {
  struct state *state = team->state;
  struct control control;
  int provided, status = BENCH_OK;
  team->algorithms = state->algorithms;
  team->algorithm_count = 1;
  if (!options->all_algorithms && !options->algorithm_count)
    return BENCH_OK;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS)
    return BENCH_FAILED;
  if (open_control(&control, operation)) {
    status = bench_mpi_add_all(team, &control, options, operation) ? BENCH_OK : BENCH_USAGE;
    MPI_T_cvar_handle_free(&control.handle);
  } else if (team->rank == 0) {
    bench_complain(
        "--mpi-algorithms: %s does not let an algorithm be chosen, so its default is measured",
        bench_mpi_library());
  }
  MPI_T_finalize();
  return status;
}

/* --- The team */

static const struct bench_team_kind kind = {bench_mpi_barrier,     bench_mpi_combine,
                                            bench_mpi_choose,      bench_mpi_dense,
                                            bench_mpi_start_dense, bench_mpi_finish_dense};

void bench_mpi_begin(int *argc, char ***argv, const struct bench_options *options, int *rank,
                     int *size) {
  int provided;
  bool thread;
  if (options->all_algorithms || options->algorithm_count) /* wants to be told before */
    setenv("OMPI_MCA_coll_tuned_use_dynamic_rules", "1", 1);
  /* Asks for MPI's locks only where ONEBIT_PROGRESS needs them, since they cost a little. The
   * library complains of a wrong value. */
  (void)ob_progress_wanted(&thread);
  MPI_Init_thread(argc, argv, thread ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, size);
}

int bench_mpi_run(bench_body *body, const void *context) {
  struct state state = {
      .request = MPI_REQUEST_NULL, .comms = {MPI_COMM_WORLD}, .algorithms = {{0, "default"}}};
  struct bench_team team = {.kind = &kind, .state = &state};
  BENCH_TRY(
      bench_status(onebit_comm_create_mpi(MPI_COMM_WORLD, &team.comm), "onebit_comm_create_mpi"));
  team.rank = onebit_comm_rank(team.comm);
  team.size = onebit_comm_size(team.comm);
  int status = body(&team, context);
  for (size_t k = 1; k < team.algorithm_count; k++)
    MPI_Comm_free(&state.comms[k]);
  onebit_comm_destroy(team.comm);
  return status;
}

void bench_mpi_end(void) { MPI_Finalize(); }

/* The first line of the version: some libraries tell all about how they were built. */
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
