/*
 * The table of places: where a plan's buffers and kept values are, and who computes on them. Any
 * row works with any transport that can take messages from where the row puts them.
 */
#ifndef OB_COLLECTIVES_PLACE_H
#define OB_COLLECTIVES_PLACE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/memory.h"
#include "onebit/plan.h"

struct onebit_plan;
struct ob_step;

struct ob_place {
  const char *codec;                /* the name of what computes; NULL: the plan's codec does */
  const struct ob_memory *kept;     /* where kept values and sums of runs are */
  const struct ob_memory *messages; /* where messages are, for the transport */
  bool shares_memory;               /* the ranks of a host add up there (host.h) */
  bool deferred;                    /* the host learns only afterwards how a call ended */

  /* Called first: fails where this executor is not available. NULL: it always is. */
  onebit_status_t (*open)(struct onebit_plan *plan);

  /* What else it needs, once the plan is built; and gives that back. */
  onebit_status_t (*create)(struct onebit_plan *plan);
  void (*destroy)(struct onebit_plan *plan);

  /* Fails unless it can work on this buffer. The error message names the argument. */
  onebit_status_t (*check)(const struct onebit_plan *plan, const char *name, const void *buffer);

  /* The host has changed the kept values, and server_large. NULL: nothing else knows of them. */
  onebit_status_t (*imported)(struct onebit_plan *plan);

  /* At the beginning and at the end of every call. */
  onebit_status_t (*begin)(struct onebit_plan *plan);
  void (*end)(struct onebit_plan *plan);

  /* Takes one step of the call. False: it has to wait for something. */
  bool (*take)(struct onebit_plan *plan, const struct ob_step *step, bool wait);

  /* After the last step: whether the call is over and its status known. Also before anything else
   * looks at what the plan keeps. */
  bool (*settled)(struct onebit_plan *plan, bool wait);

  /* What ob_steps_take asks for, where the host walks the steps (step_codec.c). */
  void (*compress)(struct onebit_plan *plan, size_t chunk);
  void (*finish_worker)(struct onebit_plan *plan);
  void (*reduce)(struct onebit_plan *plan, size_t chunk);
  void (*finish_server)(struct onebit_plan *plan);
  void (*apply)(struct onebit_plan *plan, size_t chunk);
  void (*commit)(struct onebit_plan *plan);
  /* Whether what was computed last for a chunk, or for the whole call, is among the messages and
   * accounted for in the plan's flags. */
  bool (*ready)(struct onebit_plan *plan, size_t chunk, bool wait);
  bool (*all_ready)(struct onebit_plan *plan, bool wait);
};

/* Memory of the processor, and its codecs. */
extern const struct ob_place ob_place_host;

#ifdef ONEBIT_HAVE_CUDA
/* Memory of a GPU, with kernels that work there: messages go through pinned memory of the host,
 * which walks the steps; or the transport moves them in memory of the GPU, where headers are
 * stamped and judged too, and the steps are put on a stream. */
extern const struct ob_place ob_place_staged, ob_place_stream;

/* Whether only a device can use this memory, and which one. Sets nothing of CUDA up. */
bool ob_cuda_owns(const void *memory, int *device);
#endif

/* ONEBIT_ERROR_ARGUMENT for memory that only a device can use. */
onebit_status_t ob_place_check_host(const struct onebit_plan *plan, const char *name,
                                    const void *buffer);

/* The place of plans on this device, over this communicator's transport; NULL: this build has
 * none. */
const struct ob_place *ob_place_for(onebit_comm_t comm, onebit_device_t device);

/* Sets the plan's place, from its options and its communicator's transport.
 * ONEBIT_ERROR_UNSUPPORTED: this build or this machine has none. */
onebit_status_t ob_place_choose(struct onebit_plan *plan);

#endif
