/* onebit-tune: what the cluster's network can do, and what to set. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "bench/tune_doctor.h"

int main(int argc, char **argv) {
  int status = DOCTOR_USAGE;
  MPI_Init(&argc, &argv);
  if (argc > 1 && strcmp(argv[1], "--doctor") == 0)
    status = tune_doctor(argc - 2, argv + 2);
  else
    fprintf(stderr, "Usage: onebit-tune --doctor\n");
  MPI_Finalize();
  return status;
}
