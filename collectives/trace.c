/* Notes when the steps of a plan begin and end. */
#define _POSIX_C_SOURCE 200809L
#include "collectives/trace.h"

#include <time.h>

#include "base/process.h"
#include "collectives/plan_private.h"
#include "collectives/steps.h"

static double processor_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* The time of the plan to which a step is added. */
enum time { NONE, COMPRESS, APPLY };

struct about {
  const char *name;
  enum time time;
};

static const struct about abouts[OB_STEP_KINDS] = {
    [OB_STEP_HOST_PUT] = {"host put", COMPRESS},
    [OB_STEP_HOST_BARRIER] = {"host barrier", NONE},
    [OB_STEP_HOST_COMPRESS] = {"host compress", COMPRESS},
    [OB_STEP_COMPRESS] = {"compress", COMPRESS},
    [OB_STEP_COMPRESS_WHOLE] = {"compress whole", COMPRESS},
    [OB_STEP_COMPRESS_SEGMENT] = {"compress segment", COMPRESS},
    [OB_STEP_FINISH_WORKER] = {"finish worker", COMPRESS},
    [OB_STEP_EXCHANGE] = {"exchange", NONE},
    [OB_STEP_RECEIVE] = {"receive", NONE},
    [OB_STEP_HOST_WAIT_FREE] = {"host wait free", NONE},
    [OB_STEP_REDUCE] = {"reduce", COMPRESS},
    [OB_STEP_FINISH_SERVER] = {"finish server", COMPRESS},
    [OB_STEP_REDUCE_WHOLE] = {"reduce whole", COMPRESS},
    [OB_STEP_GATHER] = {"gather", NONE},
    [OB_STEP_COLLECT] = {"collect", NONE},
    [OB_STEP_BEGIN_ROUND] = {"begin round", NONE},
    [OB_STEP_END_ROUND] = {"end round", NONE},
    [OB_STEP_HOST_PUBLISH] = {"host publish", NONE},
    [OB_STEP_HOST_WAIT] = {"host wait", NONE},
    [OB_STEP_CHECK_EARLY] = {"check early", NONE},
    [OB_STEP_APPLY_EARLY] = {"apply early", APPLY},
    [OB_STEP_HOST_APPLY_EARLY] = {"host apply early", APPLY},
    [OB_STEP_DECIDE] = {"decide", NONE},
    [OB_STEP_APPLY] = {"apply", APPLY},
    [OB_STEP_APPLY_LATE] = {"apply late", APPLY},
    [OB_STEP_HOST_APPLY_LATE] = {"host apply late", APPLY},
    [OB_STEP_APPLY_WHOLE] = {"apply whole", APPLY},
    [OB_STEP_APPLY_SEGMENT] = {"apply segment", APPLY},
    [OB_STEP_COMMIT] = {"commit", APPLY},
};

const char *ob_step_name(unsigned kind) { return kind < OB_STEP_KINDS ? abouts[kind].name : NULL; }

bool ob_step_computes(unsigned kind) { return kind < OB_STEP_KINDS && abouts[kind].time != NONE; }

void ob_plan_trace(onebit_plan_t plan, struct ob_moment *moments, size_t capacity) {
  plan->state->trace = (struct ob_trace){.moments = moments, .capacity = moments ? capacity : 0};
}

size_t ob_plan_traced(onebit_plan_t plan) { return plan->state->trace.count; }

static void trace_begin(struct ob_trace *trace, const struct ob_step *step, double now) {
  if (trace->count == trace->capacity || trace->open)
    return;
  trace->open = true;
  trace->moments[trace->count] = (struct ob_moment){
      .kind = step->kind, .chunk = step->chunk, .begin = now, .processor = processor_seconds()};
}

static void trace_end(struct ob_trace *trace, double now) {
  if (!trace->open)
    return;
  struct ob_moment *moment = &trace->moments[trace->count++];
  moment->end = now;
  moment->processor = processor_seconds() - moment->processor;
  trace->open = false;
}

void ob_plan_clock(onebit_plan_t plan) { plan->state->clocked = true; }

struct ob_spent ob_plan_read_spent(onebit_plan_t plan) {
  const struct ob_spent spent = plan->state->spent;
  plan->state->spent = (struct ob_spent){0};
  return spent;
}

static void trace_count(const struct onebit_plan *plan, const struct ob_step *step,
                        double seconds) {
  enum time time = abouts[step->kind].time;
  if (time == COMPRESS)
    plan->state->spent.compress += seconds;
  else if (time == APPLY)
    plan->state->spent.apply += seconds;
}

bool ob_trace_step(const struct onebit_plan *plan, const struct ob_step *step, bool wait) {
  double before = ob_seconds();
  trace_begin(&plan->state->trace, step, before);
  bool done = step->run(plan, step->chunk, wait);
  double after = ob_seconds();
  trace_count(plan, step, after - before);
  if (done)
    trace_end(&plan->state->trace, after);
  return done;
}
