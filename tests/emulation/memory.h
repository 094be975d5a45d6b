/*
 * Device memory and pinned host memory: what was allocated, and whose it is.
 */
#ifndef EMULATION_MEMORY_H
#define EMULATION_MEMORY_H

#include <stddef.h>

namespace emulation {

constexpr size_t DEVICE_MEMORY = size_t{4} << 30; /* of one device */

/* True if a kernel may touch these bytes. With the lock. */
bool device_can_touch(const void *pointer, size_t size);

/* Ends the process if something was written just outside of an allocation. With the lock. */
void check_memory();

/* Device memory can be touched while one of these lives; EMULATED_PROTECT closes it else. */
struct device_access {
  device_access();
  ~device_access();
};

} // namespace emulation

#endif
