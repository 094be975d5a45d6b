/*
 * The steps of a hierarchical plan inside a host. The host's L ranks sum their inputs in shared
 * memory, each for one part of the elements, and read each other's results there. (GPUs that send
 * messages to each other do not use it: cuda/stream_messages.c.)
 *
 * Every rank has a block: counters, a window of its inputs, in their own type, and the results that
 * it collects from the other hosts. A counter only grows, by one for each chunk, over all calls of
 * the plan; a rank that waits reads the counters of one kind of all ranks. A rank writes only into
 * its own block.
 */
#ifndef OB_COLLECTIVES_HOST_H
#define OB_COLLECTIVES_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/hosts.h"
#include "collectives/steps.h"
#include "compression/blocks.h"

struct onebit_plan;

struct ob_host {
  size_t ranks, local_rank; /* of this host; 0 ranks: the plan is not hierarchical */
  /* Without a base address the ranks share no memory: the plan's executor runs the steps inside the
   * host, and the fields below are unused. */
  struct ob_shared shared;
  size_t slots, segment_bytes; /* of the window: its chunks, and the bytes of a segment in each */
  size_t inputs_at, results_at[2]; /* their offsets in a block */
  float *mean;                     /* scratch: one message's inputs */
  struct ob_view *views;           /* scratch: one a rank of the host */
};

/* The host's state of a call in flight. */
struct ob_host_call {
  uint64_t base;   /* chunks of the calls before this one */
  unsigned parity; /* of the number of calls */
  int awaited;     /* the rank whose counter is behind; -1: none */
};

/* Sets ranks and local_rank once the sizes of the plan's messages are known, and creates this
 * rank's block if the ranks share memory. */
onebit_status_t ob_host_create(struct onebit_plan *plan);

/* Attaches the other ranks' blocks, after an agreement in which each rank sent its block's name. */
onebit_status_t ob_host_attach(struct onebit_plan *plan);
void ob_host_destroy(struct ob_host *host);

/* Called at the beginning and at the end of every call. */
void ob_host_begin(const struct onebit_plan *plan);
void ob_host_end(const struct onebit_plan *plan);

/* Releases the ranks that wait for this rank, after its transport has failed. */
void ob_host_give_up(const struct onebit_plan *plan);

/* The functions that run the steps inside a host. */
ob_step_run ob_host_put, ob_host_barrier, ob_host_wait_free, ob_host_publish, ob_host_wait,
    ob_host_apply_early, ob_host_apply_late;

/* True if the inputs of the call, and so those in the windows, have 16 bits. An optimizer may have
 * float32 inputs in a plan of another type. */
bool ob_host_is_half(const struct onebit_plan *plan);

/* Functions for executors that run these steps themselves. is_free: true if a chunk of this rank's
 * inputs may be written to its window. window: returns the address of a rank's inputs for a
 * segment. mark_loaded: tells the other ranks that this rank's inputs and flags are there. */
bool ob_host_is_free(const struct onebit_plan *plan, size_t chunk);
void *ob_host_window(const struct onebit_plan *plan, size_t rank, size_t segment, size_t chunk);
void ob_host_mark_loaded(const struct onebit_plan *plan, size_t chunk);

/* Computes the mean of the host's inputs for one message. Called between ob_host_barrier and
 * ob_host_mark_used. */
void ob_host_mean(const struct onebit_plan *plan, size_t segment, size_t chunk,
                  const struct ob_message_shape *shape, struct ob_view *out);
void ob_host_mark_used(const struct onebit_plan *plan, size_t chunk);

/* --- The steps of the schedule, for hierarchical.c and window.c */

/* True if the ranks of a host can reduce among themselves: in memory that they share, or in
 * messages that are put on a stream. */
bool ob_hierarchical_can_add(const struct onebit_plan *plan);

/* Add the steps of a chunk inside the host: before it is compressed and exchanged, around its
 * reduction, and for the collection of its results. */
void ob_hierarchical_add_inputs(struct onebit_plan *plan, size_t chunk, size_t ahead);
void ob_hierarchical_add_reducing(struct onebit_plan *plan, size_t chunk);
void ob_hierarchical_add_collecting(struct onebit_plan *plan, size_t chunk);

#endif
