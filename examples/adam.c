/* Fits a linear model with Efficient-Adam; each rank has its own points: mpirun -n 4 adam */
#include <onebit/mpi.h>
#include <onebit/onebit.h>
#include <stdio.h>

enum { FEATURES = 20000, POINTS = 16, STEPS = 300 };
static float weights[FEATURES], gradient[FEATURES];

static float feature(int point, int i) { /* returns a pseudorandom value from -1 to 1 */
  unsigned n = ((unsigned)point * 7919u + (unsigned)i * 104729u) * 2654435761u;
  return (float)((n ^ n >> 15) >> 8 & 0xffff) / 32768 - 1;
}

/* Computes the gradient of the mean squared error on this rank's points. */
static double compute_gradient(int rank) {
  double loss = 0;
  for (int i = 0; i < FEATURES; i++)
    gradient[i] = 0;
  for (int point = rank * POINTS; point < (rank + 1) * POINTS; point++) {
    float missed = 0;
    for (int i = 0; i < FEATURES; i++)
      missed += feature(point, i) * (weights[i] - (float)(i % 11 - 5) / 100);
    for (int i = 0; i < FEATURES; i++)
      gradient[i] += missed * feature(point, i) / POINTS;
    loss += (double)(missed * missed) / POINTS;
  }
  return loss;
}

int main(int argc, char **argv) {
  char line[400];
  onebit_comm_t comm = NULL;
  onebit_optimizer_t optimizer = NULL;
  MPI_Init(&argc, &argv);
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  onebit_tensor_t tensor = {.parameter = weights, .gradient = gradient, .count = FEATURES};
  if (status == ONEBIT_OK) /* NULL: default options */
    status = onebit_efficient_adam_create(comm, &tensor, 1, NULL, &optimizer);
  for (int step = 1; step <= STEPS && status == ONEBIT_OK; step++) {
    double loss = compute_gradient(onebit_comm_rank(comm)); /* the loss on this rank's points */
    status = onebit_optimizer_step(optimizer, 1e-3f * (float)(STEPS - step) / STEPS);
    if (step % 50 == 0 && status == ONEBIT_OK && onebit_comm_rank(comm) == 0) {
      onebit_optimizer_describe(optimizer, ONEBIT_FORMAT_TEXT, line, sizeof line, NULL);
      printf("loss %9.6f  %s\n", loss, line);
    }
    if (status == ONEBIT_SKIPPED) /* a gradient was not finite: nothing has changed */
      status = ONEBIT_OK;
  }
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
