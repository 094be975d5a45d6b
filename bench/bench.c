/*
 * The main program of onebit-bench: finds the benchmark and runs it on each rank. If the ranks are
 * MPI processes, the same launch can also time MPI's own dense collectives, with each algorithm
 * that the MPI library has.
 *
 * Open MPI's coll/tuned has a variable for the algorithm of each collective, such as
 * coll_tuned_allreduce_algorithm. If coll_tuned_use_dynamic_rules was set before MPI_Init, it reads
 * this variable each time that a communicator is created. For each algorithm this file therefore
 * writes the variable through MPI's tool interface, and duplicates MPI_COMM_WORLD. Each duplicate
 * keeps its algorithm. Other MPI libraries do not have the variable, so only their default
 * algorithm is measured. */
#define _DEFAULT_SOURCE
#ifdef ONEBIT_HAVE_MPI
#include "onebit/mpi.h"
#endif

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/knobs.h"
#include "bench/bench.h"
#include "collectives/steps.h"
#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h> /* cudaDeviceProp says if the device is emulated */
#endif

#ifdef ONEBIT_HAVE_MPI
/* --- MPI */

struct state {
  MPI_Comm comms[BENCH_ALGORITHMS + 1];
  struct bench_algorithm algorithms[BENCH_ALGORITHMS + 1];
  MPI_Request request; /* the request of a nonblocking dense collective */
};

static void bench_mpi_barrier(struct bench_team *team) {
  (void)team;
  MPI_Barrier(MPI_COMM_WORLD);
}

/* Combines numbers over the ranks, in parts whose counts fit an int. */
static void bench_mpi_combine(struct bench_team *team, double *values, size_t count, bool sum) {
  (void)team;
  for (size_t first = 0; first < count; first += INT_MAX) {
    int part = count - first < INT_MAX ? (int)(count - first) : INT_MAX;
    MPI_Allreduce(MPI_IN_PLACE, values + first, part, MPI_DOUBLE, sum ? MPI_SUM : MPI_MAX,
                  MPI_COMM_WORLD);
  }
}

/* Calls MPI's collective: the blocking function if `request` is NULL, or else the nonblocking one.
 * The operation is MPI_SUM, as in most MPI programs, although onebit computes the mean. Returns
 * MPI's status. */
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

/* Calls the dense collective. The caller ensures that the count fits an int. */
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

/* The MPI_T variable that chooses the algorithm; `names` enumerates its values. */
struct control {
  MPI_T_cvar_handle handle;
  MPI_T_enum names;
  int values;
};

