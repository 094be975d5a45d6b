/*
 * Device memory and pinned host memory: the allocations and their devices.
 */
#ifndef EMULATION_MEMORY_H
#define EMULATION_MEMORY_H

#include <stddef.h>

namespace emulation {

constexpr size_t DEVICE_MEMORY = size_t{4} << 30; /* of one device */

/* True if a kernel may touch these bytes. With the lock. */
bool device_can_touch(const void *pointer, size_t size);

/* Ends the process if bytes next to an allocation were overwritten. The caller holds the lock. */
void check_memory();

/* Makes device memory accessible to the host while one of these lives; EMULATED_PROTECT makes it
 * inaccessible otherwise. */
struct device_access {
  device_access();
  ~device_access();
};

} // namespace emulation

#endif
