/*
 * Loads all kernels of the library before one of them is needed.
 *
 * CUDA loads a kernel when it is first launched (lazy loading, CUDA C++ Programming Guide), and may
 * wait for all work on the device to do so. Behind messages of NCCL that wait for a rank which is
 * gone the launch would then never return, and its host thread could notice nothing. Each file of
 * kernels is a module of the driver's; the driver enumerates a module's kernels from version 12.4
 * on. Before that CUDA_MODULE_LOADING=EAGER does the same (docs/cuda.md).
 */
#include "cuda/load.h"

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "base/error.h"

/* One for each file of kernels. */
enum { MAX_MODULES = 32 };

static const void *modules[MAX_MODULES];
static size_t modules_count;

void ob_cuda_add_module(const void *kernel) {
  if (modules_count < MAX_MODULES)
    modules[modules_count++] = kernel;
}

#ifdef ONEBIT_EMULATED_CUDA

onebit_status_t ob_cuda_load_kernels(void) { return ONEBIT_OK; }

#else

#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

#include "base/memory.h"

/* Functions of the driver: the library is linked to the runtime alone. */
struct driver {
  CUresult (*get_module)(CUmodule *, CUfunction);
  CUresult (*count)(unsigned *, CUmodule);
  CUresult (*enumerate)(CUfunction *, unsigned, CUmodule);
  CUresult (*load)(CUfunction);
};

static bool find_driver(struct driver *driver) {
  static const char *const names[] = {"cuFuncGetModule", "cuModuleGetFunctionCount",
                                      "cuModuleEnumerateFunctions", "cuFuncLoad"};
  void *functions[4], *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  for (size_t i = 0; i < 4; i++)
    if (!library || !(functions[i] = dlsym(library, names[i])))
      return false;
  memcpy(driver, functions, sizeof *driver);
  return true;
}

static bool load_module(const struct driver *driver, const void *kernel) {
  cudaFunction_t found;
  CUmodule module;
  unsigned count = 0;
  if (cudaGetFuncBySymbol(&found, kernel) != cudaSuccess ||
      driver->get_module(&module, found) != CUDA_SUCCESS ||
      driver->count(&count, module) != CUDA_SUCCESS)
    return false;
  CUfunction *functions = ob_allocate(count, sizeof(CUfunction));
  bool loaded = functions && driver->enumerate(functions, count, module) == CUDA_SUCCESS;
  for (unsigned i = 0; loaded && i < count; i++)
    loaded = driver->load(functions[i]) == CUDA_SUCCESS;
  ob_release(functions);
  return loaded;
}

onebit_status_t ob_cuda_load_kernels(void) {
  struct driver driver;
  if (!find_driver(&driver))
    return ONEBIT_OK;
  for (size_t i = 0; i < modules_count; i++)
    if (!load_module(&driver, modules[i]))
      return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                      "the kernels of the library do not load on this device: %s",
                      cudaGetErrorString(cudaGetLastError()));
  return ONEBIT_OK;
}

#endif
