/* The subcommands. */
#include <string.h>

#include "bench/bench_buckets.h"
#include "bench/bench_collective.h"
#include "bench/bench_optimizers.h"
#include "bench/bench_passes.h"

#ifdef ONEBIT_HAVE_CUDA
#include "bench/bench_cuda.h"
#define CUDA(run) run
#else
#define CUDA(run) NULL
#endif

const struct bench_benchmark bench_table[] = {
    {"allreduce", "onebit_allreduce beside MPI_Allreduce", BENCH_COLLECTIVES, 4 << 10, 16 << 20,
     bench_run_collective, CUDA(bench_cuda_collective)},
    {"allgather", "onebit_allgather beside MPI_Allgather", BENCH_COLLECTIVES, 4 << 10, 4 << 20,
     bench_run_collective, CUDA(bench_cuda_collective)},
    {"reduce-scatter", "onebit_reduce_scatter beside MPI_Reduce_scatter_block", BENCH_COLLECTIVES,
     4 << 10, 16 << 20, bench_run_collective, CUDA(bench_cuda_collective)},
    {"iallreduce", "onebit_iallreduce beside a computation, and MPI_Iallreduce", BENCH_NONBLOCKING,
     4 << 10, 16 << 20, bench_run_nonblocking, NULL},
    {"iallgather", "onebit_iallgather beside a computation, and MPI_Iallgather", BENCH_NONBLOCKING,
     4 << 10, 4 << 20, bench_run_nonblocking, NULL},
    {"ireduce-scatter",
     "onebit_ireduce_scatter beside a computation, and MPI_Ireduce_scatter_block",
     BENCH_NONBLOCKING, 4 << 10, 16 << 20, bench_run_nonblocking, NULL},
    {"codec", "one core's passes over memory, beside a triad loop and memcpy", BENCH_CODEC, 0,
     128 << 20, bench_run_codec, CUDA(bench_cuda_codec)},
    {"adam", "the local work of a 1-bit Adam step, beside a fused Adam step", BENCH_ADAM, 0,
     128 << 20, bench_run_adam, CUDA(bench_cuda_adam)},
    {"optimizers", "the local work of each optimizer's step, beside its dense step", BENCH_ADAM, 0,
     128 << 20, bench_run_optimizers, NULL},
    {"buckets", "steps of 1-bit Adam that overlap with a backward pass", BENCH_COLLECTIVES,
     16 << 20, 16 << 20, bench_run_buckets, NULL},
    {0},
};

const struct bench_benchmark *bench_find(const char *name) {
  for (const struct bench_benchmark *row = bench_table; row->name; row++)
    if (strcmp(row->name, name) == 0)
      return row;
  return NULL;
}

int bench_run_on(const struct bench_benchmark *benchmark, const struct bench_options *options,
                 struct bench_team *team) {
  bool cuda = options->device == ONEBIT_DEVICE_CUDA;
  return (cuda ? benchmark->run_cuda : benchmark->run)(benchmark, options, team);
}
