/* Measures a cluster under mpirun, for onebit-tune and its doctor. All functions are collective. */
#ifndef TOOLS_TUNE_RUN_MPI_H
#define TOOLS_TUNE_RUN_MPI_H

#include <mpi.h>

#include "tools/tune/tune.h"

struct tune_cluster {
  MPI_Comm all, local, leaders; /* leaders: each host's first rank; else MPI_COMM_NULL */
  int rank, size, local_rank, local_size;
  int host, hosts; /* host: number of this host, the rank of its leader among the leaders */
};

/* Finds the cluster. Collective over MPI_COMM_WORLD. */
void tune_cluster_find(struct tune_cluster *cluster);
void tune_cluster_free(struct tune_cluster *cluster);

/* Waits for the other ranks without using the processor; MPI_Barrier may use it. */
void tune_wait_asleep(MPI_Comm comm);

/* Passes a small message round for `seconds` seconds: every rank waits in MPI for the message from
 * rank `before` and sends it to rank `next`. Returns on the first rank the mean time of a round in
 * microseconds, and sets *median. */
double tune_pass_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                       double *median);

struct tune_run {
  const struct tune_options *options;
  struct tune_cluster team;
  struct ob_cost_task cluster; /* the numbers of hosts and ranks */
  struct ob_costs costs;
};

/* Return the largest of all ranks' values, and true if all ranks have succeeded. */
double tune_allreduce_max(double value);
bool tune_have_all_succeeded(bool well);

/* Fills an array with pseudo-random numbers. */
void tune_fill_random(float *values, size_t count, uint64_t seed);

/* Measures whole calls: the points to which the model is fitted, and costs.measured. After an error
 * prints a message, and returns false on all ranks. */
bool tune_measure_calls(struct tune_run *run, struct tune_points *points);

#endif
