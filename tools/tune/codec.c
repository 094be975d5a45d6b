/* The codec's speed: of one rank alone, and of the ranks of one host at once, which says how many
 * cores they have. */
#ifdef ONEBIT_HAVE_MPI
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "bench/bench_passes.h"
#include "tools/tune/mpi.h"

/* Larger than caches, smaller than what the ranks of a full host have no memory for: some ten
 * arrays of 16 MiB. */
#define ELEMENTS ((size_t)4 << 20)
#define STREAMS  8
#define TURNS    3

/* Slowdowns below this are memory's, or noise: the ranks have a core each. */
#define SHARING 1.4

enum { COMPRESS, REDUCE_2, REDUCE_8, STORE, COPY, PASSES };

/* Means: ranks that take turns on a core have the medians of those that do not. */
static bool time_passes(struct bench_passes *passes, bool quick, double seconds[PASSES]) {
  const struct bench_options options = {.iterations = quick ? 2 : 5, .warmups = 1};
  struct bench_rounds rounds = {.count = 0};
  bench_rounds_add(&rounds, &bench_compress, 0);
  bench_rounds_add(&rounds, &bench_reduce, 2);
  bench_rounds_add(&rounds, &bench_reduce, STREAMS);
  bench_rounds_add(&rounds, &bench_store, 0);
  bench_rounds_add(&rounds, &bench_memcpy, 0);
  bool well = bench_rounds_run(&rounds, &options, passes) == BENCH_OK;
  for (int k = 0; well && k < PASSES; k++)
    seconds[k] = bench_statistics(rounds.entries[k].times, rounds.rounds).mean / (double)ELEMENTS;
  bench_rounds_destroy(&rounds);
  return well;
}

/* The ranks that are asked work, the others sleep. Seconds an element, of rank 0. */
static bool time_some(struct bench_passes *passes, bool asked, bool quick, double seconds[PASSES]) {
  tune_wait(MPI_COMM_WORLD);
  bool well = !asked || time_passes(passes, quick, seconds);
  tune_wait(MPI_COMM_WORLD);
  MPI_Bcast(seconds, PASSES, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  return well;
}

/* Whether all ranks run on one kernel, whatever the names of their hosts, as in containers and
 * emulated clusters, whose hosts share its cores. Told by the boot ID of Linux; elsewhere every
 * host counts as a machine. */
static bool one_machine(void) {
  char boot[2][64], own[64] = "";
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
  bool known = file && fgets(own, sizeof own, file);
  if (file)
    fclose(file);
  MPI_Allreduce(own, boot[0], sizeof own, MPI_SIGNED_CHAR, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(own, boot[1], sizeof own, MPI_SIGNED_CHAR, MPI_MAX, MPI_COMM_WORLD);
  return tune_largest(known ? 0 : 1) == 0 && memcmp(boot[0], boot[1], sizeof own) == 0;
}

static double slowdown(const double *alone, const double *together) {
  return together[COMPRESS] / alone[COMPRESS];
}

static void take(const struct tune_cluster *cluster, const double *alone, const double *host,
                 struct ob_costs *costs) {
  double on_host = slowdown(alone, host);
  costs->compress = alone[COMPRESS];
  costs->reduce_stream = fmax(0, (alone[REDUCE_8] - alone[REDUCE_2]) / (STREAMS - 2));
  costs->reduce = fmax(0, alone[REDUCE_2] - 2 * costs->reduce_stream);
  costs->apply = alone[STORE];
  costs->load = costs->convert = alone[COPY];
  costs->add = alone[COPY] / 2; /* reads, and hardly writes */
  costs->cores_per_host = on_host > SHARING ? cluster->most_ranks / on_host : 0;
  costs->cores_shared =
      cluster->hosts > 1 && one_machine() ? (double)sysconf(_SC_NPROCESSORS_ONLN) : 0;
}

bool tune_codec(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick) {
  const struct bench_options options = {.threads = 1, .streams = {STREAMS}, .stream_count = 1};
  struct bench_passes passes;
  double alone[PASSES], host[PASSES];
  int host_of_first = cluster->rank == 0;
  bool well = bench_passes_create(&options, ELEMENTS, STREAMS, &passes) == BENCH_OK;
  MPI_Allreduce(MPI_IN_PLACE, &host_of_first, 1, MPI_INT, MPI_MAX, cluster->mpi->host);
  if (tune_largest(well ? 0 : 1) == 0) {
    for (int k = 0; k < PASSES; k++)
      alone[k] = host[k] = 1;
    for (int turn = 0; turn < TURNS; turn++) {
      well &= time_some(&passes, cluster->rank == 0, quick, alone);
      well &= time_some(&passes, host_of_first, quick, host);
    }
    take(cluster, alone, host, costs);
  }
  bench_passes_destroy(&passes);
  return tune_largest(well ? 0 : 1) == 0;
}

#else
typedef int tune_no_codec_here; /* ISO C wants a declaration in every file */
#endif
