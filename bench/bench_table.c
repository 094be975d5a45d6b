/* The subcommands, and their common memory, format and sizes. */
#include <string.h>
#include <unistd.h>

#include "base/process.h"
#include "bench/bench.h"

#ifdef ONEBIT_HAVE_CUDA
#include "bench/bench_cuda.h"
#define CUDA(run) run
#else
#define CUDA(run) NULL
#endif

#define K ((size_t)1 << 10)
#define M ((size_t)1 << 20)

/* clang-format off */
const struct bench_benchmark bench_table[] = {
    {"allreduce", "onebit_allreduce beside MPI_Allreduce",
     BENCH_COLLECTIVES, 4 * K, 16 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"allgather", "onebit_allgather beside MPI_Allgather",
     BENCH_COLLECTIVES, 4 * K, 4 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"reduce-scatter", "onebit_reduce_scatter beside MPI_Reduce_scatter_block",
     BENCH_COLLECTIVES, 4 * K, 16 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"iallreduce", "onebit_iallreduce beside a computation, and MPI_Iallreduce",
     BENCH_NONBLOCKING, 4 * K, 16 * M, bench_run_nonblocking, NULL},
    {"iallgather", "onebit_iallgather beside a computation, and MPI_Iallgather",
     BENCH_NONBLOCKING, 4 * K, 4 * M, bench_run_nonblocking, NULL},
    {"ireduce-scatter",
     "onebit_ireduce_scatter beside a computation, and MPI_Ireduce_scatter_block",
     BENCH_NONBLOCKING, 4 * K, 16 * M, bench_run_nonblocking, NULL},
    {"codec", "one core's passes over memory, beside a triad loop and memcpy",
     BENCH_CODEC, 0, 128 * M, bench_run_codec, CUDA(bench_run_codec)},
    {"adam", "the local work of a 1-bit Adam step, beside a fused Adam step",
     BENCH_ADAM, 0, 128 * M, bench_run_adam, CUDA(bench_run_adam)},
    {"optimizers", "the local work of each optimizer's step, beside its dense step",
     BENCH_ADAM, 0, 128 * M, bench_run_optimizers, CUDA(bench_run_optimizers)},
    {0}};
/* clang-format on */

const struct bench_benchmark *bench_find(const char *name) {
  const struct bench_benchmark *row = bench_table;
  while (row->name && strcmp(row->name, name) != 0)
    row++;
  return row->name ? row : NULL;
}

int bench_run_on(const struct bench_benchmark *benchmark, const struct bench_options *options,
                 struct bench_team *team) {
  struct bench_table table = {.benchmark = benchmark->name,
                              .format = options->json  ? BENCH_JSON
                                        : options->csv ? BENCH_CSV
                                                       : BENCH_TEXT};
  struct bench_job job = {benchmark, options, team, NULL, &table, true, false, {0}};
  job.progress = (struct bench_progress){
      .open = !team || team->rank == 0, .terminal = isatty(STDERR_FILENO), .start = ob_seconds()};
  if (options->device == ONEBIT_DEVICE_HOST)
    return benchmark->run(&job);
  int status = BENCH_USAGE;
#ifdef ONEBIT_HAVE_CUDA
  struct bench_device device;
  status = bench_device_open(team, &device);
  job.device = &device;
  table.device = device.properties.name;
  table.emulated = BENCH_EMULATED;
  if (status == BENCH_OK)
    status = benchmark->run_cuda(&job);
  bench_device_close(&device);
#endif
  return status;
}

/* Measures each size. On the host a collective whose result is wrong goes on with the next size;
 * other failures would fail there too. */
int bench_each_size(struct bench_job *job, bench_size *measure, void *context) {
  int worst = BENCH_OK;
  for (size_t bytes = job->options->smallest; bytes <= job->options->largest;
       bytes *= job->options->factor) {
    job->last = bytes * job->options->factor > job->options->largest;
    int status = measure(job, bytes, context);
    worst = status > worst ? status : worst;
    if (status == BENCH_USAGE || (status != BENCH_OK && (!job->team || job->device)))
      break;
  }
  return worst;
}

onebit_adam_options_t bench_adam_options(const struct bench_options *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.freeze_step = 1;
  adam.common.device = options->device;
  adam.common.scale = options->scale;
  adam.common.block_size = options->block_size;
  adam.common.chunk_size = options->chunk_size;
  adam.common.threads = options->threads;
  return adam;
}
