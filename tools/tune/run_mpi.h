/* Measures a cluster under mpirun, for onebit-tune and its doctor. All functions are collective. */
#ifndef TOOLS_TUNE_RUN_MPI_H
#define TOOLS_TUNE_RUN_MPI_H

#include <mpi.h>

#include "tools/tune/tune.h"

struct tune_cluster {
  MPI_Comm all, local, leaders; /* leaders: the first ranks of all hosts; MPI_COMM_NULL on others */
  int rank, size, local_rank, local_size;
  int host, hosts; /* host: this host's number, which is its leader's rank in `leaders` */
};

/* Finds the cluster. Collective over MPI_COMM_WORLD. */
void tune_cluster_find(struct tune_cluster *cluster);
void tune_cluster_free(struct tune_cluster *cluster);

/* Waits for the other ranks without using the processor, which MPI_Barrier may do. */
void tune_wait_asleep(MPI_Comm comm);

/* Passes a small message round a ring for `seconds` seconds: every rank waits in MPI for the
 * message from rank `before` and sends it to rank `next`. Returns the mean time of a round in
 * microseconds, and stores the median; both are valid on the rank with `first`. */
double tune_pass_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                       double *median);

struct tune_run {
  const struct tune_options *options;
  struct tune_cluster team;
  struct ob_cost_task cluster; /* the numbers of hosts and ranks */
  struct ob_costs costs;
};

/* tune_allreduce_max returns the largest value of all ranks. tune_have_all_succeeded returns true
 * if the argument is true on all ranks. */
double tune_allreduce_max(double value);
bool tune_have_all_succeeded(bool well);

/* Fills an array with pseudo-random numbers. */
void tune_fill_random(float *values, size_t count, uint64_t seed);

/* Measures whole calls, fits the model to them, and fills in costs.measured. After an error, prints
 * a message and returns false on all ranks. */
bool tune_measure_calls(struct tune_run *run, struct tune_points *points);

#endif
