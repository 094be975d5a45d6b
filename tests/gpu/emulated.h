/*
 * The emulated device's counters, and functions that make CUDA calls fail on it. On a real device
 * these functions do nothing, and tests that need them (marked EMULATED) are skipped.
 */
#ifndef ONEBIT_TESTS_GPU_EMULATED_H
#define ONEBIT_TESTS_GPU_EMULATED_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#ifdef ONEBIT_EMULATED_CUDA

#include <emulation.h>
#define IS_EMULATED true

#else

#define IS_EMULATED false

struct emulation_counters {
  long kernels, copies, memsets, synchronisations, allocations, groups, events, sent_bytes;
};

static inline struct emulation_counters emulation_counts(void) {
  return (struct emulation_counters){0};
}
static inline void emulation_reset_counts(void) {}
static inline void emulation_only_count(int on) { (void)on; }
static inline int emulation_has_context(int device) { return device; }
static inline void emulation_forget_contexts(void) {}
static inline long emulation_longest_chain(cudaGraph_t graph) { return !graph; }
static inline void emulation_fail_allocation(long n) { (void)n; }
static inline void emulation_fail_launch(long n) { (void)n; }

#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>

struct emulation_nccl_counters {
  long registrations, windows;
};

static inline struct emulation_nccl_counters emulation_nccl_counts(void) {
  return (struct emulation_nccl_counters){0};
}
static inline void emulation_nccl_break(ncclComm_t comm) { (void)comm; }
#endif

#endif

#endif
