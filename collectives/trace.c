/* Notes when the steps of a plan begin and end. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/trace.h"

#include <time.h>

#include "base/clock.h"
#include "collectives/plan.h"
#include "collectives/steps.h"

static double processor_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

const char *ob_step_name(unsigned kind) {
  static const char *const names[] = {[OB_STEP_HOST_PUT] = "host put",
                                      [OB_STEP_HOST_BARRIER] = "host barrier",
                                      [OB_STEP_HOST_WAIT_FREE] = "host wait free",
                                      [OB_STEP_HOST_PUBLISH] = "host publish",
                                      [OB_STEP_HOST_WAIT] = "host wait",
                                      [OB_STEP_BEGIN_ROUND] = "begin round",
                                      [OB_STEP_END_ROUND] = "end round",
                                      [OB_STEP_COMPRESS] = "compress",
                                      [OB_STEP_FINISH_WORKER] = "finish worker",
                                      [OB_STEP_EXCHANGE] = "exchange",
                                      [OB_STEP_RECEIVE] = "receive",
                                      [OB_STEP_REDUCE] = "reduce",
                                      [OB_STEP_FINISH_SERVER] = "finish server",
                                      [OB_STEP_GATHER] = "gather",
                                      [OB_STEP_COLLECT] = "collect",
                                      [OB_STEP_CHECK_EARLY] = "check early",
                                      [OB_STEP_APPLY_EARLY] = "apply early",
                                      [OB_STEP_DECIDE] = "decide",
                                      [OB_STEP_APPLY] = "apply",
                                      [OB_STEP_COMMIT] = "commit"};
  return kind < sizeof names / sizeof names[0] ? names[kind] : NULL;
}

void ob_plan_trace(onebit_plan_t plan, struct ob_moment *moments, size_t room) {
  plan->trace = (struct ob_trace){.moments = moments, .room = moments ? room : 0};
}

size_t ob_plan_traced(onebit_plan_t plan) { return plan->trace.count; }

void ob_trace_begin(struct onebit_plan *plan, const struct ob_step *step) {
  struct ob_trace *trace = &plan->trace;
  if (trace->count == trace->room || trace->open)
    return;
  trace->open = true;
  trace->moments[trace->count] = (struct ob_moment){
      .kind = step->kind,
      .chunk = step->chunk,
      .begin = ob_seconds(),
      .processor = processor_seconds(),
  };
}

void ob_trace_end(struct onebit_plan *plan) {
  struct ob_trace *trace = &plan->trace;
  if (!trace->open)
    return;
  struct ob_moment *moment = &trace->moments[trace->count++];
  moment->end = ob_seconds();
  moment->processor = processor_seconds() - moment->processor;
  trace->open = false;
}
