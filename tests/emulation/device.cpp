/*
 * Devices, errors, counters, and failures on demand.
 */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>

#include "cuda_runtime.h"
#include "inside.h"

namespace emulation {

namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<long> counters[static_cast<int>(counted::kinds)];
std::atomic<bool> only_counting;
std::atomic<long> allocations_left, launches_left;
std::atomic<bool> contexts[MAX_DEVICES];

/* Returns the compute capability; 9.0 is 90. */
int capability() {
  const char *text = getenv("EMULATED_CAPABILITY");
  int major = 9, minor = 0;
  if (text && *text && sscanf(text, "%d.%d", &major, &minor) != 2)
    fatal("EMULATED_CAPABILITY is '%s': not of the form 9.0", text);
  return major * 10 + minor;
}

int device_count() {
  long count = read_setting("EMULATED_DEVICES", 2);
  if (count < 0 || count > MAX_DEVICES)
    fatal("EMULATED_DEVICES is %ld: from 0 to %d", count, MAX_DEVICES);
  return static_cast<int>(count);
}

bool valid(int number) { return number >= 0 && number < device_count(); }

/* Counts down. Returns true for the call that must fail. */
bool count_down(std::atomic<long> &left) {
  long seen = left.load();
  while (seen > 0)
    if (left.compare_exchange_weak(seen, seen - 1))
      return seen == 1;
  return false;
}

bool valid(const cudaLaunchConfig_t &config) {
  dim3 grid = config.gridDim, block = config.blockDim;
  return grid.x && grid.y && grid.z && block.x && block.y && block.z && grid.x <= 0x7fffffffu &&
         grid.y <= 65535 && grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 &&
         block.z <= 64 && size_t{block.x} * block.y * block.z <= 1024 && !config.dynamicSmemBytes;
}

struct error_text {
  cudaError_t error;
  const char *words;
};

const error_text TEXTS[] = {
    {cudaSuccess, "no error"},
    {cudaErrorInvalidValue, "invalid argument"},
    {cudaErrorMemoryAllocation, "out of memory"},
    {cudaErrorInvalidConfiguration, "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "invalid pitch argument"},
    {cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"},
    {cudaErrorInvalidDeviceFunction, "invalid device function"},
    {cudaErrorNoDevice, "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "invalid resource handle"},
    {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "device not ready"},
    {cudaErrorLaunchOutOfResources, "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered,
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge,
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit,
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent,
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread,
     "attempt to terminate a thread-local capture sequence from another thread"},
};

} // namespace

void fatal(const char *words, ...) {
  va_list arguments;
  va_start(arguments, words);
  fputs("emulated CUDA: ", stderr);
  vfprintf(stderr, words, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  abort();
}

int current_device() { return device; }

int use_device() {
  contexts[device] = true;
  return device;
}

cudaError_t result(cudaError_t error) {
  if (error)
    last_error = error;
  return error;
}

void count(counted what, long times) { counters[static_cast<int>(what)] += times; }
bool only_counts() { return only_counting; }
bool is_left_out(size_t bytes) { return only_counting && bytes > 4096; }
bool allocation_fails() { return count_down(allocations_left); }
bool launch_fails() { return count_down(launches_left); }

static thread_local size_t threads_that_waited;

static bool comes_early(const cudaLaunchConfig_t &config) {
  for (unsigned i = 0; i < config.numAttrs; i++)
    if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      return config.attrs[i].val.programmaticStreamSerializationAllowed;
  return false;
}

/* Runs a kernel. An early kernel is launched before the previous kernel has ended. A thread of it
 * that does not wait would read memory that the previous kernel has not written yet. */
static void run_kernel(dim3 grid, dim3 block, const std::function<void()> &thread, bool early) {
  const size_t threads = size_t{grid.x} * grid.y * grid.z * (size_t{block.x} * block.y * block.z);
  threads_that_waited = 0;
  run_grid(grid, block, thread);
  if (early && threads_that_waited < threads)
    fatal("a kernel was launched to come early, and %zu of its %zu threads have not waited for "
          "the one ahead",
          threads - threads_that_waited, threads);
}

cudaError_t launch(const cudaLaunchConfig_t &config, const void *kernel,
                   std::function<void()> thread) {
  if (!kernel)
    return result(cudaErrorInvalidDeviceFunction);
  if (!valid(config))
    return result(cudaErrorInvalidConfiguration);
  if (launch_fails())
    return result(cudaErrorLaunchOutOfResources);
  lock held(guard());
  stream_ptr stream = find_stream(config.stream);
  if (!stream || stream->device != device)
    return result(cudaErrorInvalidResourceHandle);
  return result(submit(
      held, stream,
      make_work([=, grid = config.gridDim, block = config.blockDim, early = comes_early(config)] {
        count(counted::kernels);
        if (!only_counts())
          run_kernel(grid, block, thread, early);
      })));
}

} // namespace emulation

using namespace emulation;

void cudaGridDependencySynchronize() { threads_that_waited++; }

struct emulation_counters emulation_counts(void) {
  return {counters[0], counters[1], counters[2], counters[3],
          counters[4], counters[5], counters[6], counters[7]};
}
void emulation_reset_counts(void) {
  for (std::atomic<long> &counter : counters)
    counter = 0;
}
void emulation_only_count(int on) { only_counting = on != 0; }
void emulation_fail_allocation(long n) { allocations_left = n; }
void emulation_fail_launch(long n) { launches_left = n; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char *cudaGetErrorString(cudaError_t error) {
  for (const error_text &text : TEXTS)
    if (text.error == error)
      return text.words;
  return "unrecognized error code";
}

cudaError_t cudaDriverGetVersion(int *driverVersion) {
  *driverVersion = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *runtimeVersion) {
  *runtimeVersion = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *number) {
  *number = device_count();
  return result(*number ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *number) {
  *number = device;
  return result(device_count() ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int number) {
  if (!valid(number))
    return result(device_count() ? cudaErrorInvalidDevice : cudaErrorNoDevice);
  device = number;
  use_device(); /* from CUDA 12 on, this call creates the context */
  return cudaSuccess;
}

int emulation_has_context(int number) { return contexts[number]; }
void emulation_forget_contexts(void) {
  for (std::atomic<bool> &context : contexts)
    context = false;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int number) {
  if (!valid(number))
    return result(cudaErrorInvalidDevice);
  *prop = {};
  snprintf(prop->name, sizeof prop->name, "Emulated device %d", number);
  prop->totalGlobalMem = DEVICE_MEMORY;
  prop->major = capability() / 10;
  prop->minor = capability() % 10;
  return cudaSuccess;
}

static int attribute(enum cudaDeviceAttr attr) {
  switch (attr) {
  case cudaDevAttrMaxPitch:
    return static_cast<int>(read_setting("EMULATED_PITCH", INT_MAX));
  case cudaDevAttrComputeCapabilityMajor:
    return capability() / 10;
  }
  return -1;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int number) {
  if (!valid(number))
    return result(cudaErrorInvalidDevice);
  *value = attribute(attr);
  return result(*value < 0 ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attr, const void *func) {
  if (!func)
    return result(cudaErrorInvalidDeviceFunction);
  *attr = {};
  attr->maxThreadsPerBlock = 1024;
  attr->numRegs = 32;
  attr->ptxVersion = attr->binaryVersion = capability();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  lock held(guard());
  if (cudaError_t refused = refuse_in_capture())
    return result(refused);
  count(counted::synchronisations);
  synchronise_device(held, device);
  check_memory();
  return cudaSuccess;
}
