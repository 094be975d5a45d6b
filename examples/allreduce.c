/* Averages numbers over the ranks, one bit each on the wire: mpirun -n 4 allreduce */
#include <onebit/mpi.h>
#include <onebit/onebit.h>
#include <stdio.h>

int main(int argc, char **argv) {
  enum { COUNT = 100000, STEPS = 1000 };
  static float mine[COUNT], average[COUNT];
  double sum = 0;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  MPI_Init(&argc, &argv);
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  if (status == ONEBIT_OK) /* the plan keeps the residual for the next call */
    status = onebit_plan_create(comm, COUNT, NULL, &plan);
  for (int step = 0; step < STEPS && status == ONEBIT_OK; step++, sum += (double)average[0]) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (float)((onebit_comm_rank(comm) + 1) * (i % 7 - 3));
    status = onebit_allreduce(mine, average, plan);
  }
  if (status == ONEBIT_OK && onebit_comm_rank(comm) == 0)
    printf("element 0: %.3f over %d calls, the mean of the ranks is %.3f\n", sum / STEPS, STEPS,
           -1.5 * (onebit_comm_size(comm) + 1));
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
