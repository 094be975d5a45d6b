/* Runs an allreduce over a transport that the program itself implements, with MPI calls: mpirun -n
 * 4 custom */
#include <mpi.h>
#include <onebit/onebit.h>
#include <stdio.h>
#include <stdlib.h>

static int begin_result(int code, MPI_Request *request, void **operation) {
  *operation = request;
  return request && code == MPI_SUCCESS ? 0 : -1;
}

static int send_to(void *context, const void *data, size_t bytes, int peer, int tag,
                   void **operation) {
  MPI_Request *request = malloc(sizeof *request);
  return begin_result(
      request ? MPI_Isend(data, (int)bytes, MPI_BYTE, peer, tag, *(MPI_Comm *)context, request)
              : MPI_ERR_NO_MEM,
      request, operation);
}

static int receive_from(void *context, void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  MPI_Request *request = malloc(sizeof *request);
  return begin_result(
      request ? MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, tag, *(MPI_Comm *)context, request)
              : MPI_ERR_NO_MEM,
      request, operation);
}

static int test(void *context, void *operation, double seconds, size_t *bytes) {
  int done = 0, count = 0;
  MPI_Status status;
  (void)context, (void)seconds; /* the function may return before `seconds` have passed */
  if (MPI_Test(operation, &done, &status) != MPI_SUCCESS)
    return -1;
  if (!done)
    return ONEBIT_IN_PROGRESS;
  MPI_Get_count(&status, MPI_BYTE, &count); /* the library uses the count only for receives */
  *bytes = (size_t)count;
  free(operation);
  return 0;
}

static void cancel(void *context, void *operation) {
  (void)context;
  MPI_Cancel(operation);
  MPI_Wait(operation, MPI_STATUS_IGNORE);
  free(operation);
}

int main(int argc, char **argv) {
  float mine[1000], average[1000];
  double sum = 0;
  int rank, size;
  MPI_Comm world = MPI_COMM_WORLD;
  onebit_transport_callbacks_t callbacks = ONEBIT_TRANSPORT_CALLBACKS_INIT;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  callbacks.context = &world;
  callbacks.send = send_to, callbacks.receive = receive_from;
  callbacks.test = test, callbacks.cancel = cancel;
  for (int i = 0; i < 1000; i++)
    mine[i] = (float)((rank + 1) * (i % 7 - 3));
  onebit_status_t status = onebit_comm_create_custom(&callbacks, rank, size, &comm);
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm, 1000, NULL, &plan);
  for (int step = 0; step < 1000 && status == ONEBIT_OK; step++, sum += (double)average[0])
    status = onebit_allreduce(mine, average, plan);
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  else if (rank == 0)
    printf("element 0: %.3f, the mean of the ranks is %.3f\n", sum / 1000, -1.5 * (size + 1));
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
