/*
 * A trace of one call: when each step of a plan began and ended, and what it took of the processor.
 */
#ifndef OB_COLLECTIVES_TRACE_H
#define OB_COLLECTIVES_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "collectives/steps.h"
#include "onebit/plan.h"

struct ob_moment {
  unsigned kind; /* enum ob_step_kind */
  uint32_t chunk;
  double begin,
      end; /* seconds of CLOCK_MONOTONIC; a step that waits begins when it is first tried */
  double processor; /* seconds of this thread's processor time between the two */
};

/* A name of a kind of step; NULL past the last. */
const char *ob_step_name(unsigned kind);

/* True if such a step computes, and does not wait or send. */
bool ob_step_computes(unsigned kind);

/* From its next call on the plan notes its steps in moments[0 .. room - 1], each call from the
 * start of the array; `moments` NULL: no more. The array must outlive the plan, or the next
 * ob_plan_trace. */
void ob_plan_trace(onebit_plan_t plan, struct ob_moment *moments, size_t capacity);

/* Steps noted of the latest call. */
size_t ob_plan_traced(onebit_plan_t plan);

/* Runs a step of a plan that is traced, or that counts what it spends. */
bool ob_trace_step(const struct onebit_plan *plan, const struct ob_step *step, bool wait);

#endif
