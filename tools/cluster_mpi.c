/* Finds the hosts of mpirun's ranks. */
#define _POSIX_C_SOURCE 200809L
#include "tools/cluster_mpi.h"

#include <time.h>

#include "base/process.h"
#include "tools/tune/tune.h"

void tool_cluster_find(struct tool_cluster *cluster) {
  MPI_Comm_dup(MPI_COMM_WORLD, &cluster->all);
  MPI_Comm_rank(cluster->all, &cluster->rank);
  MPI_Comm_size(cluster->all, &cluster->size);
  MPI_Comm_split_type(cluster->all, MPI_COMM_TYPE_SHARED, cluster->rank, MPI_INFO_NULL,
                      &cluster->local);
  MPI_Comm_rank(cluster->local, &cluster->local_rank);
  MPI_Comm_size(cluster->local, &cluster->local_size);
  MPI_Comm_split(cluster->all, cluster->local_rank == 0 ? 0 : MPI_UNDEFINED, cluster->rank,
                 &cluster->leaders);
  if (cluster->leaders != MPI_COMM_NULL)
    MPI_Comm_rank(cluster->leaders, &cluster->host);
  MPI_Bcast(&cluster->host, 1, MPI_INT, 0, cluster->local);
  cluster->hosts = cluster->host + 1;
  MPI_Allreduce(MPI_IN_PLACE, &cluster->hosts, 1, MPI_INT, MPI_MAX, cluster->all);
}

void tool_cluster_free(struct tool_cluster *cluster) {
  if (cluster->leaders != MPI_COMM_NULL)
    MPI_Comm_free(&cluster->leaders);
  MPI_Comm_free(&cluster->local);
  MPI_Comm_free(&cluster->all);
}

void tool_wait_asleep(MPI_Comm comm) {
  const struct timespec moment = {.tv_nsec = 500000};
  MPI_Request request;
  int done = 0;
  MPI_Ibarrier(comm, &request);
  for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done;
       MPI_Test(&request, &done, MPI_STATUS_IGNORE))
    nanosleep(&moment, NULL);
}

enum { MAX_SAMPLES = 512 };

double tool_go_round(MPI_Comm comm, int next, int before, bool first, double seconds,
                     double *median) {
  double samples[MAX_SAMPLES], start = ob_seconds(), last = start;
  int go = 1, count = 0;
  while (go) {
    if (first) {
      go = last - start < seconds;
      MPI_Send(&go, 1, MPI_INT, next, 0, comm);
    }
    MPI_Recv(&go, 1, MPI_INT, before, 0, comm, MPI_STATUS_IGNORE);
    if (!first)
      MPI_Send(&go, 1, MPI_INT, next, 0, comm);
    double now = ob_seconds();
    samples[count++ % MAX_SAMPLES] = 1e6 * (now - last);
    last = now;
  }
  *median = tune_median(samples, count < MAX_SAMPLES ? count : MAX_SAMPLES);
  return 1e6 * (last - start) / count;
}
