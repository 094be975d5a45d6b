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

/* Ranks in a build without MPI, when nobody says how many. */
#define DEFAULT_THREAD_RANKS 2

struct job {
  const struct bench_benchmark *benchmark;
  struct bench_options options;
};

static int run_job(struct bench_team *team, const void *context) {
  const struct job *job = context;
  return bench_run_on(job->benchmark, &job->options, team);
}

static void print_usage(FILE *stream) {
  fprintf(stream, "usage: onebit-bench SUBCOMMAND [options]\n\n");
  for (const struct bench_benchmark *row = bench_table; row->name; row++)
    fprintf(stream, "  %-16s%s\n", row->name, row->summary);
  fprintf(stream, "\nonebit-bench SUBCOMMAND --help has the options.\n");
}

/* Reads the options; `speak`: this rank says what there is to say. False when that was all, with
 * the exit status. */
static bool prepare(int argc, char **argv, struct job *job, bool speak, int *status) {
  char error[256];
  bool help;
  *status = BENCH_OK;
  if (!bench_options_parse(argc, argv, job->benchmark, &job->options, &help, error)) {
    if (speak)
      bench_complain("%s", error);
    *status = BENCH_USAGE;
    return false;
  }
  if (help && speak)
    bench_print_help(job->benchmark);
  /* The library reads its choice of codec from there. */
  if (job->options.codec)
    setenv(ob_knobs[OB_KNOB_CODEC].name, job->options.codec, 1);
  return !help;
}

/* Ranks that this process starts, without MPI: on the emulated device, which NCCL's ranks share
 * within a process, they are threads. */
static int run_processes(int argc, char **argv, struct job *job) {
  int status;
  if (!prepare(argc, argv, job, true, &status))
    return status;
#ifdef ONEBIT_EMULATED_CUDA
  return bench_team_run_threads(job->options.nccl_ranks, run_job, job);
#else
  return bench_team_run_processes(job->options.nccl_ranks, run_job, job);
#endif
}

/* MPI must not be begun before processes are started. */
static bool wants_processes(int argc, char **argv) {
  for (int i = 2; i < argc; i++)
    if (strncmp(argv[i], "--nccl-ranks", strlen("--nccl-ranks")) == 0)
      return true;
  return false;
}

/* Benchmarks that have ranks: under MPI unless --ranks asks for threads. */
#ifdef ONEBIT_HAVE_MPI
static int run_ranks(int argc, char **argv, struct job *job) {
  int rank, size, status;
  for (int i = 2; i < argc; i++)
    if (strncmp(argv[i], "--mpi-algorithms", strlen("--mpi-algorithms")) == 0)
      bench_mpi_allow_algorithms();
  bench_mpi_begin(&argc, &argv, &rank, &size);
  bool go = prepare(argc, argv, job, rank == 0, &status);
  if (go && job->options.ranks && size > 1) {
    if (rank == 0)
      bench_complain("--ranks %d: threads are for one process, and mpirun started %d",
                     job->options.ranks, size);
    go = false;
    status = BENCH_USAGE;
  }
  if (go)
    status = job->options.ranks ? bench_team_run_threads(job->options.ranks, run_job, job)
                                : bench_mpi_run(run_job, job);
  bench_mpi_end();
  return status;
}
#else
static int run_ranks(int argc, char **argv, struct job *job) {
  int status;
  if (!prepare(argc, argv, job, true, &status))
    return status;
  if (!job->options.ranks)
    job->options.ranks = DEFAULT_THREAD_RANKS;
  return bench_team_run_threads(job->options.ranks, run_job, job);
}
#endif

int main(int argc, char **argv) {
  struct job job = {.benchmark = argc > 1 ? bench_find(argv[1]) : NULL};
  if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
    print_usage(stdout);
    return BENCH_OK;
  }
  if (!job.benchmark) {
    if (argc > 1)
      bench_complain("%s: no such subcommand", argv[1]);
    print_usage(stderr);
    return BENCH_USAGE;
  }
  if (job.benchmark->kind & BENCH_RANKED)
    return wants_processes(argc, argv) ? run_processes(argc, argv, &job)
                                       : run_ranks(argc, argv, &job);
  int status;
  return prepare(argc, argv, &job, true, &status) ? run_job(NULL, &job) : status;
}
