/* The interface between the two parts of the executor "stream": steps among the members of a group,
 * and steps among the ranks of a host (stream_messages.c). */
#ifndef OB_CUDA_STREAM_H
#define OB_CUDA_STREAM_H

#include "cuda/device.h"

/* Returns the contents of this rank's headers, and of the headers that are expected. */
struct ob_cuda_stamp ob_stream_stamp(const struct onebit_plan *plan, enum ob_message_kind kind);

/* Stamps the messages of a chunk, unless the kernel that made them does (ob_cuda_can_seal). When
 * that fails, it is tried again with a stamp that says so: the others wait for the message. */
void ob_stream_seal(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                    size_t chunk, enum ob_message_kind kind);

/* The messages of a chunk have come. The kernel that reads them may also open them. Other steps
 * that need their flags open those that are not open yet. */
void ob_stream_came(const struct onebit_plan *plan, const struct ob_cuda_plan *messages,
                    size_t chunk, enum ob_message_kind kind);
void ob_stream_open(const struct onebit_plan *plan);

/* Decides how the call goes on after a step with this status. False: the step has to wait. */
bool ob_stream_ended(const struct onebit_plan *plan, onebit_status_t status);

/* The inside of a host, in memory of the device: after ob_device_create, before ob_device_destroy.
 * Nothing where the plan is not hierarchical. */
onebit_status_t ob_stream_host_create(struct onebit_plan *plan);
void ob_stream_host_destroy(const struct onebit_plan *plan);

/* Its steps (collectives/steps.h). */
ob_step_run ob_stream_host_put, ob_stream_host_barrier, ob_stream_host_publish, ob_stream_host_wait;

/* Rows of the executor (calls.c): whether the last call is over, and then its outcome is
 * told; the host has changed residuals, and may have found large values; ob_plan_accept. */
bool ob_stream_settled(const struct onebit_plan *plan, bool wait);
onebit_status_t ob_stream_imported(const struct onebit_plan *plan);
onebit_status_t ob_stream_accept(const struct onebit_plan *plan);

/* The rank that a state's origin stands for. */
int ob_stream_origin(const struct onebit_plan *plan, int32_t origin);

/*
 * ---- Messages beside kernels (stream_messages.c) ----
 *
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

onebit_status_t ob_overlap_create(struct onebit_plan *plan);
void ob_overlap_destroy(const struct onebit_plan *plan);

/* Enqueues a batch about a chunk, which begins after the kernels enqueued so far. Errors: the
 * transport's. */
onebit_status_t ob_overlap_put(const struct onebit_plan *plan, struct ob_batch *batch,
                               size_t chunk);

/* Makes the next work on the call's stream follow the latest batch of a chunk. */
onebit_status_t ob_overlap_join(const struct onebit_plan *plan, size_t chunk);

#endif
