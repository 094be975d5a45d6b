/*
 * Hierarchical, in three stages. Each rank of a host adds one part of the elements of all ranks of
 * the host, in full precision. Between hosts, the ranks with the same local number exchange
 * compressed messages as in exchange.c. Then the ranks of a host publish the results to each other.
 * (This is the two-level allreduce of Goyal et al. 2017, section 4, and of Horovod, with messages
 * of one bit between hosts.)
 *
 *   P0 P1 B0 C0 E0 P2 B1 C1 E1 ... | r0 f0 R0 G0 ... | c0 p0 w0 early? A0 c1 p1 w1 A1 ... | decide
 *
 * The letters are those of schedule.h. Further letters stand for steps inside the host. P: put a
 * chunk of the input into shared memory, once there is space. B: barrier. f: wait until no rank
 * uses the result of an earlier call. p: publish a chunk of the results. w: wait for those of the
 * other ranks. A rank puts its input one chunk ahead, so that the ranks of a host may differ by a
 * chunk. Before results are applied early, a rank needs the flags of the host's other ranks, which
 * receive messages from other workers. All flags are known when every rank has published the first
 * chunk of results.
 *
 * The steps inside a host are in host.c for shared memory, and in cuda/stream_messages.c for a
 * stream.
 *
 * Limits: all hosts must have the same number of ranks. Each block must have a scale, since a rank
 * compresses only a part of the buffer.
 */
#include "base/error.h"
#include "collectives/plan_private.h"

bool ob_hierarchical_can_add(const struct onebit_plan *plan) {
  return plan->executor->shares_memory || plan->comm->transport->put;
}

static onebit_status_t hierarchical_applicable(const struct onebit_plan *plan,
                                               const struct ob_plan_shape *shape) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  const char *name = "ONEBIT_SCHEDULE_HIERARCHICAL";
  if (!ob_hierarchical_can_add(plan))
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "schedule is %s, which this plan's device and transport do not support", name);
  if (shape->one_scale)
    return ob_error(
        ONEBIT_ERROR_ARGUMENT,
        "schedule is %s, block_size is ONEBIT_BLOCK_BUFFER: each rank compresses a part "
        "of the buffer, so the buffer cannot have one scale",
        name);
  if (!hosts->each)
    return ob_error(
        ONEBIT_ERROR_UNSUPPORTED,
        "schedule is %s: the hosts have %d to %d ranks, and all must have the same number", name,
        hosts->fewest, hosts->max);
  return ONEBIT_OK;
}

void ob_hierarchical_add_inputs(struct onebit_plan *plan, size_t chunk, size_t ahead) {
  for (size_t i = chunk ? chunk + ahead : 0; i <= chunk + ahead && i < plan->geometry.chunks; i++)
    ob_steps_add(plan, OB_STEP_HOST_PUT, i);
  ob_steps_add(plan, OB_STEP_HOST_BARRIER, chunk);
}

void ob_hierarchical_add_reducing(struct onebit_plan *plan, size_t chunk) {
  ob_steps_add(plan, OB_STEP_RECEIVE, chunk);
  ob_steps_add(plan, OB_STEP_HOST_WAIT_FREE, chunk);
  ob_steps_add(plan, OB_STEP_REDUCE, chunk);
  ob_steps_add(plan, OB_STEP_GATHER, chunk);
}

void ob_hierarchical_add_collecting(struct onebit_plan *plan, size_t chunk) {
  ob_steps_add(plan, OB_STEP_COLLECT, chunk);
  ob_steps_add(plan, OB_STEP_HOST_PUBLISH, chunk);
  ob_steps_add(plan, OB_STEP_HOST_WAIT, chunk);
}

static void hierarchical_build(struct onebit_plan *plan, bool decided) {
  size_t chunks = plan->geometry.chunks;
  if (decided) {
    ob_schedule_add_all(plan, OB_STEP_HOST_APPLY_LATE);
    return;
  }
  for (size_t i = 0; i < chunks; i++) {
    ob_hierarchical_add_inputs(plan, i, 1);
    ob_steps_add(plan, OB_STEP_HOST_COMPRESS, i);
    ob_steps_add(plan, OB_STEP_EXCHANGE, i);
  }
  for (size_t i = 0; i < chunks; i++)
    ob_hierarchical_add_reducing(plan, i);
  for (size_t i = 0; i < chunks; i++) {
    ob_hierarchical_add_collecting(plan, i);
    if (i == 0)
      ob_steps_add(plan, OB_STEP_CHECK_EARLY, 0);
    ob_steps_add(plan, OB_STEP_HOST_APPLY_EARLY, i);
  }
}

/* Computes the sizes. A rank compresses only its part of the elements. Results in shared memory
 * belong to the host. */
static void hierarchical_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  const struct ob_geometry *geometry = &plan->geometry;
  const size_t *own = geometry->bounds + geometry->first_segment * geometry->chunks;
  *sizes = (struct ob_schedule_sizes){
      .outgoing = geometry->members,
      .incoming = geometry->members,
      .results = plan->executor->shares_memory ? 0 : geometry->segments,
      .compressed_first = own[0],
      .compressed_end = own[geometry->members * geometry->chunks],
      .wire_bytes = ob_schedule_bytes_to_servers(plan) + ob_schedule_bytes_to_all(plan),
  };
  ob_plan_segment(plan, &sizes->reduced_first, &sizes->reduced_end);
}

static const char *hierarchical_refuse(const struct ob_cost_task *task, onebit_wire_t wire) {
  if (task->operation != ONEBIT_ALLREDUCE || wire == ONEBIT_WIRE_DENSE)
    return "";
  if (task->hosts > 1 && task->ranks_per_host > 1)
    return NULL;
  return task->hosts < 2 ? "hierarchical: not possible with one host"
         : task->ranks_per_host == 0
             ? "hierarchical: not possible, since hosts have different numbers of ranks"
             : "hierarchical: the same as exchange, since each host has one rank";
}

/* Returns the seconds of a call. Every rank copies its input to shared memory, and adds the
 * segments of its local number. The ranks of a host wait for each other three times: before and
 * after adding, and for the published results. */
static double hierarchical_cost(const struct ob_cost_model *model, onebit_wire_t wire,
                                size_t chunk) {
  const struct ob_costs *costs = model->costs;
  double n = (double)model->task->elements, part = n / model->on_host;
  struct ob_phase phase = ob_phase_of(model, wire, 0, model->hosts - 1, part / model->hosts, chunk);
  double before = n * costs->load + n * costs->add;
  return ob_cost_of_exchange(model, &phase, part, model->hosts, before, n * costs->apply) +
         3 * model->on_host * costs->inside.latency + 3 * (model->core - 1) * costs->oversubscribed;
}

const struct ob_schedule ob_schedule_hierarchical = {.applicable = hierarchical_applicable,
                                                     .build = hierarchical_build,
                                                     .sizes = hierarchical_sizes,
                                                     .refuse = hierarchical_refuse,
                                                     .cost = hierarchical_cost};
