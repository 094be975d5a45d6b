/* Walking a plan's list of steps, and how a call ends. */
#include "collectives/steps.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "collectives/messages.h"

void ob_steps_add(struct onebit_plan *plan, enum ob_step_kind kind, size_t chunk) {
  plan->steps[plan->step_count++] =
      (struct ob_step){plan->executor->run[kind], (uint32_t)chunk, kind};
}

const char *ob_operation_name(onebit_operation_t operation) {
  static const char *const names[] = {"allreduce", "allgather", "reduce-scatter"};
  return names[operation];
}

void ob_plan_describe_call(const struct onebit_plan *plan, struct ob_wait *wait) {
  static const char *const suffixes[] = {"bytes", "KiB", "MiB", "GiB"};
  double size = (double)(plan->count * ob_dtype_size(plan->options.dtype));
  unsigned suffix = 0;
  for (; size >= 1024 && suffix < 3; suffix++)
    size /= 1024;
  snprintf(wait->what, sizeof wait->what, "%s call %u of plan %" PRIu64 " (%.4g %s)",
           ob_operation_name(plan->options.operation), plan->state->sequence, plan->number, size,
           suffixes[suffix]);
  wait->others = plan->device ? "the device, or other ranks" : "other ranks";
}

/* --- Waiting -----------------------------------------------------------------------------------*/

/* The rank that the next step waits for, as far as the host can know; -1. */
static int awaited_rank(const struct onebit_plan *plan) {
  const struct ob_step *step = &plan->steps[plan->flight->step];
  const struct ob_transport *transport = plan->comm->transport;
  size_t slot = step->chunk % plan->geometry.slots;
  if (plan->host.shared.base && plan->flight->host.awaited >= 0)
    return plan->flight->host.awaited;
  if (!transport->peer_awaited)
    return -1;
  switch (step->kind) {
  case OB_STEP_RECEIVE:
    return transport->peer_awaited(plan->exchange[slot]);
  case OB_STEP_COLLECT:
    return transport->peer_awaited(plan->gather[slot]);
  case OB_STEP_END_ROUND:
    return transport->peer_awaited(plan->gather[0]);
  default:
    return -1;
  }
}

static void steps_describe(const void *waiter, struct ob_wait *wait) {
  const struct onebit_plan *plan = waiter;
  ob_plan_describe_call(plan, wait);
  if (plan->flight->step == plan->flight->stop)
    return; /* what is left is on a stream */
  const struct ob_step *step = &plan->steps[plan->flight->step];
  wait->peer = awaited_rank(plan);
  snprintf(wait->detail, sizeof wait->detail, "%s, %s %u", ob_step_name(step->kind),
           step->kind == OB_STEP_END_ROUND ? "round" : "chunk", step->chunk);
}

/* A rank waits at one step for a rank that waits at an earlier one, and so on until a rank that
 * does not answer: the later the step, the longer the grace, so that who waits for that one tells.
 */
static double grace_seconds(const struct onebit_plan *plan) {
  double longest = plan->comm->timeout / 2 < 1 ? plan->comm->timeout / 2 : 1;
  return longest * (double)plan->flight->step / (double)(plan->step_count + 1);
}

onebit_status_t ob_steps_watch(const struct onebit_plan *plan) {
  return ob_watch_look(&plan->flight->watch, plan->comm, grace_seconds(plan), steps_describe, plan);
}

bool ob_steps_walk(const struct onebit_plan *plan, bool wait) {
  const struct ob_executor *executor = plan->executor;
  struct ob_flight *flight = plan->flight;
  const bool traced = plan->state->trace.capacity || plan->state->clocked;
  int before = executor->enter ? executor->enter(plan) : 0;
  bool moved = false;
  while (flight->step < flight->stop) {
    const struct ob_step *step = &plan->steps[flight->step++];
    if (!(traced ? ob_trace_step(plan, step, wait) : step->run(plan, step->chunk, wait))) {
      flight->step--;
      break;
    }
    moved = true;
  }
  if (moved)
    flight->watch = (struct ob_watch){0};
  else if (flight->step < flight->stop && ob_steps_watch(plan) != ONEBIT_OK)
    ob_steps_give_up(plan);
  if (executor->leave)
    executor->leave(before);
  return moved;
}

bool ob_steps_settled(const struct onebit_plan *plan, bool wait) {
  return !plan->executor->settled || plan->executor->settled(plan, wait);
}

