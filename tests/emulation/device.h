/*
 * Devices, errors and counters.
 */
#ifndef EMULATION_DEVICE_STATE_H
#define EMULATION_DEVICE_STATE_H

#include "emulation.h"

namespace emulation {

constexpr int MAX_DEVICES = 64;

int current_device();
/* Returns the current device after making its context, as most calls do. */
int use_device();

/* Stores an error for cudaGetLastError and returns it; returns success unchanged. */
cudaError_t result(cudaError_t error);

enum class counted {
  kernels,
  copies,
  memsets,
  synchronisations,
  allocations,
  groups,
  events,
  sent_bytes,
  kinds
};
void count(counted what, long times = 1);

/* True if emulation_only_count is on; and then, true if so many bytes are left as they are. */
bool only_counts();
bool leaves(size_t bytes);

/* True if this allocation (launch) is the one that a test makes fail. */
bool allocation_fails();
bool launch_fails();

/* Refuses a call that would wait for, or change, what a capture must not see: an error, and the end
 * of that capture. With the lock. */
cudaError_t refuse_in_capture();

} // namespace emulation

#endif
