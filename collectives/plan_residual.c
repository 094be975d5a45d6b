/* The residual of a plan, for its owner: out, in, and set back. */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "collectives/plan.h"

/* Fails unless the plan is free for a look at its residual. Waits for what is on a stream. */
static onebit_status_t check_idle(onebit_plan_t plan) {
  OB_TRY(ob_handle_check(plan, OB_HANDLE_PLAN, "plan"));
  if (plan->in_flight)
    return ob_error(ONEBIT_ERROR_BUSY, "the plan has a request in flight");
  ob_steps_settled(plan, true);
  return ONEBIT_OK;
}

static onebit_status_t tell_executor(onebit_plan_t plan) {
  return plan->executor->imported ? plan->executor->imported(plan) : ONEBIT_OK;
}

/* A dense plan has no error, and no memory for one. */
static bool keeps_nothing(const struct onebit_plan *plan) {
  return plan->options.wire == ONEBIT_WIRE_DENSE;
}

onebit_status_t onebit_plan_export_residual(onebit_plan_t plan, float *worker, float *server) {
  OB_CALL_SCOPE;
  OB_TRY(check_idle(plan));
  if (keeps_nothing(plan))
    return ONEBIT_OK;
  if (worker)
    OB_TRY(ob_residual_export(&plan->worker, &plan->geometry.layout, worker));
  if (server)
    OB_TRY(ob_residual_export(&plan->server, &plan->geometry.layout, server));
  return ONEBIT_OK;
}

static onebit_status_t check_finite(const char *name, const float *values, size_t count) {
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
  OB_TRY(check_idle(plan));
  if (keeps_nothing(plan))
    return ONEBIT_OK;
  OB_TRY(
      check_finite("worker", worker, ob_residual_elements(&plan->worker, &plan->geometry.layout)));
  OB_TRY(
      check_finite("server", server, ob_residual_elements(&plan->server, &plan->geometry.layout)));
  if (worker)
    OB_TRY(ob_residual_import(&plan->worker, &plan->geometry.layout, worker));
  if (server) {
    OB_TRY(ob_residual_import(&plan->server, &plan->geometry.layout, server));
    plan->server_large =
        any_large(server, ob_residual_elements(&plan->server, &plan->geometry.layout));
  }
  return tell_executor(plan);
}

onebit_status_t ob_plan_accept(onebit_plan_t plan) {
  *plan->refused = false;
  ob_ladder_reset(plan);
  return plan->executor->accept ? plan->executor->accept(plan) : ONEBIT_OK;
}

onebit_status_t onebit_plan_reset_residual(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(check_idle(plan));
  if (keeps_nothing(plan))
    return ONEBIT_OK;
  OB_TRY(ob_residual_reset(&plan->worker));
  OB_TRY(ob_residual_reset(&plan->server));
  plan->server_large = false;
  return tell_executor(plan);
}

onebit_status_t ob_plan_return_residual(onebit_plan_t plan) {
  OB_TRY(onebit_plan_reset_residual(plan));
  ob_residual_return(&plan->worker);
  ob_residual_return(&plan->server);
  return ONEBIT_OK;
}

onebit_status_t onebit_plan_reset(onebit_plan_t plan) {
  OB_CALL_SCOPE;
  OB_TRY(onebit_plan_reset_residual(plan));
  return ob_plan_accept(plan);
}