/* --- What this rank knows ----------------------------------------------------------------------*/

static bool is_set(const atomic_bool *flag) {
  return atomic_load_explicit(flag, memory_order_relaxed);
}

void ob_steps_fail(const struct onebit_plan *plan, onebit_status_t status) {
  ob_outcome_add(&plan->flight->outcome, status);
}

void ob_steps_give_up(const struct onebit_plan *plan) {
  const struct ob_comm_end *end = &plan->comm->end;
  if (atomic_load(&end->set) && !strstr(onebit_last_error(), end->text))
    ob_comm_health(plan->comm); /* the first error, not those that followed from it here */
  ob_steps_fail(plan, ONEBIT_ERROR_TRANSPORT);
  plan->state->broken = true;
  plan->flight->step = plan->flight->stop;
  /* A call on a stream fails there, and its communicator is the program's to abort. */
  if (!plan->comm->transport->put)
    ob_comm_give_up(plan->comm, plan->flight->outcome.error);
  if (plan->host.shared.base)
    ob_host_give_up(plan);
}

/* In a hierarchical plan a rank speaks for its host: the others hear of its neighbours from it. */
unsigned ob_steps_flags(const struct onebit_plan *plan) {
  bool heard = plan->host.ranks > 0;
  unsigned flags = 0;
  if (is_set(&plan->state->work.not_finite) || (heard && plan->flight->not_finite_rank >= 0))
    flags |= OB_FLAG_NOT_FINITE;
  if (plan->flight->outcome.status != ONEBIT_OK || (heard && plan->flight->failed_rank >= 0))
    flags |= OB_FLAG_ERROR;
  if (is_set(&plan->state->work.large) || (heard && plan->flight->large_heard))
    flags |= OB_FLAG_LARGE;
  if (plan->flight->outcome.status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  flags |= heard ? plan->state->ladder.heard : (unsigned)plan->state->ladder.state.wish;
  return flags;
}

void ob_steps_note_own(const struct onebit_plan *plan) {
  if (is_set(&plan->state->work.not_finite) && plan->flight->not_finite_rank < 0)
    plan->flight->not_finite_rank = plan->comm->rank;
}

/* --- How the call ends -------------------------------------------------------------------------*/

/* Every worker's message is in, so no input can cause the call to be skipped any more. What a
 * server makes of finite numbers that are not large is finite; dense messages do not say whether
 * theirs are. Only a message damaged on its way is left to go wrong, and that the other ranks would
 * not learn of anyway. */
bool ob_steps_check_early(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  struct ob_flight *flight = plan->flight;
  const unsigned flags = ob_steps_flags(plan) & ~(unsigned)OB_LADDER_FLAGS;
  flight->apply_early_ok = !flight->call.hold && !plan->geometry.dense && !flags &&
                           flight->failed_rank < 0 && flight->not_finite_rank < 0 &&
                           !flight->large_heard;
  return true;
}

bool ob_steps_apply_early(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return !plan->flight->apply_early_ok || plan->executor->run[OB_STEP_APPLY](plan, chunk, wait);
}

bool ob_steps_apply_late(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return plan->flight->apply_early_ok || plan->executor->run[OB_STEP_APPLY](plan, chunk, wait);
}

static void tell_verdict(const struct onebit_plan *plan, onebit_status_t status) {
  const char *hearsay = plan->host.ranks ? " or another that it has heard of" : "";
  if (status == ONEBIT_SKIPPED)
    ob_error(status, "skipped: a value on rank %d%s is not finite", plan->flight->not_finite_rank,
             hearsay);
  else
    ob_error(status, "rank %d%s could not take part in the call", plan->flight->failed_rank,
             hearsay);
  ob_steps_fail(plan, status);
}

/* Every rank's flags are in: all ranks come to the same end. */
bool ob_steps_decide(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)chunk, (void)wait;
  ob_steps_note_own(plan);
  onebit_status_t status = ob_call_verdict(plan->flight->outcome.status, plan->flight->failed_rank,
                                           plan->flight->not_finite_rank);
  if (plan->flight->outcome.status == ONEBIT_OK && status != ONEBIT_OK)
    tell_verdict(plan, status);
  if (plan->flight->outcome.status != ONEBIT_OK)
    plan->flight->step = plan->flight->stop;
  return true;
}

bool ob_steps_nothing(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)plan, (void)chunk, (void)wait;
  return true;
}
