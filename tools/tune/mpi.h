/* The measuring parts of onebit-tune; all are collective over the ranks of mpirun. */
#ifndef TOOLS_TUNE_MPI_H
#define TOOLS_TUNE_MPI_H

#include <mpi.h>

#include "tools/tune/tune.h"

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

struct tune_buffers {
  float *send, *receive;
  onebit_comm_t comm;
};

/* Of so many bytes each. False on all ranks after complaining; to be destroyed even so. */
bool tune_buffers_create(const struct tune_cluster *cluster, size_t bytes,
                         struct tune_buffers *buffers);
void tune_buffers_destroy(struct tune_buffers *buffers);

/* The plan of a point. *possible is false when the library does not do this: then there is nothing
 * to measure, and *plan is NULL or to be destroyed. MPI_Allreduce needs none. */
onebit_status_t tune_plan_create(const struct tune_buffers *buffers, const struct tune_point *point,
                                 bool *possible, onebit_plan_t *plan);

/* Seconds of a call on the slowest rank. */
onebit_status_t tune_call_seconds(const struct tune_buffers *buffers,
                                  const struct tune_point *point, onebit_plan_t plan,
                                  double *seconds);

/* Measures the fastest messages and every schedule at a ladder of sizes, into costs->measured: what
 * corrects the model, which is to be fitted before. The same costs on all ranks, before and after.
 * False after complaining. */
bool tune_corrections(const struct tune_cluster *cluster, struct ob_costs *costs, bool quick);

/* Adds the times of MPI_Allreduce and onebit_allreduce. False after complaining. */
bool tune_collectives(const struct tune_cluster *cluster, struct tune_points *points, bool quick);

#endif
