/*
 * Fits a line by gradient descent with momentum; each rank has its own points. This is a
 * data-parallel program with ONEBIT_Allreduce in place of MPI_Allreduce. It exchanges the momentum,
 * not the gradient, so that it also works in one bit (ONEBIT_BITS=1). mpirun -n 4 mpi_calls
 */
#include <math.h>
#include <onebit/mpi_calls.h>
#include <stdio.h>
#include <stdlib.h>

enum { FEATURES = 5000, POINTS = 8, STEPS = 400 };

static float feature(int rank, int point, int i) {
  unsigned n = (unsigned)(rank * POINTS + point) * 7919u + (unsigned)i * 104729u;
  n = (n ^ n >> 13) * 2654435761u;
  return (float)(n >> 16 & 0xff) / 128 - 1;
}

static float true_weight(int i) { return (float)(i % 11 - 5) / 10; }

/* Adds the gradient of this rank's points to the decayed momentum; returns the mean squared error
 * of the line. */
static double add_gradient(int rank, const float *weights, float *momentum) {
  double loss = 0;
  for (int point = 0; point < POINTS; point++) {
    float missed = 0;
    for (int i = 0; i < FEATURES; i++)
      missed += feature(rank, point, i) * (weights[i] - true_weight(i));
    for (int i = 0; i < FEATURES; i++)
      momentum[i] += 0.1f * missed * feature(rank, point, i) / POINTS;
    loss += (double)missed * (double)missed / POINTS;
  }
  return loss;
}

int main(int argc, char **argv) {
  static float weights[FEATURES], momentum[FEATURES];
  double first = 0, loss = 0, all = 0;
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < FEATURES; i++)
      momentum[i] *= 0.9f;
    loss = add_gradient(rank, weights, momentum);
    /* This call replaces MPI_Allreduce(MPI_IN_PLACE, momentum, FEATURES, MPI_FLOAT, MPI_SUM,
     * MPI_COMM_WORLD) and a division by the number of ranks. */
    ONEBIT_Allreduce(MPI_IN_PLACE, momentum, FEATURES, MPI_FLOAT, ONEBIT_AVG, MPI_COMM_WORLD);
    for (int i = 0; i < FEATURES; i++)
      weights[i] -= 2e-4f * momentum[i];
    MPI_Allreduce(&loss, &all, 1, MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD); /* one number stays uncompressed */
    first = step ? first : all;
  }
  if (rank == 0)
    printf("loss: %.3g before, %.3g after %d steps\n", first, all, STEPS);
  MPI_Finalize();
  return all < first / 100 ? EXIT_SUCCESS : EXIT_FAILURE;
}
