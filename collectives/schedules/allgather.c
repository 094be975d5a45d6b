/*
 * Allgather: every rank sends its message to every other one. In an allreduce each rank computes
 * the mean of all messages. In the operation allgather each message is decoded to an output of its
 * own. Values are rounded once, not a second time by a server. Methods without servers exchange
 * signs in this way (EF-SGD, Karimireddy et al. 2019).
 *
 *   bits       C0 G0 C1 G1 ... | c0 c1 ... | decide | A0 A1 ...
 *   one scale  C0 C1 ... finish G0 G1 ... | c0 c1 ... | decide | A0 A1 ...
 *   dense      C0 G0 C1 G1 ... | c0 c1 ... R0 R1 ... | decide | A0 A1 ...
 *
 * The mean of dense messages is computed before the step DECIDE, because it may overflow.
 *
 * Limits: each of the P ranks sends (P - 1) n elements, so this schedule is for two or three ranks,
 * and for small buffers. With four ranks or more one small message is sent in rounds (doubling.c),
 * but not among few ranks of one host. Optimizers need messages of servers, which every rank makes
 * for itself (replicas.c).
 */
#include "base/error.h"
#include "collectives/plan_private.h"

static onebit_status_t allgather_applicable(const struct onebit_plan *plan,
                                            const struct ob_plan_shape *shape) {
  return shape->from_servers ? ob_replicas_applicable(plan, shape) : ONEBIT_OK;
}

static bool is_allreduce(const struct onebit_plan *plan) {
  return plan->options.operation == ONEBIT_ALLREDUCE;
}

static void allgather_build(struct onebit_plan *plan, bool decided) {
  if (decided) {
    ob_schedule_add_all(plan, is_allreduce(plan) ? OB_STEP_APPLY_WHOLE : OB_STEP_APPLY);
    return;
  }
  ob_schedule_add_sending(plan,
                          plan->geometry.whole ? OB_STEP_COMPRESS_WHOLE : OB_STEP_COMPRESS_SEGMENT,
                          OB_STEP_GATHER);
  ob_schedule_add_all(plan, OB_STEP_COLLECT);
  if (plan->geometry.dense && is_allreduce(plan))
    ob_schedule_add_all(plan, OB_STEP_REDUCE_WHOLE);
}

static void allgather_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  *sizes = (struct ob_schedule_sizes){
      .outgoing = plan->geometry.dense && is_allreduce(plan), /* for the mean */
      .results = plan->geometry.members,
      .compressed_end = plan->geometry.layout.blocks,
      .wire_bytes = ob_schedule_bytes_to_all(plan),
  };
  if (!plan->geometry.whole)
    ob_plan_segment(plan, &sizes->compressed_first, &sizes->compressed_end);
}

static const char *allgather_refuse(const struct ob_cost_task *task, onebit_wire_t wire) {
  (void)wire;
  return task->operation == ONEBIT_ALLREDUCE ? NULL : "";
}

static double allgather_bits_cost(const struct ob_cost_model *model, const struct ob_phase *phase,
                                  double latency) {
  const struct ob_costs *costs = model->costs;
  double n = (double)model->task->elements;
  double decode = model->task->operation == ONEBIT_ALLGATHER
                      ? model->ranks * costs->apply /* each message to its own output */
                      : ob_cost_of_mean(model);
  struct ob_call_parts parts = {
      .wire = ob_phase_wire(model, phase, true),
      .cores = model->codec * n * costs->compress + ob_phase_work(model, phase),
      .after = model->codec * n * decode + latency,
      .pieces = ob_phase_pieces(model, phase),
  };
  return ob_cost_overlap(costs, &parts);
}

static double allgather_dense_cost(const struct ob_cost_model *model, const struct ob_phase *phase,
                                   double latency) {
  const struct ob_costs *costs = model->costs;
  double n = (double)model->task->elements;
  double codec = n * (costs->load + costs->convert + model->ranks * costs->add) * model->core;
  return codec / model->threads + ob_phase_dense_wire(model, phase) + ob_phase_work(model, phase) +
         latency;
}

/* Returns the seconds of a call; if the message is sent in rounds, with the latencies of
 * doubling. */
static double allgather_cost(const struct ob_cost_model *model, onebit_wire_t wire, size_t chunk) {
  struct ob_phase phase = ob_phase_among_all(model, wire, (double)model->task->elements, chunk);
  double latency = ob_phase_latency(model, &phase);
  if (ob_cost_doubles(model, &phase))
    latency = ob_phase_double(model, &phase);
  else if (wire == ONEBIT_WIRE_DENSE && phase.bytes / phase.messages > OB_COST_EAGER_BYTES)
    latency *= 3;
  return wire == ONEBIT_WIRE_DENSE ? allgather_dense_cost(model, &phase, latency)
                                   : allgather_bits_cost(model, &phase, latency);
}

const struct ob_schedule ob_schedule_allgather = {.whole = true,
                                                  .applicable = allgather_applicable,
                                                  .build = allgather_build,
                                                  .sizes = allgather_sizes,
                                                  .refuse = allgather_refuse,
                                                  .cost = allgather_cost};
