/*
 * The messages of a call: their addresses, their transfer, and their flags.
 */
#ifndef OB_COLLECTIVES_MESSAGES_H
#define OB_COLLECTIVES_MESSAGES_H

#include "collectives/plan_private.h"

/* Returns the segment that this rank reduces. */
size_t ob_own_segment(const struct onebit_plan *plan);

/* Returns the address of a member's result in the call in flight. */
unsigned char *ob_result_of(const struct onebit_plan *plan, size_t member, size_t chunk);

/* Returns the address of a server's result for a segment, in the memory that the ranks of a host
 * share; it may be in another rank's block. */
unsigned char *ob_host_result(const struct onebit_plan *plan, int copy, size_t segment,
                              size_t chunk);

/* Fills in the header of a message that is about to be sent. */
void ob_write_header(const struct onebit_plan *plan, unsigned char *memory,
                     const struct ob_message_shape *shape, enum ob_message_kind kind, float scale);

/* Return a batch with the endpoints of a chunk's messages, whose headers are filled in already. */
struct ob_batch *ob_exchange_batch(const struct onebit_plan *plan, size_t chunk);
struct ob_batch *ob_gather_batch(const struct onebit_plan *plan, size_t chunk);

/* Begins a batch. If that fails, the plan gives up. */
void ob_begin_batch(const struct onebit_plan *plan, struct ob_batch *batch);

/* Functions of steps that the host runs (steps.h). */
ob_step_run ob_send_to_servers, ob_receive_from_workers, ob_send_to_all, ob_receive_from_servers;

/* Checks a received message about a segment, and records its flags. */
void ob_check_message(const struct onebit_plan *plan, const struct ob_endpoint *in, size_t segment,
                      size_t chunk, enum ob_message_kind kind);

/* Fails the call on this rank because of a message from `rank`. */
void ob_refuse_message(const struct onebit_plan *plan, int rank, onebit_status_t status);

#endif
