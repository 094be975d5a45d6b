/* The staging of a plan on a device (staged.c): what it is made of, and its copies. */
#ifndef OB_CUDA_STAGING_H
#define OB_CUDA_STAGING_H

#include "cuda/device.h"

/* With the plan's part on the device, where messages then have mirrors. */
onebit_status_t ob_staging_create(struct onebit_plan *plan);
void ob_staging_destroy(struct onebit_plan *plan);

/* What is sent from here on is what was computed so far. */
onebit_status_t ob_staging_computed(struct ob_staging *staging);

/* To the host: a chunk of the messages to all servers; of this rank's result; the state, after
 * which comes the event of `index`, for all that was sent before. */
onebit_status_t ob_staging_send_outgoing(struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_result(struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_send_state(struct onebit_plan *plan, size_t index);

/* From the host, before what is computed next: a chunk of the workers' messages; of all results. */
onebit_status_t ob_staging_bring_incoming(struct onebit_plan *plan, size_t chunk);
onebit_status_t ob_staging_bring_results(struct onebit_plan *plan, size_t chunk);

/* Where this rank's result of the call in flight lies, among the host's or the device's. */
unsigned char *ob_staging_result(const struct onebit_plan *plan, const struct ob_geometry *geometry,
                                 size_t chunk);

#endif
