/*
 * The steps of a collective. Each does one thing to one chunk; the order is the schedule's.
 *
 * A rank in trouble (a wrong argument, a bad message) does not stop: it goes on through the same
 * steps and sends messages that say so in their flags, so that all ranks come to the end of the
 * same call and none waits for ever. Flags add up: a message carries what its sender knows when it
 * leaves, so the last message of a phase tells all.
 */
#include "collectives/steps.h"

#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/step_parts.h"

static bool is_set(const atomic_bool *flag) {
  return atomic_load_explicit(flag, memory_order_relaxed);
}

void ob_steps_fail(struct onebit_plan *plan, onebit_status_t status) {
  if (plan->status != ONEBIT_OK)
    return; /* the first trouble is the one to tell of */
  plan->status = status;
  snprintf(plan->words, sizeof plan->words, "%s", onebit_last_error());
}

void ob_steps_give_up(struct onebit_plan *plan) {
  ob_steps_fail(plan, ONEBIT_ERROR_TRANSPORT);
  plan->broken = true;
  plan->step = plan->stop;
  if (ob_host_shares(plan))
    ob_host_give_up(plan);
}

/* In a hierarchical plan a rank speaks for its host: the others hear of its neighbours from it. */
unsigned ob_steps_flags(const struct onebit_plan *plan) {
  bool heard = plan->host.ranks > 0;
  unsigned flags =
      (ob_is_dense(plan) ? OB_FLAG_DENSE : 0u) | (ob_sends_halves(plan) ? OB_FLAG_HALF : 0u);
  if (is_set(&plan->work.not_finite) || (heard && plan->not_finite_rank >= 0))
    flags |= OB_FLAG_NOT_FINITE;
  if (plan->status != ONEBIT_OK || (heard && plan->failed_rank >= 0))
    flags |= OB_FLAG_ERROR;
  if (is_set(&plan->work.large) || (heard && plan->large_heard))
    flags |= OB_FLAG_LARGE;
  if (plan->status == ONEBIT_ERROR_MISMATCH)
    flags |= OB_FLAG_MISMATCH;
  return flags;
}

/* Who met a value that is not finite: the first. A rank's own input comes before what it hears of
 * others, and that before what it then makes of theirs, which is not its fault. */
static void note_own(struct onebit_plan *plan) {
  if (is_set(&plan->work.not_finite) && plan->not_finite_rank < 0)
    plan->not_finite_rank = plan->comm->rank;
}

static void apply_and_tell(struct onebit_plan *plan, size_t chunk) {
  plan->place->apply(plan, chunk);
  if (plan->host.ranks)
    ob_host_applied(plan, chunk);
}

/* Every worker's message is in, so no input can spoil the call any more. What a server makes of
 * finite numbers that are not large is finite; dense messages do not say whether theirs are. Only a
 * message damaged on its way is left to go wrong, and that the other ranks would not learn of
 * anyway. */
static void check_early(struct onebit_plan *plan) {
  plan->apply_early_ok = !plan->call.hold && !ob_is_dense(plan) && !ob_steps_flags(plan) &&
                         plan->failed_rank < 0 && plan->not_finite_rank < 0 && !plan->large_heard;
}

/* Every rank's flags are in: all ranks come to the same end. */
static void decide(struct onebit_plan *plan) {
  note_own(plan);
  if (plan->failed_rank >= 0) {
    ob_error(ONEBIT_ERROR_PEER, "rank %d%s could not take part in the call", plan->failed_rank,
             plan->host.ranks ? " or another that it has heard of" : "");
    ob_steps_fail(plan, ONEBIT_ERROR_PEER);
  } else if (plan->not_finite_rank >= 0) {
    ob_error(ONEBIT_SKIPPED, "skipped: a value on rank %d%s is not finite", plan->not_finite_rank,
             plan->host.ranks ? " or another that it has heard of" : "");
    ob_steps_fail(plan, ONEBIT_SKIPPED);
  }
  if (plan->status != ONEBIT_OK)
    plan->step = plan->stop;
}

