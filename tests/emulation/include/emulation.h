/*
 * An emulated CUDA device, for machines without a GPU. The project's .cu files are compiled as C++
 * against the headers in this directory, and run thread by thread. The headers compile as C99 and
 * C++.
 *
 * Each CUDA thread of a CTA is a fiber. CTAs run one after the other, on the OS thread that waits
 * for them. Work on streams runs as late as CUDA allows, so that a missing dependency gives a wrong
 * result. Undefined behaviour of CUDA ends the process with a message: a barrier that only part of
 * a CTA reaches, lanes of one mask in different collectives, a deadlock, a write past an
 * allocation.
 *
 * The environment variables, which are read at each use:
 *   EMULATED_DEVICES=2             the number of devices
 *   EMULATED_CAPABILITY=9.0        their compute capability
 *   EMULATED_ORDER=shuffle         the order of threads and CTAs: forward, backward, or shuffled
 *   EMULATED_SEED=1                the seed of the shuffle
 *   EMULATED_STREAMS=deferred      or eager, which runs work when it is enqueued
 *   EMULATED_TIMEOUT=60            seconds without progress after which a wait ends the process
 *   EMULATED_NCCL_VERSION=22809    the NCCL version; calling a newer function ends the process
 *   EMULATED_PITCH=2147483647      the largest pitch in bytes that cudaMemcpy2DAsync accepts
 *
 * Limits. CTAs are not resident together, so a CUDA thread that spins on memory which another CTA
 * must write hangs. A warp does not wait for a lane that has exited (the hardware's rule).
 * __syncthreads ends the process if a thread of the CTA has exited. Shuffles read a NaN from lanes
 * that do not take part. Only -fsanitize=alignment finds plain misaligned dereferences.
 *
 * The emulated device always behaves in ways that the documents of CUDA and NCCL permit but drivers
 * seldom show. A copy from memory that is not pinned waits for the earlier work of its stream and
 * stages the bytes. The staged bytes reach the destination after the call, when the stream runs the
 * copy. Copies between devices and memsets also run late. A call that copies to memory that is not
 * pinned returns after the copy. cudaFree and cudaFreeHost wait for all work of the device;
 * cudaStreamDestroy waits for nothing. When NCCL has failed, its kernels spin until their rank
 * aborts. ncclCommAbort and ncclCommDestroy return only when no graph with calls on the
 * communicator is left. An aborted or destroyed communicator is freed. A later call on it ends the
 * process, and so does freeing it while another thread is in a call on it.
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
  long groups;           /* groups of NCCL calls: one for each communicator and stream of a group */
  long events;           /* records of events and waits of streams, except those in graph
                          * launches */
  long sent_bytes;       /* bytes given to ncclSend */
};
struct emulation_counters emulation_counts(void);
void emulation_reset_counts(void);

/* While this mode is on, kernels are counted and not run. Copies and fills of more than 4 KiB leave
 * memory unchanged. Allocations have the requested size, but their pages stay untouched and read as
 * zeros. */
void emulation_only_count(int on);

/* True if a device has a context. A real context takes hundreds of MiB. cudaSetDevice and calls
 * that use the current device make a context. */
int emulation_has_context(int device);
void emulation_forget_contexts(void);

/* Returns the number of nodes in the longest chain of a graph. */
long emulation_longest_chain(cudaGraph_t graph);

/* Makes the n-th allocation (kernel launch) from now on fail, once. If n <= 0, none fails. */
void emulation_fail_allocation(long n);
void emulation_fail_launch(long n);

#ifdef __cplusplus
}
#endif

#endif
