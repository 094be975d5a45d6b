/* Finds the hosts of mpirun's ranks. */
#ifndef TOOLS_CLUSTER_MPI_H
#define TOOLS_CLUSTER_MPI_H

#include <mpi.h>
#include <stdbool.h>

struct tool_cluster {
  MPI_Comm all, local, leaders; /* leaders: the first ranks of hosts, MPI_COMM_NULL on the others */
  int rank, size, local_rank, local_size;
  int host, hosts; /* of this rank: the leader's rank among the leaders */
};

/* Finds the cluster. Collective over MPI_COMM_WORLD. */
void tool_cluster_find(struct tool_cluster *cluster);
void tool_cluster_free(struct tool_cluster *cluster);

/* Waits for the other ranks without using a processor, as MPI_Barrier may. */
void tool_wait_asleep(MPI_Comm comm);

/* Sends a small message round for so many seconds, while every rank waits for it in MPI: to the
 * next rank, and in from the one before. Returns the mean time of a round, in microseconds, on the
 * first rank; and the median. */
double tool_go_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                     double *median);

#endif
