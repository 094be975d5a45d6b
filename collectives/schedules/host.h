/*
 * The part of a hierarchical plan that happens inside a host. Its L ranks add up their inputs in
 * shared memory, each for one part of the elements, and see each other's results there. (GPUs that
 * send each other messages do not: cuda/stream_messages.c.)
 *
 * Every rank has a block: counters, a window of its inputs, in their own type, and the results that
 * it collects from the other hosts. A counter only grows, by one a chunk, over all calls of the
 * plan; whoever waits looks at all counters of one kind. A rank writes only into its own block.
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
  /* Without a base they share no memory: the plan's executor runs the steps inside the host, and
   * nothing below is for it. */
  struct ob_shared shared;
  size_t slots, segment_bytes; /* of the window: chunks, and bytes of a segment in one of them */
  size_t inputs_at, results_at[2]; /* where they begin in a block */
  float *mean;                     /* scratch: one message's inputs */
  struct ob_view *views;           /* scratch: one a rank of the host */
};

/* The part of a call in flight. */
struct ob_host_call {
  uint64_t base;   /* chunks of the calls before this one */
  unsigned parity; /* of the number of calls */
  int awaited;     /* the rank whose counter is behind; -1: none */
};

/* Sets ranks and local_rank, once the plan's messages are measured; and where the ranks share
 * memory makes this rank's block. */
onebit_status_t ob_host_create(struct onebit_plan *plan);

/* Attaches the other ranks' blocks, after an agreement in which each rank sent its block's name. */
onebit_status_t ob_host_attach(struct onebit_plan *plan);
void ob_host_destroy(struct ob_host *host);

/* Called at the beginning and at the end of every call. */
void ob_host_begin(const struct onebit_plan *plan);
void ob_host_end(const struct onebit_plan *plan);

/* Releases the ranks that wait for this rank, after its transport has failed. */
void ob_host_give_up(const struct onebit_plan *plan);

/* Its steps. */
ob_step_run ob_host_put, ob_host_barrier, ob_host_wait_free, ob_host_publish, ob_host_wait,
    ob_host_apply_early, ob_host_apply_late;

/* True if the call's inputs, and so those in the windows, are of 16 bits: an optimizer's may be
 * float32 in a plan of another type. */
bool ob_host_is_half(const struct onebit_plan *plan);

/* The parts of an executor's own steps: whether a chunk of this rank's inputs may be put in its
 * window; the place of a rank's inputs of a segment; and that they are there, with the flags of
 * this rank. */
bool ob_host_is_free(const struct onebit_plan *plan, size_t chunk);
void *ob_host_window(const struct onebit_plan *plan, size_t rank, size_t segment, size_t chunk);
void ob_host_mark_loaded(const struct onebit_plan *plan, size_t chunk);

/* The mean of the host's inputs for one message; between ob_host_barrier and ob_host_mark_used. */
void ob_host_mean(const struct onebit_plan *plan, size_t segment, size_t chunk,
                  const struct ob_message_shape *shape, struct ob_view *out);
void ob_host_mark_used(const struct onebit_plan *plan, size_t chunk);

/* --- The steps of the schedule, for hierarchical.c and window.c */

/* True if the ranks of a host can reduce among themselves: in memory that they share, or in
 * messages that are put on a stream. */
bool ob_hierarchical_can_add(const struct onebit_plan *plan);

/* Around a chunk's C E; around its R G; and for its results. */
void ob_hierarchical_add_inputs(struct onebit_plan *plan, size_t chunk, size_t ahead);
void ob_hierarchical_add_reducing(struct onebit_plan *plan, size_t chunk);
void ob_hierarchical_add_collecting(struct onebit_plan *plan, size_t chunk);

#endif
