/* onebit-bench SUBCOMMAND [options]: finds the benchmark and gives it its ranks. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/knobs.h"
#include "bench/bench.h"
#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h> /* says whether the device is emulated */
#endif

/* The number of ranks in a build without MPI where the user gives none. */
#define DEFAULT_THREAD_RANKS 2

struct job {
  const struct bench_benchmark *benchmark;
  struct bench_options options;
};

static int run_job(struct bench_team *team, const void *context) {
  const struct job *job = context;
  return bench_run_on(job->benchmark, &job->options, team);
}

/* Runs the benchmark on ranks that this process starts; on the emulated device, which NCCL's ranks
 * share within a process, they are threads. */
static int run_own_ranks(const struct job *job) {
  int ranks = job->options.ranks ? job->options.ranks : DEFAULT_THREAD_RANKS;
  if (!job->options.nccl_ranks)
    return bench_team_run_threads(ranks, run_job, job);
#ifdef ONEBIT_EMULATED_CUDA
  return bench_team_run_threads(job->options.nccl_ranks, run_job, job);
#else
  return bench_team_run_processes(job->options.nccl_ranks, run_job, job);
#endif
}

/* Runs the benchmark, or answers the options, whose outcome is `asked`, on rank 0. */
static int bench_run_job(const struct job *job, enum tool_asked asked, const char *error, int rank,
                         int size, bool mpi) {
  if (asked != TOOL_RUN)
    return bench_options_answer(job->benchmark, asked, error, rank == 0);
  if (!(job->benchmark->kind & BENCH_RANKED))
    return run_job(NULL, job);
  if (size > 1 && job->options.ranks) {
    if (rank == 0)
      bench_complain("--ranks %d: threads need a single process, but mpirun started %d",
                     job->options.ranks, size);
    return BENCH_USAGE;
  }
  if (job->options.sockets)
    return bench_sockets_run(job->options.connections, run_job, job);
#ifdef ONEBIT_HAVE_MPI
  if (mpi && !job->options.ranks)
    return bench_mpi_run(run_job, job);
#endif
  (void)mpi;
  return run_own_ranks(job);
}

static int print_usage(FILE *stream, int status) {
  fprintf(stream, "usage: onebit-bench SUBCOMMAND [options]\n\n");
  for (const struct bench_benchmark *row = bench_table; row->name; row++)
    fprintf(stream, "  %-16s%s\n", row->name, row->summary);
  fprintf(stream, "\nonebit-bench SUBCOMMAND --help has the options.\n");
  return status;
}

/* Starts MPI for benchmarks that have ranks, but not before processes are started. */
int main(int argc, char **argv) {
  struct job job = {.benchmark = argc > 1 ? bench_find(argv[1]) : NULL};
  char error[TOOL_ERROR];
  int rank = 0, size = 1;
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
    return print_usage(stdout, BENCH_OK);
  if (argc > 1 && (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-v") == 0))
    return printf("onebit-bench %s\n", onebit_version()) < 0;
  if (!job.benchmark && argc > 1) {
    bench_complain("%s: no such subcommand; see onebit-bench --help", argv[1]);
    return BENCH_USAGE;
  }
  if (!job.benchmark)
    return print_usage(stderr, BENCH_USAGE);
  enum tool_asked asked = bench_options_parse(argc, argv, job.benchmark, &job.options, error);
  bool mpi = job.benchmark->kind & BENCH_RANKED && !job.options.nccl_ranks && !job.options.sockets;
  if (job.options.sockets && getenv("RANK"))
    rank = atoi(getenv("RANK")); /* who says what is wrong; the library looks at it closely */
  if (job.options.codec)         /* the library reads its choice from there */
    setenv(ob_knobs[OB_KNOB_CODEC].name, job.options.codec, 1);
#ifdef ONEBIT_HAVE_MPI
  if (mpi)
    bench_mpi_begin(&argc, &argv, &job.options, &rank, &size);
#endif
  int status = bench_run_job(&job, asked, error, rank, size, mpi);
#ifdef ONEBIT_HAVE_MPI
  if (mpi)
    bench_mpi_end();
#endif
  return status;
}
