/* Averages numbers over GPUs on a stream, over NCCL. MPI starts the ranks: mpirun -n 4 stream */
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>
#include <onebit/cuda.h>
#include <onebit/nccl.h>
#include <onebit/onebit.h>
#include <stdio.h>

int main(int argc, char **argv) {
  enum { COUNT = 1 << 20 };
  static float values[COUNT];
  int rank, size, devices = 1;
  float *memory = NULL;
  cudaStream_t stream = NULL;
  ncclUniqueId id;
  ncclComm_t nccl = NULL;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.device = ONEBIT_DEVICE_CUDA;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (cudaGetDeviceCount(&devices) != cudaSuccess || cudaSetDevice(rank % devices) != cudaSuccess ||
      cudaMalloc((void **)&memory, sizeof values) != cudaSuccess ||
      cudaStreamCreate(&stream) != cudaSuccess ||
      (rank == 0 && ncclGetUniqueId(&id) != ncclSuccess))
    MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  if (ncclCommInitRank(&nccl, size, id, rank) != ncclSuccess)
    MPI_Abort(MPI_COMM_WORLD, 1);
  for (int i = 0; i < COUNT; i++)
    values[i] = i % 2 ? (float)(rank + 1) : (float)-(rank + 1);
  cudaMemcpy(memory, values, sizeof values, cudaMemcpyHostToDevice);
  onebit_status_t status = onebit_comm_create_nccl(nccl, &comm);
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm, COUNT, &options, &plan);
  if (status == ONEBIT_OK) /* in place; runs after earlier work on the stream, and the host does not
                            * wait */
    status = onebit_allreduce_stream(memory, memory, plan, stream);
  if (status == ONEBIT_OK)
    status = onebit_plan_synchronize(plan);
  cudaMemcpy(values, memory, sizeof values, cudaMemcpyDeviceToHost);
  if (status != ONEBIT_OK)
    fprintf(stderr, "%s: %s\n", onebit_status_string(status), onebit_last_error());
  else if (rank == 0)
    printf("element 1: %.3f, the mean of the ranks is %.3f\n", (double)values[1], 0.5 * (size + 1));
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  ncclCommDestroy(nccl);
  cudaFree(memory);
  MPI_Finalize();
  return status != ONEBIT_OK;
}
