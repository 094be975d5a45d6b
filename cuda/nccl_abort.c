/*
 * The abort of a communicator. NCCL's kernels end when ncclCommAbort begins, but it returns only
 * when no graph is left that has messages of the communicator in it, and a program may keep its
 * graphs: so it is called on a thread of its own.
 */
#include <sched.h>

#include "base/memory.h"
#include "base/process.h"
#include "cuda/nccl_state.h"

/* Seconds that an abort waits for a thread which is in a call of NCCL, and then for NCCL. Calls
 * that look take microseconds; one that is there longer waits for the rank that is gone, and NCCL
 * lets it go when another thread aborts. */
#define ABORT_SECONDS 1.0

void ob_nccl_state_release(struct nccl_state *state) {
  if (atomic_fetch_sub(&state->users, 1) > 1)
    return;
  pthread_mutex_destroy(&state->lock);
  ob_release(state);
}

static void *abort_nccl(void *context) {
  struct nccl_state *state = context;
  cudaSetDevice(state->device); /* else NCCL would change to it, and back to one of no concern */
  ncclCommAbort(state->comm);
  state->gone = true;
  ob_nccl_state_release(state);
  return NULL;
}

/* Without a thread the abort is made here, and may take long. */
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
  (void)text; /* the others hear of it from NCCL */
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
