/*
 * The steps of a plan, in parts: where messages lie, how they travel, and what is done with what is
 * in them. steps.c puts them in order.
 */
#ifndef OB_COLLECTIVES_STEP_PARTS_H
#define OB_COLLECTIVES_STEP_PARTS_H

#include "collectives/plan.h"

/* --- Where messages lie, and what they are about (step_messages.c) */

/* Of a member of the group, in plan->outgoing or plan->incoming. */
unsigned char *ob_message_at(const struct onebit_plan *plan, unsigned char *base, size_t member,
                             size_t chunk);

/* The result of a member of the group, in the call in flight. */
unsigned char *ob_result_of(const struct onebit_plan *plan, size_t member, size_t chunk);

/* The share that a member of the group serves; this rank's. */
size_t ob_share_of(const struct onebit_plan *plan, size_t member);
size_t ob_own_share(const struct onebit_plan *plan);

/* The member that is `step` places further: every rank begins with its neighbour, so that they do
 * not all send to the same one. */
size_t ob_shifted(const struct onebit_plan *plan, size_t step);

bool ob_is_dense(const struct onebit_plan *plan);

/* --- Sending and receiving (step_messages.c). What waits returns false when it is not over. */

/* The endpoints of a chunk's messages, for whoever has stamped them. */
struct ob_batch *ob_exchange_batch(struct onebit_plan *plan, size_t chunk);
struct ob_batch *ob_gather_batch(struct onebit_plan *plan, size_t chunk);
struct ob_batch *ob_round_batch(struct onebit_plan *plan, size_t round);

void ob_exchange_chunk(struct onebit_plan *plan, size_t chunk);
void ob_gather_chunk(struct onebit_plan *plan, size_t chunk);
bool ob_receive(struct onebit_plan *plan, struct ob_batch *batch, size_t chunk,
                enum ob_message_kind kind, bool wait);

/* A round of doubling. */
void ob_pass(struct onebit_plan *plan, size_t number);
bool ob_passed(struct onebit_plan *plan, size_t number, bool wait);

#endif
