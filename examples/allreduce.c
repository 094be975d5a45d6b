/* Averages numbers over the ranks, one bit each on the wire: mpirun -n 4 allreduce */
#include <onebit/mpi.h>
#include <onebit/onebit.h>
#include <stdio.h>

enum { COUNT = 100000, STEPS = 1000 };
static float mine[COUNT], average[COUNT];

int main(int argc, char **argv) {
  double sum = 0.0;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  MPI_Init(&argc, &argv);
  onebit_status_t status = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm);
  if (status == ONEBIT_OK) /* the plan keeps what one bit could not say, for the next call */
    status = onebit_plan_create(comm, COUNT, NULL, &plan);
  for (int step = 1; step <= STEPS && status == ONEBIT_OK; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (float)((onebit_comm_rank(comm) + 1) * (i % 7 - 3));
    status = onebit_allreduce(mine, average, plan);
    sum += (double)average[0];
    if (onebit_comm_rank(comm) == 0 && (step == 1 || step == 10 || step == 100 || step == STEPS))
      printf("step %4d: element 0 was %8.4f, on average %8.4f; the mean of the ranks is %8.4f\n",
             step, (double)average[0], sum / step, -1.5 * (onebit_comm_size(comm) + 1));
  }
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
