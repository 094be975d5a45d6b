/* A run of onebit-tune under mpirun, as this rank sees it; all of it is collective. */
#ifndef TOOLS_TUNE_RUN_MPI_H
#define TOOLS_TUNE_RUN_MPI_H

#include "tools/cluster_mpi.h"
#include "tools/tune/tune.h"

struct tune_run {
  const struct tune_options *options;
  struct tool_cluster team;
  struct ob_cost_task cluster; /* hosts and ranks */
  struct ob_costs costs;
};

/* The largest of all ranks' values; below, true if all ranks are well. */
double tune_largest(double value);
bool tune_all_well(bool well);

/* Fills an array with numbers to work on. */
void tune_fill(float *values, size_t count, uint64_t seed);

/* Measures whole calls: the times to which the model is fitted, and its errors afterwards, into
 * costs.measured. False on all ranks after complaining. */
bool tune_calls(struct tune_run *run, struct tune_points *points);

#endif
