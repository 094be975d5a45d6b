/* Kernels that are loaded before they are launched. */
#ifndef OB_CUDA_LOAD_H
#define OB_CUDA_LOAD_H

#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds the module that a kernel is of: each file of kernels does so before main (cuda/device.cuh).
 */
void ob_cuda_add_module(const void *kernel);

/* Loads the kernels of all modules on the current device. Local; errors: ONEBIT_ERROR_UNSUPPORTED
 * (the device runs none of the code that the library was built with). */
onebit_status_t ob_cuda_load_kernels(void);

#ifdef __cplusplus
}
#endif
#endif
