/* What onebit-info says of GPUs. */
#include "tools/info/info_cuda.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

#include "cuda/device.h"
#include "onebit/onebit.h"

#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>
#endif

static void print_device(int number) {
  struct cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, number);
  if (error == cudaSuccess)
    error = cudaSetDevice(number);
  if (error == cudaSuccess)
    error = cudaFree(NULL); /* makes a context: a GPU may be there and refuse */
  if (error != cudaSuccess) {
    printf("  device %-8d %s\n", number, cudaGetErrorString(error));
    return;
  }
  bool usable = ob_cuda_current(&number) == ONEBIT_OK;
  printf("  device %-8d %s, compute capability %d.%d, %.1f GiB, %s\n", number, properties.name,
         properties.major, properties.minor,
         (double)properties.totalGlobalMem / (double)((size_t)1 << 30),
         usable ? "usable" : onebit_last_error());
}

static void print_version(const char *name, int version) {
  if (version)
    printf("%s %d.%d", name, version / 1000, version % 1000 / 10);
  else
    printf("no %s", name);
}

static void print_nccl(void) {
#ifdef ONEBIT_HAVE_NCCL
  int version = 0;
  ncclResult_t result = ncclGetVersion(&version);
  if (result == ncclSuccess)
    printf("NCCL              %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
  else
    printf("NCCL              %s\n", ncclGetErrorString(result));
#else
  printf("NCCL              built without NCCL\n");
#endif
}

void info_print_cuda(void) {
  int runtime = 0, driver = 0, count = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver); /* 0 where there is none */
  printf("CUDA              ");
  print_version("runtime", runtime);
  printf(", ");
  print_version("driver", driver);
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess)
    printf("; no device: %s\n", cudaGetErrorString(error));
  else
    printf("; %d device%s\n", count, count == 1 ? "" : "s");
  for (int number = 0; error == cudaSuccess && number < count; number++)
    print_device(number);
  print_nccl();
}
