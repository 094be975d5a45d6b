/* A program that is linked to onebit and runs with it preloaded. Only one copy of the library must
 * be loaded, and the program must see this copy's counters. */
#include <mpi.h>
#include <stdio.h>

#include "onebit/counters.h"
#include "onebit/mpi.h"
#include "onebit/onebit.h"

enum { COUNT = 20000, STEPS = 30 };

static int steps_of_both(onebit_plan_t plan) {
  static float mine[COUNT], sum[COUNT], mean[COUNT];
  int bad = 0, size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (i + step) % 3 ? 1.0F : -1.0F;
    MPI_Allreduce(mine, sum, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    bad |= onebit_allreduce(mine, mean, plan) != ONEBIT_OK;
    for (int i = 0; i < COUNT; i++)
      bad |= sum[i] != mine[i] * (float)size || mean[i] != mine[i];
  }
  return bad;
}

int main(int argc, char **argv) {
  onebit_counters_t counters = {.size = sizeof counters};
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  MPI_Init(&argc, &argv);
  int bad = onebit_comm_create_mpi(MPI_COMM_WORLD, &comm) != ONEBIT_OK ||
            onebit_plan_create(comm, COUNT, NULL, &plan) != ONEBIT_OK || steps_of_both(plan) ||
            onebit_counters_get(&counters) != ONEBIT_OK;
  printf("bad %d calls %d compressed %s\n", bad, (int)counters.calls,
         counters.compressed > 0 ? "some" : "none");
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return bad;
}
