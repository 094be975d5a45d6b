/*
 * The state that the files of the transport over NCCL share. A caller of NCCL on `comm` holds the
 * lock, and checks `aborted` first.
 */
#ifndef OB_CUDA_NCCL_STATE_H
#define OB_CUDA_NCCL_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "collectives/communicator.h"
#include "cuda/device.h"
#include "onebit/nccl.h"

struct nccl_state {
  ncclComm_t comm;
  int device;
  cudaStream_t stream;   /* carries messages that the host sends */
  cudaStream_t messages; /* carries plans' messages, beside their kernels */
  pthread_mutex_t lock;
  atomic_bool aborted, gone; /* ncclCommAbort was called; it has returned */
  atomic_int users;          /* the communicator, and the thread that aborts it */
};

static inline struct nccl_state *state_of(onebit_comm_t comm) { return comm->state; }

/* The transport's abort; and the release of one user of a state, the last of which frees it
 * (nccl_state.c). */
void ob_nccl_abort(onebit_comm_t comm, const char *text);
void ob_nccl_state_release(struct nccl_state *state);

/* Waits until a call on a nonblocking communicator, which may only have started it, is complete,
 * and returns NCCL's result. Returns ONEBIT_ERROR_TRANSPORT if this takes longer than
 * ONEBIT_TIMEOUT. */
onebit_status_t ob_nccl_finish(onebit_comm_t comm, ncclResult_t result, const char *what);

/* Weak symbols: the loaded NCCL may be older than the one at compile time, and lack these. */
#if NCCL_VERSION_CODE >= 22700
#pragma weak ncclMemAlloc
#pragma weak ncclMemFree
#pragma weak ncclCommWindowRegister
#pragma weak ncclCommWindowDeregister
#endif

/* The transport's windows. */
onebit_status_t ob_nccl_window_create(onebit_comm_t comm, size_t bytes, struct ob_window **window);
onebit_status_t ob_nccl_window_register(struct ob_window *window);
void ob_nccl_window_destroy(struct ob_window *window);

#endif
