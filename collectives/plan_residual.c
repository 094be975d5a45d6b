/* The residual of a plan, for its owner: out, in, and set back. */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "collectives/plan_private.h"

/* Fails unless the plan is free for a look at its residual. Waits for what is on a stream. */
static onebit_status_t plan_residual_check_idle(onebit_plan_t plan) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  if (plan->state->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  ob_steps_settled(plan, true);
  return ONEBIT_OK;
}

onebit_status_t ob_plan_imported(onebit_plan_t plan, bool large) {
  plan->state->server_large = large;
  return plan->executor->imported ? plan->executor->imported(plan) : ONEBIT_OK;
}

onebit_status_t onebit_plan_export_residual(onebit_plan_t plan, float *worker, float *server) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  if (!ob_plan_in_bits(plan)) /* without residuals, and memory for them */
    return ONEBIT_OK;
  if (worker)
    OB_TRY(ob_residual_export(&plan->state->worker, &plan->geometry.layout, worker));
  if (server)
    OB_TRY(ob_residual_export(&plan->state->server, &plan->geometry.layout, server));
  return ONEBIT_OK;
}

static onebit_status_t plan_residual_check_finite(const char *name, const float *values,
                                                  size_t count) {
  for (size_t i = 0; values && i < count; i++)
    if (!ob_is_finite(values[i]))
      return ob_error(ONEBIT_ERROR_ARGUMENT, "%s[%zu] is %g, not finite", name, i,
                      (double)values[i]);
  return ONEBIT_OK;
}

static bool any_large(const float *values, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (fabsf(values[i]) >= OB_LARGE_SCALE)
      return true;
  return false;
}

onebit_status_t onebit_plan_import_residual(onebit_plan_t plan, const float *worker,
                                            const float *server) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  if (!ob_plan_in_bits(plan))
    return ONEBIT_OK;
  OB_TRY(plan_residual_check_finite(
      "worker", worker, ob_residual_elements(&plan->state->worker, &plan->geometry.layout)));
  OB_TRY(plan_residual_check_finite(
      "server", server, ob_residual_elements(&plan->state->server, &plan->geometry.layout)));
  if (worker)
    OB_TRY(ob_residual_import(&plan->state->worker, &plan->geometry.layout, worker));
  if (!server)
    return ob_plan_imported(plan, plan->state->server_large);
  OB_TRY(ob_residual_import(&plan->state->server, &plan->geometry.layout, server));
  return ob_plan_imported(
      plan, any_large(server, ob_residual_elements(&plan->state->server, &plan->geometry.layout)));
}

onebit_status_t ob_plan_accept(onebit_plan_t plan) {
  *plan->refused = false;
  ob_ladder_reset(plan);
  return plan->executor->accept ? plan->executor->accept(plan) : ONEBIT_OK;
}

static onebit_status_t plan_residual_reset(onebit_plan_t plan) {
  OB_TRY(ob_residual_reset(&plan->state->worker));
  OB_TRY(ob_residual_reset(&plan->state->server));
  return ob_plan_imported(plan, false);
}

onebit_status_t onebit_plan_reset_residual(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(plan_residual_check_idle(plan));
  return ob_plan_in_bits(plan) ? plan_residual_reset(plan) : ONEBIT_OK;
}

static onebit_status_t clear_results(const struct onebit_plan *plan) {
  size_t first, end;
  ob_plan_own_results(plan, &first, &end);
  for (size_t segment = first; segment < end; segment++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_last_message(plan, segment, chunk);
      OB_TRY(plan->executor->messages->clear(ob_plan_result(plan, false, segment, chunk),
                                             ob_message_bytes(&shape)));
    }
  return ONEBIT_OK;
}

/* The first copy of the residuals is an optimizer's momentum until bits are sent. */
onebit_status_t ob_plan_restart(onebit_plan_t plan, uint64_t last_width) {
  if (ob_ladder_is_used(&plan->state->ladder))
    plan->state->last_width = ob_ladder_width_in(plan, last_width);
  plan->state->worker.now = plan->state->server.now = 0;
  OB_TRY(plan_residual_reset(plan));
  return plan->momentum ? clear_results(plan) : ONEBIT_OK;
}

onebit_status_t ob_plan_return_residual(onebit_plan_t plan) {
  OB_TRY(onebit_plan_reset_residual(plan));
  ob_residual_return(&plan->state->worker);
  ob_residual_return(&plan->state->server);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_reset(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(onebit_plan_reset_residual(plan));
  return ob_plan_accept(plan);
}
