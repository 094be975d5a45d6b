/* A run of onebit-tune under mpirun, as this rank sees it, and what its doctor shares; all of it is
 * collective. */
#ifndef TOOLS_TUNE_RUN_MPI_H
#define TOOLS_TUNE_RUN_MPI_H

#include <mpi.h>

#include "tools/tune/tune.h"

struct tune_cluster {
  MPI_Comm all, local, leaders; /* leaders: the first ranks of hosts, MPI_COMM_NULL on the others */
  int rank, size, local_rank, local_size;
  int host, hosts; /* of this rank: the leader's rank among the leaders */
};

/* Finds the cluster. Collective over MPI_COMM_WORLD. */
void tune_cluster_find(struct tune_cluster *cluster);
void tune_cluster_free(struct tune_cluster *cluster);

/* Waits for the other ranks without using a processor, as MPI_Barrier may. */
void tune_wait_asleep(MPI_Comm comm);

/* Sends a small message round for `seconds` seconds, while every rank waits for it in MPI: to the
 * next rank, and in from the one before. Returns the mean time of a round, in microseconds, on the
 * first rank; and the median. */
double tune_go_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                     double *median);

struct tune_run {
  const struct tune_options *options;
  struct tune_cluster team;
  struct ob_cost_task cluster; /* hosts and ranks */
  struct ob_costs costs;
};

/* Returns the largest of all ranks' values; the function below is true if all ranks are well. */
double tune_largest(double value);
bool tune_all_well(bool well);

/* Fills an array with numbers to work on. */
void tune_fill(float *values, size_t count, uint64_t seed);

/* Measures whole calls: the times to which the model is fitted, and its errors afterwards, into
 * costs.measured. False on all ranks after complaining. */
bool tune_calls(struct tune_run *run, struct tune_points *points);

#endif
