/* Walking a plan's list of steps. */
#ifndef OB_COLLECTIVES_STEPS_H
#define OB_COLLECTIVES_STEPS_H

#include "collectives/plan.h"

/* Takes steps until the list ends or a message is not here yet; with `wait`, until the list ends.
 * The caller holds the plan's claim. True if a step was taken. */
bool ob_steps_walk(struct onebit_plan *plan, bool wait);

/* Around each step, for a plan that is traced (trace.c). */
void ob_trace_begin(struct onebit_plan *plan, const struct ob_step *step);
void ob_trace_end(struct onebit_plan *plan);

/* The step of a host that walks. False when it has to wait; plan->step already points to the step
 * after. */
bool ob_steps_take(struct onebit_plan *plan, const struct ob_step *step, bool wait);

/* Whether the list has ended. */
bool ob_steps_done(const struct onebit_plan *plan);

/* What this rank knows of the call, as the flags of a message (enum ob_message_flag). */
unsigned ob_steps_flags(const struct onebit_plan *plan);

/* Takes note of another rank's flags and of the number that it must have in common with this one.
 * */
void ob_steps_hear(struct onebit_plan *plan, int rank, unsigned flags, uint32_t agreed);

/* After a failed transport no message can be trusted to come: the call ends here, with the latest
 * words. */
void ob_steps_give_up(struct onebit_plan *plan);

/* This rank is not well: what it sends from now on says so. The latest words of this thread become
 * the plan's. */
void ob_steps_fail(struct onebit_plan *plan, onebit_status_t status);

#endif
