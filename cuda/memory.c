/*
 * The library's calls of CUDA's runtime and driver: device memory and pinned host memory, the owner
 * of a pointer, the current device, and the loading of kernels before they are launched.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/device.h"

#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#endif

onebit_status_t ob_cuda_error(cudaError_t error, const char *call) {
  cudaGetLastError(); /* clears the error, so that no later call returns it */
  onebit_status_t status =
      error == cudaErrorMemoryAllocation ? ONEBIT_ERROR_MEMORY : ONEBIT_ERROR_DEVICE;
  return ob_error(status, "CUDA: %s (%s)", cudaGetErrorString(error), call);
}

/* Returns count * size, but at least 1, as ob_allocate allocates; 0 on overflow. */
static size_t device_memory_bytes_of(size_t count, size_t size) {
  if (size && count > ((size_t)-1 >> 1) / size)
    return 0;
  return count && size ? count * size : 1;
}

/* Clears CUDA's last error: the caller reports the failure, and the next call must not find it. */
static void *forget_error(void) {
  cudaGetLastError();
  return NULL;
}

/* True if memory that this thread has begun to fill may not be filled yet. */
static _Thread_local bool filling;

/* Allocates an array, and begins to set it to the host's values, or with NULL to zero: one wait for
 * all arrays (ob_cuda_settle) costs less than a wait for each array. */
static void *allocate_filled(const void *values, size_t count, size_t size) {
  size_t bytes = device_memory_bytes_of(count, size);
  void *memory = NULL;
  if (ob_memory_must_fail() || !bytes)
    return NULL;
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  if (cudaMalloc(&memory, bytes) != cudaSuccess)
    return forget_error();
  cudaError_t error = values ? cudaMemcpy(memory, values, count * size, cudaMemcpyHostToDevice)
                             : cudaMemset(memory, 0, bytes);
  filling = true;
  if (error == cudaSuccess)
    return memory;
  cudaFree(memory);
  return forget_error();
}

static void *allocate_cuda(size_t count, size_t size) { return allocate_filled(NULL, count, size); }

void *ob_cuda_copy_array(const void *values, size_t count, size_t size) {
  return allocate_filled(values, count, size);
}

static void release_cuda(void *memory) {
  if (!memory)
    return;
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  cudaFree(memory);
}

/* Waits until the default stream's work is complete, so that other streams find it done. */
static onebit_status_t device_memory_finish(cudaError_t begun, const char *what) {
  cudaError_t error = begun == cudaSuccess ? cudaStreamSynchronize(NULL) : begun;
  filling = filling && error != cudaSuccess;
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, what);
}

onebit_status_t ob_cuda_settle(void) {
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  return filling ? device_memory_finish(cudaSuccess, "cudaStreamSynchronize") : ONEBIT_OK;
}

/* The copy runs after the program's work on the default stream, and is complete at return: a copy
 * from pageable memory, or within the device, may still be running when cudaMemcpy returns, and the
 * streams that the library makes are not ordered after the default stream. */
static onebit_status_t device_memory_copy(void *to, const void *from, size_t bytes) {
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  return device_memory_finish(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

static onebit_status_t clear_cuda(void *memory, size_t bytes) {
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  return device_memory_finish(cudaMemset(memory, 0, bytes), "cudaMemset");
}

const struct ob_memory ob_memory_cuda = {allocate_cuda, release_cuda, device_memory_copy,
                                         clear_cuda};

static void *allocate_pinned(size_t count, size_t size) {
  size_t bytes = device_memory_bytes_of(count, size);
  void *memory = NULL;
  if (ob_memory_must_fail() || !bytes)
    return NULL;
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
  return error == cudaSuccess ? memset(memory, 0, bytes) : forget_error();
}

static void release_pinned(void *memory) {
  if (!memory)
    return;
  OB_ON_DEVICE(OB_CURRENT_DEVICE);
  cudaFreeHost(memory);
}

static onebit_status_t clear_pinned(void *memory, size_t bytes) {
  memset(memory, 0, bytes);
  return ONEBIT_OK;
}

const struct ob_memory ob_memory_pinned = {allocate_pinned, release_pinned, device_memory_copy,
                                           clear_pinned};

/* The kernels are compiled for Ampere and newer. */
#define OLDEST_CAPABILITY 8

onebit_status_t ob_cuda_current_device(int *number) {
  int major = 0;
  cudaError_t error = cudaGetDevice(number);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *number);
  if (error != cudaSuccess)
    return cudaGetLastError(),
           ob_error(ONEBIT_ERROR_UNSUPPORTED, "device is ONEBIT_DEVICE_CUDA: CUDA: %s",
                    cudaGetErrorString(error));
  if (major < OLDEST_CAPABILITY)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "CUDA device %d has compute capability %d.x, but onebit needs %d.0 or newer",
                    *number, major, OLDEST_CAPABILITY);
  return ONEBIT_OK;
}

onebit_status_t ob_cuda_check(int number, const char *name, const void *buffer) {
  struct cudaPointerAttributes attributes;
  OB_ON_DEVICE(number);
  cudaError_t error = cudaPointerGetAttributes(&attributes, buffer);
  if (error != cudaSuccess)
    return ob_cuda_error(error, name);
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "%s is %p in host memory, but the device option is ONEBIT_DEVICE_CUDA", name,
                    buffer);
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != number)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %p in memory of CUDA device %d, not of device %d",
                    name, buffer, attributes.device, number);
  return ONEBIT_OK;
}

