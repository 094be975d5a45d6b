/*
 * The steps of a hierarchical plan inside a host. The host's L ranks sum their inputs in shared
 * memory, each rank for one part of the elements. They also read each other's results there. (GPUs
 * that send messages to each other use cuda/stream_messages.c instead.)
 *
 * Every rank has a block. It consists of counters, a window of the rank's inputs in their own type,
 * and the results that the rank collects from the other hosts. A counter is increased by one for
 * each chunk, over all calls of the plan, and never reset. A rank that waits reads one kind of
 * counter of all ranks. A rank writes only into its own block.
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
  /* If shared.base is NULL the ranks share no memory: the plan's executor runs the steps inside the
   * host, and the fields below are unused. */
  struct ob_shared shared;
  size_t slots, segment_bytes; /* of the window: number of chunks, and bytes of a segment in each */
  size_t inputs_at, results_at[2]; /* offsets of window and results in a block */
  float *mean;                     /* scratch: the mean of the inputs for one message */
  struct ob_view *views;           /* scratch: one for each rank of the host */
};

/* The state of a call in flight inside the host. */
struct ob_host_call {
  uint64_t base;   /* number of chunks of all earlier calls */
  unsigned parity; /* number of earlier calls, modulo 2 */
  int awaited;     /* the rank whose counter is waited for; -1: none */
};

/* Sets ranks and local_rank, once the sizes of the plan's messages are known. If the ranks share
 * memory, also creates this rank's block. */
onebit_status_t ob_host_create(struct onebit_plan *plan);

/* Attaches the blocks of the other ranks, after an agreement in which each rank has sent its
 * block's name. */
onebit_status_t ob_host_attach(struct onebit_plan *plan);
void ob_host_destroy(struct ob_host *host);

/* Called at the beginning and at the end of every call. */
void ob_host_begin(const struct onebit_plan *plan);
void ob_host_end(const struct onebit_plan *plan);

/* Ends the waits of the host's other ranks for this rank. Called after this rank's transport has
 * failed. */
void ob_host_give_up(const struct onebit_plan *plan);

/* The functions that run the steps inside a host. */
ob_step_run ob_host_put, ob_host_barrier, ob_host_wait_free, ob_host_publish, ob_host_wait,
    ob_host_apply_early, ob_host_apply_late;

/* True if the inputs of the call, and so the values in the windows, have 16 bits. An optimizer may
 * pass float32 inputs to a plan of another type. */
bool ob_host_is_half(const struct onebit_plan *plan);

/* Functions for executors that run these steps themselves. ob_host_is_free: true if a chunk of this
 * rank's inputs may be written to its window. ob_host_window: returns the address of a rank's
 * inputs for a segment. ob_host_mark_loaded: publishes that this rank's inputs and flags are
 * written. */
bool ob_host_is_free(const struct onebit_plan *plan, size_t chunk);
void *ob_host_window(const struct onebit_plan *plan, size_t rank, size_t segment, size_t chunk);
void ob_host_mark_loaded(const struct onebit_plan *plan, size_t chunk);

/* ob_host_mean computes the mean of the host's inputs for one message; it is called between
 * ob_host_barrier and ob_host_mark_used. */
void ob_host_mean(const struct onebit_plan *plan, size_t segment, size_t chunk,
                  const struct ob_message_shape *shape, struct ob_view *out);
void ob_host_mark_used(const struct onebit_plan *plan, size_t chunk);

/* --- The steps of the schedule, for hierarchical.c and window.c */

/* True if the ranks of a host can reduce among themselves: in shared memory, or by messages on a
 * stream. */
bool ob_hierarchical_can_add(const struct onebit_plan *plan);

/* These functions add a chunk's steps inside the host: the first one the steps before the chunk is
 * compressed and exchanged, the second one the steps around its reduction, and the last one the
 * steps that collect its results. */
void ob_hierarchical_add_inputs(struct onebit_plan *plan, size_t chunk, size_t ahead);
void ob_hierarchical_add_reducing(struct onebit_plan *plan, size_t chunk);
void ob_hierarchical_add_collecting(struct onebit_plan *plan, size_t chunk);

#endif
