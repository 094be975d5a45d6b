/* Widths of several plans by a budget of bytes. */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "collectives/plan_private.h"

/* The residual over the input in 1, 2, 4 and 8 bits, of normal numbers (docs/ladder.md): what a
 * residual would be in another width than its own, by these. */
static double residual_part(unsigned width) {
  return width == 1 ? 0.81 : width == 2 ? 0.37 : width == 4 ? 0.13 : 0.03;
}

/* Of all ranks the largest residual, as the square of its norm, in another width. */
static double residual_in(const struct onebit_plan *plan, unsigned width) {
  const double rms = (double)plan->state->ladder.agreed_rms * residual_part(width) /
                     residual_part(plan->state->ladder.measured_width);
  return rms * rms * (double)plan->geometry.layout.elements;
}

/* Of one message with everything. */
static double bytes_in(const struct onebit_plan *plan, unsigned width) {
  const struct ob_layout *layout = &plan->geometry.layout;
  if (plan->options.wire == ONEBIT_WIRE_DENSE)
    return (double)layout->elements * sizeof(float);
  return (double)layout->words * width * sizeof(uint32_t) + (double)layout->blocks * sizeof(float);
}

static unsigned width_of(const struct onebit_plan *plan) {
  return plan->state->ladder.fitted ? plan->state->ladder.fitted : plan->geometry.width;
}

static double sum_of_bytes(const onebit_plan_t *plans, size_t count) {
  double bytes = 0;
  for (size_t i = 0; i < count; i++)
    bytes += bytes_in(plans[i], width_of(plans[i]));
  return bytes;
}

/* The plan whose residual falls most, by the byte, with twice the bits, where they fit. */
static struct onebit_plan *find_best(const onebit_plan_t *plans, size_t count, double left) {
  struct onebit_plan *best = NULL;
  double best_fall = 0;
  for (size_t i = 0; i < count; i++) {
    const unsigned width = width_of(plans[i]);
    const double bytes = bytes_in(plans[i], 2 * width) - bytes_in(plans[i], width);
    const double falls = residual_in(plans[i], width) - residual_in(plans[i], 2 * width);
    if (width >= plans[i]->state->ladder.max || bytes > left || !(falls > best_fall * bytes))
      continue;
    best = plans[i];
    best_fall = falls / bytes;
  }
  return best;
}

static onebit_status_t check(const onebit_plan_t *plans, size_t count, double budget) {
  if (!plans && count)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "plans is NULL");
  if (!(budget > 0 && budget <= 1))
    return ob_error(ONEBIT_ERROR_ARGUMENT, "budget is %g, not above 0 and up to 1", budget);
  for (size_t i = 0; i < count; i++) {
    OB_TRY(ob_handle_check(plans[i], OB_HANDLE_PLAN, "plans"));
    if (plans[i]->state->in_flight)
      return ob_error(ONEBIT_ERROR_BUSY, "plans[%zu] has a request in flight", i);
  }
  return ONEBIT_OK;
}

static void begin(const onebit_plan_t *plans, size_t count) {
  for (size_t i = 0; i < count; i++)
    plans[i]->state->ladder.fitted = plans[i]->state->ladder.min;
}

static void end(const onebit_plan_t *plans, size_t count) {
  for (size_t i = 0; i < count; i++) {
    struct ob_ladder *ladder = &plans[i]->state->ladder;
    if (ladder->max > ladder->min)
      ob_ladder_fix(plans[i], ladder->fitted);
    ladder->fitted = 0;
  }
}

onebit_status_t onebit_plan_fit_budget(const onebit_plan_t *plans, size_t count, double budget) {
  OB_CALL_SCOPE;
  OB_TRY(check(plans, count, budget));
  double dense = 0;
  for (size_t i = 0; i < count; i++)
    dense += (double)plans[i]->geometry.layout.elements * sizeof(float);
  begin(plans, count);
  const double fewest = sum_of_bytes(plans, count);
  onebit_status_t status = ONEBIT_OK;
  if (fewest > budget * dense)
    status = ob_error(ONEBIT_ERROR_ARGUMENT,
                      "budget is %g, and the fewest bits of the plans take %g of float32", budget,
                      fewest / dense);
  for (double left = budget * dense - fewest; status == ONEBIT_OK;) {
    struct onebit_plan *best = find_best(plans, count, left);
    if (!best)
      break;
    left -= bytes_in(best, 2 * width_of(best)) - bytes_in(best, width_of(best));
    best->state->ladder.fitted *= 2;
  }
  end(plans, count);
  return status;
}
