/* The staging of a plan on a device (staged.c): what it is made of, and its copies. */
#ifndef OB_CUDA_STAGING_H
#define OB_CUDA_STAGING_H

#include "cuda/device.h"

/* With the plan's part on the device, where messages then have mirrors. */
onebit_status_t ob_staging_create(struct onebit_plan *plan);
void ob_staging_destroy(struct onebit_plan *plan);

/* Marks all that was computed so far as the source of the next sends. */
onebit_status_t ob_staging_computed(struct ob_staging *staging);

/* To the host: a chunk of the messages to all servers; of this rank's result; the state, after
 * which comes the event of `index`, for all that was sent before. */
onebit_status_t ob_staging_send_outgoing(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_result(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_state(const struct onebit_plan *plan, size_t index);

/* From the host, before what is computed next: a chunk of the workers' messages; of all results. */
onebit_status_t ob_staging_bring_incoming(const struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_bring_results(const struct onebit_plan *plan, size_t chunk);

/* Around a copy from the host, on staging->in: it waits for what was computed, where memory that it
 * writes may be in use; and what is computed next waits for it. */
onebit_status_t ob_staging_in_follows(struct ob_staging *staging);
onebit_status_t ob_staging_compute_follows(struct ob_staging *staging);

/* Rows between the host and the device, at once where they are not too far apart for that. */
struct ob_rows {
  unsigned char *memory;
  size_t pitch;
};
cudaError_t ob_staging_copy_rows(const struct onebit_plan *plan, struct ob_rows to,
                                 struct ob_rows from, size_t bytes, size_t count, bool down);

/* True if a query or a wait is over. An error ends the waiting too, and fails the call. */
bool ob_staged_over(const struct onebit_plan *plan, cudaError_t error);

/* From here on this rank only tells the others that it cannot take part. */
void ob_staged_fail(const struct onebit_plan *plan, onebit_status_t status);

/* Takes over the device's errors and flags, as they were when it sent this state. */
void ob_staged_hear(const struct onebit_plan *plan, const struct ob_cuda_state *seen);

/* The inside of a host (staging.c), in memory that its ranks share. Nothing where the plan is
 * not hierarchical. The blocks are attached: copies are made from them and to them. */
onebit_status_t ob_staged_host_create(struct onebit_plan *plan);
onebit_status_t ob_staged_host_attached(const struct onebit_plan *plan);
void ob_staged_host_destroy(const struct onebit_plan *plan);

/* At the beginning of a call. */
void ob_staged_host_begin(const struct onebit_plan *plan);

/* Its steps (collectives/steps.h). */
ob_step_run ob_staged_host_put, ob_staged_host_barrier;

/* A chunk of the host's inputs, compressed, once they are on the device. */
onebit_status_t ob_staged_host_compress(const struct onebit_plan *plan, size_t chunk);

/* A chunk of everyone's results to the device. */
onebit_status_t ob_staged_host_bring_results(const struct onebit_plan *plan, size_t chunk);

/* Returns the place of this rank's result of the call in flight, among the host's messages or the
 * device's. */
unsigned char *ob_staging_result(const struct onebit_plan *plan, const struct ob_geometry *geometry,
                                 size_t chunk);

#endif
