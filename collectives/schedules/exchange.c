/*
 * Exchange: member k reduces segment k. The schedule consists of the reduce-scatter and the
 * allgather of Rabenseifner's allreduce (Thakur, Rabenseifner, Gropp 2005). Messages are compressed
 * and go directly to their destination, and both workers and servers have a residual (1-bit Adam,
 * Tang et al. 2021: compressed_allreduce). A reduce-scatter is the first half of the schedule.
 *
 *   allreduce       C0 E0 C1 E1 ... | r0 R0 G0 r1 R1 G1 ... | early? c0 A0 c1 A1 ... | decide
 *   one scale       C0 C1 ... finish E0 E1 ... | r0 R0 r1 R1 ... finish G0 G1 ... | early? ...
 *   reduce-scatter  C0 E0 C1 E1 ... | r0 r1 ... | decide | A0 A1 ...
 *
 * While a rank compresses chunk i + 1, chunk i is sent. While it reduces chunk i, the next chunks
 * arrive and results are sent. A result is decoded when it arrives if every worker's flags have
 * been received and no rank can cause the call to be skipped any more (messages.c,
 * ob_steps_check_early). Otherwise results are decoded after the step DECIDE, so that a skipped
 * call changes no buffer.
 *
 * Limits: a rank sends 2 (P - 1) messages for each chunk; the messages of one segment have n / P
 * elements in all.
 */
#include "collectives/plan_private.h"

static void add_reduce_steps(struct onebit_plan *plan) {
  for (size_t i = 0; i < plan->geometry.chunks; i++) {
    ob_steps_add(plan, OB_STEP_RECEIVE, i);
    ob_steps_add(plan, OB_STEP_REDUCE, i);
    if (!plan->geometry.one_scale)
      ob_steps_add(plan, OB_STEP_GATHER, i);
  }
  if (!plan->geometry.one_scale)
    return;
  ob_steps_add(plan, OB_STEP_FINISH_SERVER, 0);
  ob_schedule_add_all(plan, OB_STEP_GATHER);
}

static void exchange_build(struct onebit_plan *plan, bool decided) {
  bool scatter = plan->options.operation == ONEBIT_REDUCE_SCATTER;
  if (decided) {
    ob_schedule_add_all(plan, scatter ? OB_STEP_APPLY_SEGMENT : OB_STEP_APPLY_LATE);
    return;
  }
  ob_schedule_add_sending(plan, OB_STEP_COMPRESS, OB_STEP_EXCHANGE);
  if (scatter) {
    ob_schedule_add_all(plan, OB_STEP_RECEIVE);
    return;
  }
  add_reduce_steps(plan);
  for (size_t i = 0; i < plan->geometry.chunks; i++) {
    ob_steps_add(plan, OB_STEP_COLLECT, i);
    if (i == 0)
      ob_steps_add(plan, OB_STEP_CHECK_EARLY, 0);
    ob_steps_add(plan, OB_STEP_APPLY_EARLY, i);
  }
}

static void exchange_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  size_t members = plan->geometry.members;
  bool scatter = plan->options.operation == ONEBIT_REDUCE_SCATTER;
  *sizes = (struct ob_schedule_sizes){
      .outgoing = members,
      .incoming = members,
      .results = scatter ? 0 : members,
      .compressed_end = plan->geometry.layout.blocks,
      .wire_bytes =
          ob_schedule_bytes_to_servers(plan) + (scatter ? 0 : ob_schedule_bytes_to_all(plan)),
  };
  if (!scatter)
    ob_plan_segment(plan, &sizes->reduced_first, &sizes->reduced_end);
}

static double scatter_cost(const struct ob_cost_model *model, size_t chunk) {
  const struct ob_costs *costs = model->costs;
  double segment = (double)model->task->elements;
  struct ob_phase phase = ob_phase_among_all(model, ONEBIT_WIRE_BITS, segment, chunk);
  struct ob_call_parts parts = {
      .wire = ob_phase_wire(model, &phase, true),
      .cores =
          model->codec * segment * model->ranks * costs->compress + ob_phase_work(model, &phase),
      .after = model->codec * segment * ob_cost_of_mean(model) + ob_phase_latency(model, &phase),
      .pieces = ob_phase_pieces(model, &phase),
  };
  return ob_cost_overlap(costs, &parts);
}

/* Returns the seconds of a call. In a dense call a rank waits for a chunk's result before it
 * reduces the chunk after the next one, so the model assumes that nothing overlaps. */
static double exchange_cost(const struct ob_cost_model *model, onebit_wire_t wire, size_t chunk) {
  double n = (double)model->task->elements, segment = n / model->ranks;
  if (model->task->operation == ONEBIT_REDUCE_SCATTER)
    return scatter_cost(model, chunk);
  if (wire == ONEBIT_WIRE_DENSE)
    return ob_cost_of_window(model, chunk, segment, 2);
  struct ob_phase phase = ob_phase_among_all(model, wire, segment, chunk);
  return ob_cost_of_exchange(model, &phase, n, model->ranks, 0, n * model->costs->apply);
}

const struct ob_schedule ob_schedule_exchange = {
    .build = exchange_build, .sizes = exchange_sizes, .cost = exchange_cost};
