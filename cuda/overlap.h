/*
 * Messages beside kernels: a plan of several chunks over a transport that puts messages on streams
 * (NCCL) puts them on a stream of the communicator's. A message follows all kernels that were put
 * before it; kernels follow messages only where they read them, so that chunk i + 1 is compressed
 * while chunk i travels.
 *
 *   stream of the call   C0 . C1 . C2 ...  r0 R0 . r1 R1 . ...
 *   messages             .  E0 . E1 . E2 ...     . G0 .  G1 ...
 *
 * In a graph the same events are a fork and a join. A plan of one chunk has nothing to overlap:
 * its messages go on the stream of the call.
 */
#ifndef OB_CUDA_OVERLAP_H
#define OB_CUDA_OVERLAP_H

#include "cuda/device.h"

onebit_status_t ob_overlap_create(struct onebit_plan *plan);
void ob_overlap_destroy(const struct onebit_plan *plan);

/* Enqueues a batch about a chunk, which begins after the kernels enqueued so far. Errors: the
 * transport's. */
onebit_status_t ob_overlap_put(const struct onebit_plan *plan, struct ob_batch *batch,
                               size_t chunk);

/* Makes the next work on the call's stream follow the latest batch of a chunk. */
onebit_status_t ob_overlap_join(const struct onebit_plan *plan, size_t chunk);

#endif
