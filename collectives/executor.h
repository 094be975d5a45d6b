/*
 * Executors: who computes a plan's steps, and in which memory. Every executor works with any
 * schedule, and with any transport that can send from the memory of its messages.
 */
#ifndef OB_COLLECTIVES_EXECUTOR_H
#define OB_COLLECTIVES_EXECUTOR_H

#include <stdbool.h>
#include <stddef.h>

#include "base/memory.h"
#include "collectives/steps.h"
#include "onebit/plan.h"

struct ob_executor {
  const char *codec;                 /* its name in a plan's info; NULL: the plan's codec's */
  const struct ob_memory *residuals; /* where residuals and sums of runs are */
  const struct ob_memory *messages;  /* where messages are, for the transport */
  bool shares_memory;                /* ranks of a host add inputs in it (schedules/host.h) */
  bool deferred;                     /* the host learns only afterwards how a call ended */

  /* Called first: fails where this executor is not available. NULL: it always is. */
  onebit_status_t (*open)(struct onebit_plan *plan);

  /* Returns the number of messages of each segment, if the options do not set it; `elements` is the
   * sum over all segments. NULL: the cost model decides. */
  size_t (*chunks)(const struct onebit_plan *plan, size_t elements);

  /* Allocates further memory of the executor, once the plan is built, and frees it. NULL: none. */
  onebit_status_t (*create)(struct onebit_plan *plan);
  void (*destroy)(struct onebit_plan *plan);

  /* Called when the blocks of shared memory of the host's other ranks are attached. NULL: the
   * executor uses them without preparation. */
  onebit_status_t (*attached)(const struct onebit_plan *plan);

  /* Fails unless it can work on this buffer. The error message names the argument. */
  onebit_status_t (*check)(const struct onebit_plan *plan, const char *name, const void *buffer);

  /* Called after the host has changed the residuals and server_large. NULL: no copy has to
   * follow. */
  onebit_status_t (*imported)(const struct onebit_plan *plan);

  /* Called by ob_plan_accept. NULL: the executor keeps no note of refused messages. */
  onebit_status_t (*accept)(const struct onebit_plan *plan);

  /* Called at the beginning and at the end of every call. NULL: nothing to do. */
  onebit_status_t (*begin)(const struct onebit_plan *plan);
  void (*end)(const struct onebit_plan *plan);

  /* Restores residuals of one copy after a call that is skipped or fails, to two roundings. NULL:
   * there are two copies. */
  void (*undo)(const struct onebit_plan *plan);

  /* Called around steps: make the plan's device current for this thread and return the one that was
   * current before; make that one current again. NULL on the host. */
  int (*enter)(const struct onebit_plan *plan);
  void (*leave)(int before);

  /* Called after the last step, and before the residuals are read: true if the call is over and its
   * status known. NULL: it always is. */
  bool (*settled)(const struct onebit_plan *plan, bool wait);

  ob_step_run *run[OB_STEP_KINDS];
};

/* Memory of the processor, and its codecs. */
extern const struct ob_executor ob_executor_host;

#ifdef ONEBIT_HAVE_CUDA
/* Memory of a GPU, with kernels that compute there. Staged: messages go through pinned memory of
 * the host, which runs the steps. Stream: the transport sends from memory of the GPU, kernels also
 * write and check the headers, and the steps are enqueued on a stream. */
extern const struct ob_executor ob_executor_staged, ob_executor_stream;

/* True if only a device can use this memory; sets `device` to its number. Does not initialise
 * CUDA. */
bool ob_cuda_owns(const void *memory, int *device);
#endif

/* Returns ONEBIT_ERROR_ARGUMENT for memory that only a device can use. */
onebit_status_t ob_executor_check_host(const struct onebit_plan *plan, const char *name,
                                       const void *buffer);

/* Returns the executor of plans on this device, over this communicator's transport; NULL: this
 * build has none. */
const struct ob_executor *ob_executor_for(onebit_comm_t comm, onebit_device_t device);

/* Sets the plan's executor, from its options and its communicator's transport.
 * ONEBIT_ERROR_UNSUPPORTED: this build or this machine has none. */
onebit_status_t ob_executor_choose(struct onebit_plan *plan);

#endif
