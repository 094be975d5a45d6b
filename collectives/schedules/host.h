/*
 * The part of a hierarchical plan that happens inside a host. Its L ranks add up their inputs in
 * shared memory, each for one part of the elements, and see each other's results there. (GPUs that
 * send each other messages do not: cuda/stream_host.c.)
 *
 * Every rank has a block: counters, a window of its inputs as float32, and the results that it
 * collects from the other hosts. A counter only grows, by one a chunk, over all calls of the plan;
 * whoever waits looks at all counters of one kind. A rank writes only into its own block.
 */
#ifndef OB_COLLECTIVES_HOST_H
#define OB_COLLECTIVES_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/shared.h"
#include "compression/blocks.h"

struct onebit_plan;

struct ob_host {
  size_t ranks, place; /* of this host; 0 ranks: the plan is not hierarchical */
  struct ob_shared shared;
  size_t slots, share_bytes;       /* of the window: chunks, and bytes of a share in one of them */
  size_t inputs_at, results_at[2]; /* where they begin in a block */
  float *mean;                     /* scratch: one message's inputs */
  struct ob_view *views;           /* scratch: one a rank of the host */
  uint64_t base;                   /* chunks of the calls before this one */
  unsigned parity;                 /* of the number of calls */
};

/* Sets ranks and place, once the plan's messages are measured; and where the ranks share memory
 * makes this rank's block. */
onebit_status_t ob_host_create(struct onebit_plan *plan);

/* Whether they share memory. Else the plan's executor runs the steps inside the host, and nothing
 * below is for it. */
bool ob_host_shares(const struct onebit_plan *plan);

/* Attaches the others' blocks: after an agreement in which each told the name of its own. */
onebit_status_t ob_host_attach(struct onebit_plan *plan);
void ob_host_destroy(struct ob_host *host);

/* At the beginning and at the end of every call. */
void ob_host_begin(struct onebit_plan *plan);
void ob_host_end(struct onebit_plan *plan);

/* The transport has failed: nobody must wait for this rank. */
void ob_host_give_up(struct onebit_plan *plan);

/* The steps. False: the others are not there yet. */
bool ob_host_put(struct onebit_plan *plan, size_t chunk);
bool ob_host_barrier(struct onebit_plan *plan, size_t chunk);
bool ob_host_wait_free(struct onebit_plan *plan, size_t chunk);
bool ob_host_wait(struct onebit_plan *plan, size_t chunk);
void ob_host_publish(struct onebit_plan *plan, size_t chunk);

/* The mean of the host's inputs for one message; between ob_host_barrier and ob_host_taken. */
void ob_host_mean(struct onebit_plan *plan, size_t share, size_t chunk,
                  const struct ob_message_shape *shape, struct ob_view *out);
void ob_host_taken(struct onebit_plan *plan, size_t chunk);
void ob_host_applied(struct onebit_plan *plan, size_t chunk);

#endif