static bool open_algorithm_control(struct control *control, onebit_operation_t operation) {
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

static bool find_algorithm_name(const struct control *control, int number,
                                struct bench_algorithm *algorithm) {
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

/* True if a collective on a few numbers succeeds on all ranks. Some algorithms do not support every
 * number of ranks. */
static bool algorithm_works(MPI_Comm comm, onebit_operation_t operation, int ranks) {
  float *numbers = calloc((size_t)ranks * 2, sizeof *numbers);
  int well =
      numbers && bench_mpi_call(comm, operation, numbers, numbers + ranks, 1, NULL) == MPI_SUCCESS;
  MPI_Allreduce(MPI_IN_PLACE, &well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  free(numbers);
  return well;
}

/* Adds an algorithm to the team: a communicator that uses the algorithm with this number. */
static bool add_algorithm(struct bench_team *team, const struct control *control,
                          onebit_operation_t operation, int number) {
  struct state *state = team->state;
  MPI_Comm *comm = &state->comms[team->algorithm_count];
  if (!find_algorithm_name(control, number, &state->algorithms[team->algorithm_count]) ||
      MPI_T_cvar_write(control->handle, &number) != MPI_SUCCESS ||
      MPI_Comm_dup(MPI_COMM_WORLD, comm) != MPI_SUCCESS)
    return false;
  MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
  if (algorithm_works(*comm, operation, team->size))
    team->algorithm_count++;
  else
    MPI_Comm_free(comm);
  return true;
}

/* Adds every algorithm except number 0. Number 0 is the library's own choice, which the team
 * already has. */
static bool bench_mpi_add_all(struct bench_team *team, const struct control *control,
                              onebit_operation_t operation) {
  int before;
  bool well = MPI_T_cvar_read(control->handle, &before) == MPI_SUCCESS;
  for (int k = 1; well && k < control->values && team->algorithm_count <= BENCH_ALGORITHMS; k++)
    well = add_algorithm(team, control, operation, k);
  MPI_T_cvar_write(control->handle, &before);
  return well;
}

/* Returns the MPI library's name and version, without the text about its build that some libraries
 * append. */
static const char *bench_mpi_library(void) {
  static char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  name[strcspn(name, ",\n")] = '\0';
  return name;
}

static int bench_mpi_choose(struct bench_team *team, const struct bench_options *options,
                            onebit_operation_t operation) {
  struct state *state = team->state;
  struct control control;
  int provided, status = BENCH_OK;
  team->algorithms = state->algorithms;
  team->algorithm_count = 1;
  if (!options->all_algorithms)
    return BENCH_OK;
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &provided) != MPI_SUCCESS)
    return BENCH_FAILED;
  if (open_algorithm_control(&control, operation)) {
    status = bench_mpi_add_all(team, &control, operation) ? BENCH_OK : BENCH_FAILED;
    if (status != BENCH_OK && team->rank == 0)
      bench_print_error("--mpi-algorithms all: %s rejects an algorithm that it lists",
                        bench_mpi_library());
    MPI_T_cvar_handle_free(&control.handle);
  } else if (team->rank == 0) {
    bench_print_error("--mpi-algorithms: %s does not allow the choice of an algorithm, so its "
                      "default is measured",
                      bench_mpi_library());
  }
  MPI_T_finalize();
  return status;
}

/* --- The team */

static const struct bench_team_kind kind = {bench_mpi_barrier,     bench_mpi_combine,
                                            bench_mpi_choose,      bench_mpi_dense,
                                            bench_mpi_start_dense, bench_mpi_finish_dense};

/* Calls MPI_Init_thread, and returns this rank and the number of ranks that mpirun started. */
static void bench_mpi_init(int *argc, char ***argv, const struct bench_options *options, int *rank,
                           int *size) {
  int provided;
  bool thread;
  if (options->all_algorithms) /* Open MPI reads this variable in MPI_Init */
    setenv("OMPI_MCA_coll_tuned_use_dynamic_rules", "1", 1);
  /* Requests MPI_THREAD_MULTIPLE only if ONEBIT_PROGRESS needs it, since MPI's locks cost a little
   * time. The library later reports an invalid value of ONEBIT_PROGRESS. */
  (void)ob_progress_wanted(&thread);
  MPI_Init_thread(argc, argv, thread ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, size);
}

static int bench_mpi_run(bench_body *body, const void *context) {
  struct state state = {
      .request = MPI_REQUEST_NULL, .comms = {MPI_COMM_WORLD}, .algorithms = {{0, "default"}}};
  struct bench_team team = {.kind = &kind, .state = &state, .library = bench_mpi_library()};
  BENCH_TRY(bench_check_status(onebit_comm_create_mpi(MPI_COMM_WORLD, &team.comm),
                               "onebit_comm_create_mpi"));
  team.rank = onebit_comm_rank(team.comm);
  team.size = onebit_comm_size(team.comm);
  int status = body(&team, context);
  for (size_t k = 1; k < team.algorithm_count; k++)
    MPI_Comm_free(&state.comms[k]);
  onebit_comm_destroy(team.comm);
  return status;
}

#endif

/* --- The program */

/* The number of ranks, which are threads, in a build without MPI, unless --ranks is given. */
#define DEFAULT_THREAD_RANKS 2

struct job {
  const struct bench_benchmark *benchmark;
  struct bench_options options;
};

static int bench_run_body(struct bench_team *team, const void *context) {
  const struct job *job = context;
  return bench_run_benchmark(job->benchmark, &job->options, team);
}

/* Runs the benchmark on ranks that this process starts. The ranks are threads, but processes with
 * --nccl-ranks. On the emulated device, they are always threads, since its NCCL connects only ranks
 * of one process. */
static int run_own_ranks(const struct job *job) {
  int ranks = job->options.ranks ? job->options.ranks : DEFAULT_THREAD_RANKS;
  if (!job->options.nccl_ranks)
    return bench_team_run_threads(ranks, bench_run_body, job);
#ifdef ONEBIT_EMULATED_CUDA
  return bench_team_run_threads(job->options.nccl_ranks, bench_run_body, job);
#else
  return bench_team_run_processes(job->options.nccl_ranks, bench_run_body, job);
#endif
}

/* Runs the benchmark. If the command line asks for help or the version, or is wrong, prints the
 * answer on rank 0 instead. asked: the result of parsing the options. */
static int bench_run_job(const struct job *job, enum tool_asked asked, const char *error, int rank,
                         int size, bool mpi) {
  if (asked != TOOL_RUN)
    return bench_options_answer(job->benchmark, asked, error, rank == 0);
  if (!(job->benchmark->kind & BENCH_RANKED))
    return bench_run_body(NULL, job);
  if (size > 1 && job->options.ranks) {
    if (rank == 0)
      bench_print_error("--ranks %d: threads need a single process, but mpirun started %d",
                        job->options.ranks, size);
    return BENCH_USAGE;
  }
  if (job->options.sockets)
    return bench_sockets_run(job->options.connections, bench_run_body, job);
#ifdef ONEBIT_HAVE_MPI
  if (mpi && !job->options.ranks)
    return bench_mpi_run(bench_run_body, job);
#endif
  (void)mpi;
  return run_own_ranks(job);
}

static int print_usage(FILE *stream, int status) {
  fprintf(stream, "usage: onebit-bench SUBCOMMAND [options]\n\n");
  for (const struct bench_benchmark *row = bench_table; row->name; row++)
    fprintf(stream, "  %-16s%s\n", row->name, row->summary);
  fprintf(stream, "\nonebit-bench SUBCOMMAND --help lists the options of a subcommand.\n");
  return status;
}

/* Calls MPI_Init after the options are parsed, and only for benchmarks that use MPI ranks. */
int main(int argc, char **argv) {
  struct job job = {.benchmark = argc > 1 ? bench_find_benchmark(argv[1]) : NULL};
  char error[TOOL_ERROR];
  int rank = 0, size = 1;
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
    return print_usage(stdout, BENCH_OK);
  if (argc > 1 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-v") == 0))
    return printf("onebit-bench %s\n", onebit_version()) < 0;
  if (!job.benchmark && argc > 1) {
    bench_print_error("%s: no such subcommand; see onebit-bench --help", argv[1]);
    return BENCH_USAGE;
  }
  if (!job.benchmark)
    return print_usage(stderr, BENCH_USAGE);
  enum tool_asked asked = bench_options_parse(argc, argv, job.benchmark, &job.options, error);
  bool mpi = job.benchmark->kind & BENCH_RANKED && !job.options.nccl_ranks && !job.options.sockets;
  if (job.options.sockets && getenv("RANK"))
    rank = atoi(getenv("RANK")); /* rank 0 prints errors; the library checks the value */
  if (job.options.codec)         /* the library reads the codec's name from the environment */
    setenv(ob_knobs[OB_KNOB_CODEC].name, job.options.codec, 1);
#ifdef ONEBIT_HAVE_MPI
  if (mpi)
    bench_mpi_init(&argc, &argv, &job.options, &rank, &size);
#endif
  int status = bench_run_job(&job, asked, error, rank, size, mpi);
#ifdef ONEBIT_HAVE_MPI
  if (mpi)
    MPI_Finalize();
#endif
  return status;
}
