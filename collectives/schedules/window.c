/*
 * Dense window: sends float32 or 16-bit values through few message buffers, for the warm-up of an
 * optimizer. Without the window, messages would need as much memory as the gradients. The schedule
 * is a pipelined reduce-scatter and allgather, chunk by chunk, with two chunks in flight.
 *
 *   allreduce       C0 E0 | C1 E1 r0 R0 G0 | C2 E2 r1 R1 G1 c0 A0 | C3 E3 r2 ... decide
 *   reduce-scatter  C0 E0 | C1 E1 r0 A0 | ... decide
 *   allgather       C0 G0 | C1 G1 c0 A0 | ... decide
 *
 * A letter is a step, its number is the chunk. C: compress the input, E: send segments to the ranks
 * that reduce them, r: receive segments, R: reduce them, G: send the results, c: collect results,
 * A: apply them.
 *
 * An allreduce's results are applied one chunk later than possible, so that the next messages are
 * sent first. A hierarchical plan applies them at once; inside the host it puts inputs and waits at
 * a barrier before C, waits for free memory before R, and publishes results and waits for them
 * after c (hierarchical.c).
 *
 * Limits: results are applied before the call is known to succeed. A caller that must be able to
 * skip a call passes a separate buffer for the results.
 */
#include "collectives/plan_private.h"

static void add_sending_steps(struct onebit_plan *plan, size_t chunk) {
  bool gathers = plan->options.operation == ONEBIT_ALLGATHER;
  if (plan->host.ranks)
    ob_hierarchical_add_inputs(plan, chunk, 0);
  ob_steps_add(plan,
               plan->host.ranks       ? OB_STEP_HOST_COMPRESS
               : !gathers             ? OB_STEP_COMPRESS
               : plan->geometry.whole ? OB_STEP_COMPRESS_WHOLE
                                      : OB_STEP_COMPRESS_SEGMENT,
               chunk);
  ob_steps_add(plan, gathers ? OB_STEP_GATHER : OB_STEP_EXCHANGE, chunk);
}

static void add_receiving_steps(struct onebit_plan *plan, size_t chunk) {
  switch (plan->options.operation) {
  case ONEBIT_REDUCE_SCATTER:
    ob_steps_add(plan, OB_STEP_RECEIVE, chunk);
    ob_steps_add(plan, OB_STEP_APPLY_SEGMENT, chunk);
    break;
  case ONEBIT_ALLGATHER:
    ob_steps_add(plan, OB_STEP_COLLECT, chunk);
    ob_steps_add(plan, OB_STEP_APPLY, chunk);
    break;
  case ONEBIT_ALLREDUCE:
    if (plan->host.ranks) {
      ob_hierarchical_add_reducing(plan, chunk);
      ob_hierarchical_add_collecting(plan, chunk);
      ob_steps_add(plan, OB_STEP_HOST_APPLY_LATE, chunk);
      break;
    }
    ob_steps_add(plan, OB_STEP_RECEIVE, chunk);
    ob_steps_add(plan, OB_STEP_REDUCE, chunk);
    ob_steps_add(plan, OB_STEP_GATHER, chunk);
    break;
  }
}

/* Adds the steps that end an allreduce's chunk; they come before the slot of its result is used
 * again. */
static void window_add_results(struct onebit_plan *plan, size_t chunk) {
  ob_steps_add(plan, OB_STEP_COLLECT, chunk);
  ob_steps_add(plan, OB_STEP_APPLY, chunk);
}

static void window_build(struct onebit_plan *plan, bool decided) {
  size_t chunks = plan->geometry.chunks;
  bool apart = plan->options.operation == ONEBIT_ALLREDUCE && !plan->host.ranks;
  for (size_t i = 0; !decided && i < chunks + 2; i++) {
    if (i < chunks)
      add_sending_steps(plan, i);
    if (i > 0 && i <= chunks)
      add_receiving_steps(plan, i - 1);
    if (apart && i > 1)
      window_add_results(plan, i - 2);
  }
}

static void window_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  if (plan->options.operation == ONEBIT_ALLGATHER)
    ob_schedule_allgather.sizes(plan, sizes);
  else if (plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL)
    ob_schedule_hierarchical.sizes(plan, sizes);
  else
    ob_schedule_exchange.sizes(plan, sizes);
}

/* Returns the seconds of a dense reduce-scatter or allgather. */
static double window_cost(const struct ob_cost_model *model, onebit_wire_t wire, size_t chunk) {
  (void)wire;
  return ob_cost_of_window(model, chunk, (double)model->task->elements, 1);
}

const struct ob_schedule ob_schedule_window = {
    .window = 2, .build = window_build, .sizes = window_sizes, .cost = window_cost};