bool ob_steps_take(struct onebit_plan *plan, const struct ob_step *step, bool wait) {
  const struct ob_place *place = plan->place;
  const size_t chunk = step->chunk, slot = chunk % plan->slots;
  switch (step->kind) {
  case OB_STEP_HOST_PUT:
    return ob_host_put(plan, chunk);
  case OB_STEP_HOST_BARRIER:
    return ob_host_barrier(plan, chunk);
  case OB_STEP_COMPRESS:
    place->compress(plan, chunk);
    return true;
  case OB_STEP_FINISH_WORKER:
    place->finish_worker(plan);
    return true;
  case OB_STEP_EXCHANGE:
    if (!place->ready(plan, chunk, wait))
      return false;
    note_own(plan);
    ob_exchange_chunk(plan, chunk);
    return true;
  case OB_STEP_RECEIVE:
    return ob_receive(plan, plan->exchange[slot], chunk, OB_MESSAGE_WORKER, wait);
  case OB_STEP_HOST_WAIT_FREE:
    return ob_host_wait_free(plan, chunk);
  case OB_STEP_REDUCE:
    place->reduce(plan, chunk);
    return true;
  case OB_STEP_FINISH_SERVER:
    place->finish_server(plan);
    return true;
  case OB_STEP_GATHER:
    if (!place->ready(plan, chunk, wait))
      return false;
    note_own(plan);
    ob_gather_chunk(plan, chunk);
    return true;
  case OB_STEP_COLLECT:
    return ob_receive(plan, plan->gather[slot], chunk, OB_MESSAGE_SERVER, wait);
  case OB_STEP_BEGIN_ROUND:
    if (!place->ready(plan, 0, wait))
      return false;
    note_own(plan);
    ob_pass(plan, chunk);
    return true;
  case OB_STEP_END_ROUND:
    return ob_passed(plan, chunk, wait);
  case OB_STEP_HOST_PUBLISH:
    ob_host_publish(plan, chunk);
    return true;
  case OB_STEP_HOST_WAIT:
    return ob_host_wait(plan, chunk);
  case OB_STEP_CHECK_EARLY:
    check_early(plan);
    return true;
  case OB_STEP_APPLY_EARLY:
    if (plan->apply_early_ok)
      apply_and_tell(plan, chunk);
    return true;
  case OB_STEP_DECIDE:
    if (!place->all_ready(plan, wait))
      return false;
    decide(plan);
    return true;
  case OB_STEP_APPLY:
    if (!plan->apply_early_ok)
      apply_and_tell(plan, chunk);
    return true;
  case OB_STEP_COMMIT:
    if (!ob_is_dense(plan)) {
      place->commit(plan);
      plan->result_now = !plan->result_now;
    }
    return true;
  }
  return true;
}

bool ob_steps_done(const struct onebit_plan *plan) { return plan->step >= plan->stop; }

/* Which of the plan's times a step counts to; NULL: to none. */
static double *time_of(struct onebit_plan *plan, enum ob_step_kind kind) {
  switch (kind) {
  case OB_STEP_HOST_PUT:
  case OB_STEP_COMPRESS:
  case OB_STEP_FINISH_WORKER:
  case OB_STEP_REDUCE:
  case OB_STEP_FINISH_SERVER:
    return &plan->spent.compress;
  case OB_STEP_APPLY_EARLY:
  case OB_STEP_APPLY:
  case OB_STEP_COMMIT:
    return &plan->spent.apply;
  default:
    return NULL;
  }
}

static bool take_clocked(struct onebit_plan *plan, const struct ob_step *step, bool wait) {
  double *time = plan->clocked ? time_of(plan, step->kind) : NULL;
  if (!time)
    return plan->place->take(plan, step, wait);
  double begin = ob_seconds();
  bool taken = plan->place->take(plan, step, wait);
  *time += ob_seconds() - begin;
  return taken;
}

bool ob_steps_walk(struct onebit_plan *plan, bool wait) {
  bool moved = false;
  while (!ob_steps_done(plan)) {
    const struct ob_step *step = &plan->steps[plan->step++];
    if (plan->trace.room)
      ob_trace_begin(plan, step);
    if (!take_clocked(plan, step, wait)) {
      plan->step--;
      break;
    }
    if (plan->trace.room)
      ob_trace_end(plan);
    moved = true;
  }
  return moved;
}
