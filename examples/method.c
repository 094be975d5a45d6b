/* Fits a linear model with the optimizer that has the shortest steps on these ranks: mpirun -n 4
 * method */
#include <onebit/mpi.h>
#include <onebit/onebit.h>
#include <stdio.h>

enum { FEATURES = 20000, POINTS = 16, STEPS = 300 };
static float weights[FEATURES], gradient[FEATURES];
static onebit_comm_t comm, alone; /* alone: a communicator of this rank only */
static onebit_optimizer_t optimizer;
static onebit_outer_t outer;

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

static onebit_status_t create(int rank) {
  onebit_tensor_t tensor = {.parameter = weights, .gradient = gradient, .count = FEATURES};
  onebit_efficient_adam_options_t adam = ONEBIT_EFFICIENT_ADAM_OPTIONS_INIT;
  onebit_outer_options_t options = ONEBIT_OUTER_OPTIONS_INIT;
  onebit_method_choice_t choice = ONEBIT_METHOD_CHOICE_INIT;
  double start = MPI_Wtime();
  compute_gradient(rank);
  choice.compute = MPI_Wtime() - start;
  choice.elements = FEATURES;
  choice.blocking = 1; /* a step's exchange begins when its gradient is there */
  onebit_status_t status = onebit_method_choose(comm, &choice);
  if (status == ONEBIT_OK && rank == 0)
    printf("%s\n", choice.text);
  adam.warmup_steps = choice.warmup_steps;
  adam.common.dense_below = choice.dense_below;
  options.local_steps = choice.local_steps;
  if (status == ONEBIT_OK && choice.local_steps)
    status = onebit_outer_create(comm, &tensor, 1, &options, &outer);
  if (status == ONEBIT_OK && choice.local_steps)
    status = onebit_comm_create_self(&alone);
  return status != ONEBIT_OK
             ? status
             : onebit_efficient_adam_create(alone ? alone : comm, &tensor, 1, &adam, &optimizer);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  const int rank = onebit_comm_rank(comm);
  if (status == ONEBIT_OK)
    status = create(rank);
  for (int step = 1; step <= STEPS && status == ONEBIT_OK; step++) {
    double loss = compute_gradient(rank); /* the loss on this rank's points only */
    status = onebit_optimizer_step(optimizer, 1e-3f * (float)(STEPS - step) / STEPS);
    if (status == ONEBIT_OK && outer)
      status = onebit_outer_step(outer, 1);
    if (step % 50 == 0 && rank == 0)
      printf("loss %9.6f\n", loss);
  }
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  onebit_outer_destroy(outer);
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(alone);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
