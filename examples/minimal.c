/* Averages a vector repeatedly on a single rank: the smallest program. The compression error of
 * each call is added to the input of the next call. */
#include <onebit/onebit.h>
#include <stdio.h>

int main(void) {
  float sent[3] = {1.0F, -2.0F, 4.0F}, received[3], sum[3] = {0};
  onebit_comm_t comm = NULL; /* a single rank; allreduce.c uses MPI */
  onebit_plan_t plan = NULL;
  onebit_status_t status = onebit_comm_create_self(&comm);
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm, 3, NULL, &plan);
  for (int call = 0; call < 1000 && status == ONEBIT_OK; call++) {
    status = onebit_allreduce(sent, received, plan);
    for (int i = 0; i < 3; i++)
      sum[i] += received[i];
  }
  printf("onebit %s: %s, means %.2f %.2f %.2f\n", onebit_version(), onebit_status_string(status),
         (double)sum[0] / 1000, (double)sum[1] / 1000, (double)sum[2] / 1000);
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  return status != ONEBIT_OK;
}
