/* The measuring parts of onebit-tune; all are collective over the ranks of mpirun. */
#ifndef BENCH_TUNE_MPI_H
#define BENCH_TUNE_MPI_H

#include <mpi.h>

#include "bench/tune.h"

/* Communicators of a cluster. `leaders`: the first ranks of hosts, MPI_COMM_NULL elsewhere. */
struct tune_mpi {
  MPI_Comm host, leaders;
};

/* Waits for all ranks without taking a core from them, as MPI_Barrier may. */
void tune_wait(MPI_Comm comm);

/* The largest of all ranks' values. */
double tune_largest(double value);

/* Latency, bandwidth and cost of a message, between hosts and inside; what cannot be measured (one
 * host, one rank a host) stays as it is. */
void tune_links(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick);

/* Speeds of the codec on one core, and how many cores ranks and hosts share. False after
 * complaining. */
bool tune_codec(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick);

/* Adds the times of MPI_Allreduce and onebit_allreduce. False after complaining. */
bool tune_collectives(const struct tune_cluster *cluster, struct tune_points *points, bool quick);

#endif
