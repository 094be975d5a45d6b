/* The schedule of a plan: its shares and chunks, and the list of steps that every call walks. */
#ifndef OB_COLLECTIVES_SCHEDULE_H
#define OB_COLLECTIVES_SCHEDULE_H

#include "collectives/plan.h"

/* Decides how the call goes about it: plan->schedule. ONEBIT_ERROR_ARGUMENT,
 * ONEBIT_ERROR_UNSUPPORTED when what was asked for cannot be had. */
onebit_status_t ob_schedule_choose(struct onebit_plan *plan, const struct ob_plan_shape *shape);

/* Cuts the layout in shares and chunks: plan->shares, chunks, bounds, slots, strides, wire_bytes.
 * */
onebit_status_t ob_schedule_cut(struct onebit_plan *plan, const struct ob_plan_shape *shape);

/* Writes the list of steps. */
onebit_status_t ob_schedule_steps(struct onebit_plan *plan, const struct ob_plan_shape *shape);

#endif
