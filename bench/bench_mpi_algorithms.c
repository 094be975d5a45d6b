/*
 * The algorithms that the MPI library has for a dense collective, side by side in one launch.
 *
 * Open MPI's coll/tuned looks at its variable coll_tuned_allreduce_algorithm (and its like) when a
 * communicator is made, if coll_tuned_use_dynamic_rules was set before MPI_Init. So: write the
 * variable through MPI's tool interface, duplicate MPI_COMM_WORLD, write the next. Each duplicate
 * keeps its algorithm. Other libraries do not have the variable, and only their own choice is
 * measured.
 */
#define _DEFAULT_SOURCE
#ifdef ONEBIT_HAVE_MPI
#include "bench/bench_mpi.h"

#include <stdio.h>
#include <stdlib.h>

/* The variable that chooses; its values are what an enumeration of the library's names. */
struct control {
  MPI_T_cvar_handle handle;
  MPI_T_enum names;
  int values;
};

void bench_mpi_allow_algorithms(void) { setenv("OMPI_MCA_coll_tuned_use_dynamic_rules", "1", 1); }

static bool open_control(struct control *control, onebit_operation_t operation) {
  static const char *const names[] = {
      [ONEBIT_ALLREDUCE] = "coll_tuned_allreduce_algorithm",
      [ONEBIT_ALLGATHER] = "coll_tuned_allgather_algorithm",
      [ONEBIT_REDUCE_SCATTER] = "coll_tuned_reduce_scatter_block_algorithm",
  };
  int index, verbosity, bind, scope, count, length = 0, words = 0;
  char name[2], description[2];
  MPI_Datatype type = MPI_DATATYPE_NULL;
  control->names = MPI_T_ENUM_NULL;
  if (MPI_T_cvar_get_index(names[operation], &index) != MPI_SUCCESS ||
      MPI_T_cvar_get_info(index, name, &length, &verbosity, &type, &control->names, description,
                          &words, &bind, &scope) != MPI_SUCCESS ||
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
    *algorithm = (struct bench_algorithm){.number = number};
    snprintf(algorithm->name, sizeof algorithm->name, "%.31s", name);
    return true;
  }
  return false;
}

/* A call on a few numbers: some algorithms refuse numbers of ranks that they are not made for. */
static bool works(MPI_Comm comm, onebit_operation_t operation, int ranks) {
  float *numbers = calloc((size_t)ranks * 2, sizeof *numbers);
  int well =
      numbers && bench_mpi_dense(comm, operation, numbers, numbers + ranks, 1) == MPI_SUCCESS;
  MPI_Allreduce(MPI_IN_PLACE, &well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  free(numbers);
  return well;
}

/* A communicator with the algorithm of that number, as the team's next one. */
static bool add(struct bench_team *team, const struct control *control,
                onebit_operation_t operation, int number) {
  struct bench_mpi_state *state = team->state;
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
  if (works(*comm, operation, team->size))
    team->algorithm_count++;
  else
    MPI_Comm_free(comm);
  return true;
}

static bool add_all(struct bench_team *team, const struct control *control,
                    const struct bench_options *options, onebit_operation_t operation) {
  size_t count = options->all_algorithms ? (size_t)control->values - 1 : options->algorithm_count;
  int before;
  bool well = MPI_T_cvar_read(control->handle, &before) == MPI_SUCCESS;
  for (size_t k = 0; well && k < count && team->algorithm_count <= BENCH_ALGORITHMS; k++)
    well = add(team, control, operation,
               options->all_algorithms ? (int)k + 1 : options->algorithms[k]);
  MPI_T_cvar_write(control->handle, &before);
  return well;
}

int bench_mpi_choose(struct bench_team *team, const struct bench_options *options,
                     onebit_operation_t operation) {
  struct bench_mpi_state *state = team->state;
  struct control control;
  int provided, status = BENCH_OK;
  state->comms[0] = MPI_COMM_WORLD;
  state->algorithms[0] = (struct bench_algorithm){0, "default"};
  team->algorithms = state->algorithms;
  team->algorithm_count = 1;
  if (!options->all_algorithms && !options->algorithm_count)
    return BENCH_OK;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS)
    return BENCH_FAILED;
  if (open_control(&control, operation)) {
    status = add_all(team, &control, options, operation) ? BENCH_OK : BENCH_USAGE;
    MPI_T_cvar_handle_free(&control.handle);
  } else if (team->rank == 0) {
    bench_complain("--mpi-algorithms: %s lets none be chosen, so its default is measured",
                   bench_mpi_library());
  }
  MPI_T_finalize();
  return status;
}

void bench_mpi_forget(struct bench_team *team) {
  struct bench_mpi_state *state = team->state;
  for (size_t k = 1; k < team->algorithm_count; k++)
    MPI_Comm_free(&state->comms[k]);
}

#else
typedef int bench_no_algorithms_here; /* ISO C wants a declaration in every file */
#endif
