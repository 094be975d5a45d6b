/* The schedule of a plan: its shares and chunks, and the list of steps that every call walks. */
#ifndef OB_COLLECTIVES_SCHEDULE_H
#define OB_COLLECTIVES_SCHEDULE_H

#include "collectives/plan.h"

/* Cuts the layout in shares and chunks: plan->shares, chunks, bounds, slots, stride, wire_bytes. */
onebit_status_t ob_schedule_cut(struct onebit_plan *plan, const struct ob_plan_shape *shape);

/* Writes the list of steps. */
onebit_status_t ob_schedule_steps(struct onebit_plan *plan, const struct ob_plan_shape *shape);

#endif
