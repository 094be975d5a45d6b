/*
 * The header that .cu files include. It provides the device-side language and kernel launches to a
 * C++17 compiler. A kernel is an ordinary function. A launch calls it once for each CUDA thread, on
 * a fiber.
 */
#ifndef EMULATION_CUDA_RUNTIME_H
#define EMULATION_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"

#ifdef __cplusplus

#include <functional>
#include <tuple>
#include <utility>

#include "emulation_device.h"

namespace emulation {
/* Enqueues a grid; each CUDA thread calls `thread` once. */
cudaError_t launch(const cudaLaunchConfig_t &config, const void *kernel,
                   std::function<void()> thread);
} // namespace emulation

/* Converts and copies the arguments here, at enqueue time, as the real launch does. */
template <typename... ExpTypes, typename... ActTypes>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(ExpTypes...),
                               ActTypes &&...args) {
  std::tuple<std::decay_t<ExpTypes>...> copies(std::forward<ActTypes>(args)...);
  return emulation::launch(*config, reinterpret_cast<const void *>(kernel),
                           [kernel, copies = std::move(copies)] { std::apply(kernel, copies); });
}

/* The typed overloads that the C++ header of CUDA has. */
template <typename T> cudaError_t cudaMalloc(T **devPtr, size_t size) {
  return cudaMalloc(reinterpret_cast<void **>(devPtr), size);
}
template <typename T> cudaError_t cudaHostAlloc(T **pHost, size_t size, unsigned int flags) {
  return cudaHostAlloc(reinterpret_cast<void **>(pHost), size, flags);
}
template <typename T>
cudaError_t cudaMallocHost(T **ptr, size_t size, unsigned int flags = cudaHostAllocDefault) {
  return cudaHostAlloc(reinterpret_cast<void **>(ptr), size, flags);
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attr, void (*entry)(Parameters...)) {
  return cudaFuncGetAttributes(attr, reinterpret_cast<const void *>(entry));
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned int flags) {
  return cudaEventCreateWithFlags(event, flags);
}

#endif
#endif