onebit_status_t ob_cuda_check_current(const char *name, const void *buffer) {
  int number;
  OB_TRY(ob_cuda_current_device(&number));
  return ob_cuda_check(number, name, buffer);
}

#ifdef ONEBIT_EMULATED_CUDA

bool ob_cuda_owns(const void *memory, int *device) {
  struct cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess)
    return false;
  *device = attributes.device;
  return attributes.type == cudaMemoryTypeDevice;
}

static bool has_context(int device) { return emulation_has_context(device); }

#else

/* The numbers of the driver's interface that are used here: CUpointer_attribute, CUmemorytype. */
#define ATTRIBUTE_MEMORY_TYPE    2
#define ATTRIBUTE_IS_MANAGED     8
#define ATTRIBUTE_DEVICE_ORDINAL 9
#define MEMORY_TYPE_DEVICE       2

static int count_loads(struct dl_phdr_info *info, size_t size, void *loads) {
  (void)size;
  *(unsigned long long *)loads = info->dlpi_adds;
  return 1; /* stop: dlpi_adds counts for the whole process */
}

/* Returns the driver if the program has loaded it, else NULL. It is looked for again only after the
 * program has loaded another library: a search takes 14 microseconds, which is long compared with a
 * small allreduce. */
static void *open_driver(void) {
  static _Atomic unsigned long long searched; /* libraries loaded at the last search */
  unsigned long long loads = 0;
  dl_iterate_phdr(count_loads, &loads);
  if (loads == atomic_load_explicit(&searched, memory_order_relaxed))
    return NULL;
  void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (!driver)
    atomic_store_explicit(&searched, loads, memory_order_relaxed);
  return driver;
}

/* Finds a function of the driver. C has no cast from an object pointer to a function pointer. */
static void device_memory_find(void *driver, const char *name, void *function) {
  void *symbol = dlsym(driver, name);
  memcpy(function, &symbol, sizeof symbol);
}

/* Asks the driver whether memory belongs to a device, if the program has loaded the driver:
 * cudaPointerGetAttributes would create a context on the device, even in a program that never uses
 * the device. A driver that is not initialised returns an error, and then no memory belongs to a
 * device. */
bool ob_cuda_owns(const void *memory, int *device) {
  int (*ask)(void *answer, int attribute, unsigned long long pointer);
  void *driver = open_driver();
  if (!driver)
    return false;
  device_memory_find(driver, "cuPointerGetAttribute", &ask);
  unsigned type = 0, managed = 0;
  unsigned long long pointer = (uintptr_t)memory;
  bool owns = ask && ask(&type, ATTRIBUTE_MEMORY_TYPE, pointer) == 0 &&
              type == MEMORY_TYPE_DEVICE && ask(&managed, ATTRIBUTE_IS_MANAGED, pointer) == 0 &&
              !(managed & 1) && ask(device, ATTRIBUTE_DEVICE_ORDINAL, pointer) == 0;
  dlclose(driver);
  return owns;
}

static bool has_context(int device) {
  int (*ask)(int device, unsigned *flags, int *active), active = 0;
  unsigned flags;
  void *driver = open_driver();
  if (!driver)
    return false;
  device_memory_find(driver, "cuDevicePrimaryCtxGetState", &ask);
  bool has = ask && ask(device, &flags, &active) == 0 && active;
  dlclose(driver);
  return has;
}

#endif

/* The device and the capture mode of the thread. The library's own calls of the driver would
 * invalidate a capture, so they run in another mode. */
enum { MODES = cudaStreamCaptureModeRelaxed + 1 };

/* Sets the device before any other call, which would create a context on the current device. */
int ob_cuda_enter(int number) {
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  int before = 0;
  if (cudaGetDevice(&before) == cudaSuccess && before != number && number != OB_CURRENT_DEVICE)
    cudaSetDevice(number);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return before * MODES + (int)mode;
}

/* Restores the device, unless it has no context. Such a device was current only because nothing had
 * used it, as device 0 at the start: setting it would create a context of hundreds of MiB. */
void ob_cuda_leave(int before) {
  enum cudaStreamCaptureMode mode = (enum cudaStreamCaptureMode)(before % MODES);
  int now, device = before / MODES;
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (cudaGetDevice(&now) == cudaSuccess && now != device && has_context(device))
    cudaSetDevice(device);
}

void ob_cuda_leave_block(const int *before) { ob_cuda_leave(*before); }

/*
 * ---- Kernels ----
 *
 * Loads all kernels of the library before one of them is needed.
 *
 * CUDA loads a kernel when it is first launched (lazy loading, CUDA C++ Programming Guide), and may
 * wait for all work on the device to do so. If messages of NCCL ahead of the launch wait for a lost
 * rank, the launch would then never return, and its host thread could not notice the loss. Each
 * file of kernels is a module of the driver's; the driver enumerates a module's kernels from
 * version 12.4 on. Before that CUDA_MODULE_LOADING=EAGER does the same (docs/cuda.md).
 */

/* The largest number of modules: one for each file of kernels. */
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

/* Functions of the driver, which are looked up, since the library is linked to the runtime only. */
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
                      "the library's kernels cannot be loaded on this device: %s",
                      cudaGetErrorString(cudaGetLastError()));
  return ONEBIT_OK;
}

#endif
