/* Aborts NCCL communicators, and manages the memory that newer versions of NCCL register. */
#include "cuda/nccl_state.h"

#include <sched.h>

#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"
#include "base/process.h"

/*
 * ---- The abort ----
 *
 * NCCL's kernels end when ncclCommAbort begins, but it returns only when no graph is left that has
 * messages of the communicator, and a program may keep its graphs. So ncclCommAbort is called on a
 * thread of its own.
 */

/* Seconds that an abort waits for a thread which is in a call of NCCL, and then for NCCL. A query
 * takes microseconds; a call that takes longer is waiting for the lost rank, and ends when another
 * thread aborts. */
#define ABORT_SECONDS 1.0

void ob_nccl_state_release(struct nccl_state *state) {
  if (atomic_fetch_sub(&state->users, 1) > 1)
    return;
  pthread_mutex_destroy(&state->lock);
  ob_release(state);
}

static void *abort_nccl(void *context) {
  struct nccl_state *state = context;
  cudaSetDevice(state->device); /* otherwise NCCL would change the device and restore it */
  ncclCommAbort(state->comm);
  state->gone = true;
  ob_nccl_state_release(state);
  return NULL;
}

/* Begins the abort on a thread of its own. If no thread can be created, the caller's thread aborts,
 * which may take long. */
static void begin_abort(struct nccl_state *state) {
  pthread_t thread;
  atomic_fetch_add(&state->users, 1);
  if (pthread_create(&thread, NULL, abort_nccl, state) == 0)
    pthread_detach(thread);
  else
    abort_nccl(state);
}

void ob_nccl_abort(onebit_comm_t comm, const char *text) {
  struct nccl_state *state = state_of(comm);
  int busy;
  (void)text; /* the other ranks learn of the abort from NCCL */
  if (atomic_exchange(&state->aborted, true))
    return;
  double until = ob_seconds() + ABORT_SECONDS;
  while ((busy = pthread_mutex_trylock(&state->lock)) != 0 && ob_seconds() < until)
    sched_yield();
  begin_abort(state);
  for (until = ob_seconds() + ABORT_SECONDS; !state->gone && ob_seconds() < until;)
    sched_yield();
  if (!busy)
    pthread_mutex_unlock(&state->lock);
}

/*
 * ---- Newer versions ----
 *
 * Functions of newer versions of NCCL, which are used if the library was compiled with such a
 * version and the loaded one has them. From 2.27 on these are windows: memory that is registered
 * for messages, which NCCL moves without copies of its own.
 */

#if NCCL_VERSION_CODE >= 22700

/* Returns the version of the loaded NCCL; 0: unknown. */
static int nccl_version(void) {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

struct nccl_window {
  struct ob_window window;
  ncclWindow_t handle; /* NULL: not registered, or NCCL could not use it */
};

/* ncclMemAlloc allocates whole pages of the device, which have this size: a plan with fewer bytes
 * of messages would waste memory. */
#define PAGE_BYTES ((size_t)2 << 20)

static bool has_windows(void) {
  return ncclMemAlloc && ncclMemFree && ncclCommWindowRegister && ncclCommWindowDeregister &&
         nccl_version() >= 22700;
}

static onebit_status_t window_out_of_memory(size_t bytes) {
  return ob_error(ONEBIT_ERROR_MEMORY, "out of device memory for %zu bytes of messages", bytes);
}

onebit_status_t ob_nccl_window_create(onebit_comm_t comm, size_t bytes, struct ob_window **window) {
  void *memory = NULL;
  *window = NULL;
  if (bytes < PAGE_BYTES || comm->size < 2 || !has_windows())
    return ONEBIT_OK;
  struct nccl_window *own = ob_allocate(1, sizeof *own);
  if (!own || ob_memory_must_fail() || ncclMemAlloc(&memory, bytes) != ncclSuccess) {
    cudaGetLastError();
    ob_release(own);
    return window_out_of_memory(bytes);
  }
  own->window = (struct ob_window){.comm = comm, .memory = memory};
  *window = &own->window;
  return ob_memory_cuda.clear(memory, bytes);
}

static onebit_status_t register_window(struct nccl_window *own) {
  onebit_comm_t comm = own->window.comm;
  const struct nccl_state *state = state_of(comm);
  if (state->aborted)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "NCCL: the communicator was aborted");
  ncclResult_t result = ncclCommWindowRegister(state->comm, own->window.memory, own->window.used,
                                               &own->handle, NCCL_WIN_COLL_SYMMETRIC);
  return ob_nccl_finish(comm, result, "register the memory of messages");
}

onebit_status_t ob_nccl_window_register(struct ob_window *window) {
  struct nccl_state *state = state_of(window->comm);
  OB_LOCKED(&state->lock);
  return register_window((struct nccl_window *)window);
}

/* An aborted communicator has no windows any more. While NCCL is still aborting the communicator,
 * it may yet unmap the window's memory, so the memory is not freed. */
void ob_nccl_window_destroy(struct ob_window *window) {
  struct nccl_window *own = (struct nccl_window *)window;
  struct nccl_state *state = state_of(window->comm);
  pthread_mutex_lock(&state->lock);
  if (own->handle && !state->aborted)
    ncclCommWindowDeregister(state->comm, own->handle);
  pthread_mutex_unlock(&state->lock);
  if (!state->aborted || state->gone)
    ncclMemFree(window->memory);
  ob_release(own);
}

#else

onebit_status_t ob_nccl_window_create(onebit_comm_t comm, size_t bytes, struct ob_window **window) {
  (void)comm, (void)bytes;
  *window = NULL;
  return ONEBIT_OK;
}

onebit_status_t ob_nccl_window_register(struct ob_window *window) {
  (void)window;
  return ONEBIT_OK;
}

void ob_nccl_window_destroy(struct ob_window *window) { (void)window; }

#endif
