/*
 * Replicas: the allgather of an optimizer. Each rank sends its messages for all servers to all
 * ranks, and every rank does the work of all servers. So a call waits for one message instead of
 * two, and all bits are those of the exchange (exchange.c).
 *
 *   C0 E0 C1 E1 ... | r0 R0 r1 R1 ... | early? A0 A1 ... | decide
 *
 * Every rank has the residuals of all servers. They stay equal, since all ranks reduce the same
 * messages. A rank saves only the part that it would have in the exchange; after a state is loaded,
 * the ranks send each other their parts (optimizers/replicas.c).
 *
 * Limits: each of the P ranks sends (P - 1) n elements, where the exchange sends 2 (P - 1) / P n,
 * and reduces P times as many. A rank that refuses a damaged message does not prevent the others
 * from applying the call, as with an allgather. A server may have no state but residuals: no
 * momentum, and no ladder, which is measured at one server.
 */
#include "base/error.h"
#include "collectives/plan_private.h"

onebit_status_t ob_replicas_applicable(const struct onebit_plan *plan,
                                       const struct ob_plan_shape *shape) {
  const char *why = shape->one_scale                       ? "block_size is ONEBIT_BLOCK_BUFFER"
                    : shape->serving.rule != OB_SERVE_MEAN ? "its servers have momentum"
                    : plan->options.max_bits > plan->options.bits ? "max_bits is larger than bits"
                                                                  : NULL;
  if (shape->options.device != ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "schedule is ONEBIT_SCHEDULE_ALLGATHER, which an optimizer supports only in "
                    "host memory");
  return why ? ob_error(ONEBIT_ERROR_ARGUMENT,
                        "schedule is ONEBIT_SCHEDULE_ALLGATHER, which this optimizer does not "
                        "support, since %s",
                        why)
             : ONEBIT_OK;
}

static void replicas_build(struct onebit_plan *plan, bool decided) {
  if (decided) {
    ob_schedule_add_all(plan, OB_STEP_APPLY_LATE);
    return;
  }
  ob_schedule_add_sending(plan, OB_STEP_COMPRESS, OB_STEP_EXCHANGE);
  for (size_t i = 0; i < plan->geometry.chunks; i++) {
    ob_steps_add(plan, OB_STEP_RECEIVE, i);
    ob_steps_add(plan, OB_STEP_REDUCE, i);
  }
  ob_steps_add(plan, OB_STEP_CHECK_EARLY, 0);
  ob_schedule_add_all(plan, OB_STEP_APPLY_EARLY);
}

static void replicas_sizes(const struct onebit_plan *plan, struct ob_schedule_sizes *sizes) {
  const size_t members = plan->geometry.members, blocks = plan->geometry.layout.blocks;
  *sizes = (struct ob_schedule_sizes){
      .outgoing = members,
      .incoming = members * members,
      .results = members,
      .compressed_end = blocks,
      .reduced_end = blocks,
      .wire_bytes = ob_schedule_bytes_to_replicas(plan),
  };
}

const struct ob_schedule ob_schedule_replicas = {.build = replicas_build, .sizes = replicas_sizes};
