/*
 * An emulated CUDA device, for machines without a GPU: the project's .cu files are compiled as C++
 * against the headers here and run thread by thread. C99 and C++.
 *
 * Each CUDA thread of a CTA is a fiber; CTAs run one after the other on the OS thread that waits
 * for them. Work on streams runs as late as CUDA allows, so that a missing dependency shows.
 * Undefined behaviour of CUDA ends the process with a message: a barrier that part of a CTA
 * reaches, lanes of one mask in different collectives, a deadlock, a write past an allocation.
 *
 * The environment, read at each use:
 *   EMULATED_DEVICES=2             the number of devices
 *   EMULATED_CAPABILITY=9.0        their compute capability
 *   EMULATED_ORDER=shuffle         the order of threads and CTAs: forward, backward, or shuffled
 *   EMULATED_SEED=1                the seed of the shuffle
 *   EMULATED_STREAMS=deferred      or eager: work runs when it is enqueued
 *   EMULATED_TIMEOUT=60            seconds without progress after which a wait ends the process
 *   EMULATED_NCCL_VERSION=22809    the version of NCCL; calls of newer functions end the process
 *   EMULATED_PITCH=2147483647      bytes between rows that cudaMemcpy2DAsync takes
 *
 * Limits. A CUDA thread that spins on memory which another is to write never gives way: CTAs are
 * not resident together. A warp does not wait for a lane that has exited (the hardware's rule);
 * __syncthreads ends the process if a thread of the CTA has exited. Shuffles read a NaN from lanes
 * that do not take part. Plain misaligned dereferences are left to -fsanitize=alignment.
 *
 * Behaviour that the documents of CUDA and NCCL permit, and drivers seldom show, is the rule here.
 * A copy from memory that is not pinned waits for its stream, takes the bytes, and is made when the
 * stream comes to it, after the call; so is one between devices, and a memset. A copy to memory
 * that is not pinned waits in the call. cudaFree and cudaFreeHost wait for all of the device;
 * cudaStreamDestroy for nothing. When NCCL has failed, its kernels spin until their rank aborts;
 * ncclCommAbort and ncclCommDestroy return when no graph is left that has calls on the
 * communicator. A communicator that was aborted or destroyed is freed, and a call on it, or one
 * that another thread is in, ends the process.
 */
#ifndef EMULATION_H
#define EMULATION_H

#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts of operations and calls since the last reset. */
struct emulation_counters {
  long kernels;
  long copies;
  long memsets;
  long synchronisations; /* calls in which the host waited for the device */
  long allocations;      /* of device memory and of pinned memory */
  long groups;           /* groups of NCCL calls, counted by communicator and stream */
  long events;           /* records, and waits of streams; not the repeats of a graph */
  long sent_bytes;       /* bytes given to ncclSend */
};
struct emulation_counters emulation_counts(void);
void emulation_reset_counts(void);

/* While it is on, kernels are counted and not run, copies and fills of more than 4 KiB leave memory
 * unchanged, and allocations have the size asked for, untouched: zeros. */
void emulation_only_count(int on);

/* True if a device has a context, which takes hundreds of MiB; cudaSetDevice makes one, and so do
 * calls that use the current device. */
int emulation_has_context(int device);
void emulation_forget_contexts(void);

/* Returns the number of nodes in the longest chain of a graph. */
long emulation_longest_chain(cudaGraph_t graph);

/* Makes the n-th allocation (launch) from now on fail, once; n <= 0 makes none fail. */
void emulation_fail_allocation(long n);
void emulation_fail_launch(long n);

#ifdef __cplusplus
}
#endif

#endif
