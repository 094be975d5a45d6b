/*
 * Executors run a plan's steps: on the host, in host memory, or on a device, in device memory.
 * Every executor works with any schedule, and with any transport that can send from the memory of
 * its messages.
 */
#ifndef OB_COLLECTIVES_EXECUTOR_H
#define OB_COLLECTIVES_EXECUTOR_H

#include <stdbool.h>
#include <stddef.h>

#include "base/memory.h"
#include "collectives/steps.h"
#include "onebit/plan.h"

struct ob_executor {
  const char *codec;                 /* codec name for a plan's info; NULL: the plan's codec */
  const struct ob_memory *residuals; /* memory of residuals, and of the sums of their runs */
  const struct ob_memory *messages;  /* memory of messages, which the transport reads and writes */
  bool shares_memory;                /* ranks of a host add inputs in shared memory (host.h) */
  bool deferred;                     /* the host learns the outcome of a call only afterwards */

  /* Called first; fails if this executor is not available. NULL: it always is. */
  onebit_status_t (*open)(struct onebit_plan *plan);

  /* Returns the number of messages of each segment if the options do not set it. `elements` is the
   * sum over all segments. NULL: the cost model chooses the number. */
  size_t (*chunks)(const struct onebit_plan *plan, size_t elements);

  /* `create` allocates further memory of the executor once the plan is built; `destroy` frees it.
   * NULL: none. */
  onebit_status_t (*create)(struct onebit_plan *plan);
  void (*destroy)(struct onebit_plan *plan);

  /* Called when this rank has attached the shared memory of the host's other ranks. NULL: the
   * executor needs no preparation to use it. */
  onebit_status_t (*attached)(const struct onebit_plan *plan);

  /* Fails if the executor cannot work on this buffer. The error message names the argument. */
  onebit_status_t (*check)(const struct onebit_plan *plan, const char *name, const void *buffer);

  /* Called after the host has changed the residuals and server_large. NULL: the executor has no
   * copy of them to update. */
  onebit_status_t (*imported)(const struct onebit_plan *plan);

  /* Called by ob_plan_accept. NULL: the executor does not record refused messages. */
  onebit_status_t (*accept)(const struct onebit_plan *plan);

  /* Called at the beginning and at the end of every call. NULL: nothing to do. */
  onebit_status_t (*begin)(const struct onebit_plan *plan);
  void (*end)(const struct onebit_plan *plan);

  /* Undoes the changes of residuals that have one copy, to within two roundings, after a call that
   * is skipped or fails. NULL: residuals have two copies. */
  void (*undo)(const struct onebit_plan *plan);

  /* Called before and after steps. `enter` makes the plan's device current for this thread and
   * returns the device that was current before; `leave` makes that device current again. NULL on
   * the host. */
  int (*enter)(const struct onebit_plan *plan);
  void (*leave)(int before);

  /* Called after the last step, and before the residuals are read. Returns true if the call has
   * ended and its status is known. NULL: always true. */
  bool (*settled)(const struct onebit_plan *plan, bool wait);

  ob_step_run *run[OB_STEP_KINDS];
};

/* The executor that computes on the CPU, in host memory. */
extern const struct ob_executor ob_executor_host;

#ifdef ONEBIT_HAVE_CUDA
/* The executors that compute with kernels, in memory of a GPU. Staged: the host runs the steps, and
 * messages pass through pinned host memory. Stream: the steps are enqueued on a stream, the
 * transport sends from memory of the GPU, and kernels also write and check the headers. */
extern const struct ob_executor ob_executor_staged, ob_executor_stream;

/* True if only a device can access this memory; sets `device` to its number. Does not initialise
 * CUDA. */
bool ob_cuda_owns(const void *memory, int *device);
#endif

/* Returns ONEBIT_ERROR_ARGUMENT for memory that only a device can access. */
onebit_status_t ob_executor_check_host(const struct onebit_plan *plan, const char *name,
                                       const void *buffer);

/* Returns the executor for plans on this device over this communicator's transport; NULL: this
 * build has none. */
const struct ob_executor *ob_executor_for(onebit_comm_t comm, onebit_device_t device);

/* Sets the plan's executor, from the plan's options and its communicator's transport.
 * ONEBIT_ERROR_UNSUPPORTED: this build or this machine has no such executor. */
onebit_status_t ob_executor_choose(struct onebit_plan *plan);

#endif
