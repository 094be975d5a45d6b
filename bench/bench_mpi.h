/* What the two files about MPI share. */
#ifndef BENCH_MPI_H
#define BENCH_MPI_H

#include <mpi.h>

#include "bench/bench.h"

struct bench_mpi_state {
  /* In Open MPI a communicator keeps the algorithms that were set when it was made. */
  MPI_Comm comms[BENCH_ALGORITHMS + 1];
  struct bench_algorithm algorithms[BENCH_ALGORITHMS + 1];
  MPI_Request request; /* of a nonblocking dense collective */
};

/* The dense collective, blocking, on a communicator; MPI's status. */
int bench_mpi_dense(MPI_Comm comm, onebit_operation_t operation, const float *send, float *receive,
                    int count);

/* The team kind's `choose`. */
int bench_mpi_choose(struct bench_team *team, const struct bench_options *options,
                     onebit_operation_t operation);
void bench_mpi_forget(struct bench_team *team);

#endif
